"""What of an engine is written down: weights, optimizer, random state, as shards that any number of ranks reads.

torch.distributed.checkpoint writes each rank's shards and reads them back for another number of ranks. Whole weights,
as a Hugging Face folder, are a matter of ``weights``.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from areal.training.engines.fsdp.engine import FSDPEngine

_COUNTERS = "engine"
_WRITERS = ("inline_container", "PytorchStreamWriter")


def save_shards(engine: FSDPEngine, folder: Path) -> None:
    """Into ``folder``, which is new. Every rank calls it. Durable when it returns. Raises OSError."""
    try:
        with _alone_on_purpose():
            save(_state(engine), checkpoint_id=folder, no_dist=engine.ranks.group is None)
    except CheckpointException as error:
        refused = next(filter(None, (_of_the_disk(cause) for cause, _ in error.failures.values())), None)
        if refused is None:
            raise
        raise refused from None  # one sentence for whoever runs out of space, not the stacks of all ranks


def _of_the_disk(error: BaseException) -> OSError | None:
    """torch's writer of archives, which a full disk cuts short, complains of its own position."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError):
            return reason
        reason = reason.__cause__ or reason.__context__
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _WRITERS):
        return OSError(errno.EIO, f"a file could not be written whole ({error})")  # of another rank: without its cause
    return None


def load_shards(engine: FSDPEngine, folder: Path) -> None:
    """Put the engine where it was when ``folder`` was saved, by whatever number of ranks."""
    state = _state(engine)
    with _alone_on_purpose():
        load(state, checkpoint_id=folder, no_dist=engine.ranks.group is None)
    optimizers = [] if engine.optimizer is None else [engine.optimizer]
    set_state_dict(engine.model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optim", {}))
    counters = state[_COUNTERS]
    engine.steps, engine.version = int(counters["steps"]), int(counters["version"])
    torch.set_rng_state(counters["random"].cpu())  # the ranks of a run draw alike


@contextlib.contextmanager
def _alone_on_purpose() -> Iterator[None]:
    """torch warns that a run of one process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _state(engine: FSDPEngine) -> dict[str, Any]:
    optimizers = [] if engine.optimizer is None else [engine.optimizer]
    model, optimizer = get_state_dict(engine.model, optimizers)
    counters = {
        "steps": torch.tensor(engine.steps),
        "version": torch.tensor(engine.version),
        "random": torch.get_rng_state(),
    }
    return {"model": model, _COUNTERS: counters} | ({"optim": optimizer} if optimizers else {})
