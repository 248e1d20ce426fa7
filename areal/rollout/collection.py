"""Runs the episodes of a collection on the executor of the rollout engine. It reads examples and writes trajectories to
disk.

A kill loses nothing, because of the order within an episode: the journal records the session before it is used, and the
export is on disk before it is acknowledged. A resumed run skips exactly the episodes that are on disk.

It works on an installation without extras: it imports neither torch nor NumPy.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from areal.client.errors import CallerError, ClientError, NotReady, UnknownName
from areal.dataclasses import dataclass, field, replace
from areal.dataset.examples import Example, ExampleSet
from areal.errors import ArealError, NotFound, UsageFault, did_you_mean
from areal.http import tracing
from areal.loading import call_with, check_call, load_callable
from areal.reward.answers import BUILT_IN
from areal.reward.frames import FunctionTarget, RewardError, RewardRaised, RewardTimeout
from areal.reward.functions import OWN_ARGUMENTS, Parameters, check_columns, float_of
from areal.reward.pool import RewardPool, number
from areal.rollout.collection_output import CollectionProgress, OutputFolder, outcome_of
from areal.rollout.executor import Executor, Outcome, run_attempts
from areal.rollout.failures import EpisodeFailed, FailureKind, failure_of
from areal.rollout.sessions import GroupSessions, discard, export_document, reward_session
from areal.rollout.staleness import EpisodeSpec, Rollout, StalenessManager, StalenessWindow
from areal.trajectories.record import Episode, rows_of_export, total_reward

if TYPE_CHECKING:
    from areal.client.inference import AsyncInferenceClient, AsyncSession, Style
    from areal.client.loop_thread import LoopThread

_LOAD_S = 120.0
_AGENT_ARGUMENTS = ("base_url", "api_key", "model")
_FURTHER = ("messages", "completion")  # arguments of a reward besides OWN_ARGUMENTS
_FUNCTIONS = "areal.reward.functions"
_LONGEST_PAUSE_S = 15.0
_LOOK_S = 0.1
_MIN_UNREACHABLE = 4  # unanswered attempts in a row that end the run, besides two for each concurrent episode


@dataclass(frozen=True)
class CollectionPlan:
    """The settings of a collection. ``samples``: episodes of each example. ``concurrency``: episodes at once.
    ``retries``: of a failed episode. ``timeout_s``: the agent's. ``tokens``: the reward function gets token ids.
    ``discount``, ``style``: the export's."""

    model: str
    samples: int = 1
    concurrency: int = 32
    retries: int = 1
    timeout_s: float = 600.0
    tokens: bool = False
    discount: float = 1.0
    style: Style = "individual"


@dataclass(frozen=True)
class AgentResult:
    """What an agent returned. ``rewards``: by interaction id; the empty id is the last interaction. ``tokens``: the ids
    of prompt and answer, if ``CollectionPlan.tokens`` requests them."""

    answer: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


Agent = Callable[[Example, "AsyncSession", CollectionPlan], Awaitable[AgentResult]]
"""Calls the session. It is cancelled after the plan's timeout."""


def single_turn(sampling: Mapping[str, object]) -> Agent:
    """Request one answer to the example's messages."""

    async def ask(example: Example, session: AsyncSession, plan: CollectionPlan) -> AgentResult:
        if example.messages[-1].get("role") == "assistant":
            raise EpisodeFailed(FailureKind.REFUSED, "the last message is the assistant's: a prompt has no answer")
        tools = {"tools": list(example.tools)} if example.tools else {}
        asked = {**sampling, **tools, **({"return_token_ids": True} if plan.tokens else {})}
        document = await session.chat(example.messages, timeout_s=2 * plan.timeout_s, **asked)
        try:
            choice = document["choices"][0]
            text = choice["message"].get("content") or ""
            prompt_ids, completion_ids = document.get("prompt_token_ids") or [], choice.get("token_ids") or []
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            message = f"{session.client.base_url} did not answer with a chat completion: {error!r}"
            raise EpisodeFailed(FailureKind.REFUSED, message) from error
        tokens = {"prompt_ids": prompt_ids, "completion_ids": completion_ids} if plan.tokens else {}
        return AgentResult(text, tokens=tokens)

    return ask


