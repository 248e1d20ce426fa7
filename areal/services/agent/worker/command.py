"""An agent that is a program: one process per turn, in the worker's folder and in its own process group.

The process inherits the worker's environment, with these additions:

    AREAL_SESSION_KEY, AREAL_RUN_ID
    OPENAI_BASE_URL (with /v1), OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, ANTHROPIC_AUTH_TOKEN, AREAL_MODEL
                                             if the session has a model: its address, key and name
    AREAL_MCP_SERVERS                        the service's ``tools``, as JSON

Its stdin is one line, a JSON object with ``message, history, session_key, run_id, metadata``, and then the end of file.
A line of its stdout that is a JSON object of one of these types is an event; all other output is text of the answer,
forwarded as it is written:

    {"type": "delta", "text": "..."}
    {"type": "tool_call", "name": "...", "arguments": {...}, "id": "..."}       a result without an id belongs to
    {"type": "tool_result", "name": "...", "result": "...", "id": "..."}        the oldest open call of its name
    {"type": "complete", "summary": "...", "metadata": {...}}                   both fields are optional
    {"type": "failed", "error": "..."}

A line that begins with { has at most 4,194,304 characters: a longer one fails the turn. So does a line that begins as
an event and is no JSON, or has more levels or digits than JSON is read with.

The turn ends when the program exits. An exit status other than 0 fails the turn, with the last lines of stderr in the
error; stderr goes to the worker's log. Processes that it leaves behind are killed at its exit, also those that left its
group or session. If the turn is cancelled, the group gets SIGTERM, and SIGKILL two seconds later.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import json
import logging
import os
import re
import shutil
import signal
import time
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import orjson

from areal.api.agent import AgentRequest, AgentResponse
from areal.errors import UsageFault
from areal.http import tracing
from areal.runtime import procfs
from areal.services.agent.worker.agents import MODEL, AgentAdapter
from areal.services.agent.worker.turn import AgentFailed, WorkerTurn, response_of, waited
from areal.services.http.tasks import Watchdog, uninterrupted

_READ = 64 * 1024
_LONGEST_EVENT = 4 * 1024 * 1024
_STDERR_LINES = 10
_TERM_S = 2.0
_TAIL_S = 1.0  # for the rest of the output, where a process outside the group holds it open and the caller keeps up
_RUN_ID = "AREAL_RUN_ID"
_TYPES = ("delta", "tool_call", "tool_result", "complete", "failed")
_NAMES_A_TYPE = re.compile(rf'"type"\s*:\s*"(?:{"|".join(_TYPES)})"')
_BEGINS_AS_EVENT = re.compile(rf"\{{\s*{_NAMES_A_TYPE.pattern}")
_log = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 5.0  # for killed processes to be gone, and for a program that forks as fast as it is killed
_AGAIN_S = 0.02


def command_agent(command: Sequence[str], tools: Sequence[Mapping[str, object]]) -> AgentAdapter:
    """Return the adapter of a program. Raises UsageFault if the program does not exist."""
    if shutil.which(command[0]) is None:
        raise UsageFault(f"command: there is no program {command[0]!r}")
    more = {"AREAL_MCP_SERVERS": json.dumps([each["mcp"] for each in tools])} if tools else {}
    family = ProgramFamily()

    async def run(request: AgentRequest, turn: WorkerTurn) -> object:
        return await _ProgramRun(request, turn, family).of(command, {**os.environ, **more, **_environment(request)})

    return AgentAdapter("command", run)


def _environment(request: AgentRequest) -> dict[str, str]:
    about = {"AREAL_SESSION_KEY": request.session_key, _RUN_ID: request.run_id}
    about |= {name.upper(): value for name, value in tracing.headers().items()}  # OpenTelemetry's convention
    access = request.metadata.get("areal_inference")
    if not access:
        return about
    url, key = access["base_url"].rstrip("/"), access["api_key"]
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    anthropic = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_AUTH_TOKEN": key}
    return {**about, **openai, **anthropic, "AREAL_MODEL": access.get("model") or MODEL}


class _Process(SubprocessStreamProtocol):
    """A process that leads a process group, and whose exit kills the group. ``exited`` is set at the exit; it does not
    wait for the pipes to close, which processes outside the group may hold open."""

    def __init__(self, family: ProgramFamily) -> None:
        self._family = family
        self._running_loop = asyncio.get_running_loop()
        super().__init__(limit=_READ, loop=self._running_loop)
        self.exited: asyncio.Future[None] = self._running_loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.process = cast(asyncio.SubprocessTransport, transport)
        self._family.started.add(self.process.get_pid())

    def process_exited(self) -> None:
        super().process_exited()
        self._family.started.discard(self.process.get_pid())
        self.signal(signal.SIGKILL)
        if not self.exited.done():
            self.exited.set_result(None)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.get_pid(), number)

    async def end(self) -> None:
        try:
            if not self.exited.done():
                self.signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=_TERM_S)
        finally:
            self.signal(signal.SIGKILL)
            self.process.close()


class _ProgramRun:
    """One turn of a program."""

    def __init__(self, request: AgentRequest, turn: WorkerTurn, family: ProgramFamily) -> None:
        self._family = family
        self._request = request
        self._turn = turn
        self._complete = AgentResponse()
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._writing = False  # output is being passed on, at the caller's pace

    async def of(self, command: Sequence[str], environment: Mapping[str, str]) -> AgentResponse:
        loop = asyncio.get_running_loop()
        how: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "env": environment, "process_group": 0}
        async with self._family.turn(f"{_RUN_ID}={environment[_RUN_ID]}"):
            return await self._run(loop.subprocess_exec(lambda: _Process(self._family), *command, **how), command[0])

    async def _run(
        self, start: Coroutine[Any, Any, tuple[asyncio.SubprocessTransport, _Process]], program: str
    ) -> AgentResponse:
        _, process = await start
        try:
            async with asyncio.TaskGroup() as group:
                works = (self._write(process), self._read(process), self._log(process))
                pipes = {group.create_task(work, name="pipe") for work in works}
                await process.exited
                with contextlib.suppress(TimeoutError):
                    async with Watchdog(lambda: _TAIL_S, suspended=lambda: self._writing):
                        await asyncio.wait(pipes)
                for task in pipes:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0]
        finally:
            await process.end()
        if status := process.process.get_returncode():
            how = f"exit status {status}" if status > 0 else f"signal {-status}, {signal.strsignal(-status)}"
            raise AgentFailed("\n".join((f"{program} ended with {how}", *self._stderr)))
        return self._complete

    async def _write(self, process: _Process) -> None:
        request = self._request
        names = ("message", "history", "session_key", "run_id", "metadata")
        line = {name: getattr(request, name) for name in names}
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the program may not read its stdin
            process.stdin.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            await process.stdin.drain()
            process.stdin.close()

    async def _read(self, process: _Process) -> None:
        assert process.stdout is not None
        decode, output = codecs.getincrementaldecoder("utf-8")("replace").decode, ProgramOutput()
        while data := await process.stdout.read(_READ):
            await self._take(output.push(decode(data)))
        await self._take(output.push(decode(b"", True), last=True))

    async def _take(self, parts: Iterator[str | dict[str, object]]) -> None:
        self._writing = True
        for part in parts:
            if isinstance(part, str):
                await waited(self._turn.delta(part))
            else:
                await waited(self._event(part))
        self._writing = False

    def _event(self, event: Mapping[str, Any]) -> Future[None] | None:
        """Apply an event. Raises AgentFailed for ``failed``, and for fields of a wrong type."""
        match event["type"]:
            case "delta":
                return self._turn.delta(event.get("text"))
            case "tool_call":
                return self._turn.tool_call(event.get("name"), event.get("arguments", {}), event.get("id"))
            case "tool_result":
                return self._turn.tool_result(event.get("name"), event.get("result"), event.get("id"))
            case "failed":
                raise AgentFailed(str(event.get("error") or "the program says that it has failed"))
        self._complete = response_of(AgentResponse(event.get("summary", ""), event.get("metadata", {})))
        return None

    async def _log(self, process: _Process) -> None:
        assert process.stderr is not None
        rest = b""
        while data := await process.stderr.read(_READ):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _READ:  # no line, or a very long one
                lines, rest = [*lines, rest], b""
            self._say(lines)
        self._say([rest])

    def _say(self, lines: Sequence[bytes]) -> None:
        """Log the output of one read in one record: a record per line could delay other turns."""
        printed = [line for each in lines if (line := each.decode(errors="replace").rstrip())]
        if printed:
            self._stderr.extend(printed)
            _log.info("%s: %s", self._request.run_id, "\n".join(printed))


class ProgramOutput:
    """Splits a program's output into texts and events. Line breaks at the end of the output are dropped."""

    def __init__(self) -> None:
        self._pending = ""
        self._within_line = False
        self._breaks = ""

    def push(self, text: str, *, last: bool = False) -> Iterator[str | dict[str, object]]:
        self._pending += text
        while self._pending:
            begins_event = self._pending[0] == "{" and not self._within_line
            # A text goes on to the next line that may be an event.
            end = self._pending.find("\n" if begins_event else "\n{") + 1
            whole = end > 0
            line, rest = (self._pending[:end], self._pending[end:]) if whole else (self._pending, "")
            if begins_event and not whole and len(line) >= _LONGEST_EVENT:
                self._pending = line = rest = text = ""  # the error's frames may live for long
                why = "no event may be so long, and a text that is must not begin with {"
                raise AgentFailed(f"a line that begins with {{ has over {_LONGEST_EVENT} characters: {why}")
            if begins_event and not whole and not last:
                return
            self._pending, self._within_line = rest, not line.endswith("\n")
            event = _event_of(line) if begins_event else None
            if event is not None:
                yield event
            else:
                words = self._breaks + line
                spoken = words.rstrip("\n")
                self._breaks = words[len(spoken) :]
                if spoken:
                    yield spoken


