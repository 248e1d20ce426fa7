"""Consumed rollouts as files that ``areal inf trajectories show`` reads: one episode a line, one file a version."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.client.rollouts.ledger import Rollout
from areal.trajectories.record import Episode, Interaction

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig

_log = logging.getLogger(__name__)
_COLUMNS = ("loss_mask", "logprobs", "versions", "turn_ids")
_DEFAULTS = {"loss_mask": 0, "logprobs": 0.0, "versions": -1, "turn_ids": -1}


def fileroot_of(config: InferenceEngineConfig) -> Path:
    """Where a program that is no training job keeps its trajectories."""
    root = Path(config.fileroot or ".")
    return root.joinpath(*filter(None, (config.experiment_name, config.trial_name)), "trajectories")


def write_rollouts(folder: Path, version: int, rollouts: Sequence[Rollout], model: str) -> None:
    """Append to the file of ``version``, that of the weights these are to train. ``model``: whose tokens these are.
    A full disk costs the lines, which are for people to look at, not the rollouts."""
    lines = [json.dumps(episode_of(each, model).document(), default=str) for each in rollouts]
    path = folder / f"trajectories-v{version:06d}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    except OSError as error:
        _log.warning("%d rollouts are not written down: %s", len(rollouts), error)


def episode_of(rollout: Rollout, model: str = "") -> Episode:
    """Rows of the trajectory, without padding. Text rollouts have no rows."""
    rows = rollout.trajectory if isinstance(rollout.trajectory, Mapping) else {}
    columns = {name: np.asarray(column) for name, column in rows.items() if hasattr(column, "shape")}
    count = len(columns["input_ids"]) if "input_ids" in columns else 0
    interactions = tuple(_interaction(columns, rollout, place, model) for place in range(count))
    rewards = columns.get("rewards")
    return Episode(
        episode=rollout.task_id,
        interactions=interactions,
        prompt=rollout.number,
        reward=float(rewards.mean()) if rewards is not None and len(rewards) else None,
        seconds=rollout.seconds,
        example={name: value for name, value in rollout.data.items() if isinstance(value, str | int | float | list)},
    )


def _interaction(columns: Mapping[str, Any], rollout: Rollout, place: int, model: str) -> Interaction:
    length = int(columns["attention_mask"][place].sum())
    tokens: dict[str, Any] = {
        name: columns[name][place][:length].tolist() if name in columns else [_DEFAULTS[name]] * length
        for name in _COLUMNS
    }
    reward = float(columns["rewards"][place]) if "rewards" in columns else 0.0
    raw = columns.get("original_rewards")
    return Interaction(
        interaction_id=f"{rollout.task_id}/{place}",
        model=model,
        rewarded="rewards" in columns,
        reward=reward,
        original_reward=float(raw[place]) if raw is not None else reward,
        input_ids=columns["input_ids"][place][:length].tolist(),
        **tokens,
    )
