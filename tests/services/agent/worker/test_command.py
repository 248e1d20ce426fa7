"""Agents that are programs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal.services.agent.worker.command import ProgramOutput
from tests.services.agent.worker.conftest import Events, answer, run
from tests.services.processes import Process, Processes, wait_ready, wait_until

PROGRAM = """
    import json, os, sys, time, signal, subprocess
    order = json.loads(sys.stdin.readline())
    what = order["message"]
    def say(**event): print(json.dumps(event), flush=True)
    if what == "seen":
        names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN",
                 "AREAL_SESSION_KEY", "AREAL_RUN_ID", "AREAL_MODEL")
        env = {name: os.environ.get(name) for name in names}
        say(type="complete", summary="yes", metadata={"order": order, "env": env})
    elif what == "text":
        print("one"); print("two"); print('{"type": "other"}'); print("{not json"); print()
    elif what == "stream":
        print("no line break", end="", flush=True)
        sys.stdin.read()
        time.sleep(3600)
    elif what == "events":
        say(type="delta", text="looking")
        say(type="tool_call", name="a", arguments={"x": 1}, id="call_mine")
        say(type="tool_call", name="a", arguments={"x": 2})
        say(type="tool_result", name="a", result="second first")
        print("done")
    elif what == "fail":
        print("some text")
        print("first\\nthe last words", file=sys.stderr)
        sys.exit(3)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "failed":
        say(type="failed", error="no such task")
    elif what == "untold":
        say(type="failed")
    elif what == "nan":
        say(type="complete", summary="won", metadata={"reward": float("nan")})
    elif what == "bad":
        say(type="delta", text=5)
    elif what == "orphan":
        child = subprocess.Popen(["sleep", "3600"])
        print(child.pid)
    elif what == "escaped":
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        print(child.pid)
    elif what == "vanished":  # no mark, no session, no parent of its own
        forking = "import os; pid = os.fork(); print(pid) if pid else os.execvpe('sleep', ['sleep', '3600'], {})"
        subprocess.run([sys.executable, "-c", forking], start_new_session=True, env={})
    elif what == "wait":
        print("began", flush=True)
        time.sleep(3600)
    elif what == "deep":
        print('{"type": "complete", "summary": "won", "metadata": {"x": ' + "[" * 5000 + "]" * 5000 + "}}")
    elif what == "digits":
        print('{"type": "complete", "summary": "won", "metadata": {"reward": ' + "1" * 5000 + "}}")
    elif what == "cut":
        print('{"type": "complete", "summary": "won", "metadata": {"reward": 1.0')
    elif what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "3600"])
        print(os.getpid(), child.pid, flush=True)
        time.sleep(3600)
    elif what == "flood":
        while True: print("x" * 1000)
    elif what == "flood of lines":
        print("x\\n" * 1_000_000, file=sys.stderr)
        print("x\\n" * 500_000)
    elif what == "full":  # writes until its reader has gone, and ends
        os.set_blocking(1, False)
        written, since = 0, time.monotonic()
        while time.monotonic() - since < 0.5:
            try:
                written, since = written + os.write(1, b"x" * 4096), time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        with open(order["metadata"]["file"], "w") as file:
            file.write(str(written))
    elif what == "long":
        say(type="tool_result", name="a", result="x" * (5 << 20))
    elif what == "deaf":
        sys.stdin.close()
        print("heard nothing of it")
