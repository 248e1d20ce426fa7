"""The verbs over a service that really runs: here, and from elsewhere through its gateway."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal.client import InferenceClient
from areal.client.prometheus import parse
from tests.cli.conftest import Typist
from tests.cli.test_light import HEAVY, SHOW, modules
from tests.e2e.conftest import MODEL, Box, box, served  # noqa: F401 - fixtures
from tests.services.processes import call, wait_until

pytestmark = pytest.mark.timeout(300)


def document(box: Box, *words: str) -> Any:  # noqa: F811
    return json.loads(box.ok(*words, "-o", "json").out)


def remote(box: Box) -> list[str]:  # noqa: F811
    return ["--gateway", box.url, "--api-key-file", str(box.home / "credentials" / "default")]


def requests_answered(box: Box, name: str, url: str) -> Counter[str]:  # noqa: F811
    """Requests by route; the data proxy's commits too."""
    answer = call(int(url.rpartition(":")[2]), "GET", "/metrics", key=box.key)
    page = parse(answer.body.decode())
    found = Counter({dict(k)["route"]: int(v) for k, v in page.samples.get("areal_http_requests_total", {}).items()})
    if name.startswith("data-proxy"):
        found["commits"] = int(page.total("areal_commit_seconds_count") or 0)
    return found


def test_recorded_turn_makes_one_call_per_hop_and_one_commit(served: Box) -> None:  # noqa: F811
    turns = 10
    processes = {name: str(row["url"]) for name, row in served.processes().items()}
    with InferenceClient(served.url, served.key, model="reverse") as inference:
        session = inference.start_session("count")
        session.chat([{"role": "user", "content": "1234"}])
        before = {name: requests_answered(served, name, url) for name, url in processes.items()}
        for number in range(turns):
            session.chat([{"role": "user", "content": f"{number}234"}])
        after = {name: requests_answered(served, name, url) for name, url in processes.items()}
    grown = {name: after[name] - before[name] for name in after}
    chats = Counter({"/v1/chat/completions": turns})
    proxied = chats + Counter({"commits": turns})
    engine = Counter({"/generate": turns})
    assert grown == {"gateway/0": chats, "router/0": Counter(), "data-proxy/0": proxied, "engine/0": engine}


def test_get_shows_ready_objects_and_their_processes(served: Box) -> None:  # noqa: F811
    items = {item["kind"]: item for item in document(served, "get")["items"]}
    assert items["InferenceService"]["status"]["address"] == served.url
    assert items["Model"]["status"]["phase"] == "Ready"
    rows = document(served, "get", "processes", "inf/default")["items"]
    assert sorted(f"{row['component']}/{row['replica']}" for row in rows) == [
        "data-proxy/0",
        "engine/0",
        "gateway/0",
        "router/0",
    ]
    assert all(isinstance(row["pid"], int) and row["uptimeSeconds"] >= 0 for row in rows)
    assert {row["owner"] for row in document(served, "get", "processes", "model/reverse")["items"]} == {"Model/reverse"}


def test_describe_lists_processes_and_events(served: Box) -> None:  # noqa: F811
    found = document(served, "describe", "inf/default")
    assert [row["ref"] for row in found["related"]] == ["Model/reverse"]
    assert {row["state"] for row in found["processes"]} == {"running"}
    assert "Ready" in {event["reason"] for event in found["events"]}
    assert "Processes:" in served.ok("describe", "model", "reverse").out


def test_inf_status_is_healthy_and_exits_0(served: Box) -> None:  # noqa: F811
    found = document(served, "inf", "status")
    assert found["healthy"] is True and found["address"] == served.url
    assert "reverse" in served.ok("inf", "status").out


