"""The RL sessions of an agent service's sessions, at the inference service that records their model calls.

Each session has one RL session: the data proxy starts it with the inference service's admin key, or the caller provides
it. The keys of RL sessions are held here and in the journal; an agent receives its session's key for its model calls.
An RL session of the data proxy is replaced before the next turn if it has ended or the inference service lost it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

import orjson

from areal.dataclasses import dataclass
from areal.errors import UsageFault
from areal.http.client import CallFailed, HttpClient, HttpReply
from areal.http.headers import REQUEST_ID
from areal.services.agent.data_proxy.journal import RlSession, SessionEntry
from areal.services.http.auth import load_admin_key
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import Request, idempotency_key
from areal.services.journal.keys import request_digest
from areal.wire.agents import ExportSession, ModelAccess, RewardSession
from areal.wire.bodies import IDEMPOTENCY_KEY
from areal.wire.processes import InferenceAccess

_log = logging.getLogger(__name__)
INFERENCE_AWAY = "inference_unavailable"
_TIMEOUT_S = 10.0
_EXPORT_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 5.0
_PROBE_PERIOD_S = 5.0
_SOON_S = 0.5  # probe period while the key is refused
_REFUSED = (401, 403)
_MODELS = "/v1/models"
_EXPORT = "/export_trajectories"
_NO_SESSION = "/rl/sessions/-"  # 404 with the right key
_TRUSTED_S = 60.0  # an RL session not known to record for this long is checked before the next turn
_REMOVED = b',"removed":true}'  # the end of the response to an export that removed its whole RL session
_TASK = "agent"
_LONGEST_TASK = 256


@dataclass(frozen=True)
class CallNames:
    """The identifiers of a request: its id, which its errors also have, and its Idempotency-Key."""

    request_id: str
    key: str | None = None

    @staticmethod
    def of(request: Request) -> CallNames:
        return CallNames(request.id, idempotency_key(request.headers))

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID: self.request_id} | ({IDEMPOTENCY_KEY: self.key} if self.key is not None else {})


class RlSessions:
    """Starts, checks, rewards, exports and ends the RL sessions of one data proxy.

    With ``access`` None, only RL sessions that callers provide are used. ``fault`` is the reason why the inference
    service does not accept the admin key, else None; ``on_change`` is called when it changes."""

    def __init__(self, http: HttpClient, access: InferenceAccess | None) -> None:
        self._http = http
        self._access = access
        self.fault = None if access is None else "the inference service was not asked yet"
        self.on_change: Callable[[], None] = lambda: None
        self._read_key()

    def _read_key(self) -> None:
        """Read the admin key from its file. Raises UsageFault."""
        key = load_admin_key(self._access.admin_key_file) if self._access is not None else None
        self._admin = key.bearer() if key is not None else {}

    async def watch(self) -> None:
        """Probe until cancelled whether the inference service accepts the admin key, which may be rotated. A service
        that does not answer is not reported as a fault: the turns that need it fail with 503."""
        assert self._access is not None
        while True:
            fault = await self._key_fault(self._access)
            changed, self.fault = fault != self.fault, fault
            if changed:
                self.on_change()
            await asyncio.sleep(_PROBE_PERIOD_S if fault is None else _SOON_S)

    async def _key_fault(self, access: InferenceAccess) -> str | None:
        try:
            reply = await self._send_as_admin("GET", access.addr, _NO_SESSION)
        except ApiError:
            return None
        if reply.status not in _REFUSED:
            return None
        why = reply.error().get("message") or f"status {reply.status}"
        file = access.admin_key_file or "none"
        return f"the inference service at {access.addr} refuses this service's key (file: {file}): {why}"

    async def check_brought(self, session: SessionEntry | None, theirs: RlSession | None) -> None:
        """Check the key of a caller's RL session. Raises 401 if the inference service does not know it. Nothing is
        raised if that service does not answer: the agent's model calls will then fail."""
        if theirs is None or (session is not None and session.inference == theirs):
            return
        try:
            reply = await self._send("GET", theirs.base_url, _MODELS, _bearer(theirs))
        except ApiError:
            return
        if reply.status in (*_REFUSED, 409):
            knows = "knows no RL session with" if reply.status in _REFUSED else "has ended the RL session of"
            message = f"the inference service at {theirs.base_url} {knows} this session_api_key"
            raise ApiError(401, message, code="invalid_session_api_key", param="session_api_key")

    async def start(self, metadata: Mapping[str, object]) -> RlSession | None:
        """Start an RL session; None without an inference service. Raises 502 if it refuses, 503 if it is silent."""
        if self._access is None:
            return None
        task = metadata.get("task_id")
        named = isinstance(task, str) and 1 <= len(task) <= _LONGEST_TASK and task.isprintable()
        body = {"task_id": task if named else _TASK, "model": self._access.model}
        reply = await self._send_as_admin("POST", self._access.addr, "/rl/start_session", body)
        if reply.status != 201:
            raise _refused("start an RL session", reply)
        started = reply.object()["sessions"][0]
        return RlSession(self._access.addr, started["session_api_key"], self._access.model, started["session_id"])

    async def prepare(self, session: SessionEntry) -> dict[str, object] | None:
        """Ensure, before a turn, that the session's RL session records: wait for an export to end, start a missing RL
        session, replace a stale one. Return the turn metadata that reports a replacement, or None. Raises 502, 503."""
        await _exported(session)
        rl = session.inference
        if self._access is None or (rl is not None and rl.session_id is None):
            return None
        if rl is not None and time.monotonic() - session.checked_at < _TRUSTED_S:
            return None
        reason = ("it was exported" if session.exported == rl else await self._fault(rl)) if rl is not None else ""
        if reason is not None:
            started = await self.start(session.metadata)
            assert started is not None
            await session.journal.set_inference(session, started)
        session.checked_at = time.monotonic()
        if not reason or rl is None or session.inference is None:
            return None
        return {"session_id": session.inference.session_id, "replaced": rl.session_id, "reason": reason}

    async def _fault(self, rl: RlSession) -> str | None:
        """Return why an RL session that the data proxy started no longer records, or None if it records."""
        path = f"/rl/sessions/{quote(rl.session_id or '', safe='')}"
        reply = await self._send_as_admin("GET", self._own(rl).base_url, path)
        if reply.status == 404:
            return "the inference service does not know it any more"
        if reply.status != 200:
            raise _refused("look at the RL session", reply)
        return None if reply.object().get("state") == "active" else "it has ended"

    def access(self, session: SessionEntry) -> ModelAccess | None:
        """Return the address, key and model for the agent's model calls in this session."""
        if session.inference is None:
            return None
        rl = self._own(session.inference)
        return ModelAccess(base_url=rl.base_url, api_key=rl.api_key, model=rl.model)

    def _own(self, rl: RlSession) -> RlSession:
        """Return ``rl`` with the inference service's present address and model; a caller's RL session unchanged."""
        if rl.session_id is None or self._access is None:
            return rl
        return RlSession(self._access.addr, rl.api_key, self._access.model, rl.session_id)

    async def reward(self, session: SessionEntry, reward: RewardSession, names: CallNames) -> HttpReply:
        rl = await self._place(session, names.key, "reward", vars(reward))
        headers = {**_bearer(rl), **names.headers}
        reply = await self._send("POST", rl.base_url, "/rl/set_reward", headers, vars(reward))
        if reply.status == 401 and names.key is not None and rl.session_id is not None:
            # The export has removed the RL session and its key; its answer to an earlier attempt is still found by its
            # id.
            body = {**vars(reward), "session_id": rl.session_id}
            reply = await self._send_as_admin("POST", rl.base_url, "/rl/set_reward", body, headers=names.headers)
        if reply.status in (401, 404):  # our key of the RL session is refused; the caller's was accepted before
            raise _rl_session_ended(rl)
        return reply

    async def _place(self, session: SessionEntry, key: str | None, what: str, body: Mapping[str, object]) -> RlSession:
        """Return the session's RL session; for a repeated call with this key, the one that the first call used."""
        current = self._of(session)
        if key is None:
            return current
        asked = orjson.dumps([what, body], option=orjson.OPT_SORT_KEYS)
        return self._own(
            await session.journal.rl_session_of(session, request_digest(key), request_digest(asked), current)
        )

    async def export(self, session: SessionEntry, export: ExportSession, names: CallNames) -> HttpReply:
        """Export training rows, which may remove the RL session. The next turn waits for the end of the export and
        starts another RL session if needed. Raises 400 for a caller's RL session, 409 for one that has ended."""
        await _exported(session)
        held = session.inference
        self._of(session)
        session.exporting = asyncio.Event()
        try:
            rl = await self._place(session, names.key, "export", vars(export))
            if rl.session_id is None:
                message = "the session records into an RL session of its caller: export that at the inference service"
                raise bad_request(message, code="not_our_rl_session")
            session.checked_at = -math.inf
            body = {"session_ids": [rl.session_id], **vars(export)}
            reply = await self._send_as_admin("POST", rl.base_url, _EXPORT, body, _EXPORT_TIMEOUT_S, names.headers)
        finally:
            session.exporting.set()
            session.exporting = None
        if reply.status == 404 and reply.error().get("code") == "session_not_found":
            raise _rl_session_ended(rl)
        is_held = held is not None and rl.session_id == held.session_id
        if reply.status == 200 and reply.body.endswith(_REMOVED) and is_held:
            session.exported = held
        return reply

    async def acknowledge(self, session: SessionEntry, export_id: str, names: CallNames) -> HttpReply:
        """Acknowledge an export: the inference service deletes it."""
        base, body = self._of(session).base_url, {"export_id": export_id}
        return await self._send_as_admin("POST", base, f"{_EXPORT}/ack", body, headers=names.headers)

    async def end(self, rl: RlSession | None, exported: RlSession | None = None) -> None:
        """End an RL session that the data proxy started. If that fails, the RL session expires by its time to live."""
        if rl is None or rl.session_id is None or self._access is None or rl == exported:
            return
        rl = self._own(rl)
        try:
            await self._send("POST", rl.base_url, "/rl/end_session", _bearer(rl), {}, timeout_s=_END_TIMEOUT_S)
        except ApiError as error:
            _log.warning("the RL session %s was not ended: %s", rl.session_id, error)

    def _of(self, session: SessionEntry) -> RlSession:
        """Return the session's RL session. Raises 400 if there is none."""
        if session.inference is None:
            raise bad_request("this agent service records no model calls: it has no inference", code="no_inference")
        return self._own(session.inference)

    async def _send_as_admin(
        self,
        method: str,
        base: str,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float = _TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> HttpReply:
        """Send with the admin key. If it is refused and its file has another key by now, send once more with that."""
        before = self._admin
        more = headers or {}
        reply = await self._send(method, base, path, {**before, **more}, body, timeout_s)
        if reply.status in _REFUSED:
            with contextlib.suppress(UsageFault):
                self._read_key()
            if self._admin != before:
                return await self._send(method, base, path, {**self._admin, **more}, body, timeout_s)
        return reply

    async def _send(
        self,
        method: str,
        base: str,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, object] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> HttpReply:
        """Send a request. Raises 503 if the inference service does not answer."""
        data = orjson.dumps(body) if body is not None else b""
        try:
            return await self._http.fetch(method, base, path, headers=headers, body=data, timeout_s=timeout_s)
        except (CallFailed, TimeoutError) as error:
            why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            message = f"the inference service at {base} does not answer: {why}"
            raise ApiError(503, message, code=INFERENCE_AWAY, headers={"Retry-After": "1"}) from error


async def _exported(session: SessionEntry) -> None:
    """Wait until no export of the session runs."""
    while (exporting := session.exporting) is not None:
        await exporting.wait()


def _bearer(rl: RlSession) -> dict[str, str]:
    return {"Authorization": f"Bearer {rl.api_key}"}


def _rl_session_ended(rl: RlSession) -> ApiError:
    if rl.session_id is None:
        message = "the inference service knows no RL session with the session_api_key that the caller gave"
    else:
        message = f"the RL session {rl.session_id} was exported, or has ended: the session's next turn begins another"
    return ApiError(409, message, code="rl_session_ended")


def _refused(what: str, reply: HttpReply) -> ApiError:
    reason = reply.error().get("message") or f"status {reply.status}"
    return ApiError(502, f"the inference service does not {what}: {reason}", code="inference_refused")
