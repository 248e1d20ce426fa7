"""Exports: trajectories handed out once, and the same answer again for whoever asks the same.

A trajectory that cannot be handed out is named among the ``errors`` of the answer, and is not taken; the others are.

An export takes its trajectories durably before it answers, and they stay on disk until it is acknowledged or its
retention has passed. Its answer is made anew each time from what is on disk, which no longer changes.

Nothing that was not exported is ever removed with a session: one that still has unfinished turns stays.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson

from areal.services.inference.recording import session as rules
from areal.services.inference.recording.changes import release
from areal.services.inference.recording.database import SEQUENCES
from areal.services.inference.recording.ledger import Ledger
from areal.services.inference.recording.names import HITL, ExportName, SessionName
from areal.services.inference.recording.packing import CorruptRecord, checksum
from areal.services.inference.recording.rows import RewardOverflow, Style
from areal.services.inference.recording.session import Life, Phase, Session, Trajectory
from areal.services.web.errors import ApiError, bad_request

Taken = tuple[int, int]  # session, trajectory
Errors = tuple[dict[str, Any], ...]
_MOST_SESSIONS = 4096
NOTHING_TO_EXPORT = "nothing_to_export"


@dataclass(frozen=True)
class ExportRequest:
    """``trajectory`` None: every ready one. ``remove``: the sessions go too, once nothing else is left in them."""

    session_ids: tuple[str, ...]
    trajectory: int | None = None
    discount: float = 1.0
    style: Style = Style.INDIVIDUAL
    remove: bool = True
    columns_only: bool = False  # the answer holds no text; no part of what tells one request from another

    @property
    def digest(self) -> bytes:
        parts = [list(self.session_ids), self.trajectory, self.discount, self.style.value, self.remove]
        return blake2b(orjson.dumps(parts), digest_size=16).digest()


def read_export_request(data: Mapping[str, Any]) -> ExportRequest:
    """Raises 400 naming the field."""
    ids = data.get("session_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(item, str) for item in ids):
        raise bad_request("session_ids must be a list of session ids, not an empty one", param="session_ids")
    if len(ids) > _MOST_SESSIONS or len(set(ids)) != len(ids):
        message = f"session_ids must be different ones, {_MOST_SESSIONS} at most"
        raise bad_request(message, param="session_ids")
    trajectory = _default(data, "trajectory_id", None)
    if trajectory is not None and (isinstance(trajectory, bool) or not isinstance(trajectory, int) or trajectory < 0):
        raise bad_request("trajectory_id must be a whole number, not below 0", param="trajectory_id")
    if trajectory is not None and trajectory >= SEQUENCES:
        raise ApiError(404, f"no trajectory {trajectory}", code="trajectory_not_found", param="trajectory_id")
    discount = _default(data, "discount", 1.0)
    if isinstance(discount, bool) or not isinstance(discount, int | float) or not 0.0 <= discount <= 1.0:
        raise bad_request("discount must be between 0 and 1", param="discount")
    style = _default(data, "style", Style.INDIVIDUAL.value)
    if style not in list(Style):
        raise bad_request(f"style must be one of {', '.join(Style)}", param="style")
    remove = _default(data, "remove_session", True)
    if not isinstance(remove, bool):
        raise bad_request("remove_session must be true or false", param="remove_session")
    return ExportRequest(tuple(ids), trajectory, float(discount), Style(style), remove)


def _default(data: Mapping[str, Any], name: str, default: Any) -> Any:
    value = data.get(name)
    return default if value is None else value


@dataclass(frozen=True)
class Kept:
    """An export that was made and may be asked for again. ``recovered``: its record is damaged, and ``items`` are those
    that say themselves that it took them; it stays until it is acknowledged."""

    name: ExportName
    items: tuple[Taken, ...]
    until: float
    errors: Errors = ()
    recovered: bool = False


def find_kept(ledger: Ledger, digest: bytes, now: float) -> Kept | None:
    kept = _by_digest(ledger, digest)
    return kept if kept is not None and kept.until > now else None


def _by_digest(ledger: Ledger, digest: bytes) -> Kept | None:
    query = "SELECT number, nonce, request, until, crc FROM exports WHERE digest=?"
    row = ledger.db.execute(query, (digest,)).fetchone()
    return _kept(ledger, row) if row is not None else None


def _kept(ledger: Ledger, row: tuple[Any, ...]) -> Kept:
    """Raises CorruptRecord where its record is damaged, and nothing says that this export took it."""
    number, nonce, request, until, crc = row
    name = ExportName(ledger.tag, number, nonce)
    try:
        if checksum(number, nonce, request, until) != crc:
            raise ValueError("the checksum does not match")
        stored = orjson.loads(request)
        found, errors = (stored["items"], stored["errors"]) if isinstance(stored, dict) else (stored, ())
        items = tuple((session, trajectory) for session, trajectory in found)
        return Kept(name, items, until, tuple(errors))
    except (ValueError, TypeError, LookupError) as error:
        query = "SELECT session, number FROM trajectories WHERE export=? ORDER BY session, number"
        if taken := ledger.db.execute(query, (number,)).fetchall():
            return Kept(name, tuple(taken), math.inf, recovered=True)
        raise CorruptRecord(f"export {number}: {error}") from error


def error_entry(session_id: str, trajectory: int | None, error: CorruptRecord | RewardOverflow) -> dict[str, Any]:
    """Of ``errors``."""
    return {"session_id": session_id, "trajectory_id": trajectory, "code": error.code, "message": str(error)}


def choose(ledger: Ledger, request: ExportRequest, now: float) -> tuple[tuple[Taken, ...], Errors]:
    """What the request takes, in its order, and what of it is damaged. Raises 404 for a session or trajectory that is
    not there, or a session that ended with nothing left; 425 for one that is not ready yet."""
    items: list[Taken] = []
    errors: list[dict[str, Any]] = []
    for session_id in request.session_ids:
        damaged: list[CorruptRecord] = []
        try:
            session = session_named(ledger, session_id)
            if request.trajectory is not None:
                items.append((session.number, _one(ledger, session, request.trajectory, now)))
                continue
            trajectories = ledger.trajectories(session.number, damaged.append)
        except CorruptRecord as error:
            errors.append(error_entry(session_id, request.trajectory, error))
            continue
        ready = [item.number for item in trajectories if _is_ready(item, now)]
        if not ready and not damaged and session.life is not Life.ACTIVE:
            message = f"session {session_id} has ended, and nothing of it is left to export"
            raise ApiError(404, message, code=NOTHING_TO_EXPORT, param="session_ids")
        if not ready and not damaged:
            raise _not_ready(f"session {session_id} has no trajectory that is ready")
        items += [(session.number, number) for number in ready]
        errors += [error_entry(session_id, None, error) for error in damaged]
    return tuple(items), tuple(errors)


def session_named(ledger: Ledger, session_id: str) -> Session:
    """Raises 404."""
    name = SessionName.parse(session_id)
    session = ledger.session(name.number) if name is not None and name.tag == ledger.tag else None
    if session is None or session.life is Life.REMOVED or name is None or session.task != name.task:
        if session_id == HITL:
            raise bad_request(f"{HITL} is several sessions, one a replica: use their ids", param="session_ids")
        raise ApiError(404, f"no session {session_id!r}", code="session_not_found", param="session_ids")
    return session


def _one(ledger: Ledger, session: Session, number: int, now: float) -> int:
    trajectory = ledger.trajectory(session.number, number)
    if trajectory is None or trajectory.phase is Phase.TAKEN:
        what = "was exported already" if trajectory is not None else "is not there"
        message = f"trajectory {number} of session {ledger.name(session)} {what}"
        raise ApiError(404, message, code="trajectory_not_found", param="trajectory_id")
    if not _is_ready(trajectory, now):
        raise _not_ready(f"trajectory {number} of session {ledger.name(session)} is not ready")
    return number


def _is_ready(trajectory: Trajectory, now: float) -> bool:
    return rules.matured(trajectory, now).phase is Phase.READY


def _not_ready(message: str) -> ApiError:
    return ApiError(425, message, code="trajectory_not_ready", headers={"Retry-After": "1"})


def take(
    ledger: Ledger,
    request: ExportRequest,
    chosen: Sequence[Taken],
    items: Sequence[Taken],
    errors: Errors,
    now: float,
    retention_s: float,
) -> Kept | None:
    """Hand out ``items``, those of ``chosen`` that can be: their trajectories are taken, their sessions removed where
    nothing else is left. ``errors`` says of the others why not.

    None when something changed since they were chosen: the caller looks again.
    """
    kept = find_kept(ledger, request.digest, now)
    if kept is not None:
        return kept
    if choose_again(ledger, request, now) != tuple(chosen):
        return None
    if (outlived := _by_digest(ledger, request.digest)) is not None:
        forget(ledger, outlived.name)
    number, nonce = ledger.counter("next_export"), secrets.token_hex(4)
    text = orjson.dumps({"items": items, "errors": errors} if errors else items).decode()
    ledger.set_counter("next_export", number + 1)
    until = now + retention_s
    values = (number, nonce, request.digest, text, until, checksum(number, nonce, text, until))
    ledger.db.execute("INSERT INTO exports VALUES (?,?,?,?,?,?)", values)
    for session, trajectory in items:
        _mark_taken(ledger, session, trajectory, number, now)
    if request.remove:
        for session in dict.fromkeys(session for session, _ in items):
            _remove_if_done(ledger, session)
    return Kept(ExportName(ledger.tag, number, nonce), tuple(items), until, errors)


def choose_again(ledger: Ledger, request: ExportRequest, now: float) -> tuple[Taken, ...] | None:
    try:
        return choose(ledger, request, now)[0]
    except ApiError:
        return None


def _mark_taken(ledger: Ledger, session: int, number: int, export: int, now: float) -> None:
    trajectory = ledger.trajectory(session, number)
    assert trajectory is not None
    taken = replace(rules.matured(trajectory, now), phase=Phase.TAKEN)
    ledger.save_trajectory(session, taken, export)


def _remove_if_done(ledger: Ledger, number: int) -> None:
    session = ledger.session(number)
    assert session is not None
    damaged: list[CorruptRecord] = []
    trajectories = ledger.trajectories(number, damaged.append)
    if session.standing or damaged or any(item.phase is not Phase.TAKEN for item in trajectories):
        return
    ledger.void_key(number)
    ledger.save_session(replace(session, life=Life.REMOVED))


def forget(ledger: Ledger, name: ExportName, now: float = math.inf) -> bool:
    """The export was received, or by ``now`` nobody came for it: what it took is deleted, but for what is damaged
    meanwhile. False when it is gone already."""
    query = "SELECT number, nonce, request, until, crc FROM exports WHERE number=? AND nonce=?"
    row = ledger.db.execute(query, (name.number, name.nonce)).fetchone()
    if row is None:
        return False
    kept = _kept(ledger, row)
    if kept.until > now:
        return False
    for session, number in kept.items:
        with contextlib.suppress(CorruptRecord):
            trajectory = ledger.trajectory(session, number)
            if trajectory is not None:
                release(ledger, session, trajectory)
    ledger.db.execute("DELETE FROM exports WHERE number=?", (name.number,))
    return True


def outdated(ledger: Ledger, now: float, limit: int) -> list[ExportName]:
    query = "SELECT number, nonce FROM exports WHERE until<=? LIMIT ?"
    return [ExportName(ledger.tag, *row) for row in ledger.db.execute(query, (now, limit)).fetchall()]
