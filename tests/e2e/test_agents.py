"""An agent service from its manifest to its end: it answers, is rewarded and exported, changes, fails and heals."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from areal.client.command import free_port
from tests.e2e.agents import Agents, text_of
from tests.e2e.conftest import ROOT, Box, make_box, tear_down
from tests.services.inference.running_service import later
from tests.services.processes import wait_until


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Shared by the tests of this module that leave it as they found it."""
    made = Agents(make_box(tmp_path_factory.mktemp("agents")))
    made.apply("pairs: 1")
    yield made
    tear_down(made.box)


def test_manifest_applies_answers_is_exported_and_deleted(box: Box) -> None:
    box = replace(box, folder=ROOT)
    ports = {"inferenceservice/default": free_port(), "agentservice/reverser": box.port}
    sets = [word for ref, port in ports.items() for word in ("--set", f"{ref}:spec.gateway.port={port}")]
    out = box.ok("apply", "-f", "manifests/agents.yaml", *sets).out
    assert f"agentservice/reverser created: Ready at {box.url}" in out
    agents = Agents(box, "reverser")
    status, answer = agents.ask("POST", "/v1/responses", {"input": "1234"}, "s/1")
    assert status == 200, answer
    assert agents.ask("POST", "/sessions/s%2F1/reward", {"reward": 0.5})[1]["trajectory_ready"] is True
    exported = agents.ask("POST", "/sessions/s%2F1/export", {})[1]
    (row,) = exported["traj"]["input_ids"]
    (mask,) = exported["traj"]["loss_mask"]
    assert exported["traj"]["rewards"] == [0.5] and len(row) == len(mask)
    # what the engine saw and sampled: the template's prompt of 1234, and the tokens of the answer with its end
    vocabulary = json.loads((ROOT / "examples/reverse_digits/model/tokenizer.json").read_text())["model"]["vocab"]
    text = {number: token for token, number in vocabulary.items()}
    assert "".join(text[token] for token, sampled in zip(row, mask, strict=True) if not sampled).endswith("1234=")
    sampled_texts = [text[token] for token, sampled in zip(row, mask, strict=True) if sampled]
    assert "".join(token for token in sampled_texts if not token.startswith("<")) == text_of(
        answer
    )  # without <eos>, ...
    readable = [path for path in box.home.rglob("*") if path.lstat().st_mode & 0o077 and not path.is_symlink()]
    assert not readable, "by others than their owner"
    assert "agentservice/reverser unchanged" in box.ok("apply", "-f", "manifests/agents.yaml", *sets).out
    box.ok("delete", "-f", "manifests/agents.yaml", "--yes")
    assert box.living() == []
    assert box.ok("get", "-o", "name").out == ""
    kept = {path.relative_to(box.home).as_posix() for path in box.home.rglob("*") if path.is_file()}
    assert kept == {"objects/serial", "locks/store.lock"}


@pytest.mark.extended
def test_raised_drain_timeout_applies_to_running_processes(box: Box) -> None:
    agents = Agents(box)
    agents.apply("pairs: 1", "drainTimeoutSeconds: 0")
    before = box.pids()
    turn = later(agents.say, "wait 3", "mine")
    wait_until(lambda: agents.ask("GET", "/sessions/mine")[1].get("state") == "running", what="the turn")
    assert "processes" not in agents.apply("pairs: 1", "drainTimeoutSeconds: 60")
    assert box.pids() == before
    box.ok("suspend", agents.ref)
    assert turn.result() == "one 0 wait 3"


@pytest.mark.extended
def test_scaling_pairs_keeps_session_history(agents: Agents) -> None:
    box, sessions = agents.box, [f"scaled-{number}" for number in range(8)]
    for session in sessions:
        assert agents.say("a", session) == "one 0 a"
    before = box.pids()
    box.ok("scale", agents.ref, "--replicas", "2")
    assert box.pids().items() >= before.items()
    more = [f"later-{number}" for number in range(8)]
    for session in (*sessions, *more):
        agents.say("b", session)
    box.ok("scale", agents.ref, "--replicas", "1")
    assert set(box.pids()) == {"router/0", "gateway/0", "worker/0", "data-proxy/0"}
    assert {agents.say("c", session) for session in sessions} == {"one 2 c"}
    assert {agents.say("c", session) for session in more} == {"one 1 c"}
    contents = [message["content"] for message in agents.show(sessions[0])["history"]]
    assert contents == ["a", "one 0 a", "b", "one 1 b", "c", "one 2 c"]


