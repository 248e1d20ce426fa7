"""Training rows as torch tensors: from sampled responses, and concatenated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.wire.bodies import LARGEST_F32
from areal.wire.columns import COLUMNS

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from areal.api.io_struct import ModelResponse
    from areal.api.workflow_api import Trajectory


class RewardedResponse(NamedTuple):
    """One response to a prompt, with its reward."""

    answer: ModelResponse
    reward: float


def response_rows(given: Sequence[RewardedResponse]) -> Trajectory:
    """Return columns [B, S], padded on the right, and columns [B] (``rewards``, ``truncated``). The loss mask covers
    each whole response."""
    import numpy as np
    import torch

    answers = [each.answer for each in given]
    sizes = np.array([(len(each.input_tokens), len(each.output_tokens)) for each in answers])
    before, after = sizes[:, :1], sizes.sum(1, keepdims=True)
    steps = np.arange(int(after.max()))
    is_token = steps < after
    is_answer = is_token & (steps >= before)

    def column(where: NDArray[np.bool_], values: Iterable[Any], dtype: type, fill: int = 0) -> NDArray[Any]:
        padded: NDArray[Any] = np.full(where.shape, fill, dtype=dtype)
        padded[where] = np.array(list(values), dtype=dtype)
        return padded

    tokens = chain.from_iterable(chain(each.input_tokens, each.output_tokens) for each in answers)
    rewards = np.array([each.reward for each in given], dtype=np.float32)
    columns = {
        "input_ids": column(is_token, tokens, np.int64),
        "loss_mask": is_answer.astype(np.int64),
        "logprobs": column(is_answer, chain.from_iterable(each.output_logprobs for each in answers), np.float32),
        "versions": column(is_answer, chain.from_iterable(each.output_versions for each in answers), np.int64, -1),
        "turn_ids": is_answer.astype(np.int32) - np.int32(1),
        "attention_mask": is_token,
        "rewards": rewards,
        "original_rewards": rewards.copy(),
        "temperatures": np.array([each.temperature for each in answers], dtype=np.float32),
        "truncated": np.array([each.stop_reason == "length" for each in answers]),
    }
    if any(each.images for each in answers):
        columns["images"] = np.array([each.images for each in answers], dtype=np.int64)
    # Through numpy, which reads lists several times as fast as torch.
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def row(
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
    turn_ids: Sequence[int],
    reward: float,
    truncated: bool = False,
    temperature: float = 1.0,
) -> Trajectory:
    """Return one row [1, S] of a prompt and responses, without padding. ``truncated``: the last response was cut off.
    ``temperature``: of all responses."""
    import torch

    columns = {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "versions": versions,
        "turn_ids": turn_ids,
        "attention_mask": [True] * len(input_ids),
        "rewards": reward,
        "original_rewards": reward,
        "temperatures": temperature,
    }
    tensors = {name: torch.tensor([each], dtype=getattr(torch, COLUMNS[name].dtype)) for name, each in columns.items()}
    return {**tensors, "truncated": torch.tensor([truncated])}


def check_rows(trajectory: Any) -> None:
    """Check the columns of a trajectory. Raises ValueError naming the column that is wrong."""
    import numpy as np

    if not isinstance(trajectory, Mapping):
        raise ValueError(f"an episode gives a dict of tensors or None, not {type(trajectory).__name__}")
    if "interactions" in trajectory:
        return  # of an external model: text without token columns
    for name in ("input_ids", "attention_mask"):
        if name not in trajectory:
            raise ValueError(f"a trajectory needs {name}")
    shape = _shape(trajectory, "input_ids")
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids must be [rows, tokens], not {list(shape)}")
    for name in ("attention_mask", "loss_mask", "logprobs", "versions", "turn_ids", "token_temperatures"):
        if name in trajectory and (found := _shape(trajectory, name)) != shape:
            raise ValueError(f"{name} is {list(found)}, input_ids {list(shape)}")
    for name in ("rewards", "temperatures", "sample_ids", "parents"):
        if name in trajectory and (found := _shape(trajectory, name)) != shape[:1]:
            raise ValueError(f"{name} must be one a row: {list(shape[:1])}, not {list(found)}")
    is_token = np.asarray(trajectory["attention_mask"]) > 0
    if not is_token[:, 0].all() or (is_token[:, 1:] > is_token[:, :-1]).any():
        raise ValueError("attention_mask must be 1 from a row's first token to its last: rows are padded on the right")
    is_sampled = is_token
    if "loss_mask" in trajectory:
        is_sampled = np.asarray(trajectory["loss_mask"]) > 0
        if is_sampled[:, 0].any() or (is_sampled > is_token).any():
            where = "padding" if (is_sampled > is_token).any() else "a row's first token, which follows no other"
            raise ValueError(f"loss_mask must be 1 at sampled tokens only, and is 1 at {where}")
    rewards = np.asarray(trajectory.get("rewards", ()), dtype=np.float64)
    if not (np.abs(rewards) <= LARGEST_F32).all():  # nor NaN
        raise ValueError(f"rewards must be finite, within the range of float32, not {rewards.tolist()}")
    if "logprobs" in trajectory:
        sampled = np.asarray(trajectory["logprobs"])[is_sampled]
        if not np.isfinite(sampled).all():
            raise ValueError(f"logprobs of sampled tokens must be finite, not {sampled[~np.isfinite(sampled)][0]}")


def _shape(trajectory: Mapping[str, Any], name: str) -> tuple[int, ...]:
    if (shape := getattr(trajectory[name], "shape", None)) is None:
        raise ValueError(f"{name} must be a tensor, not {type(trajectory[name]).__name__}")
    return tuple(shape)


def with_token_temperatures(trajectory: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add ``token_temperatures`` from ``temperatures``, 1 at tokens that were not sampled."""
    import torch

    if "token_temperatures" in trajectory or "temperatures" not in trajectory:
        return trajectory
    found = torch.where(trajectory["loss_mask"].bool(), trajectory["temperatures"][:, None], 1.0)
    return {**trajectory, "token_temperatures": found}


