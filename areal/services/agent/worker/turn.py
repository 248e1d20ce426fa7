"""The queue of events of one turn, between the agent and the worker's response, and the conversion of agent results.

The agent's code runs on the agent's loop or on the turn's thread, the response on the worker's loop. A ``WorkerTurn``
queues events on the agent's side, as lines of ``areal.wire.agents``, and the worker's loop takes them in batches. An
emitting agent waits while more than ``_HIGH_WATER`` bytes are queued.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import orjson

from areal.api.agent import AgentResponse, StreamResponse
from areal.http.headers import unique_id
from areal.services.http.messages import MOST_LEVELS, is_deeper
from areal.wire.agents import Failure

Outcome = Literal["", "complete", "agent", "infra", "cancelled"]
_HIGH_WATER = 256 * 1024
_PART_BYTES = 64 * 1024  # of the agent's own stream in one event
_NAMED = 200  # characters of a wrong value that an error quotes


class AgentFailed(Exception):
    """The agent broke its contract."""


class WorkerTurn:
    """The events of a turn that runs. ``limit``: bytes of all events except ``data``, the agent's own stream.

    A method that emits an event returns a future if the agent must wait before the next event. It raises AgentFailed
    beyond the limit, CancelledError once the turn was cancelled, RuntimeError once it has ended."""

    def __init__(self, limit: int) -> None:
        self._reader = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._lines: list[bytes] = []
        self._size = 0
        self._left = limit
        self._room: Future[None] | None = None
        self._open_calls: dict[object, list[str]] = defaultdict(list)
        self._call_ids: set[str] = set()
        self._texts: list[str] = []
        self.outcome: Outcome = ""  # set once it is over
        self.cancelled = False
        self._cancelled_at = math.inf

    # On the worker's loop.

    async def take(self) -> tuple[bytes, bool]:
        """Wait for queued lines and take them. Return the lines, and whether they are the last."""
        await self._news.wait()
        with self._lock:
            self._news.clear()
            lines, self._lines, self._size = self._lines, [], 0
            room, self._room = self._room, None
            last = self.outcome != ""
        if room is not None:
            room.set_result(None)
        return b"".join(lines), last

    def cancel(self) -> None:
        """Cancel the turn: its caller has disconnected."""
        with self._lock:
            self.cancelled = True
            self._cancelled_at = time.monotonic()
            room, self._room = self._room, None
            self._texts.clear()
        if room is not None:
            room.set_result(None)

    @property
    def cancelled_for(self) -> float:
        """The seconds since the cancellation; negative infinity without one."""
        return time.monotonic() - self._cancelled_at

    # On the agent's loop or thread.

    @property
    def text(self) -> str:
        """The text of the deltas since the last tool call or result."""
        return "".join(self._texts)

    def _with_text(self, event: dict[str, object]) -> Future[None] | None:
        """Emit a tool call or result, with the text since the previous one: both belong to one chat message."""
        content = {"content": text} if (text := self.text) else {}
        self._texts.clear()
        return self._put({**event, **content})

    def delta(self, text: object) -> Future[None] | None:
        if not isinstance(text, str):
            raise AgentFailed(f"a delta is a text, not {shown(text)}")
        if not text:
            return None
        self._texts.append(text)
        return self._put({"type": "delta", "text": text})

    def tool_call(self, name: object, arguments: object, call_id: object = None) -> Future[None] | None:
        known_id = call_id or unique_id("call_")
        if not (isinstance(name, str) and name and isinstance(known_id, str)) or known_id in self._call_ids:
            raise AgentFailed(f"a tool call has a name, and an id of its own: {shown(name)}, {shown(call_id)}")
        if not isinstance(arguments, str | Mapping):
            raise AgentFailed(f"the arguments of a call of {name!r} are an object, not {shown(arguments)}")
        # A string holds the model's own output. If that is not valid JSON, the tool's result tells the model so, and
        # the history keeps the original output.
        text = arguments if isinstance(arguments, str) else _json(arguments, f"the arguments of {name!r}")
        self._call_ids.add(known_id)
        self._open_calls[name].append(known_id)
        return self._with_text({"type": "tool_call", "id": known_id, "name": name, "arguments": text or "{}"})

    def tool_result(self, name: object, result: object, call_id: object = None) -> Future[None] | None:
        """Emit the result of the call ``call_id``, or of the oldest call of ``name`` without a result."""
        calls = self._open_calls.get(name, []) if isinstance(name, str) else []
        if not calls or (call_id is not None and call_id not in calls):
            raise AgentFailed(f"a result of {name!r} belongs to no call" + (f" {call_id!r}" if call_id else ""))
        known_id = call_id or calls[0]
        calls.remove(str(known_id))
        text = result if isinstance(result, str) else _json(result, f"the result of {name!r}")
        return self._with_text({"type": "tool_result", "id": known_id, "name": name, "result": text})

    def fail(self, failure: Failure, error: str) -> None:
        text = error.encode(errors="replace").decode()
        self._put({"type": "failed", "failure": failure, "error": text}, outcome=failure)

    async def complete(self, result: object) -> None:
        """End the turn with the agent's result. Raises AgentFailed for a result of an unsupported type."""
        if isinstance(result, StreamResponse):
            await self._stream(result)
            result = None
        response = response_of(result)
        metadata = orjson.Fragment(_json(response.metadata, "the metadata of the answer"))
        if is_deeper(response.metadata, MOST_LEVELS):
            raise AgentFailed(f"the metadata of the answer has more than {MOST_LEVELS} levels")
        summary, counted = response.summary or self.text, response.summary != ""
        self._put({"type": "complete", "summary": summary, "metadata": metadata}, counted=counted, outcome="complete")

    async def _stream(self, response: StreamResponse) -> None:
        status, headers = response.status_code, response.headers
        if type(status) is not int or not 200 <= status <= 599:
            raise AgentFailed(f"the status of a stream is a number from 200 to 599, not {shown(status)}")
        try:
            fields: dict[Any, Any] = dict(headers)
        except (TypeError, ValueError):
            fields = {"": None}
        if not all(isinstance(part, str) and part.isprintable() for field in fields.items() for part in field):
            raise AgentFailed(f"the headers of a stream are texts, not {shown(headers)}")
        if not isinstance(response.body, AsyncIterable):  # while the caller can still get another status
            raise AgentFailed(f"the body of a stream is an async iterator of bytes, not {shown(response.body)}")
        await waited(self._put({"type": "response", "status": status, "headers": fields}))
        async with contextlib.aclosing(_parts(response.body)) as parts:
            async for part in parts:
                await waited(self._put({"type": "data", "data": base64.b64encode(part).decode()}, counted=False))

    def _put(self, event: Mapping[str, object], *, counted: bool = True, outcome: Outcome = "") -> Future[None] | None:
        try:
            line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError as error:
            raise AgentFailed(f"a {event['type']} of the agent cannot be written as JSON: {error}") from error
        with self._lock:
            if self.cancelled:
                raise asyncio.CancelledError
            if self.outcome:
                raise RuntimeError("the turn is over: nothing can be emitted any more")
            if counted and event["type"] != "failed":
                self._left -= len(line)
                if self._left < 0:
                    raise AgentFailed("the answer is longer than a turn's answer may be (max_body_bytes)")
            quiet = not self._lines
            self._lines.append(line)
            self._size += len(line)
            self.outcome = outcome
            if outcome:  # a cycle of an error and its frames may hold the turn until the garbage is collected
                self._texts.clear()
            if self._size > _HIGH_WATER and self._room is None:
                self._room = Future()
                self._room.set_running_or_notify_cancel()  # so that no waiter can cancel it for the others
            room = self._room
        if quiet:
            self._reader.call_soon_threadsafe(self._news.set)
        return room


