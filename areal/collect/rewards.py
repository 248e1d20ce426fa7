"""User rewards in processes of their own, each call with a deadline, for threads that wait: the pool of
``areal.reward`` on a loop of its own.

A reward that hangs, crashes its process or raises is a failure of its episode and never a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from areal.client.loop_thread import LoopThread
from areal.collect.failures import EpisodeFailed, Kind
from areal.collect.scoring import BUILT_IN
from areal.errors import ArealError
from areal.reward import pool
from areal.reward.failures import RewardError, RewardTimeout
from areal.reward.frames import Job, Target

_LOAD_S = 120.0
_TOKENS = frozenset(("prompt_ids", "completion_ids"))
_CALLS = "areal.collect.reward_call"


class RewardPool:
    """``size`` processes of one reward function, ``module:function`` or a built-in name. A context manager.
    ``wants_tokens``: it names token ids among its parameters."""

    def __init__(self, spec: str, size: int, deadline_s: float) -> None:
        self._spec = BUILT_IN.get(spec, spec)
        self._deadline_s = deadline_s
        self._pool = pool.RewardPool(size)
        self.wants_tokens = False

    def __enter__(self) -> RewardPool:
        """Raises ArealError with what the first process said when it cannot load the function."""
        self._thread = LoopThread("areal-rewards")
        try:
            self.wants_tokens = not _TOKENS.isdisjoint(self._parameters())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        try:
            self._thread.run(self._pool.close())
        finally:
            self._thread.close()

    def _parameters(self) -> list[str]:
        try:
            done = self._thread.run(self._pool.run(Job(Target(_CALLS, "takes"), (self._spec,), {}), _LOAD_S))
        except RewardError as error:
            raise ArealError(f"--reward {self._spec}: its process did not start: {error.message}") from error
        said: dict[str, Any] = done.value or {"error": f"--reward {self._spec}: {done.error}"}
        if "error" in said:
            raise ArealError(str(said["error"]), hint=said.get("hint"))
        return list(said["takes"])

    def score(self, given: Mapping[str, Any]) -> float:
        """Raises EpisodeFailed. May be called from any thread."""
        job = Job(Target(_CALLS, "scorer", argument=self._spec), (dict(given),), {})
        try:
            done = self._thread.run(self._pool.run(job, self._deadline_s))
            if done.error is not None:
                raise EpisodeFailed(Kind.REWARD, done.error)
            return pool.number(done.value)
        except RewardTimeout as error:
            message = f"the reward did not come within {self._deadline_s:g} s"
            raise EpisodeFailed(Kind.REWARD_TIMEOUT, message) from error
        except RewardError as error:
            raise EpisodeFailed(Kind.REWARD, error.message) from error
