"""Rollouts as files: a line for each sample of a prompt, read by ``areal inf trajectories show``; and
``failures.jsonl`` with a line for each failed rollout.

A trainer writes one file for each step, with advantages, and one for each evaluation; a repeated step replaces its
file. Programs outside of a training job append to one file for each version of the weights.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from areal.dataset.images import shortened
from areal.rollout.failures import Failure, error_line
from areal.rollout.staleness import EpisodeSpec, Rollout
from areal.trajectories.record import Episode, Interaction, total_reward
from areal.trajectories.steps import FAILURES, step_file, step_files
from areal.wire.columns import COLUMNS, TOKEN_COLUMNS

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig


_log = logging.getLogger(__name__)


def fileroot_of(config: InferenceEngineConfig) -> Path:
    """Return the folder of trajectories of a program that runs outside a training job."""
    root = Path(config.fileroot or ".")
    return root.joinpath(*filter(None, (config.experiment_name, config.trial_name)), "trajectories")


def append_rollouts(folder: Path, version: int, rollouts: Sequence[Rollout], model: str) -> None:
    """Append to the file of ``version``, the version of the weights that the rollouts train. ``model`` sampled them. On
    a full disk the lines are lost with a warning; they are for display only."""
    lines = b"".join(_line(sample) for each in rollouts for sample in episodes_of(each, model))
    _append(folder / f"trajectories-v{version:06d}.jsonl", lines, f"{len(rollouts)} rollouts are")


def _append(path: Path, lines: bytes, what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        _log.warning("%s not written: %s", what, error)


def write_step(
    folder: Path, step: int, episodes: Iterable[Episode], *, is_eval: bool = False, append: bool = False
) -> None:
    """Write, or with ``append`` extend, the file of a training step or of the evaluation after it. Warns on a full
    disk."""
    path = folder / step_file(step, is_eval=is_eval)
    staged = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if append and path.exists():
            path.rename(staged)
        with staged.open("ab" if append else "wb") as file:
            file.write(b"".join(map(_line, episodes)))
        staged.replace(path)
    except OSError as error:
        _log.warning("the rollouts of step %d are not written: %s", step, error)


def remove_steps(folder: Path, after: int) -> None:
    """Remove the files of steps after ``after``, which a resumed run repeats."""
    for each in step_files(folder):
        if each.step > after:
            (folder / each.name).unlink(missing_ok=True)


def write_failure(folder: Path, item: EpisodeSpec, failure: Failure) -> None:
    """Append a line to ``failures.jsonl``. A full disk causes a warning."""
    line = {
        "episode": failure.task_id,
        "prompt": _prompt(item.data, item.number),
        "is_eval": item.is_eval,
        "blame": failure.blame,
        "error": error_line(failure.error),
        "attempts": failure.attempts,
        "at": round(time.time(), 3),
        "example": _plain_columns(item.data),
    }
    _append(folder / FAILURES, _json_line(line), "a failure is")


def _plain_columns(data: Mapping[str, object]) -> dict[str, object]:
    plain: dict[str, object] = {
        name: value for name, value in data.items() if isinstance(value, str | int | float | list)
    }
    if isinstance(images := plain.get("images"), list):
        plain["images"] = [shortened(each) for each in images]
    return plain


def _prompt(data: Mapping[str, object], default: int) -> int:
    """Return the row of the data set; ``default`` if the prompt is not a trainer's."""
    return int(getattr(data, "row", default))


def _line(episode: Episode) -> bytes:
    return _json_line(episode.document())


