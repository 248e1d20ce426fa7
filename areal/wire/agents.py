"""Messages between the gateway, the data proxies and the workers of an agent service.

A turn is one message to a session and the agent's answer. The worker, and after it the data proxy, answer a turn with a
stream of events (``application/x-ndjson``, one JSON object a line, sent as they happen):

    {"type": "accepted", "run_id"}                        first, from the data proxy
    {"type": "delta", "text"}
    {"type": "tool_call", "id", "name", "arguments"}      ``arguments``: the model's text, JSON unless it was mistaken
    {"type": "tool_result", "id", "name", "result"}       both with ``content``, the text that came before them, if any
    {"type": "response", "status", "headers"}             the agent answers with its own stream
    {"type": "data", "data"}                              its bytes, base64
    {"type": "complete", "summary", "metadata"}           last, when the turn is on disk
    {"type": "failed", "failure": "agent" | "infra" | "cancelled", "error"}     last, too

A session's key is opaque. In a path it is percent-encoded as one segment, and decoded after the route is chosen.

A data proxy's routes, besides those by which a router places and finds sessions (``/rl/start_session``, whose answer
may have ``journal``, the tag; ``/rl/find_key``; ``/drain``; ``/undrain``):

    POST /session/{key}/turn      TurnRequest -> events
    DELETE /session/{key}/turn?idempotency_key=     -> {"session_key", "cancelled"}: whether a turn ran; with the
                                  Idempotency-Key of a request: whether its message waited or ran
    POST /session/{key}/close     -> {"session_key", "closed"}
    GET /session/{key}            -> SessionHistory
    POST /session/{key}/reward    RewardSession -> the inference service's answer
    POST /session/{key}/export    ExportSession -> the inference service's answer
    POST /session/{key}/export/ack   AcknowledgeExport -> the inference service's answer
    GET /sessions?limit=&after=   -> {"sessions": [SessionSummary], "next"}, ordered by key; ``next``: the last key,
                                  where more follow
    POST /configure               ConfigureSessions

The ``metadata`` of ``complete`` has ``areal_inference`` {"session_id", "replaced", "reason"} where the session's RL
session was replaced before the turn. Each route is 404 ``session_not_found`` for a session that it does not have, 410
``session_ended`` for one that was closed or has expired, 421 where the session's journal has gone elsewhere, and 503
where the turn was not begun and may be sent again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from areal.dataclasses import dataclass, field
from areal.wire.bodies import IdempotencyKey, NonEmptyText
from areal.wire.fields import Count, PositiveFloat, Range, Share, Valid

LONGEST_KEY = 1024  # bytes of UTF-8
EVENTS = "application/x-ndjson"
SESSION_KEY_HEADER = "X-AReaL-Session-Key"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

QueueMode = Literal["collect", "followup"]
"""Handling of messages that come while a turn of their session runs: ``collect`` joins all such messages into one
following turn, ``followup`` gives each a turn of its own, in their order."""

Failure = Literal["agent", "infra", "cancelled"]
"""``agent``: the agent raised, or returned nonsense. ``infra``: a process or a model was lost. A failed turn has no
reward: it is never a 0."""


class CompleteEvent(TypedDict):
    type: Literal["complete"]
    summary: str
    metadata: dict[str, object]


class SessionSummary(TypedDict):
    """``turns``: how many. ``running``: the id of the run, or None. ``waiting``: how many messages. ``created`` and
    ``used``: seconds since the epoch."""

    session_key: str
    state: Literal["idle", "running"]
    created: float
    used: float
    turns: int
    running: str | None
    waiting: int
    inference_session_id: str | None
    metadata: Mapping[str, object]


class TurnRecord(TypedDict):
    """A turn of a session, also a failed one. ``at``: seconds since the epoch."""

    run_id: str
    outcome: Literal["complete", "agent", "infra", "cancelled"]
    error: str | None
    at: float
    seconds: float
    messages: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, object]


class SessionHistory(SessionSummary):
    """``history``: chat messages of the complete turns. ``recorded_turns``: all of them."""

    history: Sequence[Mapping[str, Any]]
    recorded_turns: Sequence[TurnRecord]


def is_session_key(key: str) -> bool:
    """Return whether ``key`` can name a session: 1 to 1024 bytes of UTF-8, without control characters."""
    try:
        return 1 <= len(key.encode()) <= LONGEST_KEY and _CONTROL.search(key) is None
    except UnicodeEncodeError:  # a lone surrogate
        return False


KEY_PROBLEM = f"must be 1 to {LONGEST_KEY} bytes of UTF-8 without control characters"


SessionKey: TypeAlias = Annotated[str, Valid(KEY_PROBLEM, is_session_key)]


@dataclass(frozen=True, kw_only=True)
class ModelAccess:
    """The model that an agent calls in one turn: ``base_url`` without ``/v1``, and the key of the session's RL session.
    An agent finds it in ``request.metadata["areal_inference"]``."""

    base_url: NonEmptyText
    api_key: str = field(repr=False)
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class StartAgentSession:
    """Start a session, sent to a data proxy by way of the router. ``api_key``: the session's key (absent: one is
    created); the router finds the session by the key's digest. If a session has the key already, it is returned.
    ``inference``: the RL session of the caller (else the service's own, if it has one). ``reopen``: also accept the key
    of a session that has ended."""

    api_key: SessionKey | None = None
    model: str | None = None  # the agent service's name, by which the router knows its data proxies
    metadata: Mapping[str, object] = field(default_factory=dict)
    inference: ModelAccess | None = None
    reopen: bool = False


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """``POST /session/{key}/turn`` of a data proxy. ``idempotency_key``: a turn of the session that was recorded with
    it is the answer, and one that runs is joined. ``stream``: its events are wanted as they come; else all of them are
    answered at its end, in one part where they are few."""

    message: str
    run_id: NonEmptyText
    queue_mode: QueueMode = "collect"
    idempotency_key: IdempotencyKey | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    inference: ModelAccess | None = None  # from now on the session's
    stream: bool = True


@dataclass(frozen=True, kw_only=True)
class WorkerRun:
    """``POST /run`` of a worker. ``history``: OpenAI chat messages of the session's turns that are on disk."""

    message: str
    session_key: SessionKey
    run_id: NonEmptyText
    history: tuple[Mapping[str, object], ...] = ()
    queue_mode: QueueMode = "collect"
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardSession:
    """``POST /session/{key}/reward``: for the session's last model call, or the one that is named."""

    reward: float
    interaction_id: NonEmptyText | None = None


@dataclass(frozen=True, kw_only=True)
class ExportSession:
    """``POST /session/{key}/export``, as ``/export_trajectories`` of the inference service takes them. ``reward``: that
    of the session's last model call, given first."""

    reward: float | None = None
    trajectory_id: Annotated[int, Range(0, 2**63 - 1)] | None = None
    discount: Share = 1.0
    style: Literal["individual", "concat"] = "individual"


@dataclass(frozen=True, kw_only=True)
class AcknowledgeExport:
    """``POST /session/{key}/export/ack``: the rows are safe with the caller, and the inference service deletes them."""

    export_id: NonEmptyText


@dataclass(frozen=True, kw_only=True)
class ConfigureSessions:
    """``POST /configure`` of a data proxy: settings that change while it runs. Absent fields stay."""

    idle_timeout: PositiveFloat | None = None
    turn_timeout: PositiveFloat | None = None
    max_concurrent: Count | None = None
    health_period: PositiveFloat | None = None
