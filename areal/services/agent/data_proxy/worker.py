"""The client of the pair's worker: health probes, calls, and the events of a turn in its responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, get_args

import orjson

from areal.http.client import CallFailed, HttpClient, PendingCall
from areal.services.agent.data_proxy.journal import Outcome, TurnEntry
from areal.services.agent.own_stream import OwnStreamText
from areal.services.http.tasks import happens
from areal.wire.agents import CompleteEvent, Failure
from areal.wire.processes import AgentDataProxyConfig

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 5.0
_SOON_S = 0.1
_LOST_AFTER = 2
_CLOSE_TIMEOUT_S = 10.0
_LONGEST_ERROR = 4096


class TurnFailed(Exception):
    """The failed end of a turn. ``failure`` is the kind of failure, which says who is to blame."""

    def __init__(self, failure: Outcome, error: str) -> None:
        super().__init__(error)
        self.failure = failure
        self.error = error[:_LONGEST_ERROR]

    def event(self) -> bytes:
        return event_line(type="failed", failure=self.failure, error=self.error)


class PairWorker:
    """Probes and calls the pair's worker. ``fault`` is the reason why the worker is not ready, else None; ``on_change``
    is called when it changes. ``keeps_sessions``: the agent has a ``close_session`` to call when a session ends."""

    def __init__(self, config: AgentDataProxyConfig, http: HttpClient, headers: Mapping[str, str]) -> None:
        self._url = config.worker_url
        self.period_s = config.health_period
        self._http = http
        self._headers = headers
        self._failures = _LOST_AFTER
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self.fault: str | None = "the worker was not asked yet"
        self.on_change: Callable[[], None] = lambda: None
        self.keeps_sessions = True

    async def run(self) -> None:
        """Probe the worker's readiness until cancelled, more often while it is not ready."""
        while True:
            self._wake.clear()
            self._note(await self._probe())
            await happens(self._wake, _SOON_S if self._failures else self.period_s)

    async def _probe(self) -> str | None:
        try:
            reply = await self._http.fetch(
                "GET", self._url, "/ready", headers=self._headers, timeout_s=_PROBE_TIMEOUT_S
            )
        except (CallFailed, TimeoutError) as error:
            return f"the worker does not answer: {error!r}"
        health = reply.object()
        self.keeps_sessions = bool(health.get("keeps_sessions", True))
        return None if reply.status == 200 else f"the worker is not ready: {health.get('reason')}"

    def _note(self, fault: str | None) -> None:
        self._failures = self._failures + 1 if fault is not None else 0
        if fault is not None and self._failures < _LOST_AFTER:
            return
        changed, self.fault = self.fault != fault, fault
        if fault is None:
            self._ready.set()
        else:
            self._ready.clear()
        if changed:
            self.on_change()

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the worker, which refused a connection, is ready again. Return False after ``timeout_s``."""
        self._ready.clear()
        self._failures = max(self._failures, 1)
        self._wake.set()
        return await happens(self._ready, timeout_s)

    def call(self, body: bytes) -> PendingCall:
        return self._http.call("POST", self._url, "/run", self._headers, body)

    async def close_session(self, path: str) -> None:
        """Close the session of ``path`` in the worker's agent. If the worker does not answer, this is only logged."""
        try:
            await self._http.fetch("POST", self._url, path, headers=self._headers, timeout_s=_CLOSE_TIMEOUT_S)
        except (CallFailed, TimeoutError) as error:
            _log.warning("the worker did not close a session: %r", error)


