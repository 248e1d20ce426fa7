"""Workflows: agents, environments, real users and user-defined classes, found by name, for one sample or a group.

An agent (an object with ``async run``) calls the base URL of a recorded session, and the sampled tokens are exported as
training rows. Only the session's key links a call to an episode, so clients of any framework work. Each turn can have a
reward, by its id; the reward of the newest turn is sent last, because it seals the trajectory. In an environment, the
reward of a step belongs to the latest model call before it, and earlier turns get discounted returns along the
conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

from areal.api.workflow_api import AgentWorkflow, RolloutWorkflow, Trajectory
from areal.errors import ArealError, UsageFault
from areal.http import tracing
from areal.loading import Registry
from areal.rollout.sessions import discard, reward_session
from areal.rollout.tensors import RewardedResponse, check_rows, concat_padded_tensors, response_rows

if TYPE_CHECKING:
    from areal.api.config.rollout import AgentConfig
    from areal.client.inference import AsyncSession, Style
    from areal.client.trajectories import Trajectories


T = TypeVar("T")

_log = logging.getLogger(__name__)


_http_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
_CACHE_SIZE = 16
WORKFLOWS: Registry[Any] = Registry("workflow")
AGENTS_ADDRESS, AGENTS_KEY_FILE, AGENTS_RECORD = "AREAL_AGENTS_ADDR", "AREAL_AGENTS_KEY_FILE", "AREAL_AGENTS_SERVICE"


def shared_http_client() -> Any:
    """Return this event loop's HTTP client for agents' SDKs; None if ``openai`` is not installed. A client for each
    episode would open new connections and load the certificates again. ``async with`` and ``aclose`` do not close it,
    because other episodes use it."""
    loop = asyncio.get_running_loop()
    if loop not in _http_clients:
        _http_clients[loop] = _new_http_client()
    return _http_clients[loop]


def _new_http_client() -> Any:
    try:
        import openai
    except ImportError:
        return None

    class SharedHttpClient(openai.DefaultAsyncHttpxClient):
        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def aclose(self) -> None: ...

        async def close(self) -> None:
            await super().aclose()

    return SharedHttpClient()


async def close_shared_http_client() -> None:
    client = _http_clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.close()


class ExportingWorkflow(RolloutWorkflow):
    """A workflow whose trajectories are exported from recorded sessions. ``discount``: the factor by which a turn's
    reward counts for the previous turn. ``style``: rows are turns, or conversations. None means the configured value,
    else 1.0 and ``individual``."""

    def __init__(self, *, discount: float | None = None, style: Style | None = None) -> None:
        self._given = discount, style
        self.set_export_defaults(1.0, "individual")

    def set_export_defaults(self, discount: float, style: Style) -> None:
        given_discount, given_style = self._given
        self._discount = discount if given_discount is None else given_discount
        self._style: Style = style if given_style is None else given_style


class SessionWorkflow(ExportingWorkflow):
    """A workflow with one recorded session for each episode: run, reward, export, acknowledge. An episode without a
    reward (None) is rejected."""

    @abstractmethod
    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        """Run the episode and return its reward: a number, numbers by interaction id, or None to reject the episode."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        (session,) = (await engine.start_sessions(1)).sessions
        try:
            reward = await self.run_session(session, engine, data)
            if reward is None:
                await discard(session.client, session.session_id)
                return None
            await reward_session(session, reward)
        except BaseException as error:
            await discard(session.client, session.session_id)
            if getattr(error, "code", None) == "no_interaction":
                raise UsageFault(
                    "the episode has a reward, and no call of the model to be rewarded: the agent calls the model with "
                    "the base_url and api_key of its episode"
                ) from None
            raise
        return await export_session(session, discount=self._discount, style=self._style)


async def export_session(session: AsyncSession, **options: Any) -> Trajectory | dict[str, Any]:
    """Export and acknowledge the sealed trajectories of a session. ``options``: ``discount`` and ``style``."""
    try:
        taken = await session.export(**options)
    except ArealError as error:
        if getattr(error, "param", None) != "format":
            raise
        taken = await session.export(**options, format="json")  # an external model has text without token columns
    await session.client.acknowledge(taken)
    return trajectory_rows(taken) if taken.columns else {"interactions": list(taken.interactions)}


def trajectory_rows(exported: Trajectories) -> Trajectory:
    """Return the columns as tensors, with ``truncated`` [B], ``parents`` [B] (the row that each continues, or -1) and
    ``sample_ids`` [B] (one number for the turns of a trajectory)."""
    import torch

    rows = exported.token_rows
    sealed = [(row["session_id"], row["trajectory_id"]) for row in rows]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(sealed))}
    places: dict[str | None, int] = {row["interaction_id"]: place for place, row in enumerate(rows)}
    columns: Trajectory = exported.torch()
    return {
        **columns,
        "truncated": torch.tensor([bool(row["truncated"]) for row in rows]),
        "parents": torch.tensor([places.get(row["parent_id"], -1) for row in rows], dtype=torch.int32),
        "sample_ids": torch.tensor([numbers[each] for each in sealed], dtype=torch.int32),
    }


