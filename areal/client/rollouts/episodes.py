"""One episode: its attempts, its deadline, and whose fault its failure is. A bad rollout is data, not a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal.api.workflow_context import EpisodeContext, episode
from areal.client.errors import Blame, ClientError
from areal.client.rollouts.engine import EpisodeEngine, Head
from areal.client.rollouts.ledger import Failure, Item
from areal.reward.failures import RewardError
from areal.workflow.grouped import run_episode

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
WORKFLOW, REWARD = "workflow", "reward"
_NO_MODEL = "model_not_found"  # it was there when we began: a service that is started again has it in a moment
_AGAIN = (Blame.SERVICE, Blame.INFRASTRUCTURE)


@dataclass(frozen=True)
class Given:
    """What an episode gave; ``trajectory`` None: it was rejected."""

    trajectory: Any
    head_version: int
    tail_version: int
    attempts: int
    seconds: float


class EpisodeFailed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.task_id}: {failure.error!r}")
        self.failure = failure


@dataclass(frozen=True)
class Episodes:
    """``attempts`` counts the first one too; only failures of the service or below it are tried again. ``check``:
    rows are looked at before they are accepted."""

    engine: Callable[[Item], EpisodeEngine]
    attempts: int
    timeout_s: float
    check: bool = True
    _heads: dict[int, Head] = field(default_factory=dict)

    def head_of(self, item: Item) -> int | None:
        """The version of the running episode's oldest token; None while it has sampled nothing."""
        head = self._heads.get(item.number)
        return head.version if head is not None else None

    async def run(self, item: Item) -> Given:
        """Raises EpisodeFailed."""
        try:
            return await self._attempts(item)
        finally:
            self._heads.pop(item.number, None)

    async def _attempts(self, item: Item) -> Given:
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            engine = self.engine(item)
            self._heads[item.number] = engine.head
            version = engine.get_version()
            try:
                trajectory = await self._once(item, engine)
                head, tail = versions_of(trajectory, version)
                return Given(trajectory, head, tail, attempt, time.monotonic() - started)
            except Exception as error:
                blame = blame_of(error)
                if attempt >= self.attempts or blame not in _AGAIN:
                    raise EpisodeFailed(Failure(item.task_id, blame, error, attempt)) from error
                _log.warning("episode %s: attempt %d failed: %s", item.task_id, attempt, error)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt - 1)))

    async def _once(self, item: Item, engine: EpisodeEngine) -> Any:
        with episode(EpisodeContext(item.task_id, is_eval=item.is_eval)):
            async with asyncio.timeout(self.timeout_s):
                trajectory = await run_episode(item.workflow, engine, dict(item.data))
        if trajectory is None:
            return None
        if self.check:
            check_rows(trajectory)
        if item.accept is not None and not item.accept(trajectory):
            return None
        return trajectory


def blame_of(error: BaseException) -> str:
    """caller, service, infrastructure, reward, or workflow. Clients of other libraries are known by what their errors
    have: a ``status_code``, a ``ConnectionError``, or a name that says so."""
    if getattr(error, "code", None) == _NO_MODEL:
        return Blame.SERVICE
    if isinstance(error, ClientError):
        return error.blame
    if isinstance(error, RewardError):
        return REWARD
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return Blame.SERVICE if status >= 500 or status == 429 else Blame.CALLER
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ConnectionError) or names & {"APIConnectionError", "TransportError", "ClientConnectionError"}:
        return Blame.INFRASTRUCTURE
    return blame_of(error.__cause__) if error.__cause__ is not None else WORKFLOW


def versions_of(trajectory: Any, otherwise: int) -> tuple[int, int]:
    """Of the oldest and the newest sampled token; ``otherwise`` where rows do not say."""
    versions = trajectory.get("versions") if isinstance(trajectory, Mapping) else None
    if versions is None:
        return otherwise, otherwise
    sampled, mask = np.asarray(versions), trajectory.get("loss_mask")
    is_meant = sampled >= 0 if mask is None else (sampled >= 0) & (np.asarray(mask) > 0)
    sampled = sampled[is_meant]
    return (int(sampled.min()), int(sampled.max())) if sampled.size else (otherwise, otherwise)


def check_rows(trajectory: Any) -> None:
    """Raises ValueError saying which column is wrong."""
    if not isinstance(trajectory, Mapping):
        raise ValueError(f"an episode gives a dict of tensors or None, not {type(trajectory).__name__}")
    if "interactions" in trajectory:
        return  # an external model's, as text
    for name in ("input_ids", "attention_mask"):
        if name not in trajectory:
            raise ValueError(f"a trajectory needs {name}")
    shape = tuple(trajectory["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids must be [rows, tokens], not {list(shape)}")
    for name in ("attention_mask", "loss_mask", "logprobs", "versions", "turn_ids", "token_temperatures"):
        if name in trajectory and tuple(trajectory[name].shape) != shape:
            raise ValueError(f"{name} is {list(trajectory[name].shape)}, input_ids {list(shape)}")
    for name in ("rewards", "temperatures", "sample_ids", "parents"):
        if name in trajectory and tuple(trajectory[name].shape) != shape[:1]:
            raise ValueError(f"{name} must be one a row: {list(shape[:1])}, not {list(trajectory[name].shape)}")
