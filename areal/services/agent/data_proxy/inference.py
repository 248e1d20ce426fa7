"""The RL sessions of an agent service's sessions, at the inference service that records their model calls.

Each session has one: ours, started with the service's admin key, or one that its caller has brought. The keys of both
stay here and in the journal; the agent gets its session's for its model calls. An RL session of ours that has ended, or
that the inference service does not know any more, is replaced before the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from areal.errors import UsageFault
from areal.services.agent.data_proxy.journal import RlSession, SessionEntry
from areal.services.http.auth import load_admin_key
from areal.services.http.client import CallFailed, HttpClient, HttpReply
from areal.services.http.errors import ApiError, bad_request
from areal.wire.agents import ExportSession, ModelAccess, RewardSession
from areal.wire.processes import InferenceAccess

_log = logging.getLogger(__name__)
INFERENCE_AWAY = "inference_unavailable"
_TIMEOUT_S = 10.0
_EXPORT_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 5.0
_PROBE_PERIOD_S = 5.0
_SOON_S = 0.5  # while the key is refused
_REFUSED = (401, 403)
_MODELS = "/v1/models"
_NO_SESSION = "/rl/sessions/-"  # 404 with the right key
_TRUSTED_S = 60.0  # an RL session that recorded a turn so long ago is asked for before the next one
_REMOVED = b',"removed":true}'  # the end of an export that has left nothing of its session
_TASK = "agent"
_LONGEST_TASK = 256


class RlSessions:
    """``access`` None: sessions have only what their callers bring. ``fault``: the inference service refuses our key;
    ``on_change`` is called when that changes."""

    def __init__(self, http: HttpClient, access: InferenceAccess | None) -> None:
        self._http = http
        self._access = access
        self.fault = None if access is None else "the inference service was not asked yet"
        self.on_change: Callable[[], None] = lambda: None
        self._read_key()

    def _read_key(self) -> None:
        """Raises UsageFault."""
        key = load_admin_key(self._access.admin_key_file) if self._access is not None else None
        self._admin = key.bearer() if key is not None else {}

    async def watch(self) -> None:
        """Ask whether our key is taken, for as long as the process lives: it may be rotated. One that does not answer
        is told to the turns that need it."""
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
        """Raises 401 where the inference service does not know the key that a caller brings. Where it does not answer,
        the agent is the one to find out."""
        if theirs is None or (session is not None and session.inference == theirs):
            return
        try:
            reply = await self._send("GET", theirs.base_url, _MODELS, _bearer(theirs))
        except ApiError:
            return
        if reply.status in _REFUSED:
            message = f"the inference service at {theirs.base_url} knows no RL session with this session_api_key"
            raise ApiError(401, message, code="invalid_session_api_key", param="session_api_key")

    async def start(self, metadata: Mapping[str, Any]) -> RlSession | None:
        """Start an RL session; None without an inference service. Raises 502, 503 where the service starts none."""
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

    async def prepare(self, session: SessionEntry) -> dict[str, Any] | None:
        """The session has an RL session that records, where it is to have one. What to tell its caller, where it has
        another one than before. Raises 502, 503."""
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
        """The reason why an RL session of ours records nothing any more."""
        path = f"/rl/sessions/{quote(rl.session_id or '', safe='')}"
        reply = await self._send_as_admin("GET", self._own(rl).base_url, path)
        if reply.status == 404:
            return "the inference service does not know it any more"
        if reply.status != 200:
            raise _refused("look at the RL session", reply)
        return None if reply.object().get("state") == "active" else "it has ended"

    def access(self, session: SessionEntry) -> ModelAccess | None:
        """The address, key and model of the session's agent for its model calls."""
        if session.inference is None:
            return None
        rl = self._own(session.inference)
        return ModelAccess(base_url=rl.base_url, api_key=rl.api_key, model=rl.model)

    def _own(self, rl: RlSession) -> RlSession:
        """An RL session of ours as it is reached now: the inference service may have moved since it was started."""
        if rl.session_id is None or self._access is None:
            return rl
        return RlSession(self._access.addr, rl.api_key, self._access.model, rl.session_id)

    async def reward(self, session: SessionEntry, reward: RewardSession) -> HttpReply:
        rl = self._of(session)
        body = {"reward": reward.reward, "interaction_id": reward.interaction_id}
        reply = await self._send("POST", rl.base_url, "/rl/set_reward", _bearer(rl), body)
        if reply.status == 401:  # the caller's own key is the admin's, and right
            raise _rl_session_ended(rl)
        return reply

    async def export(self, session: SessionEntry, export: ExportSession) -> HttpReply:
        """Takes what is exported: the session's next turn has an RL session of its own."""
        rl = self._of(session)
        if rl.session_id is None:
            message = "the session records into an RL session of its caller: export that at the inference service"
            raise bad_request(message, code="not_our_rl_session")
        session.checked_at = -math.inf
        body = {
            "session_ids": [rl.session_id],
            "trajectory_id": export.trajectory_id,
            "discount": export.discount,
            "style": export.style,
            "reward": export.reward,
        }
        reply = await self._send_as_admin("POST", rl.base_url, "/export_trajectories", body, _EXPORT_TIMEOUT_S)
        if reply.status == 404 and reply.error().get("code") == "session_not_found":
            raise _rl_session_ended(rl)
        if reply.status == 200 and reply.body.endswith(_REMOVED):
            session.exported = session.inference
        return reply

    async def end(self, rl: RlSession | None, exported: RlSession | None = None) -> None:
        """End an RL session that we started. One that cannot be ended now ends by its time to live."""
        if rl is None or rl.session_id is None or self._access is None or rl == exported:
            return
        try:
            await self._end(self._own(rl))
        except ApiError as error:
            _log.warning("the RL session %s was not ended: %s", rl.session_id, error)

    async def _end(self, rl: RlSession) -> None:
        await self._send("POST", rl.base_url, "/rl/end_session", _bearer(rl), {}, timeout_s=_END_TIMEOUT_S)

    def _of(self, session: SessionEntry) -> RlSession:
        """Raises 400."""
        if session.inference is None:
            raise bad_request("this agent service records no model calls: it has no inference", code="no_inference")
        return self._own(session.inference)

    async def _send_as_admin(
        self, method: str, base: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = _TIMEOUT_S
    ) -> HttpReply:
        """Send with the admin key; where it is refused, once more with the key that its file holds now, if that
        differs."""
        before = self._admin
        reply = await self._send(method, base, path, before, body, timeout_s)
        if reply.status in _REFUSED:
            with contextlib.suppress(UsageFault):
                self._read_key()
            if self._admin != before:
                return await self._send(method, base, path, self._admin, body, timeout_s)
        return reply

    async def _send(
        self,
        method: str,
        base: str,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> HttpReply:
        """Raises 503 where the inference service does not answer."""
        data = orjson.dumps(body) if body is not None else b""
        sent = {**headers, "Content-Type": "application/json"}
        try:
            return await self._http.fetch(method, base, path, headers=sent, body=data, timeout_s=timeout_s)
        except (CallFailed, TimeoutError) as error:
            why = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            message = f"the inference service at {base} does not answer: {why}"
            raise ApiError(503, message, code=INFERENCE_AWAY, headers={"Retry-After": "1"}) from error


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
