"""Exports, and the periodic upkeep of a journal.

An export delivers each trajectory once. Two kinds of repeated request get the earlier response again: a request with
the same Idempotency-Key, and a request for the same sessions, unless they have another ready trajectory; then it is the
next export. The trajectories are marked as TAKEN, durably, before the response is sent. They stay on disk until the
export is acknowledged or its retention has passed; each response is built from the stored rows, which no longer change.
A trajectory that cannot be exported is listed in the response's ``errors`` and is not taken. A session is removed only
when all its trajectories were exported. The trajectories of an export with ``remove=False`` are shared: until its
retention has passed, other requests (in another style, for example) can export them again. They then belong to the
newest export.

Upkeep applies finish timeouts, deletes exports past their retention and deletes idle sessions: after ``session_ttl``,
or after ``ready_ttl`` if a trajectory is no longer open. An abandoned session is deleted without a score. Upkeep visits
sessions in slices, in the order in which they were started; one pass reads at most one slice.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

import orjson

from areal.dataclasses import dataclass, replace
from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.recorder.changes import HITL_SESSION
from areal.services.inference.recorder.records import checksum, other_body
from areal.services.inference.recorder.rows import RewardOverflow, Style
from areal.services.inference.recorder.session import (
    HITL,
    ExportName,
    GroupName,
    SessionName,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryKind,
    TrajectoryPhase,
    apply_timeout,
)
from areal.services.inference.recorder.storage import SEQUENCES
from areal.services.inference.recorder.tables import Report, SessionTables, session_rows
from areal.services.journal.storage import CorruptRecord
from areal.wire.columns import ExportError
from areal.wire.processes import Retention

TrajectoryKey = tuple[int, int]  # session, trajectory
NOTHING_TO_EXPORT = "nothing_to_export"


@dataclass(frozen=True)
class ExportRequest:
    """A request for an export. ``trajectory`` None: every ready trajectory. ``remove``: remove sessions whose
    trajectories are all exported. ``group``: ``session_ids`` are all its sessions, and removed ones are left out."""

    session_ids: tuple[str, ...]
    trajectory: int | None = None
    discount: float = 1.0
    style: Style = Style.INDIVIDUAL
    remove: bool = True
    columns_only: bool = False  # the response format cannot hold text; not part of ``digest``
    group: GroupName | None = None
    key: bytes | None = None  # the digest of the request's Idempotency-Key; not part of ``digest``

    @property
    def digest(self) -> bytes:
        named = list(self.session_ids) if self.group is None else str(self.group)
        parts = [named, self.trajectory, self.discount, self.style.value, self.remove]
        return blake2b(orjson.dumps(parts), digest_size=16).digest()


@dataclass(frozen=True)
class StoredExport:
    """An export that can be repeated, with its trajectories (``items``). ``recovered``: its own record is damaged;
    ``items`` are the trajectories whose rows name it, and it is kept until it is acknowledged."""

    name: ExportName
    items: tuple[TrajectoryKey, ...]
    until: float
    errors: tuple[ExportError, ...] = ()
    recovered: bool = False
    shared: bool = False  # other requests may take over its trajectories
    key: bytes | None = None


def find_export(
    tables: SessionTables, request: ExportRequest, now: float, *, seals: bool = False
) -> StoredExport | None:
    """Return the export that ``request`` repeats, or None. ``seals``: the request gives the reward that makes a
    trajectory ready. Raises 422 if its Idempotency-Key was used for another export of one of its sessions."""
    if request.key is not None:
        earlier = _stored(tables, "digest=?", _digest_of_earlier(request.digest, request.key))
        if earlier is not None and earlier.until > now:
            return earlier
    stored = _stored(tables, "digest=?", request.digest)
    if stored is not None and stored.until <= now:
        stored = None
    if request.key is not None:
        if stored is not None and request.key == stored.key:
            return stored
        _check_key(tables, request, request.key, now)
    return stored if stored is not None and not _has_more(tables, request, stored, now, seals) else None


def _check_key(tables: SessionTables, request: ExportRequest, key: bytes, now: float) -> None:
    query = (
        "SELECT DISTINCT exports.number, exports.digest FROM trajectories JOIN exports"
        " ON exports.number = trajectories.export WHERE trajectories.session=?"
    )
    same = (request.digest, _digest_of_earlier(request.digest, key))
    for name in filter(None, map(SessionName.parse, request.session_ids)):
        for number, digest in tables.db.execute(query, (name.number,)).fetchall():
            with contextlib.suppress(CorruptRecord):
                stored = _stored(tables, "number=?", number)
                if stored is not None and stored.key == key and stored.until > now and digest not in same:
                    raise other_body()


def _digest_of_earlier(digest: bytes, name: bytes) -> bytes:
    """Return the digest under which an export is stored once a newer export of the same sessions exists: only its
    Idempotency-Key finds it."""
    return blake2b(digest + name, digest_size=16).digest()


def _has_more(tables: SessionTables, request: ExportRequest, stored: StoredExport, now: float, seals: bool) -> bool:
    """Return whether a session of ``request`` has a trajectory that is ready, or will be sealed, and is not in
    ``stored``."""
    if request.trajectory is not None or stored.recovered:
        return False
    failed = {(entry["session_id"], entry["trajectory_id"]) for entry in stored.errors}
    for name in filter(None, map(SessionName.parse, request.session_ids)):
        with contextlib.suppress(CorruptRecord):
            tables.session(name.number)
            trajectories = tables.trajectories(name.number, lambda error: None)
            for item in trajectories:
                waits = item.phase is not TrajectoryPhase.TAKEN if seals else _is_ready(item, now)
                if waits and (str(name), item.number) not in failed:
                    return True
    return False


def _stored(tables: SessionTables, condition: str, *values: object) -> StoredExport | None:
    """Return the stored export, or None. Raises CorruptRecord if its record is damaged and no trajectory's row names
    it."""
    query = f"SELECT number, nonce, request, until, crc FROM exports WHERE {condition}"
    row = tables.db.execute(query, values).fetchone()
    if row is None:
        return None
    number, nonce, request, until, crc = row
    name = ExportName(tables.tag, number, nonce)
    try:
        if checksum(number, nonce, request, until) != crc:
            raise ValueError("the checksum does not match")
        stored = orjson.loads(request)
        stored = stored if isinstance(stored, dict) else {"items": stored, "errors": ()}
        items = tuple((session, trajectory) for session, trajectory in stored["items"])
        key = bytes.fromhex(stored["key"]) if stored.get("key") else None
        return StoredExport(name, items, until, tuple(stored["errors"]), shared=stored.get("shared", False), key=key)
    except (ValueError, TypeError, LookupError) as error:
        query = "SELECT session, number FROM trajectories WHERE export=? ORDER BY session, number"
        if taken := tables.db.execute(query, (number,)).fetchall():
            return StoredExport(name, tuple(taken), math.inf, recovered=True)
        raise CorruptRecord(f"export {number}: {error}") from error


def error_entry(session_id: str, trajectory: int | None, error: CorruptRecord | RewardOverflow) -> ExportError:
    return {"session_id": session_id, "trajectory_id": trajectory, "code": error.code, "message": str(error)}


def choose(
    tables: SessionTables, request: ExportRequest, now: float
) -> tuple[tuple[TrajectoryKey, ...], tuple[ExportError, ...]]:
    """Return the trajectories that the request takes, in its order, and an entry for each damaged one. Raises 404 for
    an unknown session or trajectory, or a session that ended with nothing left; 425 for a trajectory that is not ready
    yet."""
    items: list[TrajectoryKey] = []
    errors: list[ExportError] = []
    session_ids = request.session_ids
    if request.group is not None and not (session_ids := tuple(name for _, name in tables.members(request.group))):
        message = f"group {request.group} was exported, and nothing of it is left"
        raise ApiError(404, message, code=NOTHING_TO_EXPORT, param="group_id")
    for session_id in session_ids:
        damaged: list[CorruptRecord] = []
        try:
            session = session_named(tables, session_id)
            if request.trajectory is not None:
                items.append((session.number, _one(tables, session, request.trajectory, now)))
                continue
            trajectories = tables.trajectories(session.number, damaged.append)
        except CorruptRecord as error:
            errors.append(error_entry(session_id, request.trajectory, error))
            continue
        shared = _shared(tables, session.number, now)
        ready = [item.number for item in trajectories if item.number in shared or _is_ready(item, now)]
        if not ready and not damaged and session.state is not SessionState.ACTIVE:
            message = f"session {session_id} has ended, and nothing of it is left to export"
            raise ApiError(404, message, code=NOTHING_TO_EXPORT, param="session_ids")
        if not ready and not damaged:
            raise _not_ready(f"session {session_id} has no trajectory that is ready")
        items += [(session.number, number) for number in ready]
        errors += [error_entry(session_id, None, error) for error in damaged]
    return tuple(items), tuple(errors)


def session_named(tables: SessionTables, session_id: str) -> SessionRecord:
    """Return the session with this id. Raises 404; 400 for the id that human-in-the-loop sessions share."""
    name = SessionName.parse(session_id)
    session = tables.session(name.number) if name is not None and name.tag == tables.tag else None
    if session is None or session.state is SessionState.REMOVED or name is None or session.task != name.task:
        if session_id == HITL:
            raise bad_request(f"{HITL} is several sessions, one a replica: use their ids", param="session_ids")
        raise SessionName.unknown(session_id, "session_ids")
    return session


def _one(tables: SessionTables, session: SessionRecord, number: int, now: float) -> int:
    trajectory = tables.trajectory(session.number, number)
    if number in _shared(tables, session.number, now):
        return number
    if trajectory is None or trajectory.phase is TrajectoryPhase.TAKEN:
        what = "was exported already" if trajectory is not None else "is not there"
        message = f"trajectory {number} of session {tables.name(session)} {what}"
        raise ApiError(404, message, code="trajectory_not_found", param="trajectory_id")
    if not _is_ready(trajectory, now):
        raise _not_ready(f"trajectory {number} of session {tables.name(session)} is not ready")
    return number


def _is_ready(trajectory: Trajectory, now: float) -> bool:
    return apply_timeout(trajectory, now).phase is TrajectoryPhase.READY


def _shared(tables: SessionTables, session: int, now: float) -> set[int]:
    """Return the session's trajectories that a shared export took: other requests may take them too."""
    taken: dict[int, set[int]] = {}
    query = "SELECT export, number FROM trajectories WHERE session=? AND export IS NOT NULL"
    for export, number in tables.db.execute(query, (session,)).fetchall():
        taken.setdefault(export, set()).add(number)
    found: set[int] = set()
    for export, numbers in taken.items():
        with contextlib.suppress(CorruptRecord):
            stored = _stored(tables, "number=?", export)
            if stored is not None and stored.shared and stored.until > now:
                found |= numbers
    return found


