"""Rows of training data as torch tensors: made from one answer, or put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from areal.api.workflow_api import Trajectory

_PADDING = {"versions": -1, "turn_ids": -1}


def row(
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
    turn_ids: Sequence[int],
    reward: float,
    truncated: bool = False,
) -> Trajectory:
    """One row [1, S], no padding. ``rewards`` and ``truncated`` (the last answer was cut off) are [1]."""
    import torch

    columns: dict[str, torch.Tensor] = {
        "input_ids": torch.tensor([input_ids], dtype=torch.int64),
        "loss_mask": torch.tensor([loss_mask], dtype=torch.int64),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int64),
        "turn_ids": torch.tensor([turn_ids], dtype=torch.int32),
        "attention_mask": torch.ones((1, len(input_ids)), dtype=torch.bool),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "original_rewards": torch.tensor([reward], dtype=torch.float32),
        "truncated": torch.tensor([truncated]),
    }
    return columns


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