def test_logs_are_merged_prefixed_and_selected(served: Box) -> None:  # noqa: F811
    merged = served.ok("logs", "inf/default").out.splitlines()
    assert {line.split("|")[0].strip() for line in merged} >= {"default gateway/0", "reverse engine/0"}
    rows = document(served, "logs", "inf/default")["items"]
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    one = served.ok("logs", "model/reverse", "-c", "engine", "-r", "0", "-n", "1").out
    assert one.count("\n") == 1 and "|" not in one.split()[0]
    first = served.ok("logs", "model/reverse", "--previous")
    assert not first.out and "no process of Model/reverse has an earlier start" in first.err
    assert served.areal("logs", "model/reverse", "--previous", "--since", "1m").code == 2
    missing = served.areal("logs", "model/reverse", "-c", "enigne")
    assert missing.code == 4 and 'did you mean "engine"' in missing.err
    assert served.ok("inf", "logs", "--component", "gateway", "-n", "1").out


def test_logs_follow_prints_later_lines(served: Box) -> None:  # noqa: F811
    following = served.start("logs", "inf/default", "-f", "-n", "1", "-o", "jsonl")
    assert following.stdout is not None
    assert len([following.stdout.readline() for _ in range(4)]) == 4  # the last line of each: it follows by now
    log = next((served.home / "runs").glob("*engine*/log/current.log"))
    with log.open("a") as file:
        file.write("a line of the test\n")
    assert json.loads(following.stdout.readline())["line"] == "a line of the test"
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=30)
    assert following.returncode == 130


def test_top_measures_each_process(served: Box) -> None:  # noqa: F811
    rows = {row["process"]: row for row in document(served, "top")["items"]}
    assert rows["engine/0"]["memoryBytes"] > 1 << 20
    assert rows["engine/0"]["cpuPercent"] >= 0
    assert rows["engine/0"]["tokensPerSecond"] is not None
    assert rows["gateway/0"]["tokensPerSecond"] is None
    assert "Unknown" not in served.ok("top").out


def test_wait_for_met_condition_returns_at_once(served: Box) -> None:  # noqa: F811
    served.ok("wait", "model/reverse", "--for", "ready,deleted", "--for", "condition=Ready", "--timeout", "20s")
    served.ok("wait", "inf/default", "--for", "jsonpath={.status.phase}=Ready", "--timeout", "20s")
    late = served.areal("wait", "model/reverse", "--for", "deleted", "--timeout", "300ms")
    assert late.code == 7


def test_chat_one_shot_takes_flag_or_pipe(served: Box) -> None:  # noqa: F811
    assert served.ok("inf", "chat", "-m", "1234", "--temperature", "0").out.strip()
    found = document(served, "inf", "chat", "-m", "1234", "--temperature", "0", "--show-logprobs", "--max-tokens", "4")
    assert found["message"]["role"] == "assistant" and found["finishReason"] in ("stop", "length")
    assert all(item["logprob"] <= 0 for item in found["logprobs"])
    piped = subprocess.run(
        [sys.executable, "-m", "areal.cli", "inf", "chat", "--temperature", "0", "--no-stream"],
        input="1234\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "AREAL_HOME": str(served.home)},
    )
    assert (
        piped.stdout == served.ok("inf", "chat", "-m", "1234", "--temperature", "0").out
    )  # its newline is no part of it
    unknown = served.areal("inf", "chat", "-m", "x", "--model", "nope")
    assert unknown.code == 4 and "nope" in unknown.err


def test_chat_prompt_keeps_saves_and_loads_a_conversation(served: Box, tmp_path: Path) -> None:  # noqa: F811
    typist = Typist(served.home, "inf", "chat", "--temperature", "0")
    assert "talking to reverse" in typist.until(">>> ")
    typist.type("1234\n")
    typist.until(">>> ")
    typist.type('"""12\n')
    typist.until("... ")
    typist.type('34"""\n')
    typist.until(">>> ")
    typist.type(f"/save {tmp_path}/talk.json\n")
    assert "saved 4 messages" in typist.until(">>> ")
    typist.type("/clear\n")
    typist.until(">>> ")
    typist.type(f"/load {tmp_path}/talk.json\n")
    assert "loaded 4 messages" in typist.until(">>> ")
    typist.type("/sett x\n")
    assert 'did you mean "set"' in typist.until(">>> ")
    typist.type("/set max_tokens many\n")
    assert "is a number" in typist.until(">>> ")
    typist.type("/?\n")
    assert "/load FILE" in typist.until(">>> ")
    typist.type("\x03")
    assert "/bye or Ctrl-D leaves" in typist.until(">>> ", again="\x03")
    typist.type("/bye\n")
    assert typist.code() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][2] == {"role": "user", "content": "12\n34"}
    assert saved["settings"] == {"temperature": 0.0, "model": "reverse"}