class Transcript:
    """Collects a turn's events as chat messages for a model's history: tool calls made together share one assistant
    message with their text, and their results follow. ``room``: bytes left. ``streamed``: the agent's own stream."""

    def __init__(self, message: str, room: int) -> None:
        self._message = message
        self._room = room - len(message)
        self._groups: list[tuple[list[str], dict[str, dict[str, object]]]] = []  # text, and calls by id
        self._results: dict[str, str] = {}
        self._own = OwnStreamText()
        self.streamed: list[str] = []

    def add(self, event: Mapping[str, Any], size: int) -> None:
        """Add an event. Raises TurnFailed beyond the size limit, KeyError for a missing field."""
        if event["type"] in ("response", "data"):
            self.streamed.append(text := self._own.take(event))
            size = len(text)
        elif event["type"] == "complete":
            self.streamed.append(self._own.end())
        self._room -= size
        if self._room < 0:
            raise TurnFailed("agent", "the agent's tool calls and answer are larger than a turn may be")
        if event["type"] == "tool_call":
            if not self._groups or any(call in self._results for call in self._groups[-1][1]):
                self._groups.append(([], {}))
            function = {"name": event["name"], "arguments": event["arguments"]}
            self._groups[-1][1][event["id"]] = {"id": event["id"], "type": "function", "function": function}
        elif event["type"] == "tool_result":
            self._results[event["id"]] = event["result"]
        if "content" in event:
            self._groups[-1][0].append(event["content"])

    def messages(self, summary: str) -> bytes:
        """Return the turn's messages as JSON. A tool call without a result gets an empty one, as models need one."""
        found: list[dict[str, object]] = [{"role": "user", "content": self._message}]
        for text, group in self._groups:
            content = "".join(text) or None
            found.append({"role": "assistant", "content": content, "tool_calls": list(group.values())})
            found += [{"role": "tool", "tool_call_id": call, "content": self._results.get(call, "")} for call in group]
        if summary:
            found.append({"role": "assistant", "content": summary})
        return orjson.dumps(found)


def event_line(**event: Any) -> bytes:
    return orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)


ALL_EVENTS = b'{"type":"all"}'
"""The first line of a recorded stream with every event of its turn; older ones have those of the own stream alone."""


def recorded_events(turn: TurnEntry) -> bytes:
    """Return the events of a recorded turn after ``accepted``. If its agent had a stream of its own, they are complete;
    otherwise the deltas have only the text beside tool calls. ``stream_lost`` comes first if it was too long."""
    summary, names = "", dict[str, str]()
    events: list[dict[str, object]] = [{"type": "stream_lost"}] if turn.stream == b"" else []
    for message in orjson.loads(turn.messages):
        if message.get("tool_calls") and message["content"]:
            events.append({"type": "delta", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            events.append({"type": "tool_call", "id": call["id"], **call["function"]})
        if message["role"] == "tool":
            result = {
                "id": message["tool_call_id"],
                "name": names[message["tool_call_id"]],
                "result": message["content"],
            }
            events.append({"type": "tool_result", **result})
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            summary = message["content"] or ""
    if turn.outcome == "complete":
        events.append({"type": "complete", "summary": summary, "metadata": orjson.Fragment(turn.metadata)})
    else:
        events.append({"type": "failed", "failure": turn.outcome, "error": turn.error})
    *before, last = (event_line(**event) for event in events)
    stream = turn.stream or b""
    if stream.startswith(ALL_EVENTS):
        return stream.removeprefix(ALL_EVENTS + b"\n") + last
    return b"".join((*before, stream, last))


def last_event(line: bytes, transcript: Transcript) -> CompleteEvent | TurnFailed | None:
    """Parse an event and add it to ``transcript``. If it ends the turn, return ``complete`` or the failure."""
    try:
        event: Any = orjson.loads(line)
        transcript.add(event, len(line))
        if event["type"] == "failed":
            known = event["failure"] in get_args(Failure)
            return TurnFailed(event["failure"] if known else "agent", event["error"])
        if event["type"] != "complete":
            return None
        if not isinstance(event["summary"], str) or not isinstance(event["metadata"], dict):
            raise TypeError(event)
        event["summary"] += "".join(transcript.streamed)
        return event
    except TurnFailed as error:
        return error
    except (KeyError, TypeError, ValueError) as error:
        return TurnFailed("infra", f"an event of the worker cannot be read: {error!r}")
