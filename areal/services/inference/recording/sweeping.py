"""What happens by itself: finish timeouts pass, exports outlive their retention, idle sessions expire.

An idle session that was never rewarded is dropped: abandoned, not scored. Sessions are looked at in slices, in the
order in which they were started; nothing here reads more than a slice at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal.services.inference.recording import exporting
from areal.services.inference.recording import session as rules
from areal.services.inference.recording.changes import release
from areal.services.inference.recording.database import SEQUENCES
from areal.services.inference.recording.ledger import Ledger, Report, row_id
from areal.services.inference.recording.packing import CorruptRecord
from areal.services.inference.recording.session import Kind, Life, Phase, Session, Trajectory

if TYPE_CHECKING:
    from areal.services.inference.recording.exporting import Taken
    from areal.services.inference.recording.journal import Rules

_SLICE = 64
_FREE_PAGES = 1024


def ready_online(
    ledger: Ledger, now: float, limit: int, but: frozenset[Taken], kind: Kind | None = None
) -> list[Taken]:
    of_kind = f" AND (SELECT i.tokens IS NULL FROM interactions i WHERE i.id=t.session*{SEQUENCES}+t.first)={kind}"
    query = (
        "SELECT t.session, t.number FROM trajectories t JOIN sessions s ON s.number=t.session"
        " WHERE (t.phase=2 OR (t.phase=1 AND t.due<=?)) AND s.online=1"
        f"{'' if kind is None else of_kind} ORDER BY t.phase DESC, t.ready_at"
    )
    found: list[Taken] = []
    for item in ledger.db.execute(query, (now,)):
        if item not in but:
            found.append(item)
        if len(found) == limit:
            break
    return found


def next_due(ledger: Ledger) -> float | None:
    row = ledger.db.execute("SELECT min(due) FROM trajectories WHERE phase=1").fetchone()
    due: float | None = row[0]
    return due


def is_spent(ledger: Ledger) -> bool:
    query = (
        "SELECT NOT EXISTS (SELECT 1 FROM sessions WHERE standing=0) AND NOT EXISTS (SELECT 1 FROM trajectories)"
        " AND NOT EXISTS (SELECT 1 FROM exports)"
    )
    return bool(ledger.db.execute(query).fetchone()[0])


def is_due(ledger: Ledger, now: float, limits: Rules, cursor: int) -> bool:
    """Whether ``sweep`` has anything to look at: where nothing has, nothing is written, and nobody is woken."""
    query = (
        "SELECT EXISTS (SELECT 1 FROM trajectories WHERE phase=1 AND due<=:now)"
        " OR EXISTS (SELECT 1 FROM exports WHERE until<=:now) OR EXISTS (SELECT 1 FROM trajectories WHERE session=0)"
        " OR coalesce(:old >= (SELECT created FROM sessions WHERE number>=max(1, :cursor) ORDER BY number LIMIT 1), 0)"
    )
    values = {"now": now, "cursor": cursor, "old": now - _soonest(limits)}
    return bool(ledger.db.execute(query, values).fetchone()[0]) or _free_pages(ledger) > 2 * _FREE_PAGES


def _soonest(limits: Rules) -> float:
    """The least age at which a session can expire."""
    return min(limits.session_ttl_s, limits.ready_ttl_s)


def _free_pages(ledger: Ledger) -> int:
    (free,) = ledger.db.execute("PRAGMA freelist_count").fetchone()
    return int(free)


def sweep(ledger: Ledger, now: float, limits: Rules, cursor: int, report: Report) -> tuple[int, int]:
    """One slice: how much was done, and from which session the next slice goes on. What is damaged is left as it is,
    and ``report`` is told."""
    matured = _seal_due(ledger, now, report)
    outdated = _forget_outdated(ledger, now, report)
    oldest = ledger.sessions(cursor - 1, _SLICE, report)
    sessions = [each for each in oldest if each.standing or each.created <= now - _soonest(limits)]
    expired = sum(_expire(ledger, session, now, limits, report) for session in sessions)
    if _free_pages(ledger) > 2 * _FREE_PAGES:
        ledger.db.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES})").fetchall()
    followed = len(sessions) == len(oldest)  # else all after them are too young
    return matured + outdated + expired, _following(ledger, oldest) if followed else 0


def _following(ledger: Ledger, seen: Sequence[Session]) -> int:
    """The first session after those; 0 after the last."""
    if not seen:
        return 0
    (number,) = ledger.db.execute("SELECT min(number) FROM sessions WHERE number>?", (seen[-1].number,)).fetchone()
    return int(number or 0)


def _forget_outdated(ledger: Ledger, now: float, report: Report) -> int:
    done = 0
    for name in exporting.outdated(ledger, now, _SLICE):
        try:
            done += exporting.forget(ledger, name, now)
        except CorruptRecord as error:
            report(error)
    return done


def _seal_due(ledger: Ledger, now: float, report: Report) -> int:
    query = "SELECT session, number FROM trajectories WHERE phase=1 AND due<=? LIMIT ?"
    done = 0
    for session, number in ledger.db.execute(query, (now, _SLICE)).fetchall():
        try:
            trajectory = ledger.trajectory(session, number)
        except CorruptRecord as error:
            report(error)
            continue
        assert trajectory is not None
        ledger.save_trajectory(session, rules.matured(trajectory, now))
        done += 1
    return done


def _expire(ledger: Ledger, session: Session, now: float, limits: Rules, report: Report) -> int:
    damaged: list[CorruptRecord] = []
    trajectories = ledger.trajectories(session.number, damaged.append)
    for error in damaged:
        report(error)
    last_at = _last_activity(ledger, session)
    if session.standing:
        return _expire_standing(ledger, session, trajectories, now, limits, report)
    if session.life is Life.REMOVED or any(item.phase is Phase.TAKEN for item in trajectories):
        return 0  # its exports say when it goes
    waiting = bool(damaged) or any(item.phase is not Phase.OPEN for item in trajectories)
    if now - last_at < (limits.ready_ttl_s if waiting else limits.session_ttl_s):
        return 0
    ledger.delete_session(session.number)
    return 1


def _last_activity(ledger: Ledger, session: Session) -> float:
    newest = ledger.newest(row_id(session.number, 0), row_id(session.number + 1, 0))
    if newest is None:
        return session.created
    (at,) = ledger.db.execute("SELECT at FROM interactions WHERE id=?", (newest,)).fetchone()
    rewarded = ledger.db.execute("SELECT at FROM rewards WHERE interaction=?", (newest,)).fetchone()
    latest: float = max(at, rewarded[0]) if rewarded else at
    return latest


def _expire_standing(
    ledger: Ledger, session: Session, trajectories: list[Trajectory], now: float, limits: Rules, report: Report
) -> int:
    """The standing session stays; trajectories of it that nobody rewarded, or fetched, go."""
    dropped = 0
    last = ledger.newest(row_id(session.number, 0), row_id(session.number + 1, 0)) or 0
    for item in trajectories:
        low, high = ledger.bounds(session.number, item)
        newest = ledger.newest(low, high)
        if newest is None or item.phase is Phase.TAKEN:
            continue
        (at,) = ledger.db.execute("SELECT at FROM interactions WHERE id=?", (newest,)).fetchone()
        ttl = limits.session_ttl_s if item.phase is Phase.OPEN else limits.ready_ttl_s
        left_behind = item.phase is Phase.OPEN and last - newest > limits.standing_turns
        if left_behind or now - at >= ttl:
            try:
                release(ledger, session.number, item)
                dropped += 1
            except CorruptRecord as error:
                report(error)
    return dropped
