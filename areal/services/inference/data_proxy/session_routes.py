"""``/rl/*``: sessions are started, rewarded, ended and looked at."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from areal.services.inference.data_proxy.callers import Caller, Callers
from areal.services.inference.recording.changes import STANDING
from areal.services.inference.recording.journal import Journal
from areal.services.inference.recording.names import HITL, GroupName, SessionName, tag_of_key
from areal.services.inference.recording.packing import CorruptRecord
from areal.services.inference.recording.rows import RewardOverflow, Style, export
from areal.services.inference.recording.session import Life, Phase, Session, Trajectory, check_reward
from areal.services.inference.recording.values import TrajectoryTurns
from areal.services.inference.recording.vault import Vault
from areal.services.web.access import Access
from areal.services.web.body import decode_object, read_body, read_object
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.keys import AdminKey
from areal.services.web.server import Request, Response
from areal.services.web.service import Service, json_response

MAX_GROUP = 1024
_BODY_BYTES = 1024 * 1024
_PAGE = 100
_OWN_KEY = re.compile(r"[!-~]{8,512}")


class SessionRoutes:
    """``check_name`` raises 404 for what is no model of this data proxy."""

    def __init__(
        self, vault: Vault, callers: Callers, key: AdminKey | None, check_name: Callable[[str | None], object]
    ) -> None:
        self._vault = vault
        self._callers = callers
        self._key = key
        self._check_name = check_name

    def add_to(self, service: Service) -> None:
        counter = service.metrics.counter
        self._started = counter("areal_sessions_started_total", "Sessions started.")
        self._rewards = counter("areal_rewards_total", "Rewards given.")
        self._vault.leaving = lambda: service.lifetime.draining
        service.route("POST", "/rl/start_session", self.start, Access.ADMIN)
        service.route("POST", "/rl/set_reward", self.reward, Access.SESSION)
        service.route("POST", "/rl/end_session", self.end, Access.SESSION)
        service.route("POST", "/drain", self.drain, Access.ADMIN)
        service.route("POST", "/undrain", self.undrain, Access.ADMIN)
        service.route("POST", "/rl/find_key", self.find_key, Access.ADMIN)
        service.route("GET", "/rl/human", self.human, Access.ADMIN)
        service.route("GET", "/rl/sessions", self.sessions, Access.ADMIN)
        service.route("GET", "/rl/sessions/{session_id}", self.session, Access.ADMIN)

    async def start(self, request: Request) -> Response:
        data = await read_object(request, _BODY_BYTES)
        self._check_model(data)
        task, size, own_key = _task(data), _group_size(data), self._own_key(data)
        online = data.get("online", True)
        if not isinstance(online, bool):
            raise bad_request("online must be true or false", param="online")
        journal = self._vault.own
        if own_key is not None and (held := self._vault.holder_of_key(own_key.encode())) is not None:
            journal = held[0]
        group, started = await journal.start(task, size, own_key, online)
        self._started.inc(len(started))
        sessions = [{"session_id": each.session_id, "session_api_key": each.key} for each in started]
        return json_response({"group_id": group, "sessions": sessions}, status=201)

    def _check_model(self, data: dict[str, Any]) -> None:
        name = data.get("model")
        if name is not None and not isinstance(name, str):
            raise bad_request("model must be a string", param="model")
        self._check_name(name)

    def _own_key(self, data: dict[str, Any]) -> str | None:
        """The key that the caller wants for its first session. A session that had the admin key would be no session."""
        key = data.get("api_key")
        if key is None:
            return None
        if not isinstance(key, str) or not _OWN_KEY.fullmatch(key):
            raise bad_request("api_key must be 8 to 512 printable ASCII characters without spaces", param="api_key")
        if self._key is not None and self._key.matches(key.encode()):
            raise bad_request("api_key must not be the admin key", param="api_key")
        tag = tag_of_key(key)
        if tag is not None and self._vault.journal(tag) is None:
            raise bad_request("api_key looks like a key of this service, but of no session here", param="api_key")
        return key

    async def reward(self, request: Request) -> Response:
        caller = self._callers.of(request.headers)
        data = await read_object(request, _BODY_BYTES)
        self._check_model(data)
        value = check_reward(data.get("reward"))
        interaction_id = data.get("interaction_id")
        if interaction_id is not None and not isinstance(interaction_id, str):
            raise bad_request("interaction_id must be a string", param="interaction_id")
        caller = self._callers.meant(caller, data.get("session_id"))
        answer = await caller.journal.reward(caller.session, value, interaction_id)
        self._rewards.inc()
        return json_response(asdict(answer))

    async def end(self, request: Request) -> Response:
        caller = self._callers.of(request.headers)
        data = decode_object(await read_body(request, _BODY_BYTES) or b"{}")
        if data.get("group_id") is not None:
            return json_response({"ended": [await self._end(each) for each in self._group(caller, data["group_id"])]})
        return json_response(await self._end(self._callers.meant(caller, data.get("session_id"))))

    async def _end(self, caller: Caller) -> dict[str, Any]:
        ended = await caller.journal.end(caller.session)
        return {"message": "session ended", "session_id": ended.session_id, "ready_trajectory_ids": ended.ready}

    def _group(self, caller: Caller, group_id: object) -> list[Caller]:
        group = GroupName.parse(group_id) if isinstance(group_id, str) else None
        if not caller.admin:
            raise ApiError(403, "a session key speaks for its own session only", code="admin_key_required")
        journal = self._vault.journal(group.tag) if group is not None else None
        if group is None or journal is None:
            raise ApiError(404, f"no group {group_id!r}", code="group_not_found", param="group_id")
        return [Caller(journal, number, admin=True) for number, _ in journal.members(group)]

    async def drain(self, request: Request) -> Response:
        """The sessions move to the model's other data proxies: ``journals`` are handed over, each when its running
        calls have ended."""
        await read_body(request, _BODY_BYTES)
        return json_response({"status": "ok", "journals": await self._vault.hand_over()})

    async def undrain(self, request: Request) -> Response:
        await read_body(request, _BODY_BYTES)
        await self._vault.keep()
        return json_response({"status": "ok", "journals": list(self._vault.journals)})

    async def find_key(self, request: Request) -> Response:
        """Which journal has the session of a key that its caller chose, by the key's digest."""
        digest = (await read_object(request, _BODY_BYTES)).get("digest")
        try:
            wanted = bytes.fromhex(digest if isinstance(digest, str) else "")
        except ValueError as error:
            raise bad_request("digest must be a key's SHA-256 in hexadecimal", param="digest") from error
        journal = self._vault.holder_of_digest(wanted)
        return json_response({"journal": journal.tag if journal is not None else None})

    async def human(self, request: Request) -> Response:
        """Where the human in the loop last spoke here, and when. Each journal has a session of theirs; the gateway asks
        all data proxies."""
        spoke = [
            (journal.spoke_at(STANDING) or 0.0, journal is self._vault.own, journal.tag) for journal in self._vault
        ]
        at, _, tag = max(spoke)
        return json_response({"session_id": str(SessionName(HITL, tag, STANDING)), "spoke_at": at or None})

    async def sessions(self, request: Request) -> Response:
        """A page of them in the order in which they were started; ``after`` is the last id of the page before."""
        limit = _limit(request.query.get("limit"))
        after = SessionName.parse(request.query.get("after", ""))
        found: list[dict[str, Any]] = []
        for journal in sorted(self._vault, key=lambda journal: journal.tag):
            if after is not None and journal.tag < after.tag:
                continue
            start = after.number if after is not None and journal.tag == after.tag else -1
            found += [_summary(journal, each) for each in journal.sessions(start, limit - len(found))]
            if len(found) >= limit:
                break
        more = len(found) >= limit
        return json_response({"sessions": found, "next": found[-1]["session_id"] if more else None})

    async def session(self, request: Request) -> Response:
        """One session; with ``rows=true`` its trajectories' rows too, as an export has them. Nothing is taken."""
        whole = request.query.get("rows") == "true"
        caller = self._callers.named(request.match_info["session_id"])
        session = caller.journal.session(caller.session)
        assert session is not None
        trajectories = [
            await _trajectory(caller.journal, session, each, whole)
            for each in caller.journal.trajectories(session.number)
        ]
        return json_response({**_summary(caller.journal, session), "trajectories": trajectories})


