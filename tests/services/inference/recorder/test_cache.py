"""Sessions in memory: what readers see, what changes see, what is left after each batch."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.changes import (
    LONGEST,
    CachedSession,
    CachedTurns,
    SessionCache,
    find_parent,
    read_session,
)
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.records import PrefixMatch, RecentTurns, digest_conversation
from areal.services.inference.recorder.session import SessionRecord, Trajectory
from tests.services.inference.recorder.support import Calls, answer, check_warm, journal_in, start, user

KEY = b"k" * 32


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SessionJournal]:
    journal = await journal_in(tmp_path / "journal")
    yield journal
    await journal.close()


@pytest.fixture
def calls() -> Calls:
    return Calls()


def warm_session(number: int, turns: int = 0) -> CachedSession:
    held = CachedSession(SessionRecord(number, "task", "", 0.0), KEY + bytes([number % 256]), Trajectory(0, 0), None)
    held.add([(number * 2**32 + seq, 1, b"t", None) for seq in range(turns)])
    return held


def held_numbers(sessions: SessionCache) -> list[int]:
    return [held.session.number for held in sessions]


def test_full_cache_drops_least_recently_used() -> None:
    sessions = SessionCache(most_bytes=3 * warm_session(1).bytes)
    for number in (1, 2, 3):
        sessions.put(warm_session(number))
    assert sessions.get(1) is not None  # 2 is now the least used
    sessions.put(warm_session(4))
    assert held_numbers(sessions) == [3, 1, 4]
    assert sessions.by_key(KEY + b"\x02") is None and sessions.by_key(KEY + b"\x04") == 4


def test_growing_sessions_stay_within_memory_bound() -> None:
    most = 3 * warm_session(1, turns=2).bytes
    sessions = SessionCache(most_bytes=most)
    for number in (1, 2, 3):
        sessions.put(warm_session(number, turns=2))
    for seq in range(2, 9):
        pending = sessions.pending(3)
        assert pending is not None
        sessions.follow(pending, Trajectory(0, 0), [(3 * 2**32 + seq, 3, b"d", None)])
        sessions.settle(committed=True)
    assert {held.session.number: (len(held.turns), held.stored) for held in sessions} == {
        1: (0, True),
        2: (0, True),
        3: (0, True),
    }
    assert sessions.held_bytes <= most


@pytest.mark.parametrize(("count", "turns"), [(2000, 0), (500, 8), (20, 1000)])
def test_cached_session_bytes_match_memory_use(count: int, turns: int) -> None:
    sessions = SessionCache(2**40)
    tracemalloc.start()
    try:
        for number in range(count):
            session = SessionRecord(number, f"task-{number}", f"group-{number}", 0.5 * number)
            held = CachedSession(session, os.urandom(32), Trajectory(0, 0), None)
            held.add([(number * 2**32 + seq, 1000 + seq, os.urandom(16), os.urandom(16)) for seq in range(turns)])
            sessions.put(held)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * taken < sessions.held_bytes < 1.6 * taken


@pytest.mark.parametrize("tokens", [10, 600, 5000])
def test_recent_turn_bytes_match_memory_use(tokens: int) -> None:
    recent = RecentTurns(2**40)
    tracemalloc.start()
    try:
        for row in range(500):
            recent.put(2**40 + row, PrefixMatch(array("i", [1]) * tokens, 3))
        for row in range(500):
            known = recent.get(2**40 + row)
            assert known is not None
            known.decoded = tokens, "x" * (4 * tokens + row % 3)
            recent.get(2**40 + row)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * taken < recent.held_bytes < 1.6 * taken


def test_recent_turns_drop_least_recently_used() -> None:
    turn = PrefixMatch(array("i", [1, 2, 3]), 1)
    recent = RecentTurns(3 * turn.bytes)
    for row in (1, 2, 3):
        recent.put(row, PrefixMatch(turn.tokens, 1))
    assert recent.get(1) is not None
    recent.put(4, turn)
    assert [row for row in (1, 2, 3, 4) if recent.get(row) is not None] == [1, 3, 4]
    for row in (1, 3, 4):
        recent.drop(row)
    assert recent.held_bytes == 0


def test_draft_is_invisible_until_batch_commit() -> None:
    sessions = SessionCache()
    sessions.put(warm_session(1))
    pending = sessions.pending(1)
    assert pending is not None
    row = 2**32
    sessions.follow(pending, Trajectory(0, 0), [(row, 3, b"d", b"after")])
    held = sessions.get(1)
    assert held is not None and held.newest is None and CachedTurns(held, row).completing([b"after"]) == []
    again = sessions.pending(1)
    assert again is pending and CachedTurns(held, row, again.added).completing([b"after"]) == [(row, 3, b"d", b"after")]
    sessions.settle(committed=True)
    assert held.newest == row and CachedTurns(held, row).completing([b"after"]) == [(row, 3, b"d", b"after")]


@pytest.mark.parametrize("committed", [True, False])
def test_forgotten_session_is_removed_on_commit_only(committed: bool) -> None:
    sessions = SessionCache()
    sessions.put(warm_session(1))
    sessions.forget(1)
    assert sessions.pending(1) is None and sessions.get(1) is not None
    sessions.settle(committed=committed)
    assert (sessions.get(1) is None) == committed


def test_reread_session_is_not_mixed_with_running_batch() -> None:
    sessions = SessionCache()
    sessions.put(warm_session(1))
    pending = sessions.pending(1)
    assert pending is not None
    sessions.follow(pending, Trajectory(0, 0), [(2**32, 3, b"d", None)])
    sessions.put(warm_session(1))
    assert sessions.pending(1) is None
    sessions.settle(committed=True)
    assert sessions.get(1) is None


def test_overlong_session_turns_are_dropped_until_next() -> None:
    sessions = SessionCache()
    sessions.put(warm_session(1, turns=LONGEST))
    pending = sessions.pending(1)
    assert pending is not None
    sessions.follow(pending, Trajectory(0, 0), [(2**32 + LONGEST, 3, b"d", None)])
    sessions.settle(committed=True)
    held = sessions.get(1)
    assert held is not None and held.stored and not held.turns and held.newest == 2**32 + LONGEST
    pending = sessions.pending(1)
    assert pending is not None
    following = (2**32 + LONGEST + 1, 3, b"d", None)
    sessions.follow(pending, Trajectory(1, LONGEST + 1), [following])
    sessions.settle(committed=True)
    assert not held.stored and held.turns == [following] and sessions.held_bytes == held.bytes


def test_cached_turns_find_same_parent_as_disk() -> None:
    held = warm_session(1, turns=3)
    turns = CachedTurns(held, 2**32 + 1)
    assert find_parent(turns, None, None) is None
    assert [turn[0] - 2**32 for turn in turns.newest(64)] == [1, 2]


async def test_concurrent_calls_in_session_agree_with_disk(journal: SessionJournal, calls: Calls) -> None:
    number, _ = await start(journal)
    first = calls.tokens([1, 2], messages=[user("a")])
    await journal.record(number, first)
    reply = answer([7])
    branches = [calls.tokens([1, 2, 7, 0, 5 + n], messages=[user("a"), reply, user(f"b{n}")], n=2) for n in range(5)]
    recorded = await asyncio.gather(*(journal.record(number, call) for call in branches))
    assert len({one.first for one in recorded}) == 5
    check_warm(journal)
    session = journal.session(number)
    assert session is not None
    turns = (await journal.turns(session, journal.trajectories(number)[0])).turns
    assert [turn.parent for turn in turns] == [None] + [0] * 10 and all(turn.joined for turn in turns[1:])


async def test_overlong_session_turns_are_found_on_disk(journal: SessionJournal, calls: Calls) -> None:
    number, _ = await start(journal)
    prompt, messages = [1], [user("a")]
    for turn in range(LONGEST + 3):
        await journal.record(number, calls.tokens(prompt, messages=messages))
        prompt, messages = [*prompt, 7, 0, 5], [*messages, answer([7]), user(f"b{turn}")]
    held = journal.cache.get(number)
    assert held is not None and held.stored and not held.turns
    check_warm(journal)
    statements: list[str] = []
    journal._read.db.set_trace_callback(statements.append)
    assert await journal.match_prefix(number, digest_conversation(messages)) is None, "its calls have no place"
    assert 0 < len(statements) < 4 and not [each for each in statements if "ORDER BY id LIMIT" in each]
    read = read_session(journal._read, number)
    assert read is not None and read.stored and not read.turns and read.newest == held.newest
    journal._read.db.set_trace_callback(None)
    assert not [each for each in statements if "ORDER BY id LIMIT" in each]
    session = journal.session(number)
    assert session is not None
    turns = (await journal.turns(session, journal.trajectories(number)[0])).turns
    assert [turn.parent for turn in turns] == [None, *range(LONGEST + 2)] and all(turn.joined for turn in turns[1:])


async def test_failed_commit_restores_previous_state(journal: SessionJournal, calls: Calls) -> None:
    number, _ = await start(journal)
    await journal.record(number, calls.tokens([1, 2], messages=[user("a")]))
    journal.commits._db.execute("PRAGMA query_only=1")
    with pytest.raises(ApiError) as failed:
        await journal.record(number, calls.tokens([1, 2, 7, 0, 5], messages=[user("a"), answer([7]), user("b")]))
    assert failed.value.status in (500, 507)
    journal.commits._db.execute("PRAGMA query_only=0")
    check_warm(journal)
    recorded = await journal.record(number, calls.tokens([1, 2, 7, 0, 6], messages=[user("a"), answer([7]), user("c")]))
    assert recorded.first % 2**32 == 1
    check_warm(journal)


async def test_reused_key_opens_newest_session(journal: SessionJournal, calls: Calls) -> None:
    number, _ = await start(journal, key="sk-own")
    digest = journal.cache.get(number)
    assert digest is not None and digest.key is not None and journal.session_by_key(digest.key) == number
    await journal.record(number, calls.tokens([1, 2]))
    await journal.reward(number, 1.0)
    following, _ = await start(journal, key="sk-own")
    assert following != number and journal.session_by_key(digest.key) == following
    check_warm(journal)
