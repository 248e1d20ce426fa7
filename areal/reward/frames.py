"""Values between a pool and its own worker processes: a length of 8 bytes, then a pickle. The pipes are private to
parent and child; nothing of this ever crosses a network."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from areal.errors import ArealError

HEAD = 8


@dataclass(frozen=True)
class FunctionTarget:
    """A function by its name in a module, or ``copy``, its pickle. ``file``: the main script, where either needs it.
    With ``argument`` it makes the function that is called, once a process."""

    module: str
    qualname: str
    file: str | None = None
    argument: str | None = None
    copy: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Load:
    """Import the function: its module may take long, and is no fault of the answer that waits for its reward."""

    target: FunctionTarget


@dataclass(frozen=True)
class RewardJob:
    target: FunctionTarget
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Jobs:
    """Several calls of one function, one after the other: ``(args, kwargs)`` each. Its value is a Done for each."""

    target: FunctionTarget
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]


@dataclass(frozen=True)
class Done:
    """``error``: what was raised, with its last traceback lines. ``seconds`` that the function itself took."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def pack(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEAD, "big") + data


def unpack(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - from our own child, over a private pipe


# A reward that could not be had is never a reward of 0: the rollout is discarded, not punished.


class RewardError(ArealError):
    pass


class RewardRaised(RewardError):
    """The reward function raised: the same input would raise again."""


class RewardTimeout(RewardError):
    """No attempt returned a reward within the deadline."""


class RewardProcessLost(RewardError):
    """The process that computed it ended."""