def concat_padded_tensors(trajectories: Sequence[Mapping[str, Any]]) -> Trajectory:
    """Concatenate rows, padded on the right to the widest, and shift ``parents`` (row numbers). Raises ValueError if
    the columns differ."""
    import torch

    if not trajectories:
        raise ValueError("no trajectory to concatenate")
    if any("token_temperatures" in each for each in trajectories):
        trajectories = [with_token_temperatures(each) for each in trajectories]
    names = list(trajectories[0])
    for each in trajectories[1:]:
        if set(each) != set(names):
            raise ValueError(f"trajectories differ in their columns: {sorted(set(each) ^ set(names))}")
    width = max(each["attention_mask"].shape[1] for each in trajectories)

    counts = [len(each["attention_mask"]) for each in trajectories]
    ends = [*accumulate(counts)]

    def joined(name: str) -> torch.Tensor:
        parts = [each[name] for each in trajectories]
        if parts[0].dim() < 2 or all(part.shape[1] == width for part in parts):
            return torch.cat(parts)
        kind = reduce(torch.promote_types, (part.dtype for part in parts))
        padding = COLUMNS[name].padding if name in COLUMNS else 0
        whole = torch.full((ends[-1], width, *parts[0].shape[2:]), padding, dtype=kind)
        for part, start, end in zip(parts, [0, *ends], ends, strict=False):
            whole[start:end, : part.shape[1]] = part
        return whole

    columns = {name: joined(name) for name in names}
    if "parents" in columns:
        above = torch.repeat_interleave(torch.tensor([0, *counts[:-1]]).cumsum(0), torch.tensor(counts))
        parents = columns["parents"]
        columns["parents"] = torch.where(parents < 0, parents, parents + above.to(parents.dtype))
    return columns