@pytest.mark.extended
def test_verbs_through_a_gateway_need_no_state(served: Box, tmp_path: Path) -> None:  # noqa: F811
    elsewhere = [*remote(served), "--home", str(tmp_path / "none")]
    assert [item["metadata"]["name"] for item in document(served, "get", "models", *elsewhere)["items"]] == ["reverse"]
    assert document(served, "get", "model/reverse", *elsewhere)["status"]["phase"] == "Ready"
    assert document(served, "get", "processes", *elsewhere)["items"][0]["model"] == "reverse"
    assert document(served, "describe", "model/reverse", *elsewhere)["workers"][0]["state"] == "ready"
    assert document(served, "inf", "status", *elsewhere)["healthy"] is True
    assert document(served, "inf", "models", *elsewhere)["items"][0]["name"] == "reverse"
    assert document(served, "inf", "ps", *elsewhere)["items"][0]["address"] == served.url
    assert served.ok("inf", "chat", "-m", "12", *elsewhere).out.strip()
    served.ok("wait", "model/reverse", "--for", "ready", "--timeout", "20s", *elsewhere)
    assert served.areal("wait", "model/none", "--for", "ready", "--timeout", "1s", *elsewhere).code == 7
    assert served.areal("get", "model/none", *elsewhere).code == 4
    assert served.areal("logs", "model/reverse", *elsewhere).code == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.extended
def test_gateway_comes_from_environment_or_context(served: Box, tmp_path: Path) -> None:  # noqa: F811
    env = {"AREAL_GATEWAY": served.url, "AREAL_API_KEY": served.key}
    assert "reverse" in served.areal("inf", "models", env=env).out
    home = ["--home", str(tmp_path / "other")]
    key = str(served.home / "credentials" / "default")
    served.ok("config", "set-context", "lab", "--gateway", served.url, "--api-key-file", key, *home)
    assert "reverse" in served.ok("inf", "models", "--context", "lab", *home).out
    served.ok("config", "use-context", "lab", *home)
    assert "reverse" in served.ok("inf", "models", *home).out
    refused = served.areal("inf", "models", env={**env, "AREAL_API_KEY": "wrong"})
    assert refused.code == 1 and "--api-key-file" in refused.err
    unreachable = served.areal("inf", "status", "--gateway", "http://127.0.0.1:1")
    assert unreachable.code == 1 and "Unreachable" in unreachable.out


@pytest.mark.extended
def test_child_failing_to_start_is_quoted(box: Box) -> None:  # noqa: F811
    folder = box.folder / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    shutil.copy(MODEL / "tokenizer.json", folder)
    words = ["inf", "run", "-d", "--port", str(box.port), "--model", "broken", "--backend", "embedded"]
    result = box.areal(*words, "--model-path", str(folder), "--timeout", "60s")
    assert result.code != 0
    assert "  | " in result.err and "hint: " in result.err
    assert "Traceback (most recent call last)" not in result.err.split("  | ")[0]
    described = box.ok("describe", "model/broken").out
    assert "Last exit of Model/broken engine/0" in described or "RolloutFailed" in described


