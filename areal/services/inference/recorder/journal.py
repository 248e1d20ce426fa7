"""One journal: sessions recorded in one folder, served by the process that holds its lock.

All changes go through the group commit and return when they are durable. Short reads use a separate connection on the
event loop; exports read in a thread. Idle sessions use only disk; the caches in memory are bounded.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import orjson

from areal.dataclasses import dataclass
from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.recorder import changes, exporting
from areal.services.inference.recorder.changes import (
    CachedSession,
    CachedTurns,
    EndedSession,
    RecordedCall,
    SessionCache,
    StoredTurns,
    continued_turn,
    read_session,
)
from areal.services.inference.recorder.exporting import ExportRequest, StoredExport, TrajectoryKey
from areal.services.inference.recorder.records import (
    CallIdentity,
    ConversationDigest,
    ModelCall,
    NamedRequest,
    PrefixMatch,
    RecentTurns,
    RecordedTurn,
    TokenSample,
    TrajectoryTurns,
    other_body,
    token_array,
)
from areal.services.inference.recorder.rows import (
    Export,
    RewardOverflow,
    Style,
    TrajectoryExport,
    export_trajectory,
    join_exports,
)
from areal.services.inference.recorder.session import (
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
from areal.services.inference.recorder.storage import SEQUENCES, open_writer
from areal.services.inference.recorder.tables import SessionTables, row_id, session_rows
from areal.services.journal.keys import key_digest, new_session_key
from areal.services.journal.storage import CorruptRecord, Journal, JournalFolder, closed_on_error, journal_tag
from areal.wire.bodies import Rewarded
from areal.wire.processes import Retention

_T = TypeVar("_T")
_INLINE_BYTES = 32 * 1024  # of a session: its rows are built in less time than a thread takes to start


@dataclass(frozen=True)
class StartedSession:
    """A session's id and key. ``key`` authenticates calls of the session; only its digest is stored."""

    session_id: str
    key: str