@pytest.mark.extended
def test_restart_replaces_pairs_and_keeps_sessions(agents: Agents) -> None:
    agents.say("a", "restarted")
    before = agents.box.pids()
    agents.box.ok("restart", agents.ref)
    after = agents.box.pids()
    assert {name for name in before if before[name] != after[name]} == set(before)
    assert agents.say("b", "restarted") == "one 1 b"


@pytest.mark.extended
def test_restart_waits_for_turn_of_disconnected_caller(agents: Agents) -> None:
    caller = agents.connect()
    caller.request("POST", "/v1/responses", '{"input": "wait 2"}', agents.headers("left", "key"))
    wait_until(lambda: agents.ask("GET", "/sessions/left")[1].get("state") == "running")
    caller.close()
    agents.box.ok("restart", agents.ref)
    shown = agents.show("left")
    assert (shown["state"], [each["content"] for each in shown["history"]]) == ("idle", ["wait 2", "one 0 wait 2"])
    assert agents.say("wait 2", "left", "key") == "one 0 wait 2"


@pytest.mark.extended
def test_session_settings_change_without_restart(agents: Agents) -> None:
    agents.say("a", "idle")
    before = agents.box.pids()
    out = agents.apply("pairs: 1", "session: {idleTimeoutSeconds: 0.2}")
    assert "in place, no process restarts" in out
    wait_until(lambda: agents.ask("GET", "/sessions/idle")[0] == 410)
    os.kill(before["data-proxy/0"], signal.SIGKILL)
    wait_until(lambda: agents.box.pids().get("data-proxy/0") not in (None, before["data-proxy/0"]))
    agents.say("a", "idle too")
    wait_until(lambda: agents.ask("GET", "/sessions/idle%20too")[0] == 410)
    assert "agentservice/counter configured" in agents.apply("pairs: 1")
    assert {**agents.box.pids(), "data-proxy/0": 0} == {**before, "data-proxy/0": 0}


@pytest.mark.extended
def test_killed_worker_fails_turn_and_session_continues(agents: Agents) -> None:
    agents.say("a", "killed")
    before = agents.box.pids()
    running = later(agents.ask, "POST", "/v1/responses", {"input": "wait 60"}, "killed")
    wait_until(lambda: agents.show("killed")["state"] == "running")
    os.kill(before["worker/0"], signal.SIGKILL)
    status, answer = running.result(30)
    assert (status, answer["error"]["code"]) == (502, "worker_lost")
    agents.box.ok("wait", agents.ref, "--for", "ready")
    after = agents.box.pids()
    assert {name for name in before if before[name] != after[name]} == {"worker/0"}
    assert agents.say("b", "killed") == "one 1 b"
    assert agents.box.areal("diff", "--drift").code == 0


