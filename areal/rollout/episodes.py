"""One episode of a trainer: its attempts with a deadline, and the validation of its rows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from areal.api.workflow_context import EpisodeContext, episode
from areal.client.errors import Blame
from areal.dataclasses import dataclass, field
from areal.errors import TimedOut
from areal.http import tracing
from areal.rollout.engine import EpisodeEngine, HeadVersion
from areal.rollout.executor import Outcome, run_attempts
from areal.rollout.failures import cause_of, error_line
from areal.rollout.staleness import EpisodeSpec, Rollout
from areal.rollout.tensors import check_rows
from areal.rollout.workflows import run_episode, shared_http_client

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_RETRYABLE = (Blame.SERVICE, Blame.INFRASTRUCTURE)


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes. ``attempts`` includes the first; only failures of the service or the infrastructure are retried.
    With ``check``, rows are validated before they are accepted. ``attempted`` gets each attempt's error, or None."""

    engine: Callable[[EpisodeSpec], EpisodeEngine]
    attempts: int
    timeout_s: float
    check: bool = True
    attempted: Callable[[BaseException | None], None] = lambda error: None
    _heads: dict[int, HeadVersion] = field(default_factory=dict)

    def head_of(self, item: EpisodeSpec) -> int | None:
        """Return the version of the running episode's oldest token; None while it has sampled nothing."""
        head = self._heads.get(item.number)
        return head.version if head is not None else None

    async def run(self, item: EpisodeSpec) -> Outcome:
        attempt, pause_s = partial(self._attempt, item, time.monotonic()), partial(self._pause_s, item)
        try:
            return await run_attempts(item.task_id, attempt, pause_s, {"areal.is_eval": item.is_eval}, _described)
        finally:
            self._heads.pop(item.number, None)

    async def _attempt(self, item: EpisodeSpec, started: float, number: int) -> Rollout | None:
        engine = self.engine(item)
        self._heads[item.number] = engine.head
        version = engine.get_version()
        trajectory = await self._trajectory(item, engine)
        self.attempted(None)
        if trajectory is None:
            return None
        head, tail = versions_of(trajectory, version)
        return Rollout(item, trajectory, head, tail, number, time.monotonic() - started, tracing.here())

    def _pause_s(self, item: EpisodeSpec, error: Exception, number: int) -> float | None:
        self.attempted(error)
        if number >= self.attempts or cause_of(error).blame not in _RETRYABLE:
            return None
        _log.warning("episode %s: attempt %d failed: %s", item.task_id, number, error_line(error))
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (number - 1))

    async def _trajectory(self, item: EpisodeSpec, engine: EpisodeEngine) -> Any:
        with episode(EpisodeContext(item.task_id, is_eval=item.is_eval, http_client=shared_http_client)):
            try:
                async with asyncio.timeout(self.timeout_s) as deadline:
                    trajectory = await run_episode(item.workflow, engine, dict(item.data))
            except BaseException as error:
                engine.release()
                if isinstance(error, TimeoutError) and deadline.expired():
                    raise TimedOut(
                        f"the episode did not end within {self.timeout_s:g} s, rollout.episode_timeout"
                    ) from error
                raise
        if trajectory is None:
            return None
        if self.check:
            check_rows(trajectory)
        return trajectory if item.accept is None or item.accept(trajectory) else None


def _described(rollout: Rollout) -> tracing.Attributes:
    """Return attributes of the episode's span. The reward is the mean over samples of the sum over turns."""
    given = rollout.trajectory.get("original_rewards", rollout.trajectory.get("rewards", ()))
    rewards = np.asarray(given, dtype=np.float64)
    samples = len(np.unique(rollout.trajectory.get("sample_ids", np.arange(len(rewards)))))
    return {
        "areal.reward": float(rewards.sum()) / samples if samples else None,
        "areal.weight_version": rollout.tail_version,
        "areal.weight_version.oldest": rollout.head_version,
    }


def versions_of(trajectory: Any, default: int) -> tuple[int, int]:
    """Return the versions of the oldest and the newest sampled token; ``default`` if the rows have none."""
    versions = trajectory.get("versions") if isinstance(trajectory, Mapping) else None
    if versions is None:
        return default, default
    sampled, mask = np.asarray(versions), trajectory.get("loss_mask")
    is_sampled = sampled >= 0 if mask is None else (sampled >= 0) & (np.asarray(mask) > 0)
    sampled = sampled[is_sampled]
    return (int(sampled.min()), int(sampled.max())) if sampled.size else (default, default)
