"""Agents that cannot be loaded, and agents that misbehave in a turn: each is named, and the worker goes on."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.services.agent.worker.conftest import Events, StartWorker, answer, start_agent
from tests.services.processes import TERM, Process, Processes, wait_until

LOADING = {
    "1 / 0": ["1 / 0", "ZeroDivisionError: division by zero", "cannot be imported"],
    "def f():\n  [][1]\nf()": ["in <module>\n    f()\n", "in f\n    [][1]\n", "IndexError: list index out of range"],
    "def Agent(:": ["SyntaxError", "cannot be imported"],
    "import no_such_module_at_all": ["its import of no_such_module_at_all failed"],
    "import sys; sys.exit(3)": ["ends the process when it is imported: SystemExit(3)"],
    "agent = 1": ["no 'Agent' there (did you mean \"agent\"?)"],
    "Agent = 1": ["is int: it has no run, and cannot be called"],
    "async def Agent(): pass": ["Agent() takes no request"],
    "class Agent:\n  def __init__(self): self.boom()\n  def boom(self): raise OSError('no disk')": [
        "self.boom()",
        "cannot be made: OSError: no disk",
    ],
    "class Agent:\n  def __init__(self, task): pass": [
        "cannot be made with kwargs []: missing a required argument: 'task'"
    ],
    "class Agent:\n  async def arun_episode(self, engine, data): pass": ["it has no run, and cannot be called"],
}


@pytest.mark.parametrize("code", LOADING)
def test_unloadable_agent_exits_worker(processes: Processes, tmp_path: Path, code: str) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(code)
    process = processes.spawn("-m", "areal.services.agent.worker", "--port", "0", "--agent", f"{file}:Agent")
    assert process.wait() != 0
    wait_until(lambda: all(part in "".join(process.log) for part in ["error: ", *LOADING[code]]), what=str(process.log))
    assert process.log[0].startswith("error: agent ") and not any("importlib" in line for line in process.log[1:])


@pytest.mark.parametrize(
    ("code", "kwargs", "named"),
    [
        (
            "class Agent:\n  async def run(self, request, *, emitter): ...",
            '{"x": 1}',
            "unexpected keyword argument 'x'",
        ),
        ("async def Agent(message): pass", '{"x": 1}', "Agent() takes no 'x'"),
    ],
)
def test_kwargs_unknown_to_agent_are_refused(
    processes: Processes, tmp_path: Path, code: str, kwargs: str, named: str
) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(code)
    flags = ("--agent", f"{file}:Agent", "--kwargs", kwargs)
    process = processes.spawn("-m", "areal.services.agent.worker", "--port", "0", *flags)
    process.wait_log(re.escape(named))
    assert process.wait() == 2


@pytest.mark.parametrize(
    "flags", [(), ("--agent", "a:b", "--command", "cat"), ("--command", "cat", "--kwargs", '{"x": 1}')]
)
def test_agent_and_command_are_mutually_exclusive(processes: Processes, flags: tuple[str, ...]) -> None:
    process = processes.spawn("-m", "areal.services.agent.worker", *flags)
    process.wait_log("error: ")
    assert process.wait() == 2


BAD = """
    import asyncio, os, sys, threading, time
    from areal.api.agent import AgentResponse, StreamResponse

    async def words():
        yield b"a"
        yield 5

    class Unreachable(ConnectionError): pass

    class Untold(ValueError):
        def __str__(self): raise KeyError

    class Agent:
        async def run(self, request, *, emitter):
            return await getattr(self, request.message)(emitter)

        async def raises(self, emitter): raise ValueError("boom")
        async def exits(self, emitter): sys.exit(1)
        async def cancels(self, emitter): raise asyncio.CancelledError
        async def lost(self, emitter): raise Unreachable("no model")
        async def surrogate(self, emitter): raise ValueError("\\ud800")
        async def untold(self, emitter): raise Untold
        async def group(self, emitter): raise ExceptionGroup("a group", [ValueError("boom")])
        async def group_lost(self, emitter): raise ExceptionGroup("a group", [Unreachable("no model")])
        async def half_object(self, emitter): return {"x": "\\ud800"}
        async def half_result(self, emitter):
            await emitter.emit_tool_call("a", {"of": "\\ud800"})
        async def number(self, emitter): return 5
        async def objects(self, emitter): return {"x": object()}
        async def nan(self, emitter): return {"x": float("nan")}
        async def huge_number(self, emitter): return {"x": 10 ** 400}
        async def deep(self, emitter):
            found = {}
            for _ in range(200): found = {"x": found}
            return found
        async def summary(self, emitter): return AgentResponse(5)
        async def metadata(self, emitter): return AgentResponse("", "no")
        async def status(self, emitter): return StreamResponse(7, {}, words())
        async def headers(self, emitter): return StreamResponse(200, {"A": "b\\r\\nc"}, words())
        async def no_headers(self, emitter): return StreamResponse(200, None, words())
        async def body(self, emitter): return StreamResponse(200, {}, [b"a"])
        async def stream(self, emitter): return StreamResponse(200, {}, words())
        async def delta(self, emitter): await emitter.emit_delta(b"bytes")
        async def half(self, emitter): await emitter.emit_delta("\\ud800")
        async def call(self, emitter): await emitter.emit_tool_call("a", [1])
        async def unnamed(self, emitter): await emitter.emit_tool_call("", {})
        async def result(self, emitter): await emitter.emit_tool_result("a", "b")
        async def list_result(self, emitter): await emitter.emit_tool_result(["a"], "b")
        async def flood(self, emitter):
            while True: await emitter.emit_delta("x" * 100_000)
        async def later(self, emitter):
            async def after():
                await asyncio.sleep(0)
                try:
                    await emitter.emit_delta("x")
                except RuntimeError as error:
                    print("later:", error, flush=True)
            self.task = asyncio.create_task(after())
        async def task_exits(self, emitter):
            async def exit(): sys.exit(1)
            self.task = asyncio.create_task(exit())
            await asyncio.sleep(0.1)
            return "went on"
        async def blocks(self, emitter):
            await emitter.emit_delta("blocking")
            time.sleep(7)
        async def forks(self, emitter):
            if (pid := os.fork()) == 0:
                await asyncio.sleep(3600)
            return str(pid)
        async def ignores(self, emitter):
            await emitter.emit_delta("stays")
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    print("not now", flush=True)
        async def well(self, emitter): return "well"

        async def close_all_sessions(self): raise ValueError("cannot")