def named_agent(text: str) -> Agent:
    """Load a function or class, and return it as an agent. Each call runs on its own thread, because it cannot be
    stopped from outside. A call that exceeds the deadline keeps running, but its session is ended, so the service
    refuses its further requests. Raises ArealError if the function does not exist."""
    found = load_callable(text, "--workflow")
    given = dict.fromkeys(_AGENT_ARGUMENTS)
    try:
        if inspect.isclass(found):
            check_call(found, given={})
            static = isinstance(inspect.getattr_static(found, "run", None), staticmethod | classmethod)
            check_call(getattr(found, "run", found.__call__), *[None][static:], {}, given=given)
        else:
            check_call(getattr(found, "run", found), {}, given=given)
    except UsageFault as error:
        hint = f"it gets the row, and those of {', '.join(_AGENT_ARGUMENTS)} that it has parameters for"
        raise UsageFault(f"--workflow {text}: {error.message}", hint=hint) from error

    def call(example: Example, session: AsyncSession, plan: CollectionPlan) -> AgentResult:
        function: Any = found() if inspect.isclass(found) else found
        function = getattr(function, "run", function)
        values = (f"{session.client.base_url}/v1", session.api_key, plan.model)
        given = dict(zip(_AGENT_ARGUMENTS, values, strict=True))
        returned = call_with(function, dict(example.fields), given=given)
        if inspect.isawaitable(returned):
            returned = asyncio.run(asyncio.wait_for(returned, plan.timeout_s))
        if returned is None:
            return AgentResult()
        if isinstance(returned, str):
            return AgentResult(returned)
        if isinstance(returned, Mapping):
            return AgentResult(rewards={str(name): _number(value) for name, value in returned.items()})
        return AgentResult(rewards={"": _number(returned)})

    async def run(example: Example, session: AsyncSession, plan: CollectionPlan) -> AgentResult:
        result: Future[AgentResult] = Future()
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(call(example, session, plan))
            except BaseException as error:  # noqa: BLE001 - the boundary to user code: its failure is data
                result.set_exception(failure_of(error, plan.timeout_s))

        threading.Thread(target=work, name=f"episode-{example.number}", daemon=True).start()
        return await asyncio.wrap_future(result)

    return run


def _number(value: Any) -> float:
    """Convert a number of any library. Raises EpisodeFailed."""
    try:
        return float_of(value)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"the agent returned {type(value).__name__}, not a text, a reward, or rewards by interaction id"
        raise EpisodeFailed(FailureKind.AGENT, message) from error


