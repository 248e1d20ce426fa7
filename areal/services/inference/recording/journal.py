"""One journal: sessions recorded in one folder, served by the one process that holds it.

All changes go through the group commit and return when they are durable. Light reads use a connection of their own on
the event loop; exports read in a thread. What is in memory of sessions is bounded (``warm``, ``recent``): those not in
use cost disk only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from areal.services.inference.recording import changes, exporting, lineage, sweeping
from areal.services.inference.recording.changes import Ended, Recorded, RewardAnswer
from areal.services.inference.recording.commits import GroupCommit, elsewhere, store_failure
from areal.services.inference.recording.conversation import Conversation
from areal.services.inference.recording.database import SEQUENCES, open_reader, open_writer
from areal.services.inference.recording.exporting import ExportRequest, Kept, Taken
from areal.services.inference.recording.flights import other_body
from areal.services.inference.recording.folder import Folder
from areal.services.inference.recording.ledger import Ledger, row_id
from areal.services.inference.recording.lineage import StoredTurns
from areal.services.inference.recording.names import (
    ExportName,
    GroupName,
    SessionName,
    key_digest,
    new_session_key,
    new_tag,
)
from areal.services.inference.recording.packing import CorruptRecord, token_array
from areal.services.inference.recording.recent import Known, RecentTurns
from areal.services.inference.recording.rows import Export, Part, RewardOverflow, Style, join_parts, part_of
from areal.services.inference.recording.session import Kind, Phase, Session, Trajectory, matured
from areal.services.inference.recording.values import Call, TokenSample, TrajectoryTurns, Turn
from areal.services.inference.recording.warm import WarmSession, WarmSessions, WarmTurns, read_warm
from areal.services.web.errors import ApiError, bad_request

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_MOST_NOTED = 100  # damaged records, by name


@dataclass(frozen=True)
class Rules:
    """How long things live, in seconds, and how much the human-in-the-loop session holds unrewarded.

    ``session_ttl_s``: an idle session without a ready trajectory. ``ready_ttl_s``: one whose trajectories nobody
    fetched. ``standing_turns``: turns of its open trajectory before the next one is opened.
    """

    finish_timeout_s: float = 0.0
    export_retention_s: float = 600.0
    visibility_timeout_s: float = 60.0
    session_ttl_s: float = 3600.0
    ready_ttl_s: float = 24 * 3600.0
    standing_turns: int = 256


@dataclass(frozen=True)
class Started:
    """``key`` is the capability of the session; only its digest is stored."""

    session_id: str
    key: str


class Journal:
    """Open with ``open_journal``. ``on_ready`` is called when a trajectory may have become ready; ``warm`` are the
    sessions in use."""

    def __init__(self, folder: Folder, db: sqlite3.Connection, tag: str, rules: Rules) -> None:
        self.folder = folder
        self.tag = tag
        self.rules = rules
        self.clock: Callable[[], float] = time.time
        self.on_ready: Callable[[], None] = lambda: None
        self.corrupt: list[str] = []
        self._recent = RecentTurns()
        self.warm = WarmSessions()
        self._cursor = 0
        self._live: int | None = None  # how many sessions live, until one begins or ends
        self.commits = GroupCommit(db, tag, lambda committed: self.warm.settle(committed=committed))
        self._db = db
        self._write = Ledger(db, tag, self.warm.forget)
        self._read = Ledger(open_reader(folder.database), tag)
        self._far = Ledger(open_reader(folder.database), tag)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"read-{tag}")
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While a model call of a session runs. Raises 421 where the journal was left to another process."""
        if self._closed:
            raise elsewhere()
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return while no model call runs."""
        while self._calls:
            await self._idle.wait()

    async def close(self, *, remove: bool = False) -> None:
        """Commit what waits and let the folder go, or delete it. Who asks for a session then is told 421."""
        self._closed = True
        await self.commits.close()
        self._thread.shutdown()
        for db in (self._read.db, self._far.db, self._db):
            db.close()
        if remove:
            self.folder.remove()
        else:
            self.folder.leave()

    # -- changes

    async def start(self, task: str, count: int, key: str | None, online: bool) -> tuple[str, list[Started]]:
        """A group of sessions: its id, and each one's name and key. ``key``: the caller's, for the first one."""
        keys = [new_session_key(self.tag) for _ in range(count)]
        if key is not None:
            keys[0] = key
        digests = [key_digest(item.encode()) for item in keys]
        sessions = await self._change(lambda now: changes.start(self._write, self.warm, task, digests, online, now))
        names = [Started(self._write.name(each), each_key) for each, each_key in zip(sessions, keys, strict=True)]
        return sessions[0].group, names

    async def record(self, session: int, call: Call) -> Recorded:
        limit = self.rules.standing_turns
        self._held(session)
        recorded = await self._commit(lambda now: changes.record(self._write, self.warm, session, call, now, limit))
        for place, sample in enumerate(call.samples):
            if isinstance(sample, TokenSample) and sample.text is not None:
                tokens = token_array(sample.prompt_ids) + token_array(sample.output_ids)
                self._recent.put(recorded.first + place, Known(tokens, sample.text))
        self.on_ready()  # the chat may have sealed the trajectory before
        return recorded

    async def reward(self, session: int, value: float, interaction_id: str | None = None) -> RewardAnswer:
        finish = self.rules.finish_timeout_s
        answer = await self._change(
            lambda now: changes.reward(self._write, session, value, interaction_id, now, finish)
        )
        self.on_ready()
        return answer

    async def end(self, session: int) -> Ended:
        ended = await self._change(lambda now: changes.end(self._write, session, now))
        self.on_ready()
        return ended

    async def note_failure(self, session: int, code: str) -> None:
        await self._change(lambda now: changes.note_failure(self._write, session, code, now))

    async def release(self, session: int, number: int) -> bool:
        """An online trajectory was received: forget it. False when it is not here, or not ready, or exported."""

        def forget(now: float) -> bool:
            trajectory = self._write.trajectory(session, number)
            if trajectory is None or matured(trajectory, now).phase is not Phase.READY:
                return False
            changes.release(self._write, session, trajectory)
            return True

        return await self._change(forget)

    async def check_writable(self) -> None:
        """Where the last commit failed, try one: nothing should be sampled that cannot be recorded. Raises 507, 500."""
        if self.commits.failing is not None:
            await self._change(lambda now: self._write.set_counter("tried_at", int(now)))

    async def _change(self, apply: Callable[[float], _T]) -> _T:
        """Of anything; a session may begin or end by it."""
        try:
            return await self._commit(apply)
        finally:
            self._live = None

    async def _commit(self, apply: Callable[[float], _T]) -> _T:
        try:
            return await self.commits.run(lambda: apply(self.clock()))
        except CorruptRecord as error:
            raise self._damaged(error) from error

    # -- reads

    def session_by_key(self, digest: bytes) -> int | None:
        number = self.warm.by_key(digest)
        return number if number is not None else self._look(lambda ledger: ledger.session_by_key(digest))

    def session_by_name(self, name: SessionName) -> Session:
        """Raises 404."""
        return self._look(lambda ledger: exporting.session_named(ledger, str(name)))

    def members(self, group: GroupName) -> list[tuple[int, str]]:
        """Number and id of the sessions of a group that are still here."""
        return self._look(lambda ledger: ledger.members(group.first, group.size, str(group)))

    def session(self, number: int) -> Session | None:
        held = self._held(number)
        return held.session if held is not None else self._look(lambda ledger: ledger.session(number))

    def sessions(self, after: int, limit: int) -> list[Session]:
        """Those that can be read."""
        return self._look(lambda ledger: ledger.sessions(after, limit, self._note))

    def name(self, session: Session) -> str:
        return self._read.name(session)

    def live_sessions(self) -> int:
        if self._live is None:
            query = "SELECT count(*) FROM sessions INDEXED BY sessions_live WHERE life=0"
            count: int = self._look(lambda ledger: ledger.db.execute(query).fetchone()[0])
            self._live = count - 1  # the standing one
        return self._live

    def count_trajectories(self, phase: Phase) -> int:
        query = "SELECT count(*) FROM trajectories WHERE phase=?"
        count: int = self._look(lambda ledger: ledger.db.execute(query, (int(phase),)).fetchone()[0])
        return count

    def totals(self, session: int) -> tuple[int, float | None]:
        """Interactions that it holds, and the sum of the rewards given; None when none was."""
        return self._look(lambda ledger: ledger.totals(session))

    def spoke_at(self, session: int) -> float | None:
        """When the newest interaction of a session was recorded; None where it has none any more."""

        def read(ledger: Ledger) -> float | None:
            newest = ledger.newest(row_id(session, 0), row_id(session + 1, 0))
            return ledger.recorded_at(newest) if newest is not None else None

        return self._look(read)

    async def known(self, session: int, conversation: Conversation) -> Known | None:
        """The turn that this conversation continues, with its tokens, where one does."""
        row = self._continued(session, conversation)
        if row is None:
            return None
        known = self._recent.get(row)
        if known is None:
            known = await self._read_apart(lambda ledger: ledger.known(row))
            if known is not None:
                self._recent.put(row, known)
        return known

    def _continued(self, session: int, conversation: Conversation) -> int | None:
        held = self._held(session)
        last = held.last if held else self._look(lambda ledger: ledger.last_trajectory(session))
        if last is None or not conversation.answered or matured(last, self.clock()).phase is not Phase.OPEN:
            return None
        low = row_id(session, last.first)
        if held is not None:
            return lineage.continued(WarmTurns(held, low), conversation)
        return self._look(lambda ledger: lineage.continued(StoredTurns(ledger, session, low), conversation))

    def _held(self, number: int) -> WarmSession | None:
        """The session in memory, read now if need be; None where there is none, or it is too long to be kept there."""
        held = self.warm.get(number)
        if held is None:
            held = self._look(lambda ledger: read_warm(ledger, number))
            if held is not None:
                self.warm.put(held)
        return held

    def trajectories(self, session: int) -> list[Trajectory]:
        """Those that can be read."""
        return self._look(lambda ledger: ledger.trajectories(session, self._note))

    async def turns(self, session: Session, trajectory: Trajectory) -> TrajectoryTurns:
        return await self._read_apart(lambda ledger: ledger.turns(session, trajectory))

    async def replay(self, session: int, digest: bytes, idempotency: bytes | None) -> list[Turn] | None:
        """The turns of a call that is recorded already, by its choices. Raises 422 for a key used with another body."""
        found = self._look(lambda ledger: ledger.find_call(session, digest, idempotency))
        if found is None:
            return None
        if found[1] != digest:
            raise other_body()
        return await self.answer(found[0])

    async def answer(self, row: int) -> list[Turn] | None:
        """All choices of the answer in ``row``; None when it was removed meanwhile."""
        return await self._read_apart(lambda ledger: ledger.answer(row // SEQUENCES, row % SEQUENCES))

    # -- exports

    async def export(self, request: ExportRequest) -> tuple[Kept, Export]:
        """Raises 404, 425, 400, and 500 where all of it is damaged; nothing is taken then."""
        while True:
            chosen, items, built = await self._read_apart(lambda ledger: self._build(ledger, request))
            kept = await self._take(request, chosen, items, tuple(built.errors))
            if kept is not None and kept.items in (chosen, items):
                return kept, built

    async def check_export(self, request: ExportRequest) -> Export:
        """What ``export`` would answer, or raise; takes nothing."""
        return (await self._read_apart(lambda ledger: self._build(ledger, request)))[2]

    async def _take(
        self, request: ExportRequest, chosen: Sequence[Taken], items: Sequence[Taken], errors: exporting.Errors
    ) -> Kept | None:
        retention = self.rules.export_retention_s
        return await self._change(
            lambda now: exporting.take(self._write, request, chosen, items, errors, now, retention)
        )

    def _build(self, ledger: Ledger, request: ExportRequest) -> tuple[tuple[Taken, ...], tuple[Taken, ...], Export]:
        """What the request means, what of it can be handed out, and the answer."""
        now = self.clock()
        try:
            kept = exporting.find_kept(ledger, request.digest, now)
        except CorruptRecord as error:
            named = ", ".join(request.session_ids)
            raise CorruptRecord(f"what was exported of session {named} is not known: {error}") from error
        chosen, known = (kept.items, kept.errors) if kept is not None else exporting.choose(ledger, request, now)
        names = {name.number: each for each in request.session_ids if (name := SessionName.parse(each))}
        items, parts, errors = [], [], list(known)
        if kept is not None and kept.recovered:
            self._note(CorruptRecord(f"the record of export {kept.name} is damaged: its trajectories say what it took"))
            taken = {number for number, _ in kept.items}
            lost = CorruptRecord("the record of its export is damaged, and says nothing of it")
            errors += [exporting.error_entry(each, None, lost) for number, each in names.items() if number not in taken]
        for item in chosen:
            try:
                parts.append(self._part(ledger, item, request.style, request.discount))
                items.append(item)
            except (CorruptRecord, RewardOverflow) as error:
                errors.append(exporting.error_entry(names[item[0]], item[1], error))
        for entry in errors:
            if entry["code"] == CorruptRecord.code:
                self._note(CorruptRecord(entry["message"]))
        if errors and not items:
            raise ApiError(500, f"nothing of it can be exported: {errors[0]['message']}", code=errors[0]["code"])
        if request.columns_only and (only_text := _without_tokens(parts)):
            message = f"session {only_text} has text only, of an external model: format must be json"
            raise bad_request(message, param="format")
        return chosen, tuple(items), join_parts(parts, errors)

    def _part(self, ledger: Ledger, item: Taken, style: Style, discount: float) -> Part:
        """Raises CorruptRecord, RewardOverflow, and 404 where it is gone meanwhile."""
        session, trajectory = ledger.session(item[0]), ledger.trajectory(*item)
        if session is None or trajectory is None:
            raise ApiError(404, "the export was released meanwhile", code="export_not_found")
        return part_of(ledger.turns(session, trajectory), style, discount)

    async def acknowledge(self, name: ExportName) -> bool:
        return await self._change(lambda now: exporting.forget(self._write, name))

    async def online(self, items: Sequence[Taken]) -> list[Part | CorruptRecord | RewardOverflow | None]:
        """Each item's rows, or why it has none; None for what was released meanwhile. Nothing is taken."""

        def load(ledger: Ledger) -> list[Part | CorruptRecord | RewardOverflow | None]:
            found: list[Part | CorruptRecord | RewardOverflow | None] = []
            for item in items:
                try:
                    found.append(self._part(ledger, item, Style.INDIVIDUAL, 1.0))
                except (CorruptRecord, RewardOverflow) as error:
                    self._note(error)
                    found.append(error)
                except ApiError:
                    found.append(None)
            return found

        return await self._read_apart(load)

    def session_id(self, number: int) -> str | None:
        """Of a session, damaged or not; None where there is none."""
        return self._look(lambda ledger: ledger.session_id(number))

    def ready_online(self, limit: int, but: frozenset[Taken], kind: Kind | None = None) -> list[Taken]:
        """Trajectories of online sessions that nobody took, the oldest first."""
        return self._look(lambda ledger: sweeping.ready_online(ledger, self.clock(), limit, but, kind))

    def next_due(self) -> float | None:
        """When the next trajectory becomes ready by its finish timeout."""
        return self._look(sweeping.next_due)

    # -- upkeep

    async def sweep(self) -> int:
        """One slice of the upkeep: how much it found to do. Call it again while that is not 0."""
        if not self._look(lambda ledger: sweeping.is_due(ledger, self.clock(), self.rules, self._cursor)):
            self._cursor = 0
            return 0
        found, self._cursor = await self._change(
            lambda now: sweeping.sweep(self._write, now, self.rules, self._cursor, self._note)
        )
        if found:
            self.on_ready()
        return found

    def is_spent(self) -> bool:
        """Whether nothing is left in it that anybody could ask for."""
        return self._look(sweeping.is_spent)

    def _look(self, read: Callable[[Ledger], _T]) -> _T:
        if self._closed:
            raise elsewhere()
        try:
            return read(self._read)
        except CorruptRecord as error:
            raise self._damaged(error) from error
        except sqlite3.Error as error:
            raise store_failure(error) from error

    def _read_at_once(self, read: Callable[[Ledger], _T]) -> _T:
        """What was committed at one moment: the loop's thread goes on writing between two queries of ``read``."""
        db = self._far.db
        db.execute("BEGIN")
        try:
            return read(self._far)
        finally:
            if db.in_transaction:  # an error of the store may have ended it
                db.execute("ROLLBACK")

    async def _read_apart(self, read: Callable[[Ledger], _T]) -> _T:
        if self._closed:
            raise elsewhere()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._read_at_once, read)
        except CorruptRecord as error:
            raise self._damaged(error) from error
        except sqlite3.Error as error:
            raise store_failure(error) from error

    def _damaged(self, error: CorruptRecord) -> ApiError:
        self._note(error)
        return ApiError(500, f"the journal is damaged: {error}", code=error.code)

    def _note(self, error: CorruptRecord | RewardOverflow) -> None:
        """Damage is counted, and logged once."""
        text = str(error)
        if isinstance(error, CorruptRecord) and text not in self.corrupt and len(self.corrupt) < _MOST_NOTED:
            self.corrupt.append(text)
            _log.error("the journal %s is damaged: %s", self.folder.path, text)


def _without_tokens(parts: Sequence[Part]) -> str | None:
    """The first session of which there is text only."""
    having = {part.session_id for part in parts if part.tokens}
    return next((part.session_id for part in parts if part.texts and part.session_id not in having), None)


async def open_journal(folder: Folder, rules: Rules, clock: Callable[[], float] = time.time) -> Journal:
    """Recovers what a killed predecessor left. Raises sqlite3.Error."""
    db = open_writer(folder.database)
    row = db.execute("SELECT value FROM about WHERE name='tag'").fetchone()
    if row is None:
        tag = new_tag()
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO about VALUES ('tag', ?)", (tag,))
        changes.start_standing(Ledger(db, tag), clock())
        db.execute("COMMIT")
    else:
        tag = row[0]
    folder.show_tag(tag)
    journal = Journal(folder, db, tag, rules)
    journal.clock = clock
    return journal
