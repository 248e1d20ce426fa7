"""Messages between a reward pool and its worker processes: a length of 8 bytes (big-endian), then a pickle. The pipes
are private to parent and child; pickles are never sent over a network."""

from __future__ import annotations

import pickle
from typing import Any

from areal.dataclasses import dataclass, field
from areal.errors import ArealError

HEAD = 8


@dataclass(frozen=True)
class FunctionTarget:
    """A reward function, given by module and name or by ``copy``, its pickle. ``file``: the main script, if either
    refers to it. With ``argument``, the function is a factory: each process calls it once, and uses the result."""

    module: str
    qualname: str
    file: str | None = None
    argument: str | None = None
    copy: bytes | None = field(default=None, repr=False)


Call = tuple[tuple[Any, ...], dict[str, object]]
"""The arguments of one call: ``(args, kwargs)``."""


@dataclass(frozen=True)
class RewardJob:
    """Sequential calls of one function. The result's value is a list with a ``Done`` for each. A job without calls only
    imports the function, so that a slow import does not count against a reward's deadline."""

    target: FunctionTarget
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Done:
    """The result of a job or a call. ``error``: what was raised, with its place. ``seconds``: its run time."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def pack(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEAD, "big") + data


def unpack(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - from our own child, over a private pipe


# A reward that cannot be computed is never replaced by 0: the rollout is discarded, not penalized.


class RewardError(ArealError):
    pass


class RewardRaised(RewardError):
    """The reward function raised: the same input would raise again."""


class RewardTimeout(RewardError):
    """No attempt returned a reward within the deadline."""


class RewardProcessLost(RewardError):
    """The process that computed it ended."""