def _event_of(line: str) -> dict[str, object] | None:
    """Return the event of a line, None for text. Raises AgentFailed for an event that is not JSON, such as one that was
    cut, has a NaN, an infinity or an unpaired surrogate, or more levels or digits than are read."""
    fault = ""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        fault = str(error)
        try:
            found = json.loads(line, parse_int=float)  # of any length
        except RecursionError:
            found = {"type": "event"} if _NAMES_A_TYPE.search(line) else None
        except ValueError:
            found = {"type": "event"} if _BEGINS_AS_EVENT.match(line) else None
        if found == {"type": "event"}:
            raise AgentFailed(f"an event of the program is no JSON: {fault}") from error
    if not isinstance(found, dict) or found.get("type") not in _TYPES:
        return None
    if fault:
        raise AgentFailed(f"a {found['type']} of the program is no JSON: {fault}")
    return found


_TICKS = os.sysconf("SC_CLK_TCK")


class ProgramFamily:
    """The programs of a worker's turns. Processes that a program leaves behind end with its turn, also those that left
    its group or its session.

    The worker is a subreaper: a process whose parent has ended becomes the worker's child. At the end of a turn, these
    are its own: a descendant with the turn's mark in its environment; and a child that the worker did not start, unless
    it is younger than a turn that runs, to which it may belong. The latter ends with that turn.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._turns: list[tuple[str, int]] = []  # the mark and the start of each
        self.started: set[int] = set()  # pids of the programs that are not reaped yet

    @contextlib.asynccontextmanager
    async def turn(self, mark: str) -> AsyncIterator[None]:
        """Yield a turn, from before its program starts until after its exit, when its leftover processes are ended.
        ``mark``: ``NAME=value`` in the environment of its processes."""
        begun = (mark, int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS))
        self._turns.append(begun)
        try:
            yield
        finally:
            self._turns.remove(begun)
            await uninterrupted(asyncio.to_thread(self._kill_all, mark), "end-of-programs")

    def _kill_all(self, mark: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self._kill(mark) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)

    def _kill(self, mark: str) -> bool:
        """Return whether there were any."""
        oldest_turn = min((started for _, started in self._turns), default=None)
        ours, (name, _, value) = os.getpid(), mark.partition("=")
        by_parent: dict[int, list[procfs.Stat]] = {}
        for each in filter(None, map(procfs.read_stat, procfs.pids())):
            by_parent.setdefault(each.ppid, []).append(each)
        found, family = False, list(by_parent.get(ours, ()))
        while family:
            child = family.pop()
            family += by_parent.get(child.pid, ())
            if child.pid in self.started:
                continue
            left = child.ppid == ours and (oldest_turn is None or child.start_ticks < oldest_turn)
            if not child.alive:
                if child.ppid == ours:
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)
            elif left or procfs.environment(child.pid).get(name) == value:
                found = True
                if (descriptor := procfs.open_verified(child.pid, child.start_ticks)) is not None:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    os.close(descriptor)
        return found
