"""``allocation_mode`` and ``backend`` strings, such as ``sglang:d4t2``: an engine and the layout of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from areal.resources.backend import TRAIN_ENGINES, Allocation, BackendError, Part, parse_backend

__all__ = ["AllocationMode", "BackendError", "ModelAllocation", "ParallelStrategy", "Part"]


@dataclass(frozen=True)
class AllocationMode:
    """The engines of an experiment, ``sglang:d4t2+fsdp:d8``: an inference part, a training part, or both."""

    allocation: Allocation

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Parse an allocation. Raises BackendError (a ValueError) with the column of the error."""
        return cls(parse_backend(text))

    @property
    def gen(self) -> Part | None:
        return self.allocation.inference

    @property
    def train(self) -> Part | None:
        return self.allocation.training

    @property
    def gen_backend(self) -> str | None:
        return self.gen.engine if self.gen is not None else None

    @property
    def train_backend(self) -> str | None:
        return self.train.engine if self.train is not None else None

    def __str__(self) -> str:
        return str(self.allocation)


@dataclass(frozen=True)
class ParallelStrategy:
    """The parallel layout of one engine, under AReaL's names."""

    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size * self.pp_size * self.cp_size

    @property
    def data_parallel_size(self) -> int:
        return self.dp_size

    @property
    def tensor_parallel_size(self) -> int:
        return self.tp_size

    @property
    def pipeline_parallel_size(self) -> int:
        return self.pp_size


@dataclass(frozen=True)
class ModelAllocation:
    """One engine of an allocation, such as ``sglang:d4t2``. ``name`` is a label that the caller chooses."""

    backend: str
    parallel: ParallelStrategy
    name: str | None = None

    @classmethod
    def from_str(cls, text: str, name: str | None = None) -> ModelAllocation:
        """Parse the allocation of a single engine. Raises BackendError for a syntax error or for several engines."""
        part = parse_backend(text, single=True).parts[0]
        return cls(
            part.engine, ParallelStrategy(part.data, part.tensor, part.pipeline, part.context, part.expert), name
        )


def train_backend(backend: str, allocation_mode: str = "") -> Part:
    """Return the training layout of ``backend``, else of ``allocation_mode``, else one process. Raises BackendError."""
    if backend:
        return parse_backend(backend, engines=TRAIN_ENGINES, single=True).parts[0]
    found = AllocationMode.from_str(allocation_mode).train if allocation_mode else None
    return found or Part("fsdp")
