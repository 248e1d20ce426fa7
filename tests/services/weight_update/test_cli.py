"""``areal weight-update`` finds the gateway of a running job by the file that it left in the job's folder."""

import json
import select
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from areal.cli.main import run
from areal.services.http.auth import load_admin_key
from areal.services.weight_update.publisher import TrainerPair, serve_endpoint
from areal.services.weight_update.staging import open_publisher
from areal.training.run_folder import config_files
from areal.training.services import weight_update_gateway
from tests.services.processes import Processes
from tests.services.weight_update.conftest import MODEL, embedded_worker, model, weights


def new_lines_of(log: Path) -> str:
    """The first line that ``logs -f`` prints of those written after it has begun."""
    command = [sys.executable, "-m", "areal.cli", "weight-update", "logs", "-n", "0", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        while not select.select([following.stdout], [], [], 0.1)[0]:
            with log.open("a") as file:
                file.write("a new line\n")
        line = following.stdout.readline()
        following.kill()
    return line


def test_gateway_with_unreadable_key_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_HOME", str(tmp_path))
    for name, key in (("a", ""), ("b", "0123456789abcdef")):
        job = tmp_path / "jobs" / name
        job.mkdir(parents=True)
        (job / "key").write_text(key)
        about = {"url": "http://127.0.0.1:1", "pid": 1, "admin_key_file": str(job / "key")}
        (job / "weight_update.json").write_text(json.dumps(about))

    assert run(["weight-update", "ps", "--all", "-o", "json"]) == 0

    captured = capsys.readouterr()
    assert [(row["name"], row["state"]) for row in json.loads(captured.out)["items"]] == [
        ("a", "unknown"),
        ("b", "dead"),
    ]
    assert "warning: a: " in captured.err and "holds no key" in captured.err and "rm " not in captured.err


@pytest.mark.extended
def test_verbs_show_and_sync_the_pairs_of_a_job(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_HOME", str(tmp_path / "home"))
    job = tmp_path / "home" / "jobs" / "demo"
    log = job / "logs" / "attempt_1" / "weight_update.log"
    log.parent.mkdir(parents=True)
    (job / "logs" / "latest").symlink_to("attempt_1")

    def areal(*words: str, code: int = 0) -> str:
        assert run(["weight-update", *words]) == code
        captured = capsys.readouterr()
        return captured.out + (captured.err if code else "")

    assert "areal train ps" in areal("pairs", code=4)
    _, proxy = embedded_worker(processes)
    publisher = open_publisher("disk", tmp_path / "weights", config_files(MODEL))
    key = load_admin_key(str(processes.key_file))
    with ExitStack() as stack:
        gateway = stack.enter_context(weight_update_gateway(job, processes.key_file, log))
        endpoint = stack.enter_context(serve_endpoint({"actor": publisher}, key))
        pair = TrainerPair(
            "actor", "disk", gateway, endpoint, {"inference_worker_urls": [proxy.url]}, publisher, processes.key
        )
        pair.connect()
        assert "has published nothing yet" in areal("force-sync", "--pair", "actor", code=1)
        pair.publish(3, weights(model(1)))

        (row,) = json.loads(areal("pairs", "-o", "json"))["items"]
        assert (row["pairName"], row["mode"], row["version"], row["state"]) == ("actor", "disk", 3, "connected")
        title, line = areal("pairs").splitlines()
        assert title.split() == ["NAME", "MODE", "TRAIN", "INFER", "VERSION", "LAST-UPDATE", "DURATION", "STATE"]
        assert line.split()[:5] == ["actor", "disk", "1", "1", "3"]
        assert "healthy" in areal("status", "--service", "demo")
        assert areal("ps").splitlines()[1].split()[0] == "demo"
        assert "listens on" in areal("logs", "-n", "5") and areal("logs", "-n", "0") == ""
        assert new_lines_of(log) == "a new line\n"
        assert json.loads(areal("logs", "-n", "1", "-o", "json"))["items"] == [{"line": "a new line"}]
        killed = tmp_path / "home" / "jobs" / "killed"  # its trainer, and so its gateway: the file stays
        (killed / "logs" / "latest").mkdir(parents=True)
        (killed / "logs" / "latest" / "weight_update.log").write_text("of another job")
        about = json.loads((job / "weight_update.json").read_text())
        (killed / "weight_update.json").write_text(json.dumps({**about, "pid": 1}))
        assert "listens on" in areal("logs") and "healthy" in areal("status")
        shutil.rmtree(killed)

        headers: dict[str, Any] = {"key": processes.key}
        proxy.call("POST", "/set_version", {"version": 1}, **headers)  # as a worker that started anew would be behind
        assert "pair/actor synced: version 3" in areal("force-sync", "--pair", "actor")
        assert proxy.call("GET", "/get_version", **headers).json()["version"] == 3
        assert "absent" in areal("force-sync", "--pair", "absent", code=4)

        remote = ("--gateway", gateway, "--api-key-file", str(processes.key_file))
        assert areal("pairs", *remote).splitlines()[1].split()[:5] == ["actor", "disk", "1", "1", "3"]
        assert "pair actor (disk): connected, version 3" in areal("status", *remote)
        assert "pair/actor synced: version 3" in areal("force-sync", "--pair", "actor", *remote)
        for verb in ("ps", "logs"):
            assert "reads files of the machine that runs the processes" in areal(verb, *remote, code=2)
        wrong = tmp_path / "wrong"
        wrong.write_text("another-key-0123456789")
        assert "key" in areal("pairs", "--gateway", gateway, "--api-key-file", str(wrong), code=1)
        pair.disconnect()
    assert areal("pairs", code=4)
    assert not (job / "weight_update.json").exists()
    assert "drains" in areal("logs")