@pytest.mark.extended
def test_foreground_run_stops_on_ctrl_c_and_restarts(box: Box) -> None:  # noqa: F811
    words = ["inf", "run", "--port", str(box.port), "--model", "reverse", "--backend", "embedded"]
    process = box.start(*words, "--model-path", str(MODEL))
    assert process.stderr is not None
    lines: list[str] = []
    while "in the foreground" not in (line := process.stderr.readline()):
        assert line, f"it ended: {lines}"
        lines.append(line)
    assert box.chat("12")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert box.living() == []
    assert document(box, "inf", "ps")["items"] == []
    assert [row["phase"] for row in document(box, "inf", "ps", "--all")["items"]] == ["Suspended"]
    again = box.ok("inf", "run", "-d")
    assert box.url in again.text
    assert box.chat("12")
    box.ok("inf", "stop", "--yes")
    assert box.living() == []
    assert document(box, "get")["items"] == []


QUICKSTART = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text()


@pytest.mark.extended
def test_replaced_processes_are_listed_only_with_all(served: Box) -> None:  # noqa: F811
    served.ok("restart", "model/reverse")
    told = served.ok("events", "model/reverse").out
    assert "engine/0: replaced: restart requested" in told and "restartedAt" not in told
    served.ok("scale", "model/reverse", "--replicas", "2")
    served.ok("scale", "model/reverse", "--replicas", "1")
    listed = document(served, "get", "processes")["items"]
    assert sorted(row["component"] for row in listed) == ["data-proxy", "engine", "gateway", "router"]
    assert all(row["pid"] for row in listed)
    for words, name in [(("inf", "status"), "components"), (("describe", "inf/default"), "processes")]:
        assert {row["uid"] for row in document(served, *words)[name]} == {row["uid"] for row in listed}
    ended = [row for row in document(served, "get", "processes", "--all")["items"] if not row["pid"]]
    assert {row["replica"] for row in ended} == {0, 1}
    assert not [row for row in document(served, "logs", "model/reverse")["items"] if row["replica"]]
    assert document(served, "logs", "model/reverse", "-r", "1")["items"]
    served.ok("suspend", "model/reverse")
    assert "hint: areal resume model/reverse; " in served.areal("inf", "chat", "-m", "12").err
    served.ok("resume", "model/reverse")


@pytest.mark.extended
def test_quickstart_kill_reaches_only_engines(served: Box) -> None:  # noqa: F811
    (line,) = re.findall(r"^kill -9 .*$", QUICKSTART, re.MULTILINE)
    served.write(
        "apiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: other}\n"
        f"spec: {{backend: embedded, path: {MODEL}}}\n",
        "other.yaml",
    )
    served.ok("apply", "-f", "other.yaml")
    served.ok("scale", "model/other", "--replicas", "2")
    served.ok("scale", "model/other", "--replicas", "1")
    before = {row["uid"]: row["pid"] for row in document(served, "get", "processes")["items"]}
    command = line.replace("areal ", f"{sys.executable} -m areal.cli ")
    env = {**os.environ, "AREAL_HOME": str(served.home)}
    subprocess.run(["bash", "-ec", command], env=env, cwd=served.folder, check=True, timeout=60)
    after = before

    def started_again() -> bool:
        nonlocal after
        after = {row["uid"]: row["pid"] for row in document(served, "get", "processes")["items"]}
        return after != before and all(after.values())

    wait_until(started_again, what="the killed engine to start again")
    (killed,) = [uid for uid, pid in before.items() if after.get(uid) != pid]
    assert "engine" in killed
    served.ok("delete", "model/other", "--yes")


def test_get_with_live_processes_imports_no_heavy_modules(served: Box) -> None:  # noqa: F811
    for words in (("get",), ("get", "models"), ("get", "processes"), ("inf", "ps"), ("inf", "models")):
        done = subprocess.run(
            [sys.executable, "-c", SHOW, *words],
            env={**os.environ, "AREAL_HOME": str(served.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        code, names = modules(done.stderr)
        assert code == 0 and sorted(name for name in HEAVY if name in names) == []
