"""Rollouts as the lines of a file: samples of a group differ from turns of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.rollout.dump import episodes_of, remove_steps, write_step
from areal.rollout.staleness import EpisodeSpec, Rollout
from areal.trajectories.reading import read_episodes
from areal.trajectories.record import Episode


def rollout(rows: list[tuple[list[int], list[int]]], *, is_eval: bool = False, **columns: list[Any]) -> Rollout:
    """``rows``: prompt and answer."""
    width = max(len(prompt + answer) for prompt, answer in rows)

    def padded(values: list[list[int]]) -> np.ndarray[Any, Any]:
        return np.array([each + [0] * (width - len(each)) for each in values])

    trajectory = {
        "input_ids": padded([prompt + answer for prompt, answer in rows]),
        "attention_mask": padded([[1] * len(prompt + answer) for prompt, answer in rows]),
        "loss_mask": padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows]),
        "rewards": np.arange(len(rows), dtype=float),
    } | {name: np.array(values) for name, values in columns.items()}
    return Rollout(EpisodeSpec(3, {"question": "?"}, None, "t-3", is_eval=is_eval), trajectory, 0, 0)


def shape(episodes: list[Episode]) -> dict[int, list[tuple[list[int], str | None]]]:
    """By sample: tokens of each turn, and which it continues."""
    return {
        each.sample: [
            (list(row.input_ids), row.parent_id and row.parent_id.rpartition("/")[2]) for row in each.interactions
        ]
        for each in episodes
    }


ANSWERS = [([1, 2], [5]), ([1, 2], [6, 7])]
TURNS = [([1, 2], [5]), ([1, 2, 5, 8], [9]), ([1, 2, 5, 8, 9, 3], [4])]
TABLE: dict[str, tuple[Rollout, dict[int, list[tuple[list[int], str | None]]]]] = {
    "one answer": (rollout(ANSWERS[:1]), {0: [([1, 2, 5], None)]}),
    "samples of a group": (rollout(ANSWERS, sample_ids=[0, 2]), {0: [([1, 2, 5], None)], 2: [([1, 2, 6, 7], None)]}),
    "samples without a report": (rollout(ANSWERS), {0: [([1, 2, 5], None)], 1: [([1, 2, 6, 7], None)]}),
    "equal samples": (rollout(ANSWERS[:1] * 2), {0: [([1, 2, 5], None)], 1: [([1, 2, 5], None)]}),
    "turns without a report": (
        rollout(TURNS),
        {0: [([1, 2, 5], None), ([1, 2, 5, 8, 9], "0"), ([1, 2, 5, 8, 9, 3, 4], "1")]},
    ),
    "turns whose template is no prefix": (
        rollout([([1, 2], [5]), ([1, 7], [9])], parents=[-1, 0], sample_ids=[1, 1]),
        {1: [([1, 2, 5], None), ([1, 7, 9], "0")]},
    ),
    "two samples of two turns": (
        rollout([*TURNS[:2], ([1, 2], [6]), ([1, 2, 6, 8], [9])], sample_ids=[0, 0, 1, 1]),
        {0: [([1, 2, 5], None), ([1, 2, 5, 8, 9], "0")], 1: [([1, 2, 6], None), ([1, 2, 6, 8, 9], "0")]},
    ),
    "two conversations of one agent": (
        rollout([([1, 2], [5]), ([1, 3], [5])]),
        {0: [([1, 2, 5], None), ([1, 3, 5], None)]},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_samples_and_turns_are_distinct(name: str) -> None:
    given, expected = TABLE[name]
    assert shape(episodes_of(given)) == expected


def test_dumped_line_has_group_step_kind_and_advantage() -> None:
    first, second = episodes_of(
        rollout(ANSWERS, sample_ids=[0, 1], truncated=[False, True]), "m", step=7, advantages=[-0.5, None]
    )
    assert (first.group, second.group) == ("t-3", "t-3") and first.episode != second.episode
    assert (first.step, first.is_eval, first.reward, second.reward) == (7, False, 0.0, 1.0)
    assert [row.advantage for each in (first, second) for row in each.interactions] == [-0.5, None]
    assert [row.truncated for each in (first, second) for row in each.interactions] == [False, True]
    (evaluated,) = episodes_of(rollout(ANSWERS[:1], is_eval=True))
    assert evaluated.is_eval


def test_repeated_step_is_dumped_once(tmp_path: Path) -> None:
    def step(number: int, *, is_eval: bool = False) -> None:
        write_step(tmp_path, number, episodes_of(rollout(ANSWERS[:1], is_eval=is_eval), step=number), is_eval=is_eval)

    def written() -> list[tuple[int | None, bool]]:
        return [(each.step, each.is_eval) for each in read_episodes(tmp_path)]

    for number in (1, 2, 3):
        step(number)
        step(number, is_eval=True)
    (tmp_path / "trajectories-000004.part").write_text("{")  # killed
    step(3)
    assert written() == [(1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
    remove_steps(tmp_path, after=1)
    assert written() == [(1, False), (1, True)]
    remove_steps(tmp_path, after=-1)
    assert not list(tmp_path.glob("*.jsonl"))