@pytest.mark.extended
def test_operator_views_show_agents(agents: Agents) -> None:
    box = agents.box
    assert box.ok("get", "agent").out.split("\n")[0].split() == ["NAME", "PAIRS", "STATUS", "ADDRESS", "AGENT", "AGE"]
    assert box.url in box.ok("get", "agent").out
    assert "counter:Counter" in box.ok("describe", agents.ref).out
    assert "counter:Counter" in box.ok("logs", agents.ref, "-c", "worker").out
    assert "data-proxy/0" in box.ok("top").out
    assert box.ok("doctor").out.strip() in ("", "nothing found")
    assert box.ok("wait", agents.ref, "--for", "ready").code == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fields", "module", "words"),
    [
        (
            "agent: broken:Agent",
            "raise RuntimeError('no tools today')\nclass Agent: ...",
            "RuntimeError: no tools today",
        ),
        pytest.param(
            "agent: broken:Agent",
            "class Agent:\n    def __init__(self): raise ValueError('bad key')\n    async def run(self, request): ...",
            "ValueError: bad key",
            marks=pytest.mark.slow,
        ),
        (
            "agent: broken:Agent\n  setupTimeoutSeconds: 4",
            "import time\ntime.sleep(1000)\nclass Agent: ...",
            "was not ready within 4 s (importing the agent broken:Agent)",
        ),
    ],
    ids=["import", "constructor", "hangs"],
)
def test_agent_failing_to_start_fails_apply_without_leftovers(box: Box, fields: str, module: str, words: str) -> None:
    agents = Agents(box)
    box.write(module, "broken.py")
    result = box.areal("apply", "-f", agents.manifest(fields, "pairs: 2"))
    assert result.code == 8
    assert words in result.err
    assert set(box.pids()) <= {"router/0", "gateway/0"}
    assert json.loads(box.ok("get", agents.ref, "-o", "json").out)["status"]["phase"] == "Failed"
    assert "Ready" in agents.apply("pairs: 2")
    assert agents.say("a", "s") == "one 0 a"
    before = box.pids()
    update = box.areal("apply", "-f", agents.manifest(fields, "pairs: 2"))
    assert update.code == 8 and words in update.err
    assert box.pids() == before, "the old pairs serve on"
    assert agents.say("b", "s") == "one 1 b"
    assert "Ready" in agents.apply("pairs: 2")


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ("agent: nowhere.agent:Agent", "spec.agent", "there is no module nowhere"),
        ("agent: counter:Countr", "spec.agent", 'did you mean "Counter"'),
        ("command: [no-such-program]", "spec.command", "there is no program 'no-such-program'"),
        ("workingDir: nowhere", "spec.workingDir", "there is no folder"),
        ("inference: {service: absent}", "spec.inference.service", "InferenceService/absent does not exist"),
        ("envFrom: {A: {env: NO_SUCH_VARIABLE}}", "spec.envFrom.A.env", "NO_SUCH_VARIABLE is not set"),
        ("tools: [{mcp: {command: [no-such-program]}}]", "spec.tools[0].mcp.command", "there is no program"),
    ],
)
def test_missing_parts_are_reported_before_start(box: Box, fields: str, where: str, words: str) -> None:
    agents = Agents(box)
    box.write("class Counter:\n    async def run(self, request): ...\n", "counter.py")
    result = box.areal("apply", "-f", agents.manifest(fields))
    assert result.code == 3
    assert where in result.err and words in result.err
    assert ":8:" in result.err or ":7:" in result.err
    assert not (box.home / "objects").exists()


@pytest.mark.extended
def test_agent_is_found_in_working_folder_or_beside_manifest(box: Box, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text(
        "import os, helper\nclass Agent:\n"
        "    async def run(self, request):\n        return f'{helper.NAME} {os.path.basename(os.getcwd())}'\n"
    )
    box.write("NAME = 'beside'", "helper.py")
    agents = Agents(box)
    box.ok("apply", "-f", agents.manifest("agent: own:Agent", f"workingDir: {elsewhere}"))
    assert agents.say("a", "s") == "beside elsewhere"
    shutil.copy(elsewhere / "own.py", box.folder)
    for number in range(3):  # each leaves records of its workers
        box.ok("apply", "-f", agents.manifest("agent: own:Agent", f"env: {{N: '{number}'}}"))
        assert agents.say("a", "s") == f"beside {box.folder.name}"


@pytest.mark.extended
def test_agent_keeps_folder_of_first_apply(box: Box) -> None:
    agents = Agents(box)
    box.write("class Agent:\n    async def run(self, request):\n        return 'first'\n", "own.py")
    manifest = agents.manifest("agent: own:Agent")
    box.ok("apply", "-f", manifest)
    other = replace(box, folder=box.folder.parent / "other")
    other.folder.mkdir()
    elsewhere = Agents(other).manifest("agent: own:Agent", "env: {N: '1'}")
    other.ok("apply", "-f", elsewhere)  # what is checked is what runs: there is no own.py here
    assert agents.say("a", "s") == "first"
    assert f"workingDir: {box.folder}" in other.ok("get", "agentservice/counter", "-o", "yaml").out