async def _parts(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the stream's bytes in parts of at most ``_PART_BYTES``, and close the stream."""
    try:
        async for chunk in body:
            data = chunk.encode() if isinstance(chunk, str) else chunk
            if not isinstance(data, bytes | bytearray | memoryview):
                raise AgentFailed(f"a stream has bytes, not {shown(chunk)}")
            for start in range(0, len(data), _PART_BYTES):
                yield bytes(data[start : start + _PART_BYTES])
    finally:
        if (close := getattr(body, "aclose", None)) is not None:
            await close()


def response_of(result: object) -> AgentResponse:
    """Return the agent's result as an AgentResponse. Raises AgentFailed for an unsupported type."""
    if result is None:
        return AgentResponse()
    if isinstance(result, str):
        return AgentResponse(result)
    if isinstance(result, dict):
        return AgentResponse(metadata=result)
    if isinstance(result, AgentResponse):
        if not isinstance(result.summary, str):
            raise AgentFailed(f"the summary is a text, not {shown(result.summary)}")
        if not isinstance(result.metadata, dict):
            raise AgentFailed(f"the metadata is a dict, not {shown(result.metadata)}")
        return result
    allowed = "an AgentResponse, a StreamResponse, a text, a dict or None"
    raise AgentFailed(f"the agent returned {shown(result)}; it may return {allowed}")


def rewarded(result: Any) -> object:
    """Return the result of a workflow's ``run``, with rewards as metadata. Raises AgentFailed if one is not finite."""
    if result is None or isinstance(result, str | AgentResponse | StreamResponse):
        return result
    rewards = result.values() if isinstance(result, Mapping) else (result,)
    try:
        if any(isinstance(reward, bool) or not math.isfinite(reward) for reward in rewards):
            raise ValueError
        values = {key: float(each) for key, each in result.items()} if isinstance(result, Mapping) else float(result)
    except (TypeError, ValueError, OverflowError) as error:
        raise AgentFailed(f"the agent returned {shown(result)}; a reward is a finite number") from error
    return AgentResponse(metadata={"reward": values})


async def waited(room: Future[None] | None) -> None:
    if room is not None:
        await asyncio.wrap_future(room)


class Emitter:
    """Emits events of a turn, as ``areal.api.agent.EventEmitter``."""

    def __init__(self, turn: WorkerTurn) -> None:
        self._turn = turn

    async def emit_delta(self, text: str) -> None:
        await waited(self._turn.delta(text))

    async def emit_tool_call(self, name: str, args: str | Mapping[str, object], call_id: str | None = None) -> None:
        await waited(self._turn.tool_call(name, args, call_id))

    async def emit_tool_result(self, name: str, result: Any, call_id: str | None = None) -> None:
        await waited(self._turn.tool_result(name, result, call_id))


class ThreadEmitter:
    """The synchronous ``Emitter``, for an agent that is not async."""

    def __init__(self, turn: WorkerTurn) -> None:
        self._turn = turn

    def emit_delta(self, text: str) -> None:
        _wait(self._turn.delta(text))

    def emit_tool_call(self, name: str, args: str | Mapping[str, object], call_id: str | None = None) -> None:
        _wait(self._turn.tool_call(name, args, call_id))

    def emit_tool_result(self, name: str, result: Any, call_id: str | None = None) -> None:
        _wait(self._turn.tool_result(name, result, call_id))


def _wait(room: Future[None] | None) -> None:
    if room is not None:
        room.result()


def _json(value: object, what: str) -> str:
    """Return ``value`` as JSON. Raises AgentFailed for values that JSON cannot represent or the data proxy cannot
    parse: NaN, infinity, unpaired surrogates, whole numbers beyond the range of a double."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        orjson.loads(text)
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise AgentFailed(f"{what} cannot be written as JSON: {error}") from error


def shown(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= _NAMED else text[:_NAMED] + "..."
