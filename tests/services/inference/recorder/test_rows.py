"""Discount along the conversation tree, and training rows."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.gateway.exports import merged_answer
from areal.services.inference.recorder.records import RecordedTurn, TokenTurn, TrajectoryTurns
from areal.services.inference.recorder.rows import Style, discounted_rewards, export_all, npz, own_reward, tree_paths
from tests.services.inference.recorder.support import token_turn, turn


def test_discount_follows_branches_not_time() -> None:
    turns = [turn(0), turn(1, 0), turn(2, 0, reward=1.0), turn(3, 1, reward=2.0)]
    assert discounted_rewards(turns, 0.5) == {0: 0.5 * 1.0 + 0.25 * 2.0, 1: 1.0, 2: 1.0, 3: 2.0}


def test_discount_without_rewards_is_zero() -> None:
    assert discounted_rewards([turn(0), turn(1, 0)], 1.0) == {0: 0.0, 1: 0.0}


@st.composite
def trees(draw: st.DrawFn) -> list[RecordedTurn]:
    turns = []
    for seq in range(draw(st.integers(1, 12))):
        parent = draw(st.none() | st.integers(0, seq - 1)) if seq else None
        reward = draw(st.none() | st.sampled_from([0.0, 0.25, 1.0]))
        turns.append(turn(seq, parent, joined=parent is not None and draw(st.booleans()), reward=reward))
    return turns


@given(trees(), st.sampled_from([0.0, 0.5, 1.0]))
def test_discounted_reward_is_own_plus_discounted_children(turns: list[RecordedTurn], discount: float) -> None:
    returns = discounted_rewards(turns, discount)
    for each in turns:
        children = [other for other in turns if other.parent == each.seq]
        assert returns[each.seq] == pytest.approx(
            own_reward(each) + discount * sum(returns[child.seq] for child in children)
        )


@given(trees())
def test_paths_cover_every_turn_and_end_at_leaves(turns: list[RecordedTurn]) -> None:
    found = tree_paths(turns, 1.0)
    assert {each.seq for path in found for each in path.turns} == {each.seq for each in turns}
    assert len({path.leaf.seq for path in found}) == len(found)
    for path in found:
        assert not any(other.joined and other.parent == path.leaf.seq for other in turns)
        assert all(b.joined and b.parent == a.seq for a, b in zip(path.turns, path.turns[1:], strict=False))


def test_path_reward_sums_its_turns_and_forked_rows() -> None:
    turns = [
        turn(0, reward=0.25),
        turn(1, 0, joined=True, reward=1.0),
        turn(2, 0, joined=True),
        turn(3, 2, reward=4.0),  # goes on with turn 2, with other tokens
    ]
    rewards = {path.leaf.seq: (path.reward, path.own) for path in tree_paths(turns, 0.5)}
    assert rewards == {1: (1.25, 1.25), 2: (0.25 + 2.0, 0.25), 3: (4.0, 4.0)}


def trajectory(turns: Sequence[RecordedTurn], session_id: str = "s-0") -> TrajectoryTurns:
    return TrajectoryTurns(session_id, 0, turns)


BRANCHES: list[RecordedTurn] = [
    token_turn(0, [1, 2], [3]),
    token_turn(1, [1, 2, 3, 4], [5, 6], 0, joined=True, reward=1.0),
    token_turn(2, [1, 2, 3, 9], [8], 0, joined=True),
    token_turn(3, [1, 7, 7, 7, 7], [5], 0),
]


def test_individual_rows_are_right_padded() -> None:
    traj = export_all([trajectory(BRANCHES)], Style.INDIVIDUAL, 0.5).traj()
    assert traj["input_ids"][0] == [1, 2, 3, 0, 0, 0]
    assert traj["loss_mask"][0] == [0, 0, 1, 0, 0, 0]
    assert traj["logprobs"][0] == [0.0, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert traj["versions"][1] == [-1, -1, -1, -1, 1, 1]
    assert traj["versions"][0] == [-1, -1, 0, -1, -1, -1]
    assert traj["turn_ids"][0] == [-1, -1, 0, -1, -1, -1]
    assert traj["attention_mask"][0] == [True] * 3 + [False] * 3
    assert traj["rewards"] == [0.5, 1.0, 0.0, 0.0]
    assert traj["original_rewards"] == [0.0, 1.0, 0.0, 0.0]


def test_concat_exports_one_row_per_leaf() -> None:
    made = export_all([trajectory(BRANCHES)], Style.CONCAT, 1.0)
    assert [row["interaction_id"] for row in made.rows] == ["i1", "i2", "i3"]
    traj = made.traj()
    assert traj["input_ids"][0] == [1, 2, 3, 4, 5, 6]
    assert traj["turn_ids"][0] == [-1, -1, 0, -1, 1, 1]
    assert traj["versions"][0] == [-1, -1, 0, -1, 1, 1]
    assert traj["turn_ids"][2] == [-1, -1, -1, -1, -1, 0]
    assert [item["interaction_id"] for item in made.rows[0]["turns"]] == ["i0", "i1"]


def test_rows_carry_sampling_temperature() -> None:
    turns: list[RecordedTurn] = [token_turn(0, [1, 2], [3], temperature=0.6), token_turn(1, [1], [2], temperature=0.0)]
    for style in Style:
        traj = export_all([trajectory(turns)], style, 1.0).traj()
        assert traj["temperatures"] == pytest.approx([0.6, 0.0])
        assert "token_temperatures" not in traj


def test_mixed_turns_have_per_token_temperatures() -> None:
    turns: list[RecordedTurn] = [
        token_turn(0, [1, 2], [3], temperature=0.5),
        token_turn(1, [1, 2, 3, 4], [5, 6], 0, joined=True, temperature=1.25),
    ]
    other: list[RecordedTurn] = [token_turn(0, [1], [2], temperature=0.75)]
    traj = export_all([trajectory(turns), trajectory(other, "s-1")], Style.CONCAT, 1.0).traj()
    assert math.isnan(traj["temperatures"][0]) and traj["temperatures"][1] == 0.75
    assert traj["token_temperatures"] == [[1.0, 1.0, 0.5, 1.0, 1.25, 1.25], [1.0, 0.75, 1.0, 1.0, 1.0, 1.0]]
    individual = export_all([trajectory(turns)], Style.INDIVIDUAL, 1.0).traj()
    assert individual["temperatures"] == [0.5, 1.25] and "token_temperatures" not in individual


def test_merged_exports_keep_temperatures() -> None:
    turns: list[RecordedTurn] = [
        token_turn(0, [1, 2], [3], temperature=0.5),
        token_turn(1, [1, 2, 3, 4], [5, 6], 0, joined=True, temperature=1.25),
    ]
    parts = [
        orjson.dumps({"traj": made.traj(), "rows": made.rows, "failures": [], "errors": [], "export_id": "e"})
        for made in (
            export_all([trajectory([token_turn(0, [1], [2], temperature=0.75)], "s-1")], Style.CONCAT, 1.0),
            export_all([trajectory(turns)], Style.CONCAT, 1.0),
        )
    ]
    reported = orjson.loads(merged_answer(parts, ["s-0", "s-1"], "json").body)["traj"]
    assert reported["temperatures"] == [None, 0.75]
    assert reported["token_temperatures"] == [[1.0, 1.0, 0.5, 1.0, 1.25, 1.25], [1.0, 0.75, 1.0, 1.0, 1.0, 1.0]]
    packed = np.load(io.BytesIO(merged_answer(parts, ["s-0", "s-1"], "npz").body))
    assert (
        np.isnan(packed["temperatures"][0]) and packed["token_temperatures"].tolist() == reported["token_temperatures"]
    )


def test_rows_describe_themselves() -> None:
    made = export_all([trajectory(BRANCHES)], Style.INDIVIDUAL, 1.0)
    assert made.rows[1] == {
        "session_id": "s-0",
        "trajectory_id": 0,
        "interaction_id": "i1",
        "parent_id": "i0",
        "finish_reason": "stop",
        "truncated": False,
        "rewarded": True,
        "model": "tiny",
        "kind": "tokens",
    }


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
            st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(Style),
)
def test_npz_holds_the_same_columns_with_the_promised_types(
    turns: list[tuple[list[int], list[int]]], style: Style
) -> None:
    made = export_all(
        [trajectory([token_turn(seq, prompt, output) for seq, (prompt, output) in enumerate(turns)])], style, 1.0
    )
    loaded = np.load(io.BytesIO(npz(made.columns, {"rows.json": b"[]"})))
    traj = made.traj()
    kinds = {name: str(loaded[name].dtype) for name in traj}
    assert kinds == {
        "input_ids": "int64",
        "loss_mask": "int64",
        "logprobs": "float32",
        "versions": "int64",
        "turn_ids": "int32",
        "attention_mask": "bool",
        "rewards": "float32",
        "original_rewards": "float32",
        "temperatures": "float32",
    }
    assert {name: loaded[name].tolist() for name in traj} == traj
    assert loaded["rows.json"] == b"[]"


def test_rows_of_several_sessions_are_padded_to_one_width() -> None:
    short: list[TokenTurn] = [token_turn(0, [1], [2])]
    traj = export_all([trajectory(short), trajectory(BRANCHES, "s-1")], Style.INDIVIDUAL, 1.0).traj()
    assert {len(row) for row in traj["input_ids"]} == {6}
    assert len(traj["rewards"]) == 5