class OnlineEpisodes(ExportingWorkflow):
    """Trajectories of real users. An episode waits until any online session has a complete one."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory:
        return trajectory_rows(await engine.lend(discount=self._discount, style=self._style))


class AgentEpisodes(SessionWorkflow):
    """Runs ``agent.run(data, base_url=, api_key=, model=, http_client=)``. The base URL is the service's root, as
    OpenAI's chat client and Anthropic's client expect; OpenAI's responses API is below its ``/v1``."""

    def __init__(self, agent: AgentWorkflow, **options: Any) -> None:
        super().__init__(**options)
        self._agent = agent
        os.environ.setdefault("OPENAI_DEFAULT_MODEL", "default")  # the OpenAI Agents SDK requires it

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        agent = type(self._agent).__name__
        with tracing.span(
            f"invoke_agent {agent}", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent}
        ):
            return await self._agent.run(
                data,
                base_url=engine.base_url,
                api_key=session.api_key,
                model=engine.model,
                http_client=shared_http_client(),
            )


async def run_episode(workflow: Any, engine: Any, data: dict[str, Any]) -> Any:
    """Run an episode and return its rows. If the workflow returns calls of ``ArealOpenAI`` clients, exports their
    rows."""
    given = await workflow.arun_episode(engine, data)
    if not isinstance(given, Mapping) or not any(hasattr(each, "interaction_id") for each in given.values()):
        return given
    interactions = {id(each.client): each for each in given.values()}  # one for each client, which is one sample
    rows = [await each.client.rows(each.style) for each in interactions.values()]
    return concat_padded_tensors([_with_sample_ids(each, [sample]) for sample, each in enumerate(rows)])


async def _run_member(workflow: Any, engine: Any, data: dict[str, object], member: int, *, check: bool) -> Any:
    with tracing.span("sample", {"areal.sample": member}):
        rows = await run_episode(workflow, engine, data)
    if check and rows is not None:  # before they are joined with others, which pads columns that are too short
        check_rows(rows)
    return rows


@runtime_checkable
class GroupSampler(Protocol):
    """A workflow that can sample a whole group in one call, which is cheaper than separate episodes."""

    def can_group(self, engine: Any, size: int) -> bool: ...

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[RewardedResponse | Exception]:
        """Return the response or the error of each member. Raises if the whole group fails."""


class GroupedWorkflow(RolloutWorkflow):
    """Several episodes of one prompt, for a group baseline. Rejected members are left out; a group without members is
    rejected. With ``drop_incomplete_group``, one failed member fails the group. Otherwise failed members are left out,
    and the group fails only if all of them fail. With ``check``, each member's rows are validated."""

    def __init__(
        self, workflow: RolloutWorkflow, group_size: int, *, drop_incomplete_group: bool = True, check: bool = True
    ) -> None:
        self._workflow = workflow
        self._group_sampler = workflow if isinstance(workflow, GroupSampler) else None
        self._size = group_size
        self._drop_incomplete_group = drop_incomplete_group
        self._check = check
        self._left_out, self._warn_at = 0, 1

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory | None:
        sampler = self._group_sampler
        if sampler is not None and sampler.can_group(engine, self._size):
            responses = self._completed(await sampler.arun_group(engine, data, self._size))
            return _with_sample_ids(response_rows(list(responses.values())), list(responses))
        ends = self._completed(await self._members(engine, data))
        rows = [_with_sample_ids(end, [sample]) for sample, end in ends.items() if end is not None]
        return concat_padded_tensors(rows) if rows else None

    def _completed(self, ends: Sequence[T | BaseException]) -> dict[int, T]:
        """Return the results of the members that did not fail, by sample number. Raises the group's error."""
        failures = [end for end in ends if isinstance(end, Exception)]
        if failures and (self._drop_incomplete_group or len(failures) == self._size):
            raise failures[0]
        # Members that are left out appear nowhere else, so the log names them, at 1, 2, 4, ... of them.
        self._left_out += len(failures)
        if self._left_out >= self._warn_at:
            self._warn_at = 2 * self._left_out
            _log.warning(
                "%d samples failed and are left out of their groups; the last: %r", self._left_out, failures[-1]
            )
        return {sample: end for sample, end in enumerate(ends) if not isinstance(end, BaseException)}

    async def _members(self, engine: Any, data: dict[str, object]) -> list[Any]:
        engines = engine.for_group(self._size) if hasattr(engine, "for_group") else [engine] * self._size
        episodes = [
            asyncio.create_task(
                _run_member(self._workflow, each, dict(data), member, check=self._check), name=f"member-{member}"
            )
            for member, each in enumerate(engines)
        ]
        try:
            until = asyncio.FIRST_EXCEPTION if self._drop_incomplete_group else asyncio.ALL_COMPLETED
            await asyncio.wait(episodes, return_when=until)
        finally:
            for episode in episodes:
                episode.cancel()
            ends = await asyncio.gather(*episodes, return_exceptions=True)
        return ends