def _not_ready(message: str) -> ApiError:
    return ApiError(425, message, code="trajectory_not_ready", headers={"Retry-After": "1"})


def take(
    tables: SessionTables,
    request: ExportRequest,
    chosen: Sequence[TrajectoryKey],
    items: Sequence[TrajectoryKey],
    errors: tuple[ExportError, ...],
    retention_s: float,
    now: float,
) -> StoredExport | None:
    """Take ``items``, the trajectories of ``chosen`` that can be exported. If the request says so, remove the sessions
    that then have none left. ``errors`` has an entry for each trajectory of ``chosen`` that is not in ``items``.

    Returns None if ``choose`` has a different result by now: the caller then retries.
    """
    if (stored := find_export(tables, request, now)) is not None:
        return stored
    try:
        if choose(tables, request, now)[0] != tuple(chosen):
            return None
    except ApiError:
        return None
    if (before := _stored(tables, "digest=?", request.digest)) is not None:
        if before.until <= now:
            forget(tables, before.name)
        else:
            earlier = _digest_of_earlier(request.digest, before.key or str(before.name).encode())
            tables.db.execute("UPDATE exports SET digest=? WHERE number=?", (earlier, before.name.number))
    number, nonce = tables.counter("next_export"), secrets.token_hex(4)
    document = {"items": items, "errors": errors, "shared": not request.remove}
    document |= {"key": request.key.hex()} if request.key is not None else {}
    plain = request.remove and not errors and request.key is None
    text = orjson.dumps(items if plain else document).decode()
    tables.set_counter("next_export", number + 1)
    until = now + retention_s
    values = (number, nonce, request.digest, text, until, checksum(number, nonce, text, until))
    tables.db.execute("INSERT INTO exports VALUES (?,?,?,?,?,?)", values)
    for item in items:
        trajectory = tables.trajectory(*item)
        assert trajectory is not None
        taken = replace(apply_timeout(trajectory, now), phase=TrajectoryPhase.TAKEN)
        tables.save_trajectory(item[0], taken, number)
    for session_number in dict.fromkeys(session for session, _ in items) if request.remove else ():
        session = tables.session(session_number)
        assert session is not None
        damaged: list[CorruptRecord] = []
        trajectories = tables.trajectories(session_number, damaged.append)
        is_done = not damaged and all(each.phase is TrajectoryPhase.TAKEN for each in trajectories)
        if is_done and not session.hitl:
            tables.void_key(session_number)
            tables.save_session(replace(session, state=SessionState.REMOVED))
    name = ExportName(tables.tag, number, nonce)
    return StoredExport(name, tuple(items), until, errors, shared=not request.remove, key=request.key)


