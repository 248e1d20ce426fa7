"""The routes of sessions and their trajectories: ``/rl/*``, ``/export_trajectories`` and ``/trajectories``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict

import orjson
from prometheus_client import Counter

from areal.dataclasses import dataclass
from areal.http import headers as names
from areal.services.http.auth import Access, AdminKey
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.messages import (
    Request,
    Response,
    idempotency_key,
    query_int,
    query_seconds,
    read_body,
    read_object,
    refuse_idempotency_key,
)
from areal.services.http.service import Service, json_response
from areal.services.inference.data_proxy.sessions import Caller, CallerResolver, SessionSeeds, journal_of
from areal.services.inference.recorder.changes import HITL_SESSION
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.records import NamedRequest, TrajectoryTurns, named_request
from areal.services.inference.recorder.rows import Export, RewardOverflow, Style, export_all, npz, parse_rows
from areal.services.inference.recorder.session import (
    HITL,
    ExportName,
    GroupName,
    SessionName,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryPhase,
    check_reward,
    parse_kind,
    read_leases,
)
from areal.services.inference.recorder.storage import SEQUENCES
from areal.services.inference.recorder.store import TrajectoryLeases, TrajectoryStore
from areal.services.journal.keys import request_digest, tag_of_key
from areal.services.journal.storage import CorruptRecord
from areal.wire.bodies import EndSession, ExportTrajectories, SetReward, StartSession

_BODY_BYTES = 1024 * 1024
_PAGE = 100


@dataclass(eq=False)
class JournalSessionRoutes:
    """The routes ``/rl/*``. ``check_name`` raises 404 for a name that is not a model of this data proxy."""

    _store: TrajectoryStore
    _callers: CallerResolver
    _key: AdminKey | None
    _check_name: Callable[[str | None], object]
    _seeds: SessionSeeds

    def add_to(self, service: Service) -> None:
        counter = service.metrics.counter
        self._started = counter("areal_sessions_started_total", "Sessions started.")
        self.rewards = counter("areal_rewards_total", "Rewards given.")
        service.route("POST", "/rl/start_session", self.start, Access.ADMIN)
        service.route("POST", "/rl/set_reward", self.reward, Access.SESSION)
        service.route("POST", "/rl/end_session", self.end, Access.SESSION)
        service.route("GET", "/rl/human", self.human, Access.ADMIN)
        service.route("GET", "/rl/sessions", self.sessions, Access.ADMIN)
        service.route("GET", "/rl/sessions/{session_id}", self.session, Access.ADMIN)

    async def start(self, request: Request) -> Response:
        body = await read_body(request, StartSession, _BODY_BYTES)
        if body.api_key is None:
            refuse_idempotency_key(request, "give api_key, whose second start is refused")
        self._check_name(body.model)
        self._store.require(request.headers)
        self._check_key(body.api_key)
        seed = self._seeds.chosen(body.seed, body.default_seed)
        journal = self._store.own
        if body.api_key is not None and (held := self._store.holder_of_key(body.api_key.encode())) is not None:
            journal = held[0]
        group, started = await journal.start(body.task_id, body.group_size, body.api_key, body.online)
        if seed is not None:
            self._seeds.start(seed, [each.session_id for each in started])
        self._started.inc(len(started))
        sessions = [{"session_id": each.session_id, "session_api_key": each.key} for each in started]
        counted = self._store.count_started(len(started))
        return json_response({"group_id": group, "sessions": sessions}, status=201, more_headers=counted)

    def _check_key(self, key: str | None) -> None:
        """Check the key that a client chooses for its first session. Raises 400 for the admin key, since calls with it
        belong to no started session, and for a generated key whose session is not at this data proxy."""
        if key is None:
            return
        if self._key is not None and self._key.matches(key.encode()):
            raise bad_field("api_key", "must not be the admin key")
        tag = tag_of_key(key)
        if tag is not None and tag not in self._store.journals:
            raise bad_field("api_key", "has the form of a key of this service, but no session has it")

    async def reward(self, request: Request) -> Response:
        caller = self._callers.resolve(request)
        body = await read_body(request, SetReward, _BODY_BYTES)
        self._check_name(body.model)
        value = check_reward(body.reward)
        named = named_request(idempotency_key(request.headers), [value, body.interaction_id])
        name = SessionName.parse(body.session_id or "") if caller.admin else None
        if named is not None and name is not None:
            answer = journal_of(self._store, name.tag).repeated_reward(name, named)
            if answer is not None:
                return json_response(asdict(answer))
        caller = self._callers.selected(caller, body.session_id)
        answer = await caller.journal.reward(caller.session, value, body.interaction_id, named)
        self.rewards.inc()
        return json_response(asdict(answer))

    async def end(self, request: Request) -> Response:
        caller = self._callers.resolve(request)
        body = await read_body(request, EndSession, _BODY_BYTES, empty=b"{}")
        if body.group_id is not None:
            if not caller.admin:
                raise ApiError(403, "a session key is valid for its own session only", code="admin_key_required")
            journal, group = _group(self._store, body.group_id)
            ended = [await self._end(Caller(journal, number, admin=True)) for number, _ in journal.members(group)]
            return json_response({"ended": ended})
        named = named_request(idempotency_key(request.headers), "end")
        return json_response(await self._end(self._callers.selected(caller, body.session_id), named))

    async def _end(self, caller: Caller, request: NamedRequest | None = None) -> dict[str, object]:
        ended = await caller.journal.end(caller.session, request)
        self._seeds.end(caller.journal.tag, caller.session)
        return {"message": "session ended", "session_id": ended.session_id, "ready_trajectory_ids": ended.ready}

    async def human(self, request: Request) -> Response:
        """Return the last call of the human in the loop at this data proxy. Each journal has one such session; the
        gateway queries all data proxies. ``elsewhere``: the journals that other processes hold now; the router may not
        know all of them."""
        spoke = [
            (journal.last_call_at(HITL_SESSION) or 0.0, journal is self._store.own, journal.tag)
            for journal in self._store
        ]
        at, _, tag = max(spoke)
        return json_response(
            {
                "session_id": str(SessionName(HITL, tag, HITL_SESSION)),
                "spoke_at": at or None,
                "journals": list(self._store.journals),
                "elsewhere": list(self._store.others()),
            }
        )

    async def sessions(self, request: Request) -> Response:
        """Return a page of sessions by journal tag and, within a journal, in order of start. ``after``: the last id of
        the previous page."""
        limit = query_int(request, "limit", _PAGE, 1, 1000)
        after = SessionName.parse(request.query.get("after", ""))
        found: list[dict[str, object]] = []
        for journal in sorted(self._store, key=lambda journal: journal.tag):
            if after is not None and journal.tag < after.tag:
                continue
            start = after.number if after is not None and journal.tag == after.tag else -1
            found += [_summary(journal, each) for each in journal.sessions(start, limit - len(found))]
            if len(found) >= limit:
                break
        more = len(found) >= limit
        return json_response({"sessions": found, "next": found[-1]["session_id"] if more else None})

    async def session(self, request: Request) -> Response:
        """Return one session; with ``rows=true`` also the rows of its trajectories, as in an export. Nothing is
        exported."""
        whole = request.query.get("rows") == "true"
        caller = self._callers.named(request.match_info["session_id"])
        session = caller.journal.session(caller.session)
        assert session is not None
        trajectories = [
            await _trajectory(caller.journal, session, each, whole)
            for each in caller.journal.trajectories(session.number)
        ]
        return json_response({**_summary(caller.journal, session), "trajectories": trajectories})


def _group(store: TrajectoryStore, group_id: str) -> tuple[SessionJournal, GroupName]:
    """Return the group's journal and its name. Raises 404, or 421 if another process has the journal."""
    group = GroupName.require(group_id)
    return journal_of(store, group.tag), group


def _summary(journal: SessionJournal, session: SessionRecord) -> dict[str, object]:
    trajectories = journal.trajectories(session.number)
    interactions, reward = journal.totals(session.number)
    return {
        "session_id": journal.name(session),
        "group_id": session.group or None,
        "task_id": session.task,
        "state": SessionState(session.state).name.lower(),
        "online": session.online,
        "created": session.created,
        "ready": sum(each.phase is TrajectoryPhase.READY for each in trajectories),
        "trajectory_count": len(trajectories),
        "interaction_count": interactions,
        "reward": reward,
    }


async def _trajectory(
    journal: SessionJournal, session: SessionRecord, trajectory: Trajectory, whole: bool
) -> dict[str, object]:
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


def _rows(turns: TrajectoryTurns) -> dict[str, object]:
    found = export_all([turns], Style.INDIVIDUAL, 1.0)
    return {"traj": found.traj(), "rows": found.rows}


# Training rows: exports by session, and leases of any ready trajectory.

_EXPORT_BODY_BYTES = 4 * 1024 * 1024
_LONGEST_WAIT_S = 300.0
_MOST_ITEMS = 1024
_AT_ONCE_BYTES = 32 * 1024  # columns up to this size are serialized inline, since starting a thread takes longer
_MOST_SKIPPED = 100


class TrajectoryRoutes:
    """The routes of exports and leases: ``/export_trajectories`` and ``/trajectories``."""

    def __init__(self, store: TrajectoryStore, rewards: Counter) -> None:
        self._store = store
        self._rewards = rewards
        self._leases = TrajectoryLeases(store, lambda code: self._errors.labels(code).inc())

    def add_to(self, service: Service) -> None:
        counter = service.metrics.counter
        self._exports = counter("areal_exports_total", "Exports answered, repeated ones too.")
        self._rows = counter("areal_exported_rows_total", "Training rows in those answers.")
        self._acknowledged = counter("areal_exports_acknowledged_total", "Exports that were received, and are gone.")
        self._errors = counter(
            "areal_trajectory_errors_total", "Trajectories left out of an export or skipped by leases.", ("code",)
        )
        service.route("POST", "/export_trajectories", self.export, Access.ADMIN)
        service.route("POST", "/export_trajectories/ack", self.acknowledge_exports, Access.ADMIN)
        service.route("GET", "/trajectories", self.lease, Access.ADMIN)
        service.route("POST", "/trajectories/ack", self.acknowledge_leases, Access.ADMIN)

    async def export(self, request: Request) -> Response:
        """Export trajectories. With ``dry_run`` nothing is exported: the response says whether the export would
        succeed."""
        body = await read_body(request, ExportTrajectories, _EXPORT_BODY_BYTES)
        wanted = self._export_request(body, idempotency_key(request.headers))
        # Only the gateway combines sessions of several journals.
        tags = {SessionName.require(session_id, "session_ids").tag for session_id in wanted.session_ids}
        if len(tags) > 1:
            message = "these sessions are recorded in several places: export them through the gateway"
            raise bad_request(message, param="session_ids", code="several_journals")
        journal = journal_of(self._store, tags.pop())
        if body.dry_run:
            if body.reward is not None:
                raise bad_request("dry_run gives no reward: check without it, and export with it", param="reward")
            await journal.check_export(wanted)
            return json_response({"status": "ok"})
        taken = None
        if body.reward is not None:
            value = check_reward(body.reward)
            if len(wanted.session_ids) > 1 or wanted.trajectory is not None:
                raise bad_field("reward", "is for one session, and its last interaction")
            given, taken = await journal.seal(SessionName.require(wanted.session_ids[0], "session_ids"), value, wanted)
            self._rewards.inc(int(given))
        stored, export = taken or await journal.export(wanted)
        self._exports.inc()
        self._rows.inc(len(export.rows))
        for error in export.errors:
            self._errors.labels(error["code"]).inc()
        removed = wanted.remove and journal.has_removed(wanted.session_ids)
        if not export.interactions and sum(len(column.data) for column in export.columns) <= _AT_ONCE_BYTES:
            return _answer(str(stored.name), export, body.format, removed)
        return await asyncio.to_thread(_answer, str(stored.name), export, body.format, removed)

    def _export_request(self, body: ExportTrajectories, key: str | None) -> ExportRequest:
        ids, group = body.session_ids, None
        if ids and body.group_id is not None:
            GroupName.require(body.group_id).check_members(ids)
        elif body.group_id is not None:
            journal, group = _group(self._store, body.group_id)
            ids = tuple(name for _, name in journal.members(group, removed=True))
            if not ids:
                raise GroupName.unknown(body.group_id)
        if not ids:
            raise bad_field("session_ids", "must be a list of session ids, not an empty one")
        if body.trajectory_id is not None and body.trajectory_id >= SEQUENCES:
            message = f"no trajectory {body.trajectory_id}"
            raise ApiError(404, message, code="trajectory_not_found", param="trajectory_id")
        style, columns_only = Style(body.style), body.format == "npz"
        return ExportRequest(
            ids,
            body.trajectory_id,
            body.discount,
            style,
            body.remove_session,
            columns_only,
            group,
            request_digest(key) if key is not None else None,
        )

    async def acknowledge_exports(self, request: Request) -> Response:
        export_id = (await read_object(request, _EXPORT_BODY_BYTES)).get("export_id")
        name = ExportName.parse(export_id)
        if name is None:
            raise bad_field("export_id", "must be that of an export")
        released = await journal_of(self._store, name.tag).acknowledge(name)
        self._acknowledged.inc(int(released))
        return json_response({"status": "ok", "released": released})

    async def lease(self, request: Request) -> Response:
        """Lease ready trajectories. With ``limit=0`` nothing is leased, and the response only shows whether there are
        any. ``skipped``: ready trajectories that cannot be exported."""
        limit = query_int(request, "limit", 1, 0, _MOST_ITEMS)
        wait_s = query_seconds(request, "wait", _LONGEST_WAIT_S)
        kind = parse_kind(request.query.get("kind"))
        if limit == 0:
            return json_response({"items": [], "ready": await self._leases.wait_for_any(wait_s, kind)})
        leased = await self._leases.lease(limit, wait_s, kind, *parse_rows(request.query))
        try:
            items = [
                {
                    "lease_id": str(each.lease),
                    "session_id": each.session_id,
                    "trajectory_id": each.trajectory,
                    "traj": each.export.traj(),
                    "rows": each.export.rows,
                }
                for each in leased
            ]
            skipped = list(self._leases.skipped.values())
            more = {"skipped": skipped[:_MOST_SKIPPED], "skipped_count": len(skipped)}
            response = json_response({"items": items, **more})
            await request.answer(response)
        except BaseException:
            self._leases.give_back(each.lease for each in leased)
            raise
        return response

    async def acknowledge_leases(self, request: Request) -> Response:
        leases = read_leases(await read_object(request, _EXPORT_BODY_BYTES))
        for lease in leases:
            journal_of(self._store, lease.tag)
        return json_response({"status": "ok", "released": await self._leases.acknowledge(leases)})


def _answer(export_id: str, export: Export, form: str, removed: bool) -> Response:
    """Return the response of an export. ``removed``: the exported sessions and their records are deleted."""
    more: dict[str, object] = {"rows": export.rows, "failures": export.failures, "errors": export.errors}
    more |= {"export_id": export_id, "removed": removed}
    if form == "json":
        return json_response({"traj": export.traj(), **more})
    body = npz(export.columns, {"about.json": orjson.dumps({**more, "interactions": export.interactions})})
    headers = {names.EXPORT_ID: export_id}
    return Response(body=body, content_type="application/octet-stream", headers=headers)
