"""Several episodes of one prompt, at once: the group that a baseline is computed over."""

from __future__ import annotations

import asyncio
from typing import Any

from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.workflow.tensors import concat_padded_tensors


class GroupedWorkflow(RolloutWorkflow):
    """Rejected episodes are left out; a group that has none left is rejected. One that fails fails the group, unless
    the others may do without it (``whole`` false): then the group is short, and only fails when all do."""

    def __init__(self, workflow: RolloutWorkflow, group_size: int, *, whole: bool = True) -> None:
        self._workflow = workflow
        self._size = group_size
        self._whole = whole

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory | None:
        engines = [
            engine.for_member(member) if hasattr(engine, "for_member") else engine for member in range(self._size)
        ]
        episodes = [
            asyncio.create_task(self._workflow.arun_episode(each, dict(data)), name=f"member-{member}")
            for member, each in enumerate(engines)
        ]
        try:
            await asyncio.wait(episodes, return_when=asyncio.FIRST_EXCEPTION if self._whole else asyncio.ALL_COMPLETED)
        finally:
            for episode in episodes:
                episode.cancel()
            ends = await asyncio.gather(*episodes, return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
        if failures and (self._whole or len(failures) == self._size):
            raise failures[0]
        given = [end for end in ends if isinstance(end, dict)]
        return concat_padded_tensors(given) if given else None
