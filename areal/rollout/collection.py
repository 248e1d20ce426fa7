"""Runs the episodes of a collection on threads; each thread takes the next episode until none is left.

The order within an episode makes a kill harmless: its session is journaled before it is used, and its export is on disk
before it is acknowledged. The episodes on disk alone decide which ones a resumed run skips.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areal.client.http import AdminClient
from areal.client.loop_thread import LoopThread
from areal.dataclasses import dataclass, field
from areal.dataset.examples import Example
from areal.errors import ArealError, NotFound, UsageFault, did_you_mean
from areal.loading import call_with, load_callable
from areal.reward.answers import BUILT_IN
from areal.reward.frames import FunctionTarget, RewardError, RewardTimeout
from areal.reward.pool import RewardPool, number
from areal.rollout.collection_output import CollectionProgress, OutputFolder, outcome_of
from areal.rollout.failures import EpisodeFailed, FailureKind, failure_of_agent, refusal
from areal.rollout.sessions import CollectionSession, Exported, SessionService
from areal.trajectories.record import Episode, total_reward


@dataclass(frozen=True)
class AgentEndpoint:
    """The session that an agent calls. ``base_url`` ends in ``/v1``, as OpenAI's SDK expects. ``tokens``: whether the
    reward function takes the answer's token ids."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = ""
    timeout_s: float = 600.0
    tokens: bool = False


@dataclass(frozen=True)
class AgentResult:
    """``rewards`` by interaction id; the empty id is the last interaction. ``tokens``: the ids of prompt and answer,
    where ``AgentEndpoint.tokens`` asks for them."""

    answer: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


Agent = Callable[[Example, AgentEndpoint], AgentResult]  # raises EpisodeFailed, and ends within the endpoint's timeout

_LOAD_S = 120.0
_TOKENS = frozenset(("prompt_ids", "completion_ids"))
_OURS = frozenset(("prompt", "messages", "completion", "completions"))
_FUNCTIONS = "areal.reward.functions"
_GRACE_S = 0.5  # an async agent gets this long to end after its deadline


def single_turn(sampling: Mapping[str, Any]) -> Agent:
    """One answer to the example's messages."""

    def ask(example: Example, endpoint: AgentEndpoint) -> AgentResult:
        client = AdminClient(endpoint.base_url, endpoint.api_key, timeout_s=endpoint.timeout_s)
        body = {"model": endpoint.model, "messages": list(example.messages), **sampling}
        if example.tools:
            body["tools"] = list(example.tools)
        if endpoint.tokens:
            body["return_token_ids"] = True
        try:
            status, document = client.post("/chat/completions", body)
        except TimeoutError as error:
            raise EpisodeFailed(FailureKind.TIMEOUT, f"no answer within {endpoint.timeout_s:g} s") from error
        except OSError as error:
            raise EpisodeFailed(FailureKind.UNREACHABLE, f"{endpoint.base_url}: {error}") from error
        if status != 200:
            raise refusal(status, document)
        try:
            choice = document["choices"][0]
            text = choice["message"].get("content") or ""
            prompt_ids, completion_ids = document.get("prompt_token_ids") or [], choice.get("token_ids") or []
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EpisodeFailed(
                FailureKind.REFUSED, f"{endpoint.base_url} answered no completion: {error!r}"
            ) from error
        tokens = {"prompt_ids": prompt_ids, "completion_ids": completion_ids} if endpoint.tokens else {}
        return AgentResult(text, tokens=tokens)

    return ask


def named_agent(text: str) -> Agent:
    """Load the function or class once. Raises ArealError where it does not exist."""
    found = load_callable(text, "--workflow")

    def call(example: Example, endpoint: AgentEndpoint) -> AgentResult:
        function: Any = found() if inspect.isclass(found) else found
        function = getattr(function, "run", function)
        given = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        returned = call_with(function, dict(example.fields), given=given)
        if inspect.isawaitable(returned):
            returned = asyncio.run(asyncio.wait_for(returned, endpoint.timeout_s))
        if returned is None:
            return AgentResult()
        if isinstance(returned, str):
            return AgentResult(returned)
        if isinstance(returned, Mapping):
            return AgentResult(rewards={str(name): _number(value) for name, value in returned.items()})
        return AgentResult(rewards={"": _number(returned)})

    return lambda example, endpoint: _run_with_deadline(
        lambda: call(example, endpoint), f"episode-{example.number}", endpoint.timeout_s
    )


