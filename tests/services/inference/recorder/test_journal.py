"""Sessions through a journal on disk: the rules end to end, and what a restart finds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.changes import HITL_SESSION
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.records import (
    CallIdentity,
    TokenSample,
    digest_conversation,
    named_request,
)
from areal.services.inference.recorder.rows import Style
from areal.services.inference.recorder.session import SessionName, TrajectoryPhase
from areal.services.journal.keys import key_digest
from tests.services.inference.recorder.support import Calls, Clock, answer, journal_in, start, user


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
async def journal(tmp_path: Path, clock: Clock) -> AsyncIterator[SessionJournal]:
    journal = await journal_in(tmp_path / "run", clock)
    yield journal
    await journal.close()


async def refused(awaitable: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await awaitable
    return caught.value


async def test_reward_without_id_seals_newest_turn(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.record(session, calls.tokens([1, 2, 3]))
    answered = await journal.reward(session, 0.5)
    assert (answered.trajectory_ready, answered.ready_transition, answered.interaction_count) == (True, True, 2)
    assert (answered.session_id, answered.trajectory_id, answered.interaction_id) == (session_id, 0, "chatcmpl-2")


async def test_reward_on_an_earlier_interaction_never_seals(journal: SessionJournal, calls: Calls) -> None:
    session, _ = await start(journal)
    await journal.record(session, calls.tokens([1]))
    await journal.record(session, calls.tokens([2]))
    answered = await journal.reward(session, 0.5, "chatcmpl-1")
    assert not answered.trajectory_ready
    assert not answered.ready_transition
    await journal.reward(session, 0.75, "chatcmpl-1")  # open, so it may change
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((journal.name(journal.session(session)),)))  # type: ignore[arg-type]
    assert export.traj()["original_rewards"] == [0.75, 1.0]


async def test_repeated_reward_replays_and_other_value_is_409(journal: SessionJournal, calls: Calls) -> None:
    session, _ = await start(journal)
    await journal.record(session, calls.tokens([1]))
    first = await journal.reward(session, 1.0)
    assert await journal.reward(session, 1) == first
    assert await journal.reward(session, 1.0, "chatcmpl-1") == first
    assert (await refused(journal.reward(session, 0.0))).status == 409


async def test_reward_without_interaction_is_400(journal: SessionJournal) -> None:
    session, _ = await start(journal)
    error = await refused(journal.reward(session, 1.0))
    assert (error.status, error.code) == (400, "no_interaction")
    error = await refused(journal.reward(session, 1.0, "chatcmpl-9"))
    assert (error.status, error.code) == (400, "interaction_not_found")


async def test_next_chat_opens_the_next_trajectory(journal: SessionJournal, calls: Calls) -> None:
    session, _ = await start(journal)
    assert (await journal.record(session, calls.tokens([1]))).trajectory == 0
    await journal.reward(session, 1.0)
    assert (await journal.record(session, calls.tokens([2]))).trajectory == 1
    answered = await journal.reward(session, 2.0)
    assert (answered.trajectory_id, answered.interaction_count) == (1, 1)


async def test_finish_timeout_seals_after_the_last_reward(tmp_path: Path, clock: Clock, calls: Calls) -> None:
    journal = await journal_in(tmp_path / "run", clock, reward_finish_timeout=10.0)
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1]))
    assert not (await journal.reward(session, 1.0)).trajectory_ready
    clock.now += 8
    await journal.reward(session, 2.0)  # still open: it may change, and the timeout starts anew
    clock.now += 8
    assert (await refused(journal.export(ExportRequest((session_id,))))).status == 425
    assert journal.next_due() == clock.now + 2
    clock.now += 2
    _, export = await journal.export(ExportRequest((session_id,)))
    assert export.traj()["rewards"] == [2.0]
    await journal.close()


async def test_chat_within_the_finish_timeout_seals_at_once(tmp_path: Path, clock: Clock, calls: Calls) -> None:
    journal = await journal_in(tmp_path / "run", clock, reward_finish_timeout=10.0)
    session, _ = await start(journal)
    await journal.record(session, calls.tokens([1]))
    await journal.reward(session, 1.0)
    assert (await journal.record(session, calls.tokens([2]))).trajectory == 1
    assert [item.phase for item in journal.trajectories(session)] == [TrajectoryPhase.READY, TrajectoryPhase.OPEN]
    await journal.close()


async def test_end_makes_an_unrewarded_trajectory_ready_with_zero(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1]))
    ended = await journal.end(session)
    assert ended.ready == (0,)
    assert await journal.end(session) == ended
    assert (await refused(journal.record(session, calls.tokens([2])))).code == "session_ended"
    _, export = await journal.export(ExportRequest((session_id,)))
    assert export.traj()["rewards"] == [0.0]
    assert [row["rewarded"] for row in export.rows] == [False]


async def test_repeated_end_of_the_human_in_the_loop_leaves_the_next_trajectory_open(
    journal: SessionJournal, calls: Calls
) -> None:
    await journal.record(HITL_SESSION, calls.tokens([1]))
    ended = await journal.end(HITL_SESSION, named_request("key", "end"))
    await journal.record(HITL_SESSION, calls.tokens([2]))
    assert await journal.end(HITL_SESSION, named_request("key", "end")) == ended
    phases = [item.phase for item in journal.trajectories(HITL_SESSION)]
    assert phases == [TrajectoryPhase.READY, TrajectoryPhase.OPEN]
    assert (await journal.end(HITL_SESSION, named_request("another", "end"))).ready == (0, 1)


async def test_choices_of_one_call_are_siblings(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2], n=3))
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((session_id,), style=Style.CONCAT))
    assert [row["interaction_id"] for row in export.rows] == ["chatcmpl-1", "chatcmpl-1-1", "chatcmpl-1-2"]
    assert [row["parent_id"] for row in export.rows] == [None] * 3
    assert export.traj()["input_ids"] == [[1, 2, 7, 0], [1, 2, 7, 1], [1, 2, 7, 2]]


async def test_turns_are_linked_by_messages_and_by_tokens(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    first = [user("a")]
    await journal.record(session, calls.tokens([1, 2], [7], messages=first))
    second = [*first, answer([7]), user("b")]
    await journal.record(session, calls.tokens([1, 2, 7, 0, 3], [8], messages=second))  # goes on with these tokens
    await journal.record(session, calls.tokens([1, 9, 3], [8], messages=[*first, answer([7]), user("c")]))  # does not
    await journal.record(session, calls.tokens([1, 2, 7, 0, 3, 8, 0, 4], [5]))  # tokens only
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((session_id,), discount=0.5))
    assert [row["parent_id"] for row in export.rows] == [None, "chatcmpl-1", "chatcmpl-1", "chatcmpl-2"]
    assert export.traj()["rewards"] == [0.25, 0.5, 0.0, 1.0]


async def test_concat_reuses_parent_tokens_exactly(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2], [7], version=3))
    await journal.record(session, calls.tokens([1, 2, 7, 0, 5], [8], version=4))
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((session_id,), style=Style.CONCAT, discount=0.5))
    traj = export.traj()
    assert traj["input_ids"] == [[1, 2, 7, 0, 5, 8, 0]]
    assert traj["loss_mask"] == [[0, 0, 1, 1, 0, 1, 1]]
    assert traj["versions"] == [[-1, -1, 3, 3, -1, 4, 4]]
    assert traj["turn_ids"] == [[-1, -1, 0, 0, -1, 1, 1]]
    assert traj["rewards"] == traj["original_rewards"] == [1.0]


async def test_export_repeats_until_acknowledged(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.reward(session, 1.0)
    request = ExportRequest((session_id,))
    kept, export = await journal.export(request)
    again, same = await journal.export(request)
    assert (again.name, same.traj(), same.rows) == (kept.name, export.traj(), export.rows)
    assert await journal.acknowledge(kept.name)
    assert not await journal.acknowledge(kept.name)
    assert (await refused(journal.export(request))).status == 404


async def test_export_after_next_trajectory_takes_next_one(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.reward(session, 1.0)
    await journal.record(session, calls.tokens([3, 4]))
    first, export = await journal.export(ExportRequest((session_id,)))
    assert [row["trajectory_id"] for row in export.rows] == [0]
    await journal.reward(session, 0.25)
    second, export = await journal.export(ExportRequest((session_id,)))
    assert [row["trajectory_id"] for row in export.rows] == [1]
    again, _ = await journal.export(ExportRequest((session_id,)))
    assert (again.name, first.name != second.name) == (second.name, True), "nothing else is ready: it is a retry"
    assert [await journal.acknowledge(stored.name) for stored in (first, second)] == [True, True]
    assert (await refused(journal.export(ExportRequest((session_id,))))).status == 404


async def test_export_retry_is_answered_after_newer_export(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    exports: list[ExportRequest] = []
    for name in (b"1" * 16, b"2" * 16):
        if not exports:
            await journal.record(session, calls.tokens([1, 2]))
        await journal.reward(session, 1.0)
        await journal.record(session, calls.tokens([5]))
        exports.append(ExportRequest((session_id,), key=name))
        stored, _ = await journal.export(exports[-1])
        assert stored.items == ((session, len(exports) - 1),)
    for number, request in enumerate(exports):
        assert (await journal.export(request))[0].items == ((session, number),)


async def test_reused_idempotency_key_of_export_is_422(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.reward(session, 1.0)
    request = ExportRequest((session_id,), remove=False, key=b"1" * 16)
    first, _ = await journal.export(request)
    error = await refused(journal.export(replace(request, discount=0.5)))
    assert (error.status, error.code) == (422, "idempotency_key_reused")
    assert (await journal.export(request))[0].name == first.name
    other, _ = await journal.export(replace(request, discount=0.5, key=b"2" * 16))
    assert other.name != first.name


async def test_export_with_reward_seals_new_trajectory(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    name, request = SessionName.require(session_id), ExportRequest((session_id,), key=b"1" * 16)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.reward(session, 1.0)
    await journal.record(session, calls.tokens([3]))
    await journal.export(request)
    for _ in range(2):  # the second one repeats the first
        given, taken = await journal.seal(name, 0.25, replace(request, key=b"2" * 16))
        _, export = taken or await journal.export(replace(request, key=b"2" * 16))
        assert [row["trajectory_id"] for row in export.rows] == [1]
    assert not given


async def test_named_reward_applies_once(journal: SessionJournal, calls: Calls, clock: Clock) -> None:
    session, _ = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    named = named_request("once", [1.0, None])
    first = await journal.reward(session, 1.0, None, named)
    await journal.record(session, calls.tokens([3]))
    assert await journal.reward(session, 1.0, None, named) == first
    states = [each.phase for each in journal.trajectories(session)]
    assert states == [TrajectoryPhase.READY, TrajectoryPhase.OPEN]
    error = await refused(journal.reward(session, 0.5, None, named_request("once", [0.5, None])))
    assert (error.status, error.code) == (422, "idempotency_key_reused")
    clock.now += 601
    await journal.sweep()
    assert (await journal.reward(session, 0.5, None, named_request("once", [0.5, None]))).trajectory_id == 1


@pytest.mark.parametrize("acknowledged", [False, True])
async def test_named_reward_is_answered_after_export(
    journal: SessionJournal, calls: Calls, clock: Clock, acknowledged: bool
) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    name, named = SessionName.require(session_id), named_request("once", [1.0, None])
    assert named is not None and journal.repeated_reward(name, named) is None
    first = await journal.reward(session, 1.0, None, named)
    stored, _ = await journal.export(ExportRequest((session_id,)))
    if acknowledged:
        await journal.acknowledge(stored.name)
    assert journal.repeated_reward(name, named) == first
    assert journal.repeated_reward(SessionName("other", name.tag, name.number), named) is None
    other = named_request("once", [0.5, None])
    assert other is not None
    with pytest.raises(ApiError, match="Idempotency-Key"):
        journal.repeated_reward(name, other)
    clock.now += 601
    await journal.sweep()
    assert journal.repeated_reward(name, named) is None


async def test_export_expires_after_its_retention(journal: SessionJournal, calls: Calls, clock: Clock) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.reward(session, 1.0)
    await journal.export(ExportRequest((session_id,)))
    clock.now += 599
    await journal.sweep()
    await journal.export(ExportRequest((session_id,)))
    clock.now += 2
    await journal.sweep()
    assert (await refused(journal.export(ExportRequest((session_id,))))).status == 404
    assert journal.is_spent()


async def test_concurrent_equal_exports_are_one(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1, 2]))
    await journal.reward(session, 1.0)
    exports = await asyncio.gather(*(journal.export(ExportRequest((session_id,))) for _ in range(5)))
    assert len({str(kept.name) for kept, _ in exports}) == 1


async def test_export_keeping_session_leaves_it_for_others(journal: SessionJournal, calls: Calls, clock: Clock) -> None:
    session, session_id = await start(journal)
    for tokens in ([1], [1, 7, 0, 3]):
        await journal.record(session, calls.tokens(tokens))
    await journal.reward(session, 1.0)
    keeping = ExportRequest((session_id,), remove=False)
    one, each = await journal.export(keeping)
    other, joined = await journal.export(replace(keeping, style=Style.CONCAT))
    third, named = await journal.export(replace(keeping, trajectory=0, discount=0.5))
    assert [len(export.traj()["input_ids"]) for export in (each, joined, named)] == [2, 1, 2]
    assert (await journal.export(keeping))[0] == one, "the same again"
    for export in (one, other):  # they are released with the newest export that has them
        assert await journal.acknowledge(export.name)
        assert [each.phase for each in journal.trajectories(session)] == [TrajectoryPhase.TAKEN]
    assert (await journal.export(ExportRequest((session_id,))))[1].rows == each.rows
    assert (await refused(journal.export(keeping))).status == 404
    assert await journal.acknowledge(third.name)
    clock.now += 601
    while await journal.sweep():
        pass
    assert journal.session(session) is None


async def test_expired_export_is_gone_for_all_callers(journal: SessionJournal, calls: Calls, clock: Clock) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.tokens([1]))
    await journal.reward(session, 1.0)
    keeping = ExportRequest((session_id,), remove=False)
    await journal.export(keeping)
    clock.now += 601
    for request in (keeping, replace(keeping, style=Style.CONCAT), replace(keeping, remove=True)):
        assert (await refused(journal.export(request))).code == "trajectory_not_ready"


async def test_export_refusals_take_nothing(journal: SessionJournal, calls: Calls) -> None:
    ready, ready_id = await start(journal)
    _, open_id = await start(journal)
    text, text_id = await start(journal)
    columns = ExportRequest((ready_id, text_id), columns_only=True)
    await journal.record(ready, calls.tokens([1]))
    await journal.reward(ready, 1.0)
    await journal.record(text, calls.text([user("a")], "b"))
    await journal.reward(text, 1.0)
    assert (await refused(journal.export(ExportRequest((ready_id, "absent"))))).status == 404
    assert (await refused(journal.export(ExportRequest((ready_id, open_id))))).status == 425
    error = await refused(journal.export(columns))
    assert (error.status, error.param) == (400, "format")
    assert (await refused(journal.export(ExportRequest((ready_id,), trajectory=1)))).status == 404
    _, export = await journal.export(ExportRequest((ready_id,)))
    assert len(export.rows) == 1


async def test_reward_and_export_of_short_session_commit_once(journal: SessionJournal, calls: Calls) -> None:
    for tokens, commits in (([1], 1), ([1] * 20_000, 2)):
        session, session_id = await start(journal)
        name = SessionName.require(session_id, "session_ids")
        await journal.record(session, calls.tokens(tokens))
        request, before = ExportRequest((session_id,)), journal.commits.commits
        given, taken = await journal.seal(name, 0.5, request)
        kept, export = taken or await journal.export(request)
        assert (given, journal.commits.commits - before) == (True, commits)
        assert export.traj()["original_rewards"] == [0.5]
        assert journal.has_removed([session_id])
        assert await journal.seal(name, 0.5, request) == (False, None)
        assert (await journal.export(request))[0] == kept, "the same again"


async def test_reward_is_kept_when_export_is_refused(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.text([user("a")], "b"))
    request = ExportRequest((session_id,), columns_only=True)
    assert await journal.seal(SessionName.require(session_id, "session_ids"), 0.5, request) == (True, None)
    assert (await refused(journal.export(request))).param == "format"
    assert (await refused(journal.reward(session, 1.0))).status == 409
    assert (await journal.export(replace(request, columns_only=False)))[1].interactions[0]["reward"] == 0.5


async def test_session_ended_empty_is_404(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    assert (await refused(journal.export(ExportRequest((session_id,))))).status == 425
    await journal.end(session)
    error = await refused(journal.export(ExportRequest((session_id,))))
    assert (error.status, error.code, error.headers) == (404, "nothing_to_export", {})


async def test_export_of_one_trajectory_keeps_the_rest(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    for prompt in ([1], [2]):
        await journal.record(session, calls.tokens(prompt))
        await journal.reward(session, 1.0)
    await journal.record(session, calls.tokens([3]))  # in progress
    kept, _ = await journal.export(ExportRequest((session_id,), trajectory=1))
    await journal.acknowledge(kept.name)
    kept, export = await journal.export(ExportRequest((session_id,), trajectory=0))
    assert export.traj()["input_ids"] == [[1, 7, 0]]
    await journal.acknowledge(kept.name)
    answered = await journal.reward(session, 3.0)  # it is all still there
    assert (answered.trajectory_id, answered.interaction_count) == (2, 1)


async def test_numbers_are_never_reused(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    for number in range(3):
        recorded = await journal.record(session, calls.tokens([number]))
        assert recorded.trajectory == number
        await journal.reward(session, 1.0)
        kept, _ = await journal.export(ExportRequest((session_id,), remove=False))
        await journal.acknowledge(kept.name)


async def test_text_sessions_export_messages(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.record(session, calls.text([user("a")], "b"))
    reply = {"role": "assistant", "content": "b"}
    await journal.record(session, calls.text([user("a"), reply, user("c")], "d"))
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((session_id,), discount=0.5))
    interactions = export.traj()["interactions"]
    assert [item["reward"] for item in interactions] == [0.5, 1.0]
    assert interactions[0] == {"messages": [user("a")], "response": reply, "reward": 0.5, "original_reward": 0.0}


async def test_reused_key_is_409_until_first_trajectory(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal, key="my-own-key")
    assert (await refused(journal.start("again", 1, "my-own-key", True))).code == "api_key_in_use"
    await journal.record(session, calls.tokens([1]))
    await journal.reward(session, 1.0)
    following, _ = await start(journal, key="my-own-key")
    assert journal.session_by_key(key_digest(b"my-own-key")) == following
    await journal.export(ExportRequest((session_id,)))  # the first one is still there


async def test_equal_row_of_other_conversation_is_not_continued(journal: SessionJournal, calls: Calls) -> None:
    session, _ = await start(journal)
    call = calls.tokens([1, 2, 3], [50, 51], messages=[user("task")])
    first = await journal.record(
        session,
        replace(call, samples=[replace(each, place=1) for each in call.samples if isinstance(each, TokenSample)]),
    )
    await journal.reward(session, 1.0)
    assert await journal.release(session, 0)
    second = await journal.record(session, calls.text([user("task")], "B"))
    assert second.first == first.first, "the row is used again"
    reply = {"role": "assistant", "content": "B"}
    assert await journal.match_prefix(session, digest_conversation([user("task"), reply, user("go on")])) is None


async def test_failures_are_exported_beside_rows(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    await journal.note_failure(session, "engine_failed")
    await journal.note_failure(session, "engine_failed")
    await journal.record(session, calls.tokens([1]))
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((session_id,)))
    assert len(export.rows) == 1
    assert export.failures == [{"session_id": session_id, "trajectory_id": 0, "code": "engine_failed", "count": 2}]


async def test_failure_counts_for_trajectory_of_its_call(journal: SessionJournal, calls: Calls) -> None:
    session, session_id = await start(journal)
    for _ in range(2):
        await journal.record(session, calls.tokens([1]))
        await journal.reward(session, 1.0)
    kept, _ = await journal.export(ExportRequest((session_id,), trajectory=1, remove=False))
    await journal.acknowledge(kept.name)
    await journal.release(session, 1)
    await journal.note_failure(session, "engine_failed")
    await journal.record(session, calls.tokens([1]))
    await journal.reward(session, 1.0)
    _, export = await journal.export(ExportRequest((session_id,)))
    numbers = [row["trajectory_id"] for row in export.rows]
    assert [each["trajectory_id"] for each in export.failures] == [max(numbers)] == [2]


async def test_idle_session_expires_unscored(journal: SessionJournal, calls: Calls, clock: Clock) -> None:
    abandoned, _ = await start(journal)
    await journal.record(abandoned, calls.tokens([1]))
    fetched, _ = await start(journal)
    await journal.record(fetched, calls.tokens([1]))
    await journal.reward(fetched, 1.0)
    clock.now += 3601
    await journal.sweep()
    assert journal.session(abandoned) is None
    assert journal.session(fetched) is not None
    clock.now += 24 * 3600
    await journal.sweep()
    assert journal.session(fetched) is None


async def test_hitl_session_is_bounded_and_kept(tmp_path: Path, clock: Clock, calls: Calls) -> None:
    journal = await journal_in(tmp_path / "run", clock, hitl_turns=4)
    for number in range(40):
        await journal.record(0, calls.tokens([number]))
        await journal.sweep()
    assert len(journal.trajectories(0)) <= 3
    await journal.reward(0, 1.0)
    session = journal.session(0)
    assert session is not None
    await journal.export(ExportRequest((journal.name(session),)))
    assert journal.session(0) == session
    await journal.close()


async def test_restart_finds_all_acknowledged_data(tmp_path: Path, clock: Clock, calls: Calls) -> None:
    journal = await journal_in(tmp_path / "run", clock)
    session, session_id = await start(journal, key="key")
    await journal.record(session, calls.tokens([1, 2], [3, 4]))
    await journal.reward(session, 1.0)
    kept, export = await journal.export(ExportRequest((session_id,), remove=False))
    await journal.record(session, calls.tokens([5]))
    await journal.close()
    journal = await journal_in(tmp_path / "run", clock)
    assert journal.session_by_key(key_digest(b"key")) == session
    again, same = await journal.export(ExportRequest((session_id,), remove=False))
    assert (again, same) == (kept, export)
    assert (await journal.reward(session, 2.0)).trajectory_id == 1
    await journal.close()


async def test_recorded_call_is_found_by_body_and_by_key(journal: SessionJournal, calls: Calls) -> None:
    session, _ = await start(journal)
    call = calls.tokens([1, 2], [3], n=2, body=b"{}", key=b"k" * 16)
    await journal.record(session, call)
    await journal.record(session, calls.tokens([1]))
    retry = CallIdentity((journal.tag, session), call.digest, retry=True)
    for each in (retry, replace(retry, idempotency=b"k" * 16)):
        turns = await journal.replay(each)
        assert turns is not None
        assert [turn.interaction_id for turn in turns] == ["chatcmpl-1", "chatcmpl-1-1"]
    assert await journal.replay(replace(retry, digest=b"x" * 16)) is None
    assert (await refused(journal.replay(replace(retry, digest=b"x" * 16, idempotency=b"k" * 16)))).status == 422


async def test_idle_upkeep_commits_and_reads_nothing(
    journal: SessionJournal, calls: Calls, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [(await start(journal))[0] for _ in range(70)]
    await journal.record(numbers[0], calls.tokens([1]))
    await journal.record(0, calls.tokens([1]))
    before = journal.commits.commits
    read: list[str] = []
    journal._read.db.set_trace_callback(read.append)
    for _ in range(5):
        assert await journal.sweep() == 0
    assert journal.commits.commits == before
    assert len(read) == 10  # one look each, and the free pages
    clock.now += 3601
    while await journal.sweep():
        pass
    assert [journal.session(number) for number in numbers] == [None] * 70
    assert journal.trajectories(0) == []


async def test_sessions_are_recounted_only_after_start_or_end(journal: SessionJournal, calls: Calls) -> None:
    number, _ = await start(journal)
    assert journal.live_sessions() == 1
    counted: list[str] = []
    journal._read.db.set_trace_callback(lambda query: counted.append(query) if "count" in query else None)
    for turn in range(3):
        await journal.record(number, calls.tokens([turn]))
        assert journal.live_sessions() == 1
    assert not counted
    other, _ = await start(journal)
    assert journal.live_sessions() == 2
    await journal.end(other)
    assert journal.live_sessions() == 1
    await journal.end(number)
    assert journal.live_sessions() == 0


async def test_close_waits_for_running_export(tmp_path: Path) -> None:
    journal = await journal_in(tmp_path / "run")
    release = threading.Event()
    export = asyncio.create_task(journal._read_in_thread(lambda tables: release.wait(1.0)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(journal.close())
    asyncio.get_running_loop().call_soon(release.set)
    assert await export, "the loop ran while the journal waited for the export"
    await closing
