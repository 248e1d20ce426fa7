"""What a trainer calls a workflow, as something that runs: a class, an instance, ``module:attr``, or an agent."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal.api.registry import Registry
from areal.api.workflow_api import RolloutWorkflow
from areal.errors import UsageFault
from areal.workflow.agents import AgentEpisodes, OnlineEpisodes, SharedHttp
from areal.workflow.grouped import GroupedWorkflow

if TYPE_CHECKING:
    from areal.api.config.rollout import AgentConfig

_REMEMBERED = 16
WORKFLOWS: Registry[Any] = Registry("workflow")


class Workflows:
    """Makes each workflow once: asking for the same again, with equal arguments, gives the same. ``whole``: a group
    that lacks a member is dropped, whatever the workflow (else where its ``gconfig`` says so)."""

    def __init__(self, agent: AgentConfig | None = None, *, whole: bool = False) -> None:
        self._agent = agent
        self._whole = whole
        self._http = SharedHttp()
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
        said = bool(getattr(kwargs.get("gconfig"), "drop_incomplete_group", False))
        return GroupedWorkflow(single, size, whole=self._whole or said)

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