def _number(value: Any) -> float:
    """Accepts the number types of any library. Raises EpisodeFailed."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"the agent returned {type(value).__name__}, not a text, a reward, or rewards by interaction id"
        raise EpisodeFailed(FailureKind.AGENT, message) from error


def _run_with_deadline(work: Callable[[], AgentResult], name: str, timeout_s: float) -> AgentResult:
    """Run ``work`` on its own thread, because a call cannot be stopped from outside. A call that exceeds the deadline
    keeps running; the caller ends its session, so the service refuses its further requests."""
    outcome: list[AgentResult | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - the boundary to user code: its failure is data
            outcome.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s + _GRACE_S)
    if not outcome:
        raise EpisodeFailed(FailureKind.TIMEOUT, f"the agent did not end within {timeout_s:g} s")
    found = outcome[0]
    if isinstance(found, AgentResult):
        return found
    raise found if isinstance(found, EpisodeFailed) else failure_of_agent(found, timeout_s) from found


class RewardScorer:
    """A context manager of ``size`` processes that run one reward function (``module:function`` or a built-in name),
    each call with a deadline. A reward that hangs, raises or crashes its process fails its episode and is never a
    number. ``wants_tokens``: the function has a parameter for token ids. ``needs``: parameters without a default."""

    def __init__(self, spec: str, size: int, deadline_s: float) -> None:
        """Raises UsageFault for a name that is neither built in nor that of a function."""
        if spec not in BUILT_IN and ":" not in spec and "." not in spec:
            raise UsageFault(
                f"--reward {spec!r} is not built in{did_you_mean(spec, BUILT_IN)}",
                hint=f"{', '.join(BUILT_IN)}, or module:function, or path/to/file.py:function",
            )
        self._spec = BUILT_IN.get(spec, spec)
        self._deadline_s = deadline_s
        self._pool = RewardPool(size)
        self.wants_tokens = False
        self.needs: tuple[str, ...] = ()

    def __enter__(self) -> RewardScorer:
        """Raises ArealError with the message of the first process where it cannot load the function."""
        self._thread = LoopThread("areal-rewards")
        try:
            found = self._parameters()
            self.wants_tokens, self.needs = not _TOKENS.isdisjoint(found["takes"]), tuple(found["needs"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._thread.run(self._pool.close())
        finally:
            self._thread.close()

    def check_columns(self, examples: Sequence[Example]) -> None:
        """Raises UsageFault for the first example without a column that the function needs."""
        columns = [name for name in self.needs if name not in _OURS and name not in _TOKENS]
        for example in examples:
            if missing := [name for name in columns if name not in example.fields]:
                raise UsageFault(
                    f"the reward {self._spec} needs {', '.join(missing)}, and example {example.number} (from 0) has "
                    f"{', '.join(example.fields)}",
                    hint="rename the column, or give the parameter a default",
                )

    def _parameters(self) -> dict[str, list[str]]:
        try:
            target = FunctionTarget(_FUNCTIONS, "takes")
            (done,) = self._thread.run(self._pool.run(target, [((self._spec,), {})], _LOAD_S))
        except RewardError as error:
            raise ArealError(f"--reward {self._spec}: its process did not start: {error.message}") from error
        answer: dict[str, Any] = done.value or {"error": f"--reward {self._spec}: {done.error}"}
        if "error" in answer:
            raise ArealError(str(answer["error"]), hint=answer.get("hint"))
        return answer

    def score(self, given: Mapping[str, Any]) -> float:
        """Raises EpisodeFailed. May be called from any thread."""
        target = FunctionTarget(_FUNCTIONS, "scorer", argument=self._spec)
        try:
            (done,) = self._thread.run(self._pool.run(target, [((dict(given),), {})], self._deadline_s))
            if done.error is not None:
                raise EpisodeFailed(FailureKind.REWARD, done.error)
            return number(done.value)
        except RewardTimeout as error:
            message = f"the reward did not come within {self._deadline_s:g} s"
            raise EpisodeFailed(FailureKind.REWARD_TIMEOUT, message) from error
        except RewardError as error:
            raise EpisodeFailed(FailureKind.REWARD, error.message) from error


_LONGEST_PAUSE_S = 15.0
_MIN_UNREACHABLE = 8  # unanswered attempts in a row, on top of two for each concurrent episode, that end the run

Score = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class CollectionPlan:
    """``samples`` episodes of each example, ``concurrency`` at once. ``retries`` of a failed episode; ``timeout_s`` of
    its agent; ``tokens``: the reward function takes token ids."""

    model: str
    samples: int = 1
    concurrency: int = 32
    retries: int = 1
    timeout_s: float = 600.0
    tokens: bool = False


@dataclass
class _ExampleGroup:
    """The remaining samples of one example. The first thread starts the sessions of all of them together."""

    example: Example
    samples: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: dict[int, CollectionSession] = field(default_factory=dict)
    started: bool = False


@dataclass
class Collection:
    """Call ``run`` once. ``score``: None where the agent sets the rewards, or there are none."""

    service: SessionService
    agent: Agent
    score: Score | None
    output: OutputFolder
    examples: Sequence[Example]
    plan: CollectionPlan

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._unreachable = 0  # failed attempts since the service last answered one
        self.progress = CollectionProgress(len(self.examples) * self.plan.samples)

    def run(
        self, interrupted: threading.Event, tick: Callable[[CollectionProgress], None], every_s: float = 0.2
    ) -> None:
        """Run all episodes; after ``interrupted``, only those that run already. Calls ``tick`` periodically."""
        done = self._resume()
        waiting = self._episodes(done)
        threads = [
            threading.Thread(target=self._work, args=(waiting, interrupted), name=f"collect-{number}", daemon=True)
            for number in range(min(self.plan.concurrency, max(1, self.progress.planned - len(done))))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(every_s)
                tick(self.progress)
        if self._errors:
            raise self._errors[0]

    def _resume(self) -> set[str]:
        """The names of the finished episodes. Episodes in the folder beyond this plan are kept, but not counted."""
        done: set[str] = set()
        previous = self.output.previous_run
        for episode in self.output.episodes():
            if episode.prompt < len(self.examples) and episode.sample < self.plan.samples:
                done.add(episode.episode)
                self.progress.outcomes.append(outcome_of(episode))
            if episode.episode in previous.sessions and episode.episode not in previous.acknowledged:
                self._acknowledge(episode.episode, episode.export_id)
        for example in self.examples:
            for sample in range(self.plan.samples):
                name = _name(example.number, sample)
                session_id = previous.sessions.get(name) if name not in done else None
                if session_id is not None and self._export_previous(example, sample, session_id):
                    done.add(name)
        self.progress.before = len(self.progress.outcomes)
        return done

    def _export_previous(self, example: Example, sample: int, session_id: str) -> bool:
        """Export an interrupted episode's session where it is complete; whether it was. The text of the answer is lost
        with the killed process."""
        session, name = CollectionSession(session_id), _name(example.number, sample)
        try:
            exported = self.service.export(session)
        except EpisodeFailed as failure:
            if failure.kind is not FailureKind.LOST:
                raise ArealError(f"session {session_id} of an earlier run: {failure.message}") from failure
            return False
        if exported is None or (self.score is not None and not exported.rewarded):
            self._drop(name, session)
            return False
        self._finish(example, sample, exported, None, 0.0)
        return True

    def _episodes(self, done: set[str]) -> Iterator[tuple[_ExampleGroup, int]]:
        """The remaining episodes in the order of the data set, the samples of an example next to each other."""
        for example in self.examples:
            samples = tuple(s for s in range(self.plan.samples) if _name(example.number, s) not in done)
            group = _ExampleGroup(example, samples)
            yield from ((group, sample) for sample in samples)

    def _work(self, waiting: Iterator[tuple[_ExampleGroup, int]], interrupted: threading.Event) -> None:
        try:
            while not interrupted.is_set() and not self._errors:
                with self._lock:
                    following = next(waiting, None)
                if following is None:
                    return
                self._episode(*following, interrupted)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: a full disk ends the run with its error
            self._errors.append(error)

    def _episode(self, group: _ExampleGroup, sample: int, interrupted: threading.Event) -> None:
        name = _name(group.example.number, sample)
        with self._lock:
            self.progress.running += 1
        try:
            for attempt in range(self.plan.retries + 1):
                try:
                    self._attempt(group, sample)
                    return
                except EpisodeFailed as failure:
                    self.output.failed(name, attempt, failure)
                    last = attempt == self.plan.retries or not failure.retryable or interrupted.is_set()
                    self._count_unreachable(failure)
                    with self._lock:
                        if last:
                            self.progress.failed[failure.kind] += 1
                            if not self.progress.first_failure:
                                self.progress.first_failure = f"prompt {group.example.number}: {failure.message}"
                            return
                        self.progress.retried += 1
                    if failure.kind is FailureKind.UNREACHABLE:
                        interrupted.wait(min(_LONGEST_PAUSE_S, 2.0**attempt) * random.uniform(0.5, 1.0))
        finally:
            with self._lock:
                self.progress.running -= 1

    def _count_unreachable(self, failure: EpisodeFailed) -> None:
        """Stop the run where the service stays away: it would fail every remaining episode."""
        with self._lock:
            self._unreachable = self._unreachable + 1 if failure.kind is FailureKind.UNREACHABLE else 0
            if self._unreachable >= _MIN_UNREACHABLE + 2 * self.plan.concurrency and not self._errors:
                message = f"the service has not answered {self._unreachable} attempts in a row: {failure.message}"
                self._errors.append(ArealError(message, hint="areal inf status; then the same command with --resume"))

    def _attempt(self, group: _ExampleGroup, sample: int) -> None:
        began, example = time.monotonic(), group.example
        session = self._session(group, sample)
        try:
            endpoint = AgentEndpoint(
                f"{self.service.url}/v1", session.key, self.plan.model, self.plan.timeout_s, self.plan.tokens
            )
            result = self.agent(example, endpoint)
            scored = {"": self.score(_fields(example, result))} if self.score is not None else result.rewards
            self.service.seal(session, scored)
            exported = self.service.export(session)
            if exported is None:
                raise EpisodeFailed(FailureKind.NO_INTERACTION, "the agent ended without an answer of the model")
        except EpisodeFailed:
            self._drop(_name(example.number, sample), session)
            raise
        self._unreachable = 0
        self._finish(example, sample, exported, result.answer, time.monotonic() - began)

    def _session(self, group: _ExampleGroup, sample: int) -> CollectionSession:
        """The session that was started with the group; a retry starts a new one."""
        with group.lock:
            if sample not in group.sessions:
                together = (sample,) if group.started else group.samples
                task = f"collect-{self.output.run_id}.{group.example.number}"
                for each, session in zip(together, self._start(task, len(together)), strict=True):
                    group.started = True
                    group.sessions[each] = session
                    self.output.started(_name(group.example.number, each), session.session_id)
            return group.sessions.pop(sample)

    def _start(self, task: str, count: int) -> list[CollectionSession]:
        """Start sessions. A refusal ends the run: with a wrong model or key every later start fails too."""
        try:
            return self.service.start(task, count, self.plan.model)
        except EpisodeFailed as failure:
            if failure.kind is FailureKind.UNREACHABLE:
                raise
            problem = NotFound if failure.status == 404 else ArealError
            raise problem(
                f"the service does not start sessions of {self.plan.model}: {failure.message}",
                hint="areal inf models lists its models; the key has to be the service's own",
            ) from failure

    def _finish(self, example: Example, sample: int, exported: Exported, answer: str | None, seconds: float) -> None:
        episode = Episode(
            episode=_name(example.number, sample),
            interactions=exported.rows,
            prompt=example.number,
            sample=sample,
            reward=total_reward(exported.rows),
            answer=answer,
            seconds=seconds,
            export_id=exported.export_id,
            example=example.fields,
            failures=exported.failures,
        )
        self.output.write(episode)
        with self._lock:
            self.progress.outcomes.append(outcome_of(episode))
        self._acknowledge(episode.episode, episode.export_id)

    def _acknowledge(self, name: str, export_id: str) -> None:
        """Acknowledge an export. A failure is ignored: the episode is on disk, and an unacknowledged export expires."""
        try:
            self.service.acknowledge(export_id)
        except EpisodeFailed:
            return
        self.output.acknowledged(name)

    def _drop(self, name: str, session: CollectionSession) -> None:
        self.output.dropped(name, session.session_id)
        self.service.drop(session)


def _name(number: int, sample: int) -> str:
    return f"{number}-{sample}"


def _fields(example: Example, result: AgentResult) -> dict[str, Any]:
    """The keyword arguments for the reward function."""
    ours = {
        "prompt": example.prompt,
        "messages": list(example.messages),
        "completion": result.answer,
        "completions": result.answer,
    }
    return {**example.fields, **ours, **result.tokens}