class SessionJournal(Journal):
    """A journal of recorded sessions; open it with ``open_journal``. ``on_news``: a trajectory may have become ready.
    ``cache``: the sessions in use."""

    def __init__(self, folder: JournalFolder, db: sqlite3.Connection, tag: str, retention: Retention) -> None:
        super().__init__(folder, db, tag, lambda committed: self.cache.settle(committed=committed))
        self.retention = retention
        self._recent = RecentTurns()
        self.cache = SessionCache()
        self._cursor = 0
        self._live: int | None = None  # number of live sessions; None after one may have started or ended
        self._write = SessionTables(db, tag, self.cache.forget)
        self._read = SessionTables(self._reader(), tag)
        self._far = SessionTables(self._reader(), tag)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"read-{tag}")

    async def close(self, *, remove: bool = False) -> None:
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown)  # it waits for a running export
        await super().close(remove=remove)

    async def start(self, task: str, count: int, key: str | None, online: bool) -> tuple[str, list[StartedSession]]:
        """Start a group of sessions. Return its id and the sessions. ``key``: the client's own key, for the first
        session."""
        keys = [new_session_key(self.tag) for _ in range(count)]
        if key is not None:
            keys[0] = key
        digests = [key_digest(item.encode()) for item in keys]
        sessions = await self._change(lambda now: changes.start(self._write, self.cache, task, digests, online, now))
        names = [
            StartedSession(self._write.name(each), each_key) for each, each_key in zip(sessions, keys, strict=True)
        ]
        return sessions[0].group, names

    async def record(self, session: int, call: ModelCall) -> RecordedCall:
        limit = self.retention.hitl_turns
        self._held(session)
        recorded = await self._commit(lambda now: changes.record(self._write, self.cache, session, call, now, limit))
        for place, sample in enumerate(call.samples):
            row = recorded.first + place
            if isinstance(sample, TokenSample) and sample.place is not None:
                tokens = token_array(sample.prompt_ids) + token_array(sample.output_ids)
                before = recorded.parents[place]
                parent = self._recent.get(before) if before is not None else None
                self._recent.put(row, PrefixMatch(tokens, sample.place, parent.decoded if parent else (0, "")))
            else:  # the row id may have belonged to a turn of a trajectory that was deleted since
                self._recent.drop(row)
        self.on_news()  # the call may have sealed the previous trajectory
        return recorded

    async def reward(
        self, session: int, value: float, interaction_id: str | None = None, request: NamedRequest | None = None
    ) -> Rewarded:
        finish = self.retention.reward_finish_timeout
        answer = await self._change(
            lambda now: changes.reward_once(self._write, request, session, value, interaction_id, now, finish)
        )
        self.on_news()
        return answer

    def repeated_reward(self, name: SessionName, request: NamedRequest) -> Rewarded | None:
        """Return the answer to an earlier reward with the same Idempotency-Key, even if an export has removed the
        session. Raises 422 if the earlier request differed."""
        stored = self._read_inline(lambda tables: tables.answer_of(name.number, request))
        answer = Rewarded(**orjson.loads(stored)) if stored is not None else None
        return answer if answer is not None and answer.session_id == str(name) else None

    async def end(self, session: int, request: NamedRequest | None = None) -> EndedSession:
        ended = await self._change(lambda now: changes.end(self._write, session, now, request))
        self.on_news()
        return ended

    async def note_failure(self, session: int, code: str) -> None:
        await self._change(lambda now: changes.note_failure(self._write, session, code, now))

    async def release(self, session: int, number: int) -> bool:
        """Delete an online trajectory that a client received. Return False if it is unknown, not ready, or exported."""

        def forget(now: float) -> bool:
            trajectory = self._write.trajectory(session, number)
            if trajectory is None or apply_timeout(trajectory, now).phase is not TrajectoryPhase.READY:
                return False
            self._write.release(session, trajectory)
            return True

        return await self._change(forget)

    async def _change(self, apply: Callable[[float], _T]) -> _T:
        """Commit a change that may start or end a session."""
        try:
            return await self._commit(apply)
        finally:
            self._live = None

    async def _commit(self, apply: Callable[[float], _T]) -> _T:
        try:
            return await self.commits.run(lambda: apply(self.clock()))
        except CorruptRecord as error:
            raise self._damaged(error) from error

    def session_by_key(self, digest: bytes) -> int | None:
        number = self.cache.by_key(digest)
        return number if number is not None else self._read_inline(lambda tables: tables.session_by_key(digest))

    def session_by_name(self, name: SessionName) -> SessionRecord:
        """Raise 404."""
        return self._read_inline(lambda tables: exporting.session_named(tables, str(name)))

    def members(self, group: GroupName, *, removed: bool = False) -> list[tuple[int, str]]:
        """Return number and id of each session of a group. ``removed``: include those whose export is not acknowledged
        yet."""
        return self._read_inline(lambda tables: tables.members(group, removed=removed))

    def session(self, number: int) -> SessionRecord | None:
        held = self._held(number)
        return held.session if held is not None else self._read_inline(lambda tables: tables.session(number))

    def sessions(self, after: int, limit: int) -> list[SessionRecord]:
        """Return up to ``limit`` sessions with numbers above ``after``, without damaged ones."""
        return self._read_inline(lambda tables: tables.sessions(after, limit, self._note))

    def name(self, session: SessionRecord) -> str:
        return self._read.name(session)

    def live_sessions(self) -> int:
        if self._live is None:
            query = "SELECT count(*) FROM sessions INDEXED BY sessions_live WHERE life=0"
            count: int = self._read_inline(lambda tables: tables.db.execute(query).fetchone()[0])
            self._live = count - 1  # the human-in-the-loop session
        return self._live

    def count_trajectories(self, phase: TrajectoryPhase) -> int:
        query = "SELECT count(*) FROM trajectories WHERE phase=?"
        return self._read_inline(lambda tables: tables.db.execute(query, (int(phase),)).fetchone()[0])

    def totals(self, session: int) -> tuple[int, float | None]:
        """Return the number of a session's interactions, and the sum of their rewards (None without rewards)."""
        return self._read_inline(lambda tables: tables.totals(session))

    def last_call_at(self, session: int) -> float | None:
        """Return when the session's newest interaction was recorded, in Unix seconds, or None if it has no
        interaction."""

        def read(tables: SessionTables) -> float | None:
            newest = tables.newest(*session_rows(session))
            return tables.recorded_at(newest) if newest is not None else None

        return self._read_inline(read)

    async def match_prefix(self, session: int, conversation: ConversationDigest) -> PrefixMatch | None:
        """Return the tokens of the turn that this conversation continues, or None if it continues none."""
        held = self._held(session)
        last = held.last if held else self._read_inline(lambda tables: tables.last_trajectory(session))
        if last is None or apply_timeout(last, self.clock()).phase is not TrajectoryPhase.OPEN:
            return None
        low = row_id(session, last.first)
        if held is not None and not held.stored:
            row = continued_turn(CachedTurns(held, low), conversation)
        else:
            row = self._read_inline(lambda tables: continued_turn(StoredTurns(tables, session, low), conversation))
        if row is None:
            return None
        match = self._recent.get(row)
        if match is None:
            match = await self._read_in_thread(lambda tables: tables.match_prefix(row))
            if match is not None:
                self._recent.put(row, match)
        return match

    def _held(self, number: int) -> CachedSession | None:
        """Return the session from the cache, after loading it from disk if necessary. Return None if it is unknown."""
        held = self.cache.get(number)
        if held is None:
            held = self._read_inline(lambda tables: read_session(tables, number))
            if held is not None:
                self.cache.put(held)
        return held

    def trajectories(self, session: int) -> list[Trajectory]:
        """Return the session's trajectories, without damaged ones."""
        return self._read_inline(lambda tables: tables.trajectories(session, self._note))

    async def turns(self, session: SessionRecord, trajectory: Trajectory) -> TrajectoryTurns:
        return await self._read_in_thread(lambda tables: tables.turns(session, trajectory))

    async def replay(self, call: CallIdentity) -> list[RecordedTurn] | None:
        """Return the turns of a repeated call that is already recorded, one per choice, or None.

        A retry that is matched by its body alone gets turns of an open trajectory only, because each trajectory may
        begin with the same body. Raises 422 for an Idempotency-Key used with another body.
        """
        session = call.session[1]

        def find(tables: SessionTables) -> tuple[int, bytes] | None:
            if call.idempotency is not None:
                return tables.find_call(session, call.digest, call.idempotency)
            attempt = tables.find_attempt(session, call.digest, call.call_id) if call.again else None
            if attempt is not None:
                return attempt, call.digest
            found = tables.find_call(session, call.digest, None) if call.retry else None
            if found is None:
                return None
            trajectory = tables.trajectory_of(session, found[0] % SEQUENCES)
            return found if trajectory is not None and trajectory.phase is TrajectoryPhase.OPEN else None

        found = self._read_inline(find)
        if found is None:
            return None
        if found[1] != call.digest:
            raise other_body()
        return await self.answer(found[0])

    async def answer(self, row: int) -> list[RecordedTurn] | None:
        """Return all choices of the answer in ``row``, or None if it has been deleted."""
        return await self._read_in_thread(lambda tables: tables.answer(row // SEQUENCES, row % SEQUENCES))

    async def seal(
        self, name: SessionName, value: float, request: ExportRequest
    ) -> tuple[bool, tuple[StoredExport, Export] | None]:
        """Reward the last interaction of a session before its export, without a finish timeout. A short session is
        exported in the same commit. If ``request`` repeats an export, the reward is compared and nothing is written.
        Returns whether the reward was set, and the export if there is one. Raises 404, and as ``reward``."""
        stored = self._read_inline(lambda tables: exporting.find_export(tables, request, self.clock(), seals=True))
        if stored is not None:
            for number, place in stored.items[-1:]:
                self._read_inline(partial(changes.check_exported_reward, number=number, place=place, value=value))
            return False, None
        number = self.session_by_name(name).number
        short = self._read_inline(lambda tables: tables.recorded_bytes(number)) <= _INLINE_BYTES
        return True, await self._change(partial(self._seal, number, value, request, short))

    def _seal(
        self, number: int, value: float, request: ExportRequest, short: bool, now: float
    ) -> tuple[StoredExport, Export] | None:
        """Set the reward and export the session. Returns None if the export has to be done separately; the reward is
        set in either case."""
        named = NamedRequest(request.key, request.digest) if request.key is not None else None
        changes.reward_once(self._write, named, number, value, None, now, 0.0)
        if not short:
            return None
        try:
            chosen, items, built = self._build(self._write, request)
        except (ApiError, CorruptRecord):
            return None
        retention = self.retention.export_retention
        stored = exporting.take(self._write, request, chosen, items, tuple(built.errors), retention, now)
        return (stored, built) if stored is not None else None

    async def export(self, request: ExportRequest) -> tuple[StoredExport, Export]:
        """Take and return the requested trajectories. Raises 400, 404, 425; 422 or 500 if none of them can be exported
        (rewards overflow, records damaged). After an error nothing is taken."""
        retention = self.retention.export_retention
        while True:
            chosen, items, built = await self._read_in_thread(lambda tables: self._build(tables, request))
            errors = tuple(built.errors)
            stored = await self._change(partial(exporting.take, self._write, request, chosen, items, errors, retention))
            if stored is not None and stored.items in (chosen, items):
                return stored, built

    def has_removed(self, session_ids: Iterable[str]) -> bool:
        """Return whether all these sessions were removed."""
        names = [name for each in session_ids if (name := SessionName.parse(each)) is not None]
        found = self._read_inline(lambda tables: [tables.session(name.number) for name in names])
        return all(session is None or session.state is SessionState.REMOVED for session in found)

    async def check_export(self, request: ExportRequest) -> Export:
        """Return the response of ``export``, or raise its error, without taking anything."""
        return (await self._read_in_thread(lambda tables: self._build(tables, request)))[2]

    def _build(
        self, tables: SessionTables, request: ExportRequest
    ) -> tuple[tuple[TrajectoryKey, ...], tuple[TrajectoryKey, ...], Export]:
        """Return the trajectories that the request names, those of them that can be exported, and the response."""
        now = self.clock()
        try:
            stored = exporting.find_export(tables, request, now)
        except CorruptRecord as error:
            named = ", ".join(request.session_ids)
            raise CorruptRecord(f"what was exported of session {named} is not known: {error}") from error
        chosen, known = (stored.items, stored.errors) if stored is not None else exporting.choose(tables, request, now)
        names = {name.number: each for each in request.session_ids if (name := SessionName.parse(each))}
        items, parts, errors = [], [], list(known)
        if stored is not None and stored.recovered:
            self._note(
                CorruptRecord(f"the record of export {stored.name} is damaged: its trajectories say what it took")
            )
            taken = {number for number, _ in stored.items}
            lost = CorruptRecord("the record of its export is damaged, and says nothing of it")
            errors += [exporting.error_entry(each, None, lost) for number, each in names.items() if number not in taken]
        for item in chosen:
            try:
                parts.append(self._part(tables, item, request.style, request.discount))
                items.append(item)
            except (CorruptRecord, RewardOverflow) as error:
                errors.append(exporting.error_entry(names[item[0]], item[1], error))
        for entry in errors:
            if entry["code"] == CorruptRecord.code:
                self._note(CorruptRecord(entry["message"]))
        if errors and not items:
            code, message = errors[0]["code"], f"nothing of it can be exported: {errors[0]['message']}"
            raise ApiError(422 if code == RewardOverflow.code else 500, message, code=code)
        with_tokens = {part.session_id for part in parts if part.tokens}
        only_text = [part.session_id for part in parts if part.texts and part.session_id not in with_tokens]
        if request.columns_only and only_text:
            message = f"session {only_text[0]} has text only, of an external model: format must be json"
            raise bad_request(message, param="format")
        return chosen, tuple(items), join_exports(parts, errors)

    def _part(self, tables: SessionTables, item: TrajectoryKey, style: Style, discount: float) -> TrajectoryExport:
        """Return the export of one trajectory. Raises CorruptRecord, RewardOverflow, and 404 if it has been deleted."""
        session, trajectory = tables.session(item[0]), tables.trajectory(*item)
        if session is None or trajectory is None:
            raise ApiError(404, "the export was released meanwhile", code="export_not_found")
        return export_trajectory(tables.turns(session, trajectory), style, discount)

    async def acknowledge(self, name: ExportName) -> bool:
        return await self._change(lambda now: exporting.forget(self._write, name))

    async def online(
        self, items: Sequence[TrajectoryKey], style: Style, discount: float
    ) -> list[TrajectoryExport | CorruptRecord | RewardOverflow | None]:
        """Return for each item its export, the error that prevents it, or None if it has been deleted. Takes
        nothing."""

        def load(
            tables: SessionTables, item: TrajectoryKey
        ) -> TrajectoryExport | CorruptRecord | RewardOverflow | None:
            try:
                return self._part(tables, item, style, discount)
            except CorruptRecord as error:
                self._note(error)
                return error
            except RewardOverflow as error:
                return error
            except ApiError:
                return None

        return await self._read_in_thread(lambda tables: [load(tables, item) for item in items])

    def session_id(self, number: int) -> str | None:
        """Return the id of a session, even of a damaged one; None if it is unknown."""
        return self._read_inline(lambda tables: tables.session_id(number))

    def ready_online(
        self, limit: int, but: frozenset[TrajectoryKey], kind: TrajectoryKind | None = None
    ) -> list[TrajectoryKey]:
        """Return up to ``limit`` ready trajectories of online sessions, oldest first, except those in ``but``."""
        return self._read_inline(lambda tables: exporting.ready_online(tables, self.clock(), limit, but, kind))

    def next_due(self) -> float | None:
        """Return when the next finish timeout of a trajectory passes, in Unix seconds, or None if none is set."""
        return self._read_inline(exporting.next_due)

    async def sweep(self) -> int:
        """Process one slice of the upkeep. Returns the number of changes."""
        if not self._read_inline(lambda tables: exporting.is_due(tables, self.clock(), self.retention, self._cursor)):
            self._cursor = 0
            return 0
        found, self._cursor = await self._change(
            lambda now: exporting.sweep(self._write, now, self.retention, self._cursor, self._note)
        )
        if found:
            self.on_news()
        return found

    def is_spent(self) -> bool:
        """Return whether the journal has no session (except the human-in-the-loop one), trajectory or export."""
        return self._read_inline(exporting.is_spent)

    def _read_inline(self, read: Callable[[SessionTables], _T]) -> _T:
        with self._reading():
            return read(self._read)

    async def _read_in_thread(self, read: Callable[[SessionTables], _T]) -> _T:
        """Read in a thread, in one transaction: the event loop may write between two queries of ``read``."""

        def read_at_once() -> _T:
            db = self._far.db
            db.execute("BEGIN")
            try:
                return read(self._far)
            finally:
                if db.in_transaction:  # SQLite may have ended the transaction after an error
                    db.execute("ROLLBACK")

        with self._reading():
            return await asyncio.get_running_loop().run_in_executor(self._thread, read_at_once)


async def open_journal(
    folder: JournalFolder, retention: Retention, clock: Callable[[], float] = time.time
) -> SessionJournal:
    """Open the journal of a locked folder, and recover it after a crash. Raises sqlite3.Error."""
    with closed_on_error(open_writer(folder.database)) as db:
        tag = journal_tag(db, lambda tag: changes.start_hitl(SessionTables(db, tag), clock()))
        journal = SessionJournal(folder, db, tag, retention)
    journal.clock = clock
    return journal
