"""``kill -9`` of a collection at each thing that it says to the service, before and after it is heard."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Spawner
from tests.rollout.collection.conftest import Bench, Collecting

REQUESTS = 5  # of an episode: start, chat, reward, export, acknowledge


class Crossing(ThreadingHTTPServer):
    """Passes requests on to the data proxy, and kills the collector at the N-th."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.there = port
        self.lock = threading.Lock()
        self.arm(0, heard=False, pid=0)

    def arm(self, at: int, *, heard: bool, pid: int) -> None:
        self.seen, self.at, self.heard, self.pid = 0, at, heard, pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Passing(BaseHTTPRequestHandler):
    server: Crossing

    def _pass(self) -> None:
        with self.server.lock:
            self.server.seen += 1
            mine = self.server.seen == self.server.at
        if mine and not self.server.heard:
            return self._kill()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        connection = http.client.HTTPConnection("127.0.0.1", self.server.there, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if mine:
            return self._kill()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None

    def _kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.close_connection = True

    do_GET = do_POST = _pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def crossing(bench: Bench) -> Iterator[Crossing]:
    server = Crossing(bench.proxy.port)
    threading.Thread(target=server.serve_forever, name="crossing", daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.extended
@pytest.mark.parametrize("heard", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("prompts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kill_9_at_any_point_loses_and_doubles_nothing(
    bench: Bench, collecting: Collecting, crossing: Crossing, spawn: Spawner, heard: bool, prompts: int
) -> None:
    data = collecting.data(*({"prompt": str(each), "answer": "x"} for each in range(prompts)))
    for at in range(2, 1 + REQUESTS * prompts + 1):  # the first asks for the models
        folder = collecting.folder / f"out-{at}"
        words = ["inf", "collect", "--dataset", data, "--output", str(folder), "--gateway", crossing.url]
        words += ["--reward", "exact", "--reward-processes", "1", "--concurrency", "2", "--retries", "0"]
        killed = spawn(*words)
        crossing.arm(at, heard=heard, pid=killed.popen.pid)
        assert killed.finish().code == -signal.SIGKILL, f"request {at} never came"
        crossing.arm(0, heard=False, pid=0)
        result = collecting.areal(*words, "--resume", "-o", "json")
        assert result.code == 0, result.err
        lines = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
        assert sorted(line["episode"] for line in lines) == [f"{each}-0" for each in range(prompts)], f"killed at {at}"
        assert [line["reward"] for line in lines] == [0.0] * prompts
        assert_forgotten(bench, folder)


def assert_forgotten(bench: Bench, folder: Path) -> None:
    """Nothing of the run waits in the service for anybody: what was ready was exported and acknowledged, or dropped."""
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    mine = [each for each in bench.sessions() if run_id in each["task_id"]]
    assert [each for each in mine if each["ready"]] == []


def test_torn_line_and_lost_acknowledgement_are_repaired(bench: Bench, collecting: Collecting) -> None:
    data = collecting.data({"prompt": "a"}, {"prompt": "b"})
    assert collecting(data).code == 0
    lines = collecting.output / "trajectories.jsonl"
    whole = lines.read_bytes()
    lines.write_bytes(whole[:-20])
    result = collecting(data, "--resume")
    assert (result.code, result.json["done_before"], result.json["done"]) == (0, 1, 2)
    assert len({line["episode"] for line in collecting.lines()}) == 2
    assert lines.read_bytes().startswith(whole[: whole.index(b"\n") + 1])


def test_second_collection_into_folder_is_locked_out(bench: Bench, collecting: Collecting, spawn: Spawner) -> None:
    hold = collecting.code("import time\ndef agent(data):\n    print('holding', flush=True)\n    time.sleep(60)\n")
    data = collecting.data({"prompt": "a"})
    first = spawn(*collecting.arguments(data, "--agent", f"{hold}:agent"))
    assert first.popen.stdout is not None and first.popen.stdout.readline() == "holding\n"
    result = collecting(data, "--agent", f"{hold}:agent", "--resume")
    assert result.code == 6 and "another collection writes into" in result.err


def test_ctrl_c_finishes_episodes_with_resume_hint(bench: Bench, collecting: Collecting, spawn: Spawner) -> None:
    agent = collecting.code(
        "import os, signal, json, urllib.request\n"
        "def agent(data, base_url, api_key):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}).encode()\n"
        "    headers = {'Authorization': 'Bearer ' + api_key, 'Content-Type': 'application/json'}\n"
        "    urllib.request.urlopen(urllib.request.Request(base_url + '/chat/completions', body, headers)).read()\n"
    )
    data = collecting.data({"prompt": "a"}, {"prompt": "b"})
    words = collecting.arguments(data, "--agent", f"{agent}:agent", "--concurrency", "1")
    ended = spawn(*words).finish()
    assert ended.code == 130
    assert "1 of 2 done; the same command with --resume goes on" in ended.err
    assert [line["episode"] for line in collecting.lines()] == ["0-0"]
    reward = collecting.code("def reward(prompt):\n    return 0.0\n", name="rewards.py") + ":reward"
    judged = ("--name", "judged", "--reward", reward, "--fail-under", "1")
    ended = spawn("eval", "--dataset", data, "--agent", f"{agent}:agent", "--concurrency", "1", *judged).finish()
    assert ended.code == 130 and "below 1" not in ended.err, "an interrupted evaluation is not judged"


def test_ctrl_c_ends_pause_before_retry(bench: Bench, collecting: Collecting, spawn: Spawner) -> None:
    agent = collecting.code(
        "import os, signal, threading\n"
        "from areal.client.errors import Unreachable\n"
        "calls = []\n"
        "def agent(data):\n"
        "    calls.append(1)\n"
        "    print('asked', flush=True)\n"
        "    if len(calls) == 4:\n"  # the pause is of 4 to 8 s
        "        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    raise Unreachable('gone')\n"
    )
    data = collecting.data({"prompt": "a"})
    ended = spawn(*collecting.arguments(data, "--agent", f"{agent}:agent", "--retries", "9")).finish()
    assert ended.code == 130 and ended.out.count("asked") == 4, ended.out
    assert "interrupted with 0 of 1 done" in ended.err and len(collecting.failures()) == 4


@pytest.mark.parametrize("act", ["shutil.rmtree(OUT)", "os.rename(OUT, OUT + '-elsewhere')"])
def test_output_folder_that_disappears_is_named(bench: Bench, collecting: Collecting, act: str) -> None:
    agent = collecting.code(
        "import os, shutil, json, urllib.request\n"
        f"OUT = {str(collecting.output)!r}\n"
        "def agent(data, base_url, api_key):\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}).encode()\n"
        "    headers = {'Authorization': 'Bearer ' + api_key, 'Content-Type': 'application/json'}\n"
        "    urllib.request.urlopen(urllib.request.Request(base_url + '/chat/completions', body, headers)).read()\n"
        f"    {act}\n"
    )
    data = collecting.data({"prompt": "a"}, {"prompt": "b"})
    ended = collecting(data, "--agent", f"{agent}:agent", "--concurrency", "1")
    assert ended.code == 1 and f"{collecting.output}/trajectories.jsonl was moved or removed while" in ended.err
    assert not collecting.output.exists()
