"""``allocation_mode`` and ``backend`` strings: which engines, on how many devices."""

from __future__ import annotations

from dataclasses import dataclass

from areal.resources.backend_grammar import TRAIN_ENGINES, Allocation, BackendError, Part, parse_backend

__all__ = ["AllocationMode", "BackendError", "Part"]


@dataclass(frozen=True)
class AllocationMode:
    """``sglang:d4t2+fsdp:d8``: an inference part, a training part, or both."""

    allocation: Allocation

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        """Raises BackendError (a ValueError) naming the column."""
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


def train_backend(backend: str, allocation_mode: str = "") -> Part:
    """The training layout: ``backend`` where it is said, else that of ``allocation_mode``, else one process. Raises
    BackendError."""
    if backend:
        return parse_backend(backend, engines=TRAIN_ENGINES, single=True).parts[0]
    found = AllocationMode.from_str(allocation_mode).train if allocation_mode else None
    return found or Part("fsdp")