def forget(tables: SessionTables, name: ExportName, now: float = math.inf) -> bool:
    """Delete an export that was acknowledged or has expired at ``now``, and its trajectories, except damaged ones and
    those that a newer export took. Return False if the export does not exist or has not expired."""
    stored = _stored(tables, "number=? AND nonce=?", name.number, name.nonce)
    if stored is None or stored.until > now:
        return False
    newest = "SELECT export FROM trajectories WHERE session=? AND number=?"  # the export that took it last
    for session, number in stored.items:
        with contextlib.suppress(CorruptRecord):
            trajectory = tables.trajectory(session, number)
            if trajectory is not None and tables.db.execute(newest, (session, number)).fetchone() == (name.number,):
                tables.release(session, trajectory)
    tables.db.execute("DELETE FROM exports WHERE number=?", (name.number,))
    return True


_SLICE = 64
_FREE_PAGES = 1024


def ready_online(
    tables: SessionTables, now: float, limit: int, but: frozenset[TrajectoryKey], kind: TrajectoryKind | None = None
) -> list[TrajectoryKey]:
    of_kind = f" AND (SELECT i.tokens IS NULL FROM interactions i WHERE i.id=t.session*{SEQUENCES}+t.first)={kind}"
    query = (
        "SELECT t.session, t.number FROM trajectories t JOIN sessions s ON s.number=t.session"
        " WHERE (t.phase=2 OR (t.phase=1 AND t.due<=?)) AND s.online=1"
        f"{'' if kind is None else of_kind} ORDER BY t.phase DESC, t.ready_at"
    )
    return list(islice((item for item in tables.db.execute(query, (now,)) if item not in but), limit))