def _with_sample_ids(trajectory: Trajectory, samples: list[int]) -> Trajectory:
    """Add ``sample_ids`` [B]: one for each row, or one for all rows."""
    import torch

    if "attention_mask" not in trajectory:  # text of an external model
        return trajectory
    rows = len(trajectory["attention_mask"])
    return {**trajectory, "sample_ids": torch.tensor(samples, dtype=torch.int32).expand(rows)}


def configured_workflow(name: str, default: str, environment: Mapping[str, str]) -> str:
    """Return ``name``. If an AgentService runs the job's episodes (``rollout.agents``), its workflow replaces
    ``default``."""
    return "areal.rollout.agents:AgentServiceWorkflow" if name == default and environment.get(AGENTS_ADDRESS) else name


class WorkflowResolver:
    """Creates workflows and caches them by their arguments. ``drop_incomplete_group`` true applies to all workflows;
    false: the ``gconfig`` of each workflow decides. ``check``: that of groups."""

    def __init__(
        self, agent: AgentConfig | None = None, *, drop_incomplete_group: bool = False, check: bool = True
    ) -> None:
        self._agent = agent
        self._check = check
        self._drop_incomplete_group = drop_incomplete_group
        self._cache: deque[tuple[Any, dict[str, object], int, RolloutWorkflow]] = deque(maxlen=_CACHE_SIZE)
        self._closing = contextlib.AsyncExitStack()

    def resolve(self, workflow: Any, kwargs: Mapping[str, Any] | None = None, group_size: int = 1) -> RolloutWorkflow:
        """Return a workflow for episodes. Raises UsageFault for other objects, and errors of its constructor."""
        if workflow is None and self._agent is not None and self._agent.mode == "online":
            workflow = OnlineEpisodes
        if workflow is None:
            workflow = self._agent.agent_cls_path if self._agent is not None else None
        if not workflow:
            raise UsageFault("no workflow was given", hint="workflow='areal.workflow.rlvr:RLVRWorkflow'")
        if group_size < 1:
            raise UsageFault(f"group_size must be at least 1, not {group_size}")
        given = dict(kwargs or {})
        for known, arguments, size, made in self._cache:
            if size == group_size and _same(known, workflow) and _same(arguments, given):
                return made
        made = self._single(workflow, given)
        self._configure_export(made)
        if group_size > 1:
            drop = self._drop_incomplete_group or bool(getattr(given.get("gconfig"), "drop_incomplete_group", False))
            made = GroupedWorkflow(made, group_size, drop_incomplete_group=drop, check=self._check)
        self._cache.append((workflow, given, group_size, made))
        return made

    async def close(self) -> None:
        """Close the workflows and agents that were created here and have ``async close()``."""
        await self._closing.aclose()

    def _configure_export(self, workflow: RolloutWorkflow) -> None:
        """Apply the configured export to a workflow that exports sessions; its arguments override it."""
        config = self._agent
        if config is None or (config.turn_discount, config.export_style) == (1.0, "individual"):
            return
        if isinstance(workflow, ExportingWorkflow):
            workflow.set_export_defaults(config.turn_discount, config.export_style)
            return
        _log.warning(
            "rollout.agent.turn_discount and export_style have no effect: %s exports no session",
            type(workflow).__name__,
        )

    def _single(self, workflow: Any, kwargs: dict[str, object]) -> RolloutWorkflow:
        found = WORKFLOWS.resolve(workflow) if isinstance(workflow, str) else workflow
        if inspect.isclass(found):
            try:
                inspect.signature(found).bind(**kwargs)
            except TypeError as error:
                hint = "workflow_kwargs are its constructor's arguments"
                raise UsageFault(f"{found.__name__}: {error}", hint=hint) from error
            found = found(**kwargs)
            if inspect.iscoroutinefunction(close := getattr(found, "close", None)):
                self._closing.push_async_callback(close)
        elif kwargs and (_has(found, "arun_episode") or _has(found, "run")):
            raise UsageFault(f"workflow_kwargs are for a class; {type(found).__name__} is made already")
        if isinstance(found, RolloutWorkflow) or _has(found, "arun_episode"):
            return found
        if _has(found, "run"):
            return AgentEpisodes(found)
        raise UsageFault(
            f"{type(found).__name__} is not a workflow: it has neither async arun_episode(engine, data) nor "
            "async run(data, **extra)"
        )


def _has(found: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(found, method, None))


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors have no single truth value
        return False