class RewardScorer:
    """A context manager of ``size`` processes that run one reward function (``module:function`` or a built-in name),
    each call with a deadline. A reward that hangs, raises or crashes its process fails its episode and is never a
    number. ``parameters``: those of the function."""

    parameters: Parameters

    def __init__(self, spec: str, size: int, deadline_s: float, thread: LoopThread) -> None:
        """Create the scorer of ``spec``. ``thread`` runs the event loop that calls ``score``. Raises UsageFault for a
        name that is neither built in nor that of a function."""
        if spec not in BUILT_IN and ":" not in spec and "." not in spec:
            raise UsageFault(
                f"--reward {spec!r} is not built in{did_you_mean(spec, BUILT_IN)}",
                hint=f"{', '.join(BUILT_IN)}, or module:function, or path/to/file.py:function",
            )
        self._spec = BUILT_IN.get(spec, spec)
        self._deadline_s = deadline_s
        self._pool = RewardPool(size)
        self._thread = thread

    def __enter__(self) -> RewardScorer:
        """Start the processes. Raises UsageFault with the message of the first one if it cannot load the function."""
        try:
            target = FunctionTarget(_FUNCTIONS, "parameters_of")
            (done,) = self._thread.run(self._pool.run(target, [((self._spec,), {})], _LOAD_S))
            found: dict[str, Any] = done.value or {"error": f"--reward {self._spec}: {done.error}"}
            if "error" in found:
                raise UsageFault(str(found["error"]), hint=found.get("hint"))
        except BaseException as error:
            self.__exit__()
            if isinstance(error, RewardError):
                raise ArealError(f"--reward {self._spec}: its process did not start: {error.message}") from error
            raise
        self.parameters = found["parameters"]
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.run(self._pool.close())

    def check(self, dataset: ExampleSet, limit: int | None, *, tokens: bool) -> None:
        """Raise UsageFault for a function that does not reward single responses, or that needs columns which the first
        ``limit`` examples lack. ``tokens``: whether it will get token ids."""
        self.parameters.check_types()
        rows = (example.fields for example in dataset.examples[:limit])
        check_columns([self.parameters], rows, dataset.place, also=_FURTHER, tokens=tokens)

    async def score(self, example: Example, result: AgentResult) -> float:
        """Return the reward of a response. Raises RewardError."""
        target = FunctionTarget(_FUNCTIONS, "scorer", argument=self._spec)
        own = (example.prompt, result.answer, *(result.tokens.get(name) for name in OWN_ARGUMENTS[2:]))
        also = dict(zip(_FURTHER, (list(example.messages), result.answer), strict=True))
        try:
            (done,) = await self._pool.run(target, [((own, dict(example.fields), also), {})], self._deadline_s)
        except RewardTimeout as error:
            raise RewardTimeout(f"the reward did not come within {self._deadline_s:g} s") from error
        if done.error is not None:
            raise RewardRaised(done.error)
        return number(done.value)


Score = Callable[[Example, AgentResult], Awaitable[float]]


