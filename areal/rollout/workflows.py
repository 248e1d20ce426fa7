"""Workflows: agents, environments, real users and code of its own, as a trainer names them; alone or in groups.

An agent (an object with ``async run``) talks to the base URL of a recorded session; what the engine sampled comes back
as training rows. The session's key alone ties a call to an episode, so any client of any framework will do. Each turn
may have a reward, by its id; the newest turn's is given last, because it seals the trajectory. In an environment a
step's reward goes to the newest model call before it, so the rows of earlier turns have returns by the discount along
the conversation, as in any other reinforcement learning.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from areal.api.workflow_api import Agent, AgentWorkflow, Environment, RolloutWorkflow, Trajectory
from areal.errors import ArealError, UsageFault
from areal.loading import Registry
from areal.rollout.sessions import seal
from areal.rollout.tensors import RewardedResponse, concat_padded_tensors, response_rows

if TYPE_CHECKING:
    from areal.api.config.rollout import AgentConfig
    from areal.client.inference import AsyncSession
    from areal.client.trajectories import Trajectories


T = TypeVar("T")

_log = logging.getLogger(__name__)
_CLEAN_UP_S = 10.0
_ONLINE_WAIT_S = 30.0


_http_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()


def shared_http_client() -> Any:
    """The HTTP client of this event loop for the SDKs of agents; None where no such library is installed. A client of
    its own would open connections for each episode, and read the machine's certificates again."""
    loop = asyncio.get_running_loop()
    if loop not in _http_clients:
        try:
            import openai
        except ImportError:
            _http_clients[loop] = None
        else:
            _http_clients[loop] = openai.DefaultAsyncHttpxClient()
    return _http_clients[loop]


async def close_shared_http_client() -> None:
    client = _http_clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


class SessionWorkflow(RolloutWorkflow):
    """One recorded session an episode: run, reward, export, acknowledge. Without a reward (None) it is rejected."""

    def __init__(self, *, discount: float = 1.0, style: Literal["individual", "concat"] = "individual") -> None:
        self._discount = discount
        self._style = style

    @abstractmethod
    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        """The episode itself; its reward: one number, some by interaction, or None."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        (session,) = (await engine.start_sessions(1)).sessions
        try:
            reward = await self.run_session(session, engine, data)
            if reward is None:
                await _discard(session)
                return None
            await reward_session(session, reward)
        except BaseException:
            with contextlib.suppress(ArealError, TimeoutError):  # what is left in the service expires
                async with asyncio.timeout(_CLEAN_UP_S):
                    await _discard(session)
            raise
        return await export_session(session, discount=self._discount, style=self._style)


async def export_session(session: AsyncSession, **options: Any) -> Trajectory | dict[str, Any]:
    """Export the sealed trajectories of a session and acknowledge them. ``options``: ``discount`` and ``style``."""
    try:
        taken = await session.export(**options)
    except ArealError as error:
        if getattr(error, "param", None) != "format":
            raise
        taken = await session.export(**options, format="json")  # an external model's: text, no columns
    await session.client.acknowledge(taken)
    return trajectory_rows(taken) if taken.columns else {"interactions": list(taken.interactions)}


def trajectory_rows(exported: Trajectories) -> Trajectory:
    """The columns as tensors, which rows ended because there was no more room, and which row each continues."""
    import torch

    rows = exported.token_rows
    places = {about["interaction_id"]: place for place, about in enumerate(rows)}
    columns: Trajectory = exported.torch()
    return {
        **columns,
        "truncated": torch.tensor([bool(about["truncated"]) for about in rows]),
        "parents": torch.tensor([places.get(about.get("parent_id"), -1) for about in rows], dtype=torch.int32),
    }


async def reward_session(session: AsyncSession, reward: float | Mapping[str, float]) -> None:
    """Reward the episode and seal it, whatever time the service leaves for further rewards."""
    steps, answer = seal(reward), None
    with contextlib.suppress(StopIteration):
        while True:
            call = steps.send(answer)  # type: ignore[arg-type]  # None starts it
            if call.kind == "describe":
                answer = await session.client.session(session.session_id)
            elif call.kind == "reward":
                answer = vars(await session.reward(call.reward, call.interaction_id))
            else:
                await session.end()


async def _discard(session: AsyncSession) -> None:
    """Leave nothing of the session in the service."""
    if await session.end():
        await session.client.acknowledge(await session.export(format="json"))


class OnlineEpisodes(RolloutWorkflow):
    """Trajectories of real users: whatever session has one ready. An episode waits until there is one."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Trajectory:
        while True:
            leases = await engine.client.lend(1, wait_s=_ONLINE_WAIT_S, kind="tokens")
            if leases:
                trajectory = trajectory_rows(leases[0].trajectories)
                await engine.client.acknowledge_leases(leases)
                return trajectory