def next_due(tables: SessionTables) -> float | None:
    return tables.db.execute("SELECT min(due) FROM trajectories WHERE phase=1").fetchone()[0]


def is_spent(tables: SessionTables) -> bool:
    query = (
        "SELECT NOT EXISTS (SELECT 1 FROM sessions WHERE standing=0) AND NOT EXISTS (SELECT 1 FROM trajectories)"
        " AND NOT EXISTS (SELECT 1 FROM exports)"
    )
    return bool(tables.db.execute(query).fetchone()[0])


def is_due(tables: SessionTables, now: float, retention: Retention, cursor: int) -> bool:
    """Return whether ``sweep`` has work to do. If not, the caller writes nothing and wakes no waiter."""
    query = (
        "SELECT EXISTS (SELECT 1 FROM trajectories WHERE phase=1 AND due<=:now)"
        " OR EXISTS (SELECT 1 FROM exports WHERE until<=:now)"
        " OR EXISTS (SELECT 1 FROM requests WHERE until<=:now)"
        " OR coalesce(:old >= (SELECT created FROM sessions WHERE number>=max(1, :cursor) ORDER BY number LIMIT 1), 0)"
        " OR coalesce(:old >= (SELECT at FROM interactions WHERE id<:hitl_end ORDER BY id LIMIT 1), 0)"
        " OR coalesce((SELECT max(id) FROM interactions WHERE id<:hitl_end)"
        " > :turns + (SELECT min(id) FROM interactions WHERE id<:hitl_end), 0)"
    )
    values = {
        "now": now,
        "cursor": cursor,
        "old": now - _soonest(retention),
        "hitl_end": session_rows(HITL_SESSION)[1],
        "turns": retention.hitl_turns,
    }
    return bool(tables.db.execute(query, values).fetchone()[0]) or _free_pages(tables) > 2 * _FREE_PAGES