@dataclass
class Collection:
    """One run of a collection; call ``run`` once. ``score``: None if the agent sets the rewards, or there are none.
    ``place``: the file and line of an example, by its number."""

    agent: Agent
    score: Score | None
    output: OutputFolder
    examples: Sequence[Example]
    place: Callable[[int], str]
    plan: CollectionPlan
    client: AsyncInferenceClient = field(init=False)

    def __post_init__(self) -> None:
        """Read the episodes on disk. Those beyond this plan are kept, but not counted."""
        self._fault: Exception | None = None  # ends the run
        self._unreachable = 0  # failed attempts since the service last answered one
        self.progress = CollectionProgress(len(self.examples) * self.plan.samples)
        self._done: set[str] = set()
        self._unacknowledged: dict[str, str] = {}  # exports of episodes on disk
        previous = self.output.previous_run
        for episode in self.output.episodes():
            if episode.prompt < len(self.examples) and episode.sample < self.plan.samples:
                self._done.add(episode.episode)
                self.progress.outcomes.append(outcome_of(episode))
            if episode.episode in previous.sessions and episode.episode not in previous.acknowledged:
                self._unacknowledged[episode.episode] = episode.export_id
        self.progress.before = self.progress.done

    def run(
        self,
        client: AsyncInferenceClient,
        thread: LoopThread,
        interrupted: threading.Event,
        tick: Callable[[CollectionProgress], None],
        every_s: float = 0.2,
    ) -> None:
        """Run all episodes; after ``interrupted``, only those that run already. Calls ``tick`` periodically."""
        self.client = client
        running = thread.start(self._run(interrupted))
        while wait([running], every_s).not_done:
            tick(self.progress)
        tick(self.progress)
        running.result()

    async def _run(self, interrupted: threading.Event) -> None:
        async with self.client:
            await self._resume()
            executor = Executor(
                StalenessManager(StalenessWindow(0, 0, self.plan.concurrency)), lambda item: item.workflow(item)
            )
            await executor.run_each(self._remaining(interrupted), self.plan.concurrency)
        if self._fault is not None:
            raise self._fault

    async def _resume(self) -> None:
        """Acknowledge the exports of earlier runs, and export their complete sessions."""
        for name, export_id in self._unacknowledged.items():
            await self._acknowledge(name, export_id)
        sessions = self.output.previous_run.sessions
        for example in self.examples:
            for sample in range(self.plan.samples):
                name = _name(example.number, sample)
                session_id = sessions.get(name) if name not in self._done else None
                if session_id is not None and await self._export_previous(example, sample, session_id):
                    self._done.add(name)
        self.progress.before = self.progress.done

    async def _export_previous(self, example: Example, sample: int, session_id: str) -> bool:
        """Export the session of an interrupted episode if it is complete, and return whether it was. The text of the
        answer is lost with the killed process."""
        try:
            episode = await self._export(example, sample, session_id)
        except (ClientError, EpisodeFailed) as error:
            failure = failure_of(error, self.plan.timeout_s)
            if failure.kind is not FailureKind.LOST:
                raise ArealError(f"session {session_id} of an earlier run: {failure.message}") from failure
            return False
        if episode is None or not (self.score is None or any(row.rewarded for row in episode.interactions)):
            await self._drop(_name(example.number, sample), session_id)
            return False
        await self._finish(episode)
        return True

    def _remaining(self, interrupted: threading.Event) -> Iterator[EpisodeSpec]:
        """Yield the remaining episodes in the order of the data set, until the run ends. The samples of an example are
        adjacent and share ``GroupSessions``."""
        numbers = count()
        for example in self.examples:
            names = {sample: _name(example.number, sample) for sample in range(self.plan.samples)}
            names = {sample: name for sample, name in names.items() if name not in self._done}
            task = f"collect-{self.output.run_id}.{example.number}"
            model, note = self.plan.model, self._note_started
            group = GroupSessions(self.client, task, list(names.values()), note, model=model)
            for sample, name in names.items():
                if interrupted.is_set() or self._fault is not None:
                    return
                run = partial(self._episode, example=example, sample=sample, group=group, interrupted=interrupted)
                yield EpisodeSpec(next(numbers), example.fields, run, name, outside_window=True)

    def _note_started(self, name: str, session: AsyncSession) -> None:
        self.output.started(name, session.session_id)

    async def _episode(
        self, item: EpisodeSpec, example: Example, sample: int, group: GroupSessions[str], interrupted: threading.Event
    ) -> Outcome:
        if interrupted.is_set() or self._fault is not None:
            return None
        self.progress.running += 1
        try:
            attempt = partial(self._attempt, item, example, sample, group, interrupted)
            pause_s, sleep = partial(self._pause_s, example, sample, interrupted), partial(_sleep, interrupted)
            return await run_attempts(item.task_id, attempt, pause_s, {"areal.sample": sample}, sleep=sleep)
        except Exception as error:  # noqa: BLE001 - the run's boundary: a full disk ends it with its error
            self._fault = self._fault or error
            return None
        finally:
            self.progress.running -= 1

    def _pause_s(
        self, example: Example, sample: int, interrupted: threading.Event, error: Exception, number: int
    ) -> float | None:
        """Record a failed attempt, and return the seconds before the next; None for no other. Raises errors that are
        not the attempt's own."""
        if not isinstance(error, EpisodeFailed):
            raise error
        self.output.failed(_name(example.number, sample), number - 1, error)
        self._unreachable = self._unreachable + 1 if error.kind is FailureKind.UNREACHABLE else 0
        if self._unreachable >= _MIN_UNREACHABLE + 2 * self.plan.concurrency and self._fault is None:
            message = f"the service has not answered {self._unreachable} attempts in a row: {error.message}"
            self._fault = ArealError(message, hint="areal inf status; then the same command with --resume")
        if number > self.plan.retries or error.kind is FailureKind.REFUSED or interrupted.is_set():
            self.progress.failed[error.kind] += 1
            if not self.progress.first_failure:
                self.progress.first_failure = f"{self.place(example.number)}: {error.message}"
            return None
        if error.kind is not FailureKind.UNREACHABLE:
            return 0.0
        return min(_LONGEST_PAUSE_S, 2.0 ** (number - 1)) * random.uniform(0.5, 1.0)

    async def _attempt(
        self,
        item: EpisodeSpec,
        example: Example,
        sample: int,
        group: GroupSessions[str],
        interrupted: threading.Event,
        number: int,
    ) -> Rollout | None:
        if number > 1:
            if interrupted.is_set() or self._fault is not None:
                return None
            self.progress.retried += 1
        began = time.monotonic()
        session = await self._session(group, item.task_id)
        try:
            episode = await self._sample(example, sample, session)
        except Exception as error:
            await self._drop(item.task_id, session.session_id)
            if isinstance(error, EpisodeFailed):
                raise
            raise failure_of(error, self.plan.timeout_s) from error
        self._unreachable = 0
        await self._finish(replace(episode, seconds=time.monotonic() - began))
        return Rollout(item, None, 0, 0, number)

    async def _session(self, group: GroupSessions[str], name: str) -> AsyncSession:
        """Return a session for an episode. A refusal ends the run, because a wrong model or key fails all later
        starts."""
        try:
            return await group.take(name)
        except ClientError as error:
            failure = failure_of(error, self.plan.timeout_s)
            if failure.kind is FailureKind.UNREACHABLE:
                raise failure from error
            problem = NotFound if error.status == 404 else ArealError
            raise problem(
                f"the service does not start sessions of {self.plan.model}: {failure.message}",
                hint="areal inf models lists its models; the key has to be the service's own",
            ) from error

    async def _sample(self, example: Example, sample: int, session: AsyncSession) -> Episode:
        async with asyncio.timeout(self.plan.timeout_s):
            result = await self.agent(example, session, self.plan)
        rewards = result.rewards
        if self.score is not None:
            with tracing.span("reward") as span:
                rewards = {"": await self.score(example, result)}
                span.set({"areal.reward": rewards[""]})
        try:
            await reward_session(session, rewards)
        except UsageFault as error:
            raise EpisodeFailed(FailureKind.REFUSED, error.message) from error
        except CallerError as error:
            if error.status == 400 and "" in rewards:
                raise EpisodeFailed(FailureKind.NO_INTERACTION, error.message) from error
            raise
        episode = await self._export(example, sample, session.session_id)
        if episode is None:
            raise EpisodeFailed(FailureKind.NO_INTERACTION, "the agent ended without an answer of the model")
        return replace(episode, answer=result.answer)

    async def _export(self, example: Example, sample: int, session_id: str) -> Episode | None:
        """Return the episode of a session, the same until its export is acknowledged; None while none of its
        trajectories is ready. Raises ClientError, EpisodeFailed."""
        try:
            document = await export_document(self.client, session_id, self.plan.discount, self.plan.style)
            rows, export_id = rows_of_export(document), document["export_id"]
        except NotReady:
            return None
        except UnknownName as error:
            if error.code == "nothing_to_export":
                return None
            raise EpisodeFailed(FailureKind.LOST, f"session {session_id} is gone") from error
        except ValueError as error:
            message = f"the export of {session_id} is unreadable: {error}"
            raise EpisodeFailed(FailureKind.REFUSED, message) from error
        return Episode(
            episode=_name(example.number, sample),
            interactions=rows,
            prompt=example.number,
            sample=sample,
            reward=total_reward(rows),
            export_id=export_id,
            example=example.fields,
            failures=tuple(document.get("failures") or ()),
        )

    async def _finish(self, episode: Episode) -> None:
        await asyncio.to_thread(self.output.write, episode)
        self.progress.outcomes.append(outcome_of(episode))
        await self._acknowledge(episode.episode, episode.export_id)

    async def _acknowledge(self, name: str, export_id: str) -> None:
        """Acknowledge an export. A failure is ignored: the episode is on disk, and an unacknowledged export expires."""
        try:
            await self.client.acknowledge(export_id)
        except ClientError:
            return
        self.output.acknowledged(name)

    async def _drop(self, name: str, session_id: str) -> None:
        self.output.dropped(name, session_id)
        await discard(self.client, session_id)


async def _sleep(interrupted: threading.Event, seconds: float) -> None:
    """Sleep, at most until another thread sets ``interrupted``."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not interrupted.is_set():  # noqa: ASYNC110 - a thread's event
        await asyncio.sleep(min(left, _LOOK_S))


def _name(number: int, sample: int) -> str:
    return f"{number}-{sample}"
