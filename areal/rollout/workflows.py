"""From what a trainer calls a workflow (a class, an instance, ``module:attr``, or an agent) to what runs; and several
episodes of one prompt at once: the group that a baseline is computed over."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from areal.api.registry import Registry
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.errors import UsageFault
from areal.rollout.agents import AgentEpisodes, OnlineEpisodes, SharedHttpClient
from areal.rollout.tensors import RewardedResponse, concat_padded_tensors, response_rows

if TYPE_CHECKING:
    from areal.api.config.rollout import AgentConfig


T = TypeVar("T")

_log = logging.getLogger(__name__)


async def run_episode(workflow: Any, engine: Any, data: dict[str, Any]) -> Any:
    """The episode's rows, also where it returns the calls of its OpenAI clients."""
    given = await workflow.arun_episode(engine, data)
    if not isinstance(given, Mapping) or not any(hasattr(each, "interaction_id") for each in given.values()):
        return given
    from areal.rollout.openai_client import rows_of_interactions

    return await rows_of_interactions(given)


@runtime_checkable
class SamplesGroups(Protocol):
    """A workflow that can sample a whole group itself, which is cheaper than so many episodes."""

    def can_group(self, engine: Any, size: int) -> bool: ...

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[RewardedResponse | Exception]:
        """The row of each member, or its error. Raises the error of all of them."""
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
            return _of_sample(response_rows(list(given.values())), list(given))
        ends = self._given(await self._members(engine, data))
        rows = [_of_sample(end, [sample]) for sample, end in ends.items() if isinstance(end, dict)]
        return concat_padded_tensors(rows) if rows else None

    def _given(self, ends: Sequence[T | BaseException]) -> dict[int, T]:
        """Results by the number of the sample."""
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
    """Add ``sample_ids`` [B]: ``samples``, one per row, or one for all rows."""
    import torch

    if "attention_mask" not in trajectory:  # an external model's, as text
        return trajectory
    rows = len(trajectory["attention_mask"])
    return {**trajectory, "sample_ids": torch.tensor(samples, dtype=torch.int32).expand(rows)}


_REMEMBERED = 16
WORKFLOWS: Registry[Any] = Registry("workflow")


class WorkflowResolver:
    """Makes each workflow once: asking for the same again, with equal arguments, gives the same. ``whole``: a group
    that lacks a member is dropped, whatever the workflow (else where its ``gconfig`` says so)."""

    def __init__(self, agent: AgentConfig | None = None, *, whole: bool = False) -> None:
        self._agent = agent
        self._whole = whole
        self._http = SharedHttpClient()
        self._made: deque[tuple[Any, dict[str, Any], int, RolloutWorkflow]] = deque(maxlen=_REMEMBERED)

    def resolve(self, workflow: Any, kwargs: Mapping[str, Any] | None = None, group_size: int = 1) -> RolloutWorkflow:
        """Raises UsageFault for what is no workflow, and what its constructor raises."""
        if workflow is None and self._agent is not None and self._agent.mode == "online":
            workflow = OnlineEpisodes
        if workflow is None:
            workflow = self._agent.agent_cls_path if self._agent is not None else None
        if not workflow:
            raise UsageFault("no workflow was given", hint="workflow='areal.workflow.rlvr:RLVRWorkflow'")
        if group_size < 1:
            raise UsageFault(f"group_size must be at least 1, not {group_size}")
        given = dict(kwargs or {})
        for known, arguments, size, made in self._made:
            if size == group_size and _same(known, workflow) and _same(arguments, given):
                return made
        made = self._grouped(self._single(workflow, given), given, group_size)
        self._made.append((workflow, given, group_size, made))
        return made

    def _grouped(self, single: RolloutWorkflow, kwargs: Mapping[str, Any], size: int) -> RolloutWorkflow:
        if size == 1:
            return single
        configured = bool(getattr(kwargs.get("gconfig"), "drop_incomplete_group", False))
        return GroupedWorkflow(single, size, whole=self._whole or configured)

    def _single(self, workflow: Any, kwargs: dict[str, Any]) -> RolloutWorkflow:
        found = WORKFLOWS.resolve(workflow) if isinstance(workflow, str) else workflow
        if inspect.isclass(found):
            found = _made(found, kwargs)
        elif kwargs and _runs(found):
            raise UsageFault(f"workflow_kwargs are for a class; {type(found).__name__} is made already")
        if isinstance(found, RolloutWorkflow) or _has(found, "arun_episode"):
            runs: RolloutWorkflow = found
            return runs
        if _has(found, "run"):
            how = {"discount": self._agent.turn_discount, "style": self._agent.export_style} if self._agent else {}
            return AgentEpisodes(found, self._http, **how)
        raise UsageFault(
            f"{type(found).__name__} is no workflow: it has neither async arun_episode(engine, data) nor "
            "async run(data, **extra)"
        )

    async def close(self) -> None:
        await self._http.close()


def _has(found: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(found, method, None))


def _runs(found: Any) -> bool:
    return _has(found, "arun_episode") or _has(found, "run")


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # tensors have no one truth
        return False


def _made(cls: type, kwargs: dict[str, Any]) -> Any:
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise UsageFault(f"{cls.__name__}: {error}", hint="workflow_kwargs are its constructor's arguments") from error
    return cls(**kwargs)