def _soonest(retention: Retention) -> float:
    """Return the least age at which a session can expire."""
    return min(retention.session_ttl, retention.ready_ttl)


def _free_pages(tables: SessionTables) -> int:
    (free,) = tables.db.execute("PRAGMA freelist_count").fetchone()
    return int(free)


def sweep(tables: SessionTables, now: float, retention: Retention, cursor: int, report: Report) -> tuple[int, int]:
    """Process one slice. Return the number of changes and the session at which the next slice starts. Damaged rows are
    reported and left as they are."""
    done = 0
    query = "SELECT session, number FROM trajectories WHERE phase=1 AND due<=? LIMIT ?"
    for key in tables.db.execute(query, (now, _SLICE)).fetchall():
        try:
            trajectory = tables.trajectory(*key)
        except CorruptRecord as error:
            report(error)
            continue
        assert trajectory is not None
        tables.save_trajectory(key[0], apply_timeout(trajectory, now))
        done += 1
    query = "SELECT number, nonce FROM exports WHERE until<=? LIMIT ?"
    for row in tables.db.execute(query, (now, _SLICE)).fetchall():
        try:
            done += forget(tables, ExportName(tables.tag, *row), now)
        except CorruptRecord as error:
            report(error)
    done += tables.db.execute("DELETE FROM requests WHERE until<=?", (now,)).rowcount
    oldest = tables.sessions(cursor - 1, _SLICE, report)
    sessions = [each for each in oldest if each.hitl or each.created <= now - _soonest(retention)]
    done += sum(_expire(tables, session, now, retention, report) for session in sessions)
    if _free_pages(tables) > 2 * _FREE_PAGES:
        tables.db.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES})").fetchall()
    if not oldest or len(sessions) < len(oldest):  # none, or all after them are too young
        return done, 0
    query = "SELECT min(number) FROM sessions WHERE number>?"
    (following,) = tables.db.execute(query, (oldest[-1].number,)).fetchone()
    return done, int(following or 0)


def _expire(tables: SessionTables, session: SessionRecord, now: float, retention: Retention, report: Report) -> int:
    damaged: list[CorruptRecord] = []
    trajectories = tables.trajectories(session.number, damaged.append)
    for error in damaged:
        report(error)
    newest = tables.newest(*session_rows(session.number))
    if session.hitl:
        return _expire_hitl(tables, session, trajectories, newest or 0, now, retention, report)
    if session.state is SessionState.REMOVED or any(item.phase is TrajectoryPhase.TAKEN for item in trajectories):
        return 0  # deleted with its exports
    waiting = bool(damaged) or any(item.phase is not TrajectoryPhase.OPEN for item in trajectories)
    last_at = session.created
    if newest is not None:
        (last_at,) = tables.db.execute("SELECT at FROM interactions WHERE id=?", (newest,)).fetchone()
        rewarded = tables.db.execute("SELECT at FROM rewards WHERE interaction=?", (newest,)).fetchone()
        last_at = max(last_at, rewarded[0]) if rewarded else last_at
    if now - last_at < (retention.ready_ttl if waiting else retention.session_ttl):
        return 0
    tables.delete_session(session.number)
    return 1


def _expire_hitl(
    tables: SessionTables,
    session: SessionRecord,
    trajectories: list[Trajectory],
    last: int,
    now: float,
    retention: Retention,
    report: Report,
) -> int:
    """Delete trajectories that were not rewarded or fetched in time. ``last``: row id of the newest interaction."""
    dropped = 0
    for item in trajectories:
        low, high = tables.bounds(session.number, item)
        newest = tables.newest(low, high)
        if newest is None or item.phase is TrajectoryPhase.TAKEN:
            continue
        (at,) = tables.db.execute("SELECT at FROM interactions WHERE id=?", (newest,)).fetchone()
        ttl = retention.session_ttl if item.phase is TrajectoryPhase.OPEN else retention.ready_ttl
        left_behind = item.phase is TrajectoryPhase.OPEN and last - newest > retention.hitl_turns
        if left_behind or now - at >= ttl:
            try:
                tables.release(session.number, item)
                dropped += 1
            except CorruptRecord as error:
                report(error)
    return dropped