def _task(data: dict[str, Any]) -> str:
    task = data.get("task_id")
    if not isinstance(task, str) or not 1 <= len(task) <= 256 or not task.isprintable():
        raise bad_request("task_id must be a string of 1 to 256 printable characters", param="task_id")
    return task


def _group_size(data: dict[str, Any]) -> int:
    size = data.get("group_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_GROUP:
        raise bad_request(f"group_size must be a whole number from 1 to {MAX_GROUP}", param="group_size")
    return size


def _limit(text: str | None) -> int:
    if text is None:
        return _PAGE
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise bad_request("limit must be a whole number from 1 to 1000", param="limit")
    return int(text)


def _summary(journal: Journal, session: Session) -> dict[str, Any]:
    trajectories = journal.trajectories(session.number)
    interactions, reward = journal.totals(session.number)
    return {
        "session_id": journal.name(session),
        "group_id": session.group or None,
        "task_id": session.task,
        "state": Life(session.life).name.lower(),
        "online": session.online,
        "created": session.created,
        "ready": sum(each.phase is Phase.READY for each in trajectories),
        "trajectory_count": len(trajectories),
        "interaction_count": interactions,
        "reward": reward,
    }


async def _trajectory(journal: Journal, session: Session, trajectory: Trajectory, whole: bool) -> dict[str, Any]:
    about = {"trajectory_id": trajectory.number, "state": trajectory.phase.name.lower()}
    try:
        turns = await journal.turns(session, trajectory)
        rows = await asyncio.to_thread(_rows, turns) if whole else {}
    except ApiError as error:
        if error.code != CorruptRecord.code:
            raise
        return {**about, "interactions": [], "failures": {}, "error": error.message}
    except RewardOverflow as error:
        return {**about, "interactions": [], "failures": {}, "error": str(error)}
    names = {turn.seq: turn.interaction_id for turn in turns.turns}
    interactions = [
        {
            "interaction_id": turn.interaction_id,
            "parent_id": names.get(turn.parent) if turn.parent is not None else None,
            "finish_reason": turn.finish_reason,
            "reward": turn.reward,
            "at": turn.at,
            **turn.size(),
        }
        for turn in turns.turns
    ]
    return {**about, "interactions": interactions, "failures": dict(turns.failures), **rows}


def _rows(turns: TrajectoryTurns) -> dict[str, Any]:
    found = export([turns], Style.INDIVIDUAL, 1.0)
    return {"traj": found.traj(), "rows": found.rows}
