"""Rows of training data as torch tensors: made from one answer, or put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from areal.api.workflow_api import Trajectory

_PADDING = {"versions": -1, "turn_ids": -1}


class Row(NamedTuple):
    """One sequence, prompt and answers: the first five columns are equally long. ``truncated``: the last answer was
    cut off."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    turn_ids: Sequence[int]
    reward: float
    truncated: bool = False


def rows(given: Sequence[Row]) -> Trajectory:
    """[B, S], padded on the right; ``rewards`` and ``truncated`` are [B]."""
    import numpy as np
    import torch

    sizes = [len(each.input_ids) for each in given]
    width = max(sizes)

    def column(name: str, dtype: type) -> torch.Tensor:
        padding = _PADDING.get(name, 0)
        lists = [[*getattr(each, name), *[padding] * (width - size)] for each, size in zip(given, sizes, strict=True)]
        return torch.from_numpy(np.array(lists, dtype=dtype))  # numpy reads lists several times as fast as torch

    rewards = torch.tensor([each.reward for each in given], dtype=torch.float32)
    return {
        "input_ids": column("input_ids", np.int64),
        "loss_mask": column("loss_mask", np.int64),
        "logprobs": column("logprobs", np.float32),
        "versions": column("versions", np.int64),
        "turn_ids": column("turn_ids", np.int32),
        "attention_mask": torch.arange(width) < torch.tensor(sizes)[:, None],
        "rewards": rewards,
        "original_rewards": rewards.clone(),
        "truncated": torch.tensor([each.truncated for each in given]),
    }


def row(
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
    turn_ids: Sequence[int],
    reward: float,
    truncated: bool = False,
) -> Trajectory:
    """One row [1, S], no padding."""
    return rows([Row(input_ids, loss_mask, logprobs, versions, turn_ids, reward, truncated)])


def concat_padded_tensors(trajectories: Sequence[Mapping[str, Any]]) -> Trajectory:
    """One under the other, padded on the right to the widest: 0, or -1 where 0 means something. Raises ValueError where
    the columns differ."""
    import torch

    if not trajectories:
        raise ValueError("no trajectory to put together")
    names = list(trajectories[0])
    for each in trajectories[1:]:
        if set(each) != set(names):
            raise ValueError(f"trajectories differ in their columns: {sorted(set(each) ^ set(names))}")
    width = max(each["attention_mask"].shape[1] for each in trajectories)

    def widened(name: str, column: torch.Tensor) -> torch.Tensor:
        if column.dim() < 2 or column.shape[1] == width:
            return column
        return torch.nn.functional.pad(column, (0, width - column.shape[1]), value=_PADDING.get(name, 0))

    return {name: torch.cat([widened(name, each[name]) for each in trajectories]) for name in names}
