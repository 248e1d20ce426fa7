"""The SQL of one journal: synchronous reads and writes on one connection. Every row has a checksum, except counters.

The ``SessionTables`` of the writer are used inside changes (``journal.storage.CommitQueue``); those of a reader see
committed rows.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from areal.dataclasses import dataclass
from areal.services.inference.recorder.records import (
    NamedRequest,
    PrefixMatch,
    RecordedTurn,
    TextTurn,
    TokenTurn,
    TrajectoryTurns,
    checksum,
    other_body,
    unpack,
)
from areal.services.inference.recorder.session import (
    GroupName,
    SealReason,
    SessionName,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryPhase,
)
from areal.services.inference.recorder.storage import SEQUENCES
from areal.services.journal.storage import CorruptRecord

_T = TypeVar("_T")
_SESSION = "number, task, grp, created, life, online, standing, next_trajectory, crc, key"
_TRAJECTORY = "number, first, phase, due, sealed, ready_at, crc, session, export"


def row_id(session: int, seq: int) -> int:
    return session * SEQUENCES + seq


def session_rows(session: int) -> tuple[int, int]:
    """Return the range of row ids of a session's interactions: the first id and the end (exclusive)."""
    return row_id(session, 0), row_id(session + 1, 0)


Report = Callable[[CorruptRecord], None]
"""Called with the error of each damaged row when several rows are read; reading continues."""


def _refuse(error: CorruptRecord) -> None:
    raise error


