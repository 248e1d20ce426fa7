"""Megatron's checkpoints: tensors by their position in the whole model, so that any layout can read them.

They are written by torch.distributed.checkpoint in the training process, because Megatron's own writer forks it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from areal.api.engine_api import CheckpointUnreadable

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""The distributed optimizer's moments are written in the layout of their weights."""


class _Writer(SaveShardedStrategy):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path | str) -> None:
        mine, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save(
            mcore_to_pyt_state_dict(mine, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


def write(state: dict[str, object], folder: Path, *, is_first: bool) -> None:
    """Write sharded tensors, and other values from the first rank. Raises OSError."""
    if is_first:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder), _Writer(), content_metadata=METADATA)


def read(state: dict[str, Any], folder: Path, optimizers: int) -> dict[str, Any]:
    """Read a checkpoint into ``state``, which has ``optimizers`` optimizers. Raises CheckpointUnreadable."""
    try:
        written = dist_checkpointing.load_common_state_dict(folder)["optimizers"]
        if written != optimizers:
            raise CheckpointUnreadable(
                "experts that are shared out have an optimizer of their own: a checkpoint with e1 and one with more "
                "are not read by each other; start from the model's folder instead"
            )
        found: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    except CheckpointException as error:
        cause = next((each for each, _ in error.failures.values()), error)
        raise CheckpointUnreadable(f"{type(cause).__name__}: {cause}") from error
    except _UNREADABLE as error:
        raise CheckpointUnreadable(f"{type(error).__name__}: {error}") from error
    return found


_UNREADABLE = (CheckpointingException, OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError)