def _json_line(document: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(document, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a text with half of a surrogate pair is not UTF-8
        return json.dumps(document, default=str).encode() + b"\n"


def episodes_of(
    rollout: Rollout, model: str = "", *, step: int | None = None, advantages: Sequence[float | None] | None = None
) -> list[Episode]:
    """Return one episode for each sample of the group, rows without padding. Text rollouts have no rows.
    ``advantages``: one for each row."""
    rows = rollout.trajectory if isinstance(rollout.trajectory, Mapping) else {}
    columns = {name: np.asarray(column).tolist() for name, column in rows.items() if hasattr(column, "shape")}
    if advantages is not None:
        columns["advantages"] = list(advantages)
    samples, parents = _conversations(columns) if "input_ids" in columns else ([], [])
    interactions = _interactions(columns, samples, parents, rollout.task_id, model)
    episodes = []
    for sample in dict.fromkeys(samples or [0]):
        own = tuple(row for each, row in zip(samples, interactions, strict=True) if each == sample)
        episodes.append(
            Episode(
                episode=f"{rollout.task_id}/{sample}",
                interactions=own,
                prompt=_prompt(rollout.data, rollout.number),
                sample=sample,
                reward=total_reward(own),
                seconds=rollout.seconds,
                example=_plain_columns(rollout.data),
                group=rollout.task_id,
                step=step,
                is_eval=rollout.item.is_eval,
            )
        )
    return episodes


def _interactions(
    columns: Mapping[str, list[Any]], samples: Sequence[int], parents: Sequence[int], task_id: str, model: str
) -> list[Interaction]:
    lengths = [sum(mask) for mask in columns.get("attention_mask", ())]
    tokens: dict[str, Any] = {
        name: columns[name] if name in columns else [[COLUMNS[name].padding] * length for length in lengths]
        for name in TOKEN_COLUMNS[1:]
    }
    rewards = columns.get("rewards", [0.0] * len(lengths))
    original = columns.get("original_rewards", rewards)
    advantages = columns.get("advantages", [None] * len(lengths))
    truncated = columns.get("truncated", [False] * len(lengths))
    temperatures = columns.get("temperatures", [1.0] * len(lengths))
    by_token = columns.get("token_temperatures")
    names = [f"{task_id}/{sample}/{place - samples.index(sample)}" for place, sample in enumerate(samples)]
    return [
        Interaction(
            interaction_id=names[place],
            parent_id=names[parents[place]] if parents[place] >= 0 else None,
            model=model,
            truncated=bool(truncated[place]),
            rewarded="rewards" in columns,
            reward=rewards[place],
            original_reward=original[place],
            advantage=advantages[place],
            temperature=None if math.isnan(temperatures[place]) else temperatures[place],
            token_temperatures=by_token[place][:length] if by_token and math.isnan(temperatures[place]) else (),
            input_ids=columns["input_ids"][place][:length],
            **{name: column[place][:length] for name, column in tokens.items()},
        )
        for place, length in enumerate(lengths)
    ]


def _conversations(columns: Mapping[str, list[Any]]) -> tuple[list[int], list[int]]:
    """Return (sample, parent) of each row. The parent is the row whose conversation the row continues, -1 for none. If
    the columns are missing, the parent is the longest row that is a prefix of the prompt, and each answer a sample."""
    tokens = [ids[: sum(mask)] for ids, mask in zip(columns["input_ids"], columns["attention_mask"], strict=True)]
    masks = columns.get("loss_mask") or [[0] * len(ids) for ids in tokens]
    prompts = [ids[: mask.index(1)] if 1 in mask else ids for ids, mask in zip(tokens, masks, strict=True)]
    given = columns.get("sample_ids")
    parents = columns.get("parents")
    if parents is None:
        parents = []
        for place, prompt in enumerate(prompts):
            before = [
                at
                for at, ids in enumerate(tokens)
                if at != place
                and (given is None or given[at] == given[place])
                and len(ids) < len(prompt)
                and prompt[: len(ids)] == ids
            ]
            parents.append(max(before, key=lambda at: len(tokens[at]), default=-1))
    if given is not None:
        return given, parents
    prompts_seen: list[list[int]] = []
    samples = [0] * len(tokens)
    for place in sorted(range(len(tokens)), key=lambda at: len(tokens[at])):  # parents are shorter: they come first
        if parents[place] >= 0:
            samples[place] = samples[parents[place]]
        elif len(tokens) > 1:
            samples[place] = prompts_seen.count(prompts[place])
            prompts_seen.append(prompts[place])
    return samples, parents