"""


@pytest.fixture(scope="module")
def worker(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Process:
    return start_agent(module_processes, tmp_path_factory.mktemp("agent"), BAD, "--max-body-bytes", "2000000")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raises", "ValueError: boom (my_agent.py:"),
        ("exits", "SystemExit: 1 (my_agent.py:"),
        ("cancels", "CancelledError"),
        ("surrogate", "ValueError: ? (my_agent.py:"),
        ("untold", "Untold, whose text cannot be had: KeyError"),
        ("group", "ValueError: boom (my_agent.py:"),
        ("half_object", "the metadata of the answer cannot be written as JSON"),
        ("half_result", "the arguments of 'a' cannot be written as JSON"),
        ("number", "the agent returned int 5; it may return an AgentResponse, a StreamResponse"),
        ("objects", "the metadata of the answer cannot be written as JSON"),
        ("nan", "the metadata of the answer cannot be written as JSON"),
        ("huge_number", "the metadata of the answer cannot be written as JSON: number is infinity"),
        ("deep", "the metadata of the answer has more than 200 levels"),
        ("summary", "the summary is a text, not int 5"),
        ("metadata", "the metadata is a dict, not str 'no'"),
        ("status", "the status of a stream is a number from 200 to 599, not int 7"),
        ("headers", "the headers of a stream are texts"),
        ("no_headers", "the headers of a stream are texts, not NoneType None"),
        ("body", "the body of a stream is an async iterator of bytes, not list [b'a']"),
        ("stream", "a stream has bytes, not int 5"),
        ("delta", "a delta is a text, not bytes b'bytes'"),
        ("half", "a delta of the agent cannot be written as JSON"),
        ("call", "the arguments of a call of 'a' are an object, not list [1]"),
        ("unnamed", "a tool call has a name"),
        ("result", "a result of 'a' belongs to no call"),
        ("list_result", "a result of ['a'] belongs to no call"),
        ("flood", "the answer is longer than a turn's answer may be"),
    ],
)
def test_bad_agent_fails_turn_with_its_error(worker: Process, what: str, error: str) -> None:
    last = answer(worker, what)
    assert last["type"] == "failed" and last["failure"] == "agent" and last["error"].startswith(error), last
    assert answer(worker, "well")["summary"] == "well"


def test_turn_that_loses_model_is_infra_failure(worker: Process) -> None:
    for what in ("lost", "group_lost"):
        last = answer(worker, what)
        assert last["failure"] == "infra" and last["error"].startswith("Unreachable: no model")


def test_event_after_the_turn_is_refused(worker: Process) -> None:
    assert answer(worker, "later")["type"] == "complete"
    worker.wait_log("later: the turn is over")


def test_sys_exit_in_task_does_not_exit_worker(worker: Process) -> None:
    assert answer(worker, "task_exits")["summary"] == "went on"
    worker.wait_log("a task of the agent would end the worker")


def test_forked_child_does_not_run_the_workers_loop(worker: Process) -> None:
    pid = int(answer(worker, "forks")["summary"])
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert answer(worker, "well")["summary"] == "well"


def test_agent_blocking_event_loop_is_reported(worker: Process) -> None:
    events = Events(worker, "blocks")
    events.next()
    blocked = wait_until(lambda: (answer := worker.call("GET", "/ready")).status == 503 and answer.json())
    assert blocked["reason"].startswith("the agent blocks its event loop for ")
    assert "in turn run-1: " in blocked["reason"] and blocked["reason"].endswith(", blocks")
    worker.wait_log("the agent blocks its event loop")
    assert "areal_agent_loop_blocked_total 1.0" in worker.call("GET", "/metrics").body.decode()
    assert [event["type"] for event in events] == ["complete"]
    assert wait_until(lambda: worker.call("GET", "/ready").status == 200)


def wait_new_port(worker: Process, starts: int) -> None:
    """The process has started so many times; it listens on another port now."""
    begun = re.compile(r"listens on \S+ port (\d+)")
    wait_until(lambda: sum(begun.search(line) is not None for line in worker.log) == starts)
    worker.port = int(next(filter(None, map(begun.search, reversed(worker.log))))[1])


@pytest.mark.extended
def test_agent_ignoring_cancellation_does_not_keep_worker(start_worker: StartWorker) -> None:
    worker = start_worker(BAD)
    events = Events(worker, "ignores")
    events.next()
    events.leave()
    worker.wait_log("not now")
    assert worker.call("GET", "/ready").json()["turns"] == 1
    worker.signal(TERM)
    assert worker.wait(60) == 0


@pytest.mark.extended
def test_cancelled_turn_blocking_loop_restarts_worker(start_worker: StartWorker) -> None:
    code = """
        import asyncio, threading
        class Agent:
            async def run(self, message, *, emitter):
                if message == "well":
                    return message
                await emitter.emit_delta("blocks")
                if message == "task":
                    await asyncio.create_task(self.block())
                await self.block()
            async def block(self):
                threading.Event().wait()
    """
    worker = start_worker(code)
    for starts, message in ((2, "turn"), (3, "task")):
        events = Events(worker, message)
        events.next()
        events.leave()
        worker.wait_log("a cancelled turn goes on; the worker restarts: .*my_agent.py:12, block")
        wait_new_port(worker, starts)
        assert answer(worker, "well")["summary"] == "well"
    assert worker.popen.poll() is None


@pytest.mark.extended
def test_uncancellable_function_restarts_worker(start_worker: StartWorker) -> None:
    code = """
        import threading
        def Agent(message, *, emitter):
            if message != "hang":
                return message.upper()
            emitter.emit_delta("hangs")
            threading.Event().wait()
    """
    worker = start_worker(code)
    events = Events(worker, "hang")
    events.next()
    events.leave()
    wait_until(lambda: worker.call("GET", "/ready").json()["turns"] == 0)  # it has ended for its caller
    assert answer(worker)["summary"] == "HELLO"
    worker.wait_log("cancelled plain functions go on; the worker restarts: .*my_agent.py:7")
    wait_new_port(worker, 2)
    assert answer(worker)["summary"] == "HELLO"
    assert worker.popen.poll() is None
