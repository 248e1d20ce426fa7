"""Several episodes of one prompt, at once: the group that a baseline is computed over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.workflow.tensors import Answered, answered, concat_padded_tensors

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def run_episode(workflow: Any, engine: Any, data: dict[str, Any]) -> Any:
    """The episode's rows, also where it returns the calls of its OpenAI clients."""
    given = await workflow.arun_episode(engine, data)
    if not isinstance(given, Mapping) or not any(hasattr(each, "interaction_id") for each in given.values()):
        return given
    from areal.workflow.openai.client import rows_of_interactions

    return await rows_of_interactions(given)


@runtime_checkable
class SamplesGroups(Protocol):
    """A workflow that can sample a whole group itself, which is cheaper than so many episodes."""

    def can_group(self, engine: Any, size: int) -> bool: ...

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[Answered | Exception]:
        """Of each member its row, or what kept it. Raises what kept all."""
        ...


class GroupedWorkflow(RolloutWorkflow):
    """Rejected episodes are left out; a group that has none left is rejected. One that fails fails the group, unless
    the others may do without it (``whole`` false): then the group is short, and only fails when all do."""

    def __init__(self, workflow: RolloutWorkflow, group_size: int, *, whole: bool = True) -> None:
        self._workflow = workflow
        self._together = workflow if isinstance(workflow, SamplesGroups) else None
        self._size = group_size
        self._whole = whole
        self._left_out, self._say_at = 0, 1

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory | None:
        together = self._together
        if together is not None and together.can_group(engine, self._size):
            given = self._given(await together.arun_group(engine, data, self._size))
            return _of_sample(answered(list(given.values())), list(given))
        ends = self._given(await self._members(engine, data))
        rows = [_of_sample(end, [sample]) for sample, end in ends.items() if isinstance(end, dict)]
        return concat_padded_tensors(rows) if rows else None

    def _given(self, ends: Sequence[T | BaseException]) -> dict[int, T]:
        """By the number of the sample."""
        failures = [end for end in ends if isinstance(end, Exception)]
        if failures and (self._whole or len(failures) == self._size):
            raise failures[0]
        self._say_of(failures)
        return {sample: end for sample, end in enumerate(ends) if not isinstance(end, BaseException)}

    def _say_of(self, failures: Sequence[Exception]) -> None:
        """Nobody else hears of a member that is left out. The first, and then each time twice as many."""
        self._left_out += len(failures)
        if self._left_out >= self._say_at:
            self._say_at = 2 * self._left_out
            _log.warning(
                "%d samples failed and are left out of their groups; the last: %r", self._left_out, failures[-1]
            )

    async def _members(self, engine: Any, data: dict[str, Any]) -> list[Any]:
        engines = engine.for_group(self._size) if hasattr(engine, "for_group") else [engine] * self._size
        episodes = [
            asyncio.create_task(run_episode(self._workflow, each, dict(data)), name=f"member-{member}")
            for member, each in enumerate(engines)
        ]
        try:
            await asyncio.wait(episodes, return_when=asyncio.FIRST_EXCEPTION if self._whole else asyncio.ALL_COMPLETED)
        finally:
            for episode in episodes:
                episode.cancel()
            ends = await asyncio.gather(*episodes, return_exceptions=True)
        return ends


def _of_sample(trajectory: Trajectory, samples: list[int]) -> Trajectory:
    """With ``sample_ids`` [B]: ``samples``, one a row, or the one that all rows are of."""
    import torch

    if "attention_mask" not in trajectory:  # an external model's, as text
        return trajectory
    rows = len(trajectory["attention_mask"])
    return {**trajectory, "sample_ids": torch.tensor(samples, dtype=torch.int32).expand(rows)}
