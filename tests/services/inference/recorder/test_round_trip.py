"""What is written is read back the same, for every value of every field."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.records import ModelCall, TextSample, TextTurn, TokenSample, TokenTurn
from areal.services.inference.recorder.session import (
    SealReason,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryPhase,
)
from areal.services.inference.recorder.storage import open_writer
from areal.services.inference.recorder.tables import SessionTables
from areal.services.journal.storage import open_reader
from areal.wire.bodies import LARGEST_F32
from tests.services.inference.recorder.support import journal_in, start

F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
REWARDS = st.floats(-LARGEST_F32, LARGEST_F32) | st.sampled_from([-0.0, 0.0, 5e-324, -5e-324, LARGEST_F32])
TIMES = st.floats(0, 1e300)
I32, I62 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["", "\0", "a\0b", "\u2028\u2029", "\U0010ffff"]
)
JSON = st.recursive(
    st.none() | st.booleans() | I62 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
EASY = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))


def same(first: Any, second: Any) -> bool:
    """Equal, and zeros of the same sign."""
    return repr(first) == repr(second)


@EASY
@given(reward=REWARDS)
async def test_reward_round_trips_with_sign(reward: float, tmp_path_factory: Any) -> None:
    journal = await journal_in(tmp_path_factory.mktemp("run"))
    session, name = await start(journal)
    sample = TokenSample([1], [2], [-0.5], [0], "stop")
    await journal.record(session, ModelCall("c", "m", 0, b"d" * 16, [sample]))
    await journal.reward(session, reward)
    await journal.reward(session, reward)  # the same again is only answered again
    [trajectory] = journal.trajectories(session)
    found = journal.session(session)
    assert found is not None
    [turn] = (await journal.turns(found, trajectory)).turns
    assert same(turn.reward, reward)
    _, export = await journal.export(ExportRequest((name,)))
    assert same(export.traj()["original_rewards"], [struct.unpack("f", struct.pack("f", reward))[0]])
    await journal.close()


@EASY
@given(
    tokens=st.lists(st.tuples(I32, F32, I62), max_size=5),
    prompt=st.lists(I32, max_size=5),
    texts=st.tuples(TEXT, TEXT, TEXT),
    created=st.integers(0, 2**63 - 1),
    extra=st.dictionaries(TEXT, JSON, max_size=3),
)
async def test_token_turn_round_trips(
    tokens: list[tuple[int, float, int]],
    prompt: list[int],
    texts: tuple[str, str, str],
    created: int,
    extra: Any,
    tmp_path_factory: Any,
) -> None:
    journal = await journal_in(tmp_path_factory.mktemp("run"))
    session, _ = await start(journal)
    name, model, finish = texts
    ids, logprobs, versions = map(list, zip(*tokens, strict=True)) if tokens else ([], [], [])
    sample = TokenSample(prompt, ids, logprobs, versions, finish, extra=extra)
    await journal.record(session, ModelCall(name, model, created, b"d" * 16, [sample]))
    found = journal.session(session)
    assert found is not None
    [turn] = (await journal.turns(found, journal.trajectories(session)[0])).turns
    assert isinstance(turn, TokenTurn)
    read = [turn.prompt_ids.tolist(), turn.output_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist()]
    assert same(read, [prompt, ids, logprobs, versions])
    assert (turn.interaction_id, turn.model, turn.finish_reason, turn.created) == (name, model, finish, created)
    assert same(turn.extra, extra)
    await journal.close()


@EASY
@given(
    messages=st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3),
    response=st.dictionaries(TEXT, JSON, max_size=3),
)
async def test_text_turn_round_trips(
    messages: list[dict[str, Any]], response: dict[str, Any], tmp_path_factory: Any
) -> None:
    journal = await journal_in(tmp_path_factory.mktemp("run"))
    session, _ = await start(journal)
    await journal.record(session, ModelCall("c", "m", 0, b"d" * 16, [TextSample(messages, response, "stop")]))
    found = journal.session(session)
    assert found is not None
    [turn] = (await journal.turns(found, journal.trajectories(session)[0])).turns
    assert isinstance(turn, TextTurn)
    assert same((turn.messages, turn.response), (messages, response))
    await journal.close()


@EASY
@given(
    task=TEXT,
    group=TEXT,
    created=TIMES,
    online=st.booleans(),
    life=st.sampled_from(SessionState),
    number=st.integers(1, 10**9 - 1),
    phase=st.sampled_from(TrajectoryPhase),
    sealed=st.sampled_from(SealReason),
    times=st.tuples(st.none() | TIMES, st.none() | TIMES),
)
def test_session_and_trajectory_rows_round_trip(
    task: str,
    group: str,
    created: float,
    online: bool,
    life: SessionState,
    number: int,
    phase: TrajectoryPhase,
    sealed: SealReason,
    times: tuple[float | None, float | None],
    tmp_path_factory: Any,
) -> None:
    file: Path = tmp_path_factory.mktemp("run") / "db"
    writer = SessionTables(open_writer(file), "tag")
    session = SessionRecord(number, task, group, created, life, online, next_trajectory=number)
    trajectory = Trajectory(number, number, phase, times[0], sealed, times[1])
    writer.add_session(session, b"k")
    writer.save_trajectory(number, trajectory)
    reader = SessionTables(open_reader(file), "tag")
    assert same(reader.session(number), session)
    assert same(reader.trajectory(number, number), trajectory)
    writer.db.close()
    reader.db.close()


async def test_unsigned_reward_of_older_journal_is_read(tmp_path: Path) -> None:
    journal = await journal_in(tmp_path / "run")
    session, name = await start(journal)
    await journal.record(session, ModelCall("c", "m", 0, b"d" * 16, [TokenSample([1], [2], [-0.5], [0], "stop")]))
    await journal.reward(session, -0.0)
    journal._db.execute("UPDATE rewards SET value=0.0")  # as a column of type REAL gives it back
    _, export = await journal.export(ExportRequest((name,)))
    [reward] = export.traj()["rewards"]
    assert reward == 0.0 and math.copysign(1.0, reward) == -1.0
    assert np.isfinite(reward)
    await journal.close()