"""


@pytest.fixture(scope="module")
def worker(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Process:
    file = tmp_path_factory.mktemp("program") / "agent.py"
    file.write_text(textwrap.dedent(PROGRAM))
    process = module_processes.service("agent.worker", "--command", sys.executable, str(file), keyed=False)
    wait_ready(process)
    return process


def test_program_receives_request_and_session_model(worker: Process) -> None:
    access = {"base_url": "http://x:1", "api_key": "key", "model": None}
    history = [{"role": "user", "content": "ü"}]
    last = answer(worker, "seen", history=history, metadata={"areal_inference": access, "n": 1}, session_key="ä/b")
    assert last["summary"] == "yes"
    order = last["metadata"]["order"]
    assert (order["message"], order["history"], order["session_key"]) == ("seen", history, "ä/b")
    assert order["metadata"]["n"] == 1
    assert last["metadata"]["env"] == {
        "OPENAI_BASE_URL": "http://x:1/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": "http://x:1",
        "ANTHROPIC_API_KEY": "key",
        "ANTHROPIC_AUTH_TOKEN": "key",
        "AREAL_SESSION_KEY": "ä/b",
        "AREAL_RUN_ID": "run-1",
        "AREAL_MODEL": "default",
    }


def test_non_event_lines_form_answer(worker: Process) -> None:
    assert answer(worker, "text")["summary"] == 'one\ntwo\n{"type": "other"}\n{not json'


def test_partial_line_is_streamed_and_disconnect_ends_program(worker: Process) -> None:
    events = Events(worker, "stream")
    assert events.next() == {"type": "delta", "text": "no line break"}
    children = psutil.Process(worker.popen.pid).children()
    events.leave()
    _, alive = psutil.wait_procs(children, 10)
    assert children and not alive


def test_program_emits_events(worker: Process) -> None:
    *events, last = run(worker, "events")
    assert [event["type"] for event in events] == ["delta", "tool_call", "tool_call", "tool_result", "delta"]
    assert events[1]["id"] == events[3]["id"] == "call_mine" and json.loads(events[2]["arguments"]) == {"x": 2}
    assert last["summary"] == "done", "the text since the last tool call"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("fail", "ended with exit status 3\nfirst\nthe last words"),
        ("killed", "ended with signal 9, Killed"),
        ("failed", "no such task"),
        ("untold", "the program says that it has failed"),
        (
            "nan",
            "unexpected character, expected a JSON value: line 1 column 63 (char 62)",
        ),
        ("deep", "depth limit exceeded: line 1 column 1081 (char 1080)"),
        ("digits", "number is infinity when parsed as double: line 1 column 63 (char 62)"),
        ("cut", "unexpected end of data: line 2 column 1 (char 66)"),
        ("bad", "a delta is a text, not int 5"),
    ],
)
def test_program_failure_is_reported(worker: Process, what: str, error: str) -> None:
    last = answer(worker, what)
    assert last["type"] == "failed" and last["failure"] == "agent" and last["error"].endswith(error)


def test_program_leaves_no_process_behind(worker: Process) -> None:
    pid = int(answer(worker, "orphan")["summary"])
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("how", ["escaped", "vanished"])
def test_daemonised_process_ends_with_turn(worker: Process, how: str) -> None:
    """It also holds the program's output open."""
    pid = int(answer(worker, how)["summary"])
    assert not psutil.pid_exists(pid)


def test_unmarked_process_ends_with_its_possible_turns(worker: Process) -> None:
    other = Events(worker, "wait")
    assert other.next() == {"type": "delta", "text": "began"}
    vanished = psutil.Process(int(answer(worker, "vanished")["summary"]))
    assert not ended(vanished), "it may be the other turn's"
    other.leave()
    wait_until(lambda: ended(vanished), what="the process to end")


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_program_ignoring_sigterm_is_killed_with_group(worker: Process) -> None:
    events = Events(worker, "stubborn")
    pids = [int(pid) for pid in events.next()["text"].split()]
    processes = [psutil.Process(pid) for pid in pids]
    events.leave()
    wait_until(lambda: all(map(ended, processes)), what="the program and its child to end")


def test_program_not_reading_stdin_still_answers(worker: Process) -> None:
    history = [{"role": "user", "content": "x" * 1_000_000}]
    assert answer(worker, "deaf", history=history)["summary"] == "heard nothing of it"