@dataclass(eq=False)
class SessionTables:
    """Reads and writes the rows of sessions. ``changed`` is called with the number of each session whose own row or
    trajectory rows are changed."""

    db: sqlite3.Connection
    tag: str
    _changed: Callable[[int], None] = lambda number: None

    def name(self, session: SessionRecord) -> str:
        return str(SessionName(session.task, self.tag, session.number))

    def _value(self, query: str, *values: object) -> Any:
        """Return the first column of the first row; None if there is no row."""
        row = self.db.execute(query, values).fetchone()
        return row[0] if row else None

    def session(self, number: int) -> SessionRecord | None:
        row = self.db.execute(f"SELECT {_SESSION} FROM sessions WHERE number=?", (number,)).fetchone()
        return _session(row) if row else None

    def session_id(self, number: int) -> str | None:
        task = self._value("SELECT task FROM sessions WHERE number=?", number)
        return str(SessionName(task, self.tag, number)) if task is not None else None

    def session_by_key(self, digest: bytes) -> int | None:
        return self._value("SELECT number FROM sessions WHERE key=?", digest)

    def key(self, number: int) -> bytes | None:
        """Return the digest of a session's key."""
        return self._value("SELECT key FROM sessions WHERE number=?", number)

    def sessions(self, after: int, limit: int, report: Report = _refuse) -> list[SessionRecord]:
        query = f"SELECT {_SESSION} FROM sessions WHERE number>? ORDER BY number"
        rows = self.db.execute(query, (after,))
        return list(islice(_read_each(_session, rows, report), limit))

    def members(self, group: GroupName, *, removed: bool = False) -> list[tuple[int, str]]:
        """Return number and id of each session of a group, damaged ones included. ``removed``: include those that were
        removed by an export that is not acknowledged yet."""
        query = "SELECT number, task FROM sessions WHERE number>=? AND number<? AND grp=? AND life!=? ORDER BY number"
        but = -1 if removed else int(SessionState.REMOVED)
        rows = self.db.execute(query, (group.first, group.first + group.size, str(group), but))
        return [(number, str(SessionName(task, self.tag, number))) for number, task in rows]

    def add_session(self, session: SessionRecord, key: bytes | None) -> None:
        fields = _session_values(session)
        values = (*fields, checksum(*map(_plain, fields)), key)
        self.db.execute(f"INSERT INTO sessions ({_SESSION}) VALUES (?,?,?,?,?,?,?,?,?,?)", values)

    def save_session(self, session: SessionRecord) -> None:
        """Save everything of the session but its key."""
        self._changed(session.number)
        query = "UPDATE sessions SET life=?, next_trajectory=?, crc=? WHERE number=?"
        crc = checksum(*map(_plain, _session_values(session)))
        self.db.execute(query, (session.state, session.next_trajectory, crc, session.number))

    def void_key(self, number: int) -> None:
        self._changed(number)
        self.db.execute("UPDATE sessions SET key=NULL WHERE number=?", (number,))

    def delete_session(self, number: int) -> None:
        self._changed(number)
        self._delete_interactions(*session_rows(number))
        for table in ("trajectories", "failures"):
            self.db.execute(f"DELETE FROM {table} WHERE session=?", (number,))
        self.db.execute("DELETE FROM sessions WHERE number=?", (number,))

    def counter(self, name: str) -> int:
        return int(self._value("SELECT value FROM about WHERE name=?", name) or 0)

    def set_counter(self, name: str, value: int) -> None:
        self.db.execute("INSERT OR REPLACE INTO about VALUES (?,?)", (name, str(value)))

    def answer_of(self, session: int, request: NamedRequest) -> bytes | None:
        """Return the answer to the earlier request with this Idempotency-Key, or None. Raises 422 if that request
        differed."""
        query = "SELECT key, asked, answer, until, crc FROM requests WHERE session=? AND key=?"
        row = self.db.execute(query, (session, request.key)).fetchone()
        if row is None:
            return None
        if checksum(session, *row[:-1]) != row[-1]:
            raise CorruptRecord(f"a request of session {session}: the checksum does not match")
        if row[1] != request.asked:
            raise other_body()
        return bytes(row[2])

    def keep_answer(self, session: int, request: NamedRequest, answer: bytes, until: float) -> None:
        values = (session, request.key, request.asked, answer, until)
        self.db.execute("INSERT OR REPLACE INTO requests VALUES (?,?,?,?,?,?)", (*values, checksum(*values)))

    def last_trajectory(self, session: int) -> Trajectory | None:
        return self._trajectory("session=? ORDER BY number DESC LIMIT 1", session)

    def trajectories(self, session: int, report: Report = _refuse) -> list[Trajectory]:
        query = f"SELECT {_TRAJECTORY} FROM trajectories WHERE session=? ORDER BY number"
        rows = self.db.execute(query, (session,)).fetchall()
        return list(_read_each(_trajectory, rows, report))

    def trajectory(self, session: int, number: int) -> Trajectory | None:
        return self._trajectory("session=? AND number=?", session, number)

    def trajectory_of(self, session: int, seq: int) -> Trajectory | None:
        """Return the trajectory that contains turn ``seq``."""
        return self._trajectory("session=? AND first<=? ORDER BY number DESC LIMIT 1", session, seq)

    def _trajectory(self, condition: str, *values: int) -> Trajectory | None:
        row = self.db.execute(f"SELECT {_TRAJECTORY} FROM trajectories WHERE {condition}", values).fetchone()
        return _trajectory(row) if row else None

    def save_trajectory(self, session: int, value: Trajectory, export: int | None = None) -> None:
        self._changed(session)
        query = f"INSERT OR REPLACE INTO trajectories ({_TRAJECTORY}) VALUES (?,?,?,?,?,?,?,?,?)"
        fields = _trajectory_values(value)
        self.db.execute(query, (*fields, checksum(session, *map(_plain, fields)), session, export))

    def bounds(self, session: int, trajectory: Trajectory) -> tuple[int, int]:
        """Return the range of row ids of the trajectory's interactions: the first id and the end (exclusive)."""
        query = "SELECT first FROM trajectories WHERE session=? AND number>? ORDER BY number LIMIT 1"
        following = self._value(query, session, trajectory.number)
        end = row_id(session + 1, 0) if following is None else row_id(session, following)
        return row_id(session, trajectory.first), end

    def release(self, number: int, trajectory: Trajectory) -> None:
        """Delete a trajectory and its interactions. A REMOVED session is deleted with its last trajectory."""
        session = self.session(number)
        if session is None:
            return
        self._changed(number)
        self._delete_interactions(*self.bounds(number, trajectory))
        for table, column in (("trajectories", "number"), ("failures", "trajectory")):
            self.db.execute(f"DELETE FROM {table} WHERE session=? AND {column}=?", (number, trajectory.number))
        if session.state is SessionState.REMOVED and self.last_trajectory(number) is None:
            self.delete_session(number)
        else:
            following = max(session.next_trajectory, trajectory.number + 1)
            self.save_session(replace(session, next_trajectory=following))

    def _delete_interactions(self, low: int, high: int) -> None:
        self.db.execute("DELETE FROM rewards WHERE interaction>=? AND interaction<?", (low, high))
        self.db.execute("DELETE FROM interactions WHERE id>=? AND id<?", (low, high))

    def newest(self, low: int, high: int) -> int | None:
        """Return the row id of the newest interaction in a range, or None if the range is empty."""
        return self._value("SELECT max(id) FROM interactions WHERE id>=? AND id<?", low, high)

    def recorded_at(self, row: int) -> float:
        """Return when the interaction in ``row`` was recorded, in Unix seconds. Raises CorruptRecord."""
        name, data = self.db.execute("SELECT name, data FROM interactions WHERE id=?", (row,)).fetchone()
        return unpack(data, f"interaction {name}").header["at"]

    def answered(self, low: int, high: int, limit: int) -> list[tuple[int, int, bytes | None, bytes | None]]:
        """Return the first ``limit`` turns in a range: row id, number of tokens and their digest, and the digest of the
        conversation that the turn's answer completes."""
        query = "SELECT id, total, tokens, after FROM interactions WHERE id>=? AND id<? ORDER BY id LIMIT ?"
        return self.db.execute(query, (low, high, limit)).fetchall()

    def count(self, low: int, high: int) -> int:
        return self._value("SELECT count(*) FROM interactions WHERE id>=? AND id<?", low, high)

    def totals(self, session: int) -> tuple[int, float | None]:
        """Return the number of a session's interactions, and the sum of their rewards (None without rewards)."""
        rows = session_rows(session)
        query = "SELECT sum(value) FROM rewards WHERE interaction>=? AND interaction<?"
        return self.count(*rows), self._value(query, *rows)

    def recorded_bytes(self, session: int) -> int:
        """Return the size of the session's recorded interactions in bytes."""
        each = "length(data) + coalesce(length(tokens), 0)"
        query = f"SELECT coalesce(sum({each}), 0) FROM interactions WHERE id>=? AND id<?"
        return self._value(query, *session_rows(session))

    def find(self, session: int, interaction_id: str) -> int | None:
        query = "SELECT id FROM interactions WHERE id>=? AND id<? AND name=? ORDER BY id DESC LIMIT 1"
        return self._value(query, *session_rows(session), interaction_id)

    def find_call(self, session: int, digest: bytes, idempotency: bytes | None) -> tuple[int, bytes] | None:
        """Return row id and body digest of a call's newest interaction, found by Idempotency-Key or else by body."""
        if idempotency is not None:
            of_call, values = "session=? AND idempotency=?", [session, idempotency]
        else:
            of_call, values = "id>=? AND id<? AND call=?", [*session_rows(session), digest]
        query = f"SELECT id, call FROM interactions WHERE {of_call} ORDER BY id DESC LIMIT 1"
        return self.db.execute(query, values).fetchone()

    def find_attempt(self, session: int, digest: bytes, call_id: str | None) -> int | None:
        """Return the row id of a call's newest interaction, found by body and the relay's call id. Raises
        CorruptRecord."""
        query = "SELECT id, name, data FROM interactions WHERE id>=? AND id<? AND call=? ORDER BY id DESC"
        for row, name, data in self.db.execute(query, (*session_rows(session), digest)):
            if unpack(data, f"interaction {name}").header.get("call") == call_id:
                return int(row)
        return None

    def reward(self, interaction: int) -> float | None:
        row = self.db.execute("SELECT value, at, crc FROM rewards WHERE interaction=?", (interaction,)).fetchone()
        return _reward(interaction, *row) if row else None

    def set_reward(self, interaction: int, value: float, at: float) -> None:
        crc = checksum(interaction, value, at)
        self.db.execute("INSERT OR REPLACE INTO rewards VALUES (?,?,?,?)", (interaction, value, at, crc))

    def failures(self, session: int, trajectory: int) -> dict[str, int]:
        query = "SELECT code, count FROM failures WHERE session=? AND trajectory=?"
        return dict(self.db.execute(query, (session, trajectory)).fetchall())

    def turns(self, session: SessionRecord, trajectory: Trajectory) -> TrajectoryTurns:
        """Return the trajectory with all its turns. Raises CorruptRecord."""
        low, high = self.bounds(session.number, trajectory)
        query = "SELECT interaction, value, at, crc FROM rewards WHERE interaction>=? AND interaction<?"
        rewards = {row[0]: _reward(*row) for row in self.db.execute(query, (low, high)).fetchall()}
        try:
            turns = list(self._turns(session, low, high, rewards))
        except (LookupError, TypeError, ValueError) as error:  # the checksum matches: another version wrote it
            what = f"trajectory {trajectory.number} of session {self.name(session)}"
            raise CorruptRecord(f"{what} cannot be read: {error!r}") from error
        return TrajectoryTurns(
            self.name(session), trajectory.number, turns, self.failures(session.number, trajectory.number)
        )

    def answer(self, number: int, seq: int) -> list[RecordedTurn] | None:
        """Return all choices of the answer to which turn ``seq`` belongs, or None if the turn has been deleted."""
        session, trajectory = self.session(number), self.trajectory_of(number, seq)
        if session is None or trajectory is None:
            return None
        turns = self.turns(session, trajectory).turns
        answer_id = next((turn.answer_id for turn in turns if turn.seq == seq), None)
        return [turn for turn in turns if turn.answer_id == answer_id] if answer_id else None

    def match_prefix(self, row: int) -> PrefixMatch | None:
        """Return all tokens of the turn in ``row``, including those stored with its ancestors. None if the turn has
        been deleted, or was no chat."""
        parts: list[array[int]] = []
        place: int | None = None
        at: int | None = row
        while at is not None:
            found = self.db.execute("SELECT name, data FROM interactions WHERE id=?", (at,)).fetchone()
            if found is None:
                return None
            packed = unpack(found[1], f"interaction {found[0]}")
            if at == row:
                place = packed.header.get("place")  # messages without tokens have none
                if place is None:
                    return None
            parts += [packed.output, packed.prompt]
            at = row_id(row // SEQUENCES, packed.header["parent"]) if packed.shared else None
        assert place is not None
        tokens = array("i")
        for part in reversed(parts):
            tokens.extend(part)
        return PrefixMatch(tokens, place)

    def _turns(
        self, session: SessionRecord, low: int, high: int, rewards: Mapping[int, float]
    ) -> Iterator[RecordedTurn]:
        whole: dict[int, array[int]] = {}  # all tokens of each turn, by sequence number
        query = "SELECT id, name, data FROM interactions WHERE id>=? AND id<? ORDER BY id"
        for found, name, data in self.db.execute(query, (low, high)):
            item = unpack(data, f"interaction {name} of session {self.name(session)}")
            head, seq = item.header, found % SEQUENCES
            if head["id"] != found or head["name"] != name:
                raise CorruptRecord(f"interaction {name} of session {self.name(session)}: its row is another's")
            common: dict[str, Any] = {
                "seq": seq,
                "interaction_id": name,
                "answer_id": head["answer"],
                "created": head["created"],
                "parent": head["parent"],
                "joined": item.shared > 0,
                "model": head["model"],
                "finish_reason": head["finish"],
                "reward": rewards.get(found),
                "at": head["at"],
                "extra": head["extra"],
            }
            if "messages" in head:
                yield TextTurn(**common, messages=head["messages"], response=head["response"])
                continue
            prompt = item.prompt
            if item.shared:
                prompt = whole[head["parent"]][: item.shared] + prompt
            whole[seq] = prompt + item.output
            yield TokenTurn(
                **common,
                prompt_ids=prompt,
                output_ids=item.output,
                logprobs=item.logprobs,
                versions=item.versions(),
                temperature=head.get("temperature", 1.0),  # older records have none: theirs is 1
            )


def _read_each(read: Callable[[tuple[Any, ...]], _T], rows: Iterable[tuple[Any, ...]], report: Report) -> Iterator[_T]:
    for row in rows:
        try:
            value = read(row)
        except CorruptRecord as error:
            report(error)
        else:
            yield value


# ``dataclasses.astuple`` copies each value, which costs as much as the SQL statement.
_session_values = attrgetter(*(each.name for each in fields(SessionRecord)))
_trajectory_values = attrgetter(*(each.name for each in fields(Trajectory)))


def _plain(value: object) -> object:
    """Return the value as SQLite returns it, so that checksums agree."""
    return int(value) if isinstance(value, int) else value


def _session(row: tuple[Any, ...]) -> SessionRecord:
    *values, crc, _key = row
    if checksum(*values) != crc:
        raise CorruptRecord(f"session {values[0]}: the checksum does not match")
    number, task, group, created, life, online, standing, next_trajectory = values
    return SessionRecord(
        number, task, group, created, SessionState(life), bool(online), bool(standing), next_trajectory
    )


def _trajectory(row: tuple[Any, ...]) -> Trajectory:
    *values, crc, session, _export = row
    if checksum(session, *values) != crc:
        raise CorruptRecord(f"trajectory {values[0]} of session {session}: the checksum does not match")
    number, first, phase, due, sealed, ready_at = values
    return Trajectory(number, first, TrajectoryPhase(phase), due, SealReason(sealed), ready_at)


def _reward(interaction: int, value: float, at: float, crc: int) -> float:
    if checksum(interaction, value, at) != crc:
        if value == 0.0 and checksum(interaction, -0.0, at) == crc:  # older journals' column of type REAL lost the sign
            return -0.0
        raise CorruptRecord(f"reward of interaction {interaction}: the checksum does not match")
    return value