class AgentEpisodes(SessionWorkflow):
    """``agent.run(data, base_url=, api_key=, model=, http_client=)``. The base URL is the service's root: what OpenAI's
    client needs for chat, and Anthropic's for messages; OpenAI responses are below ``/v1`` of it."""

    def __init__(self, agent: AgentWorkflow, **how: Any) -> None:
        super().__init__(**how)
        self._agent = agent
        os.environ.setdefault("OPENAI_DEFAULT_MODEL", "default")  # of the OpenAI Agents SDK: its session's, not theirs

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        return await self._agent.run(
            data,
            base_url=engine.base_url,
            api_key=session.api_key,
            model=engine.model,
            http_client=shared_http_client(),
        )


@dataclass
class _SessionChat:
    """A session's chats, and which of them came last."""

    session: AsyncSession
    model: str | None
    newest: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        answer = await self.session.chat(messages, **{"model": self.model, **fields})
        self.newest = answer["id"]
        return answer

    def reward(self, value: float) -> None:
        if self.newest is None:
            raise UsageFault("the agent acted without asking the model: its reward belongs to no answer")
        self.rewards[self.newest] = self.rewards.get(self.newest, 0.0) + value


class EnvironmentWorkflow(SessionWorkflow):
    """``agent`` and ``environment`` make a new one each episode; the environment gets the row as ``options``. Its
    methods run on a thread. ``max_steps`` ends an episode that the environment does not."""

    def __init__(
        self,
        agent: Callable[[], Agent],
        environment: Callable[[], Environment],
        *,
        max_steps: int = 64,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        self._make_agent = agent
        self._make_environment = environment
        self._max_steps = max_steps

    async def run_session(self, session: AsyncSession, engine: Any, data: dict[str, Any]) -> Any:
        agent, chat = self._make_agent(), _SessionChat(session, engine.model)
        environment = await asyncio.to_thread(self._make_environment)
        try:
            observation, _ = await asyncio.to_thread(environment.reset, seed=data.get("seed"), options=data)
            for _ in range(self._max_steps):
                action = await agent.act(observation, chat)
                observation, reward, terminated, truncated, _ = await asyncio.to_thread(environment.step, action)
                chat.reward(float(reward))
                if terminated or truncated:
                    break
        finally:
            await asyncio.to_thread(environment.close)
        return chat.rewards


# Groups: several episodes of one prompt, which a baseline is computed over


async def run_episode(workflow: Any, engine: Any, data: dict[str, Any]) -> Any:
    """The episode's rows, also where it returns the calls of its OpenAI clients."""
    given = await workflow.arun_episode(engine, data)
    if not isinstance(given, Mapping) or not any(hasattr(each, "interaction_id") for each in given.values()):
        return given
    interactions = {id(each.client): each for each in given.values()}  # one of each client: it exports all of its own
    return concat_padded_tensors([await each.client.rows(each.style) for each in interactions.values()])


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
        self._left_out, self._warn_at = 0, 1

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
        # Nobody else hears of a member that is left out: the first, and then each time twice as many.
        self._left_out += len(failures)
        if self._left_out >= self._warn_at:
            self._warn_at = 2 * self._left_out
            _log.warning(
                "%d samples failed and are left out of their groups; the last: %r", self._left_out, failures[-1]
            )
        return {sample: end for sample, end in enumerate(ends) if not isinstance(end, BaseException)}

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
AGENTS_ADDRESS, AGENTS_KEY_FILE, AGENTS_RECORD = "AREAL_AGENTS_ADDR", "AREAL_AGENTS_KEY_FILE", "AREAL_AGENTS_SERVICE"


def configured_workflow(name: str, default: str, environment: Mapping[str, str]) -> str:
    """``name``, unless it is the ``default`` and an AgentService runs the job's episodes (``rollout.agents``)."""
    return "areal.rollout.agents:AgentServiceWorkflow" if name == default and environment.get(AGENTS_ADDRESS) else name


class WorkflowResolver:
    """Makes each workflow once: asking for the same again, with equal arguments, gives the same. ``whole``: a group
    that lacks a member is dropped, whatever the workflow (else where its ``gconfig`` says so)."""

    def __init__(self, agent: AgentConfig | None = None, *, whole: bool = False) -> None:
        self._agent = agent
        self._whole = whole
        self._made: deque[tuple[Any, dict[str, Any], int, RolloutWorkflow]] = deque(maxlen=_REMEMBERED)
        self._closing = contextlib.AsyncExitStack()

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
        made = self._single(workflow, given)
        if group_size > 1:
            configured = bool(getattr(given.get("gconfig"), "drop_incomplete_group", False))
            made = GroupedWorkflow(made, group_size, whole=self._whole or configured)
        self._made.append((workflow, given, group_size, made))
        return made

    async def close(self) -> None:
        """Close the workflows and agents that were made here, as far as they have ``async close()``."""
        await self._closing.aclose()

    def _single(self, workflow: Any, kwargs: dict[str, Any]) -> RolloutWorkflow:
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
            runs: RolloutWorkflow = found
            return runs
        if _has(found, "run"):
            how = {"discount": self._agent.turn_discount, "style": self._agent.export_style} if self._agent else {}
            return AgentEpisodes(found, **how)
        raise UsageFault(
            f"{type(found).__name__} is no workflow: it has neither async arun_episode(engine, data) nor "
            "async run(data, **extra)"
        )


def _has(found: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(found, method, None))


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # tensors have no one truth
        return False
