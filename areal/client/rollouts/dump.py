"""Consumed rollouts as files that ``areal inf trajectories show`` reads: one episode a line, one file a version; and
beside them ``failures.jsonl``, a line for each that failed, with whose fault it was."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from areal.client.rollouts.executor import said
from areal.client.rollouts.ledger import Failure, Item, Rollout
from areal.trajectories.record import Episode, Interaction

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig

_log = logging.getLogger(__name__)
_COLUMNS: dict[str, int | float] = {"loss_mask": 0, "logprobs": 0.0, "versions": -1, "turn_ids": -1}  # where absent


def fileroot_of(config: InferenceEngineConfig) -> Path:
    """Where a program that is no training job keeps its trajectories."""
    root = Path(config.fileroot or ".")
    return root.joinpath(*filter(None, (config.experiment_name, config.trial_name)), "trajectories")


def write_rollouts(folder: Path, version: int, rollouts: Sequence[Rollout], model: str) -> None:
    """Append to the file of ``version``, that of the weights these are to train. ``model``: whose tokens these are.
    A full disk costs the lines, which are for people to look at, not the rollouts."""
    lines = b"".join(_line(episode_of(each, model)) for each in rollouts)
    path = folder / f"trajectories-v{version:06d}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        _log.warning("%d rollouts are not written down: %s", len(rollouts), error)


def write_failure(folder: Path, item: Item, failure: Failure) -> None:
    """Append it. A full disk costs the line."""
    line = {
        "episode": failure.task_id,
        "prompt": item.number,
        "blame": failure.blame,
        "error": said(failure.error),
        "attempts": failure.attempts,
        "at": round(time.time(), 3),
        "example": _shown(item.data),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "failures.jsonl").open("ab") as file:
            file.write(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        _log.warning("a failure is not written down: %s", error)


def _shown(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if isinstance(value, str | int | float | list)}


def _line(episode: Episode) -> bytes:
    return orjson.dumps(episode.document(), default=str, option=orjson.OPT_APPEND_NEWLINE)


def episode_of(rollout: Rollout, model: str = "") -> Episode:
    """Rows of the trajectory, without padding. Text rollouts have no rows."""
    rows = rollout.trajectory if isinstance(rollout.trajectory, Mapping) else {}
    columns = {name: np.asarray(column).tolist() for name, column in rows.items() if hasattr(column, "shape")}
    rewards = columns.get("rewards")
    return Episode(
        episode=rollout.task_id,
        interactions=_interactions(columns, rollout, model) if "input_ids" in columns else (),
        prompt=rollout.number,
        reward=sum(rewards) / len(rewards) if rewards else None,
        seconds=rollout.seconds,
        example=_shown(rollout.data),
    )


def _interactions(columns: Mapping[str, list[Any]], rollout: Rollout, model: str) -> tuple[Interaction, ...]:
    lengths = [sum(mask) for mask in columns["attention_mask"]]
    rewards = columns.get("rewards", [0.0] * len(lengths))
    tokens: dict[str, Any] = {
        name: columns[name] if name in columns else [[absent] * length for length in lengths]
        for name, absent in _COLUMNS.items()
    }
    temperatures = columns.get("temperatures", [1.0] * len(lengths))
    by_token = columns.get("token_temperatures")
    return tuple(
        Interaction(
            interaction_id=f"{rollout.task_id}/{place}",
            model=model,
            rewarded="rewards" in columns,
            reward=rewards[place],
            original_reward=columns.get("original_rewards", rewards)[place],
            temperature=None if math.isnan(temperatures[place]) else temperatures[place],
            token_temperatures=by_token[place][:length] if by_token and math.isnan(temperatures[place]) else (),
            input_ids=columns["input_ids"][place][:length],
            **{name: column[place][:length] for name, column in tokens.items()},
        )
        for place, length in enumerate(lengths)
    )