def test_output_flood_is_throttled_and_bounded(worker: Process) -> None:
    events = Events(worker, "flood")
    events.next()
    wait_until(lambda: psutil.Process(worker.popen.pid).children()[0].status() == psutil.STATUS_SLEEPING)
    assert psutil.Process(worker.popen.pid).memory_info().rss < 300 * 1024 * 1024
    *_, last = events
    assert last["failure"] == "agent" and "longer than a turn's answer may be" in last["error"]
    events.leave()


FAILING_TURNS = """
    import asyncio, gc, sys, tracemalloc
    from areal.api.agent import AgentRequest
    from areal.services.agent.worker.command import command_agent
    from areal.services.agent.worker.turn import AgentFailed, WorkerTurn

    async def read(turn):
        while not (await turn.take())[1]:
            pass

    async def fail():
        turn = WorkerTurn(5_000_000)
        reader = asyncio.create_task(read(turn))
        try:
            await command_agent([sys.executable, "-c", sys.argv[1]], []).run(AgentRequest("go", "s", "run-1"), turn)
        except AgentFailed as error:
            turn.fail("agent", str(error))
        await reader

    async def main():
        for _ in range(2):
            await fail()
        print(tracemalloc.get_traced_memory()[0])

    gc.disable()
    tracemalloc.start()
    asyncio.run(main())
"""


@pytest.mark.parametrize("program", ["while True: print('x' * 1000)", "print('{' + 'x' * 5_000_000)"])
def test_text_of_failed_turn_is_freed_without_gc(program: str) -> None:
    # In a process of its own, as a turn's end kills what else its process has started and is not marked.
    script = [sys.executable, "-c", textwrap.dedent(FAILING_TURNS), program]
    held = int(subprocess.run(script, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert held < 4_000_000


def test_flood_of_short_lines_does_not_block_other_turns(worker: Process) -> None:
    flood = Events(worker, "flood of lines")
    waits = []
    for _ in range(5):
        since = time.monotonic()
        assert answer(worker, "deaf")["summary"] == "heard nothing of it"
        waits.append(time.monotonic() - since)
    *_, last = flood
    assert last["type"] == "complete" and last["summary"].count("x") == 500_000
    assert max(waits) < 2
    flood.leave()


def test_late_reader_gets_whole_answer(worker: Process, tmp_path: Path) -> None:
    file = tmp_path / "written"
    events = Events(worker, "full", metadata={"file": str(file)})
    wait_until(lambda: file.exists() and file.read_text() != "")
    time.sleep(2.5)
    *_, last = events
    assert (last["type"], len(last["summary"])) == ("complete", int(file.read_text()))
    events.leave()


def test_overlong_event_fails_turn(worker: Process) -> None:
    *events, last = run(worker, "long")
    assert events == [] and last["failure"] == "agent"
    assert last["error"].startswith("a line that begins with { has over 4194304 characters")


def test_missing_program_exits_worker(processes: Processes) -> None:
    process = processes.spawn("-m", "areal.services.agent.worker", "--command", "no-such-program")
    process.wait_log("error: command: there is no program 'no-such-program'")
    assert process.wait() == 2


def pushed(pieces: list[str]) -> list[Any]:
    output = ProgramOutput()
    found = [part for piece in pieces for part in output.push(piece)]
    return [*found, *output.push("", last=True)]


@pytest.mark.parametrize(
    ("pieces", "parts"),
    [
        (["a\n", "b\n\n"], ["a", "\nb"]),
        (['{"type": "del', 'ta", "text": "x"}\nrest'], [{"type": "delta", "text": "x"}, "rest"]),
        (['{"type": "complete"}'], [{"type": "complete"}]),
        (['a {"type": "delta"}\n'], ['a {"type": "delta"}']),
        (["a", '{"type": "delta"}\n{"type": []}'], ["a", '{"type": "delta"}', '\n{"type": []}']),
        (["{" * 10], ["{" * 10]),
        ([""], []),
    ],
)
def test_output_is_split_into_texts_and_events(pieces: list[str], parts: list[Any]) -> None:
    assert pushed(pieces) == parts
