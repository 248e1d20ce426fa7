"""Runs the episodes of a collection: threads that each take the next one, until none is left.

The order within an episode is what makes a kill harmless: its session is noted before it is used, its
export is written to disk before it is acknowledged, and what is written decides what is done.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.client.http import AdminClient
from areal.client.loop_thread import LoopThread
from areal.dataset.examples import Example
from areal.errors import ArealError, NotFound
from areal.loading import call_with, load_callable
from areal.reward.answers import BUILT_IN
from areal.reward.frames import FunctionTarget, RewardError, RewardJob, RewardTimeout
from areal.reward.pool import RewardPool, number
from areal.rollout.collection_output import CollectionProgress, OutputFolder, outcome_of
from areal.rollout.failures import EpisodeFailed, FailureKind, failure_of_agent, refusal
from areal.rollout.sessions import CollectionSession, Exported, SessionService
from areal.trajectories.record import Episode, total_reward


@dataclass(frozen=True)
class AgentEndpoint:
    """The session that an agent talks to. ``base_url`` ends in ``/v1``, as OpenAI's SDK wants it.
    ``tokens``: whether the reward wants the answer's token ids."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = ""
    timeout_s: float = 600.0
    tokens: bool = False


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent. ``rewards`` by interaction id; the empty id is the last interaction. ``tokens``: ids of
    prompt and answer, where the endpoint wants them."""

    answer: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)


Agent = Callable[[Example, AgentEndpoint], AgentResult]  # raises EpisodeFailed, and ends within the endpoint's timeout

_LOAD_S = 120.0
_TOKENS = frozenset(("prompt_ids", "completion_ids"))
_FUNCTIONS = "areal.reward.functions"
_GRACE_S = 0.5  # for an async agent to end after its deadline


def single_turn(sampling: Mapping[str, Any]) -> Agent:
    """One answer to the example's messages."""

    def ask(example: Example, endpoint: AgentEndpoint) -> AgentResult:
        client = AdminClient(endpoint.base_url, endpoint.api_key, timeout_s=endpoint.timeout_s)
        body = {"model": endpoint.model, "messages": list(example.messages), **sampling}
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
    """Raises ArealError when there is no such code. It is looked up once, here."""
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

    return lambda example, endpoint: _run_within(
        lambda: call(example, endpoint), f"episode-{example.number}", endpoint.timeout_s
    )


def _number(value: Any) -> float:
    """Numbers of any library, but no truth values by accident: True is 1."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        message = f"the agent returned {type(value).__name__}, which is no text, reward, or rewards by interaction id"
        raise EpisodeFailed(FailureKind.AGENT, message) from error


def _run_within(work: Callable[[], AgentResult], name: str, timeout_s: float) -> AgentResult:
    """On a thread of its own, since nothing can stop a call from without: one that does not end in time is left behind,
    and the caller ends its session, so that what it still asks for is refused."""
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
    """Rewards for threads that wait: ``size`` processes of one function (``module:function`` or a built-in name), each
    call with a deadline. A reward that hangs, raises or crashes its process fails its episode and is never a number. A
    context manager. ``wants_tokens``: the function names token ids among its parameters."""

    def __init__(self, spec: str, size: int, deadline_s: float) -> None:
        self._spec = BUILT_IN.get(spec, spec)
        self._deadline_s = deadline_s
        self._pool = RewardPool(size)
        self.wants_tokens = False

    def __enter__(self) -> RewardScorer:
        """Raises ArealError with the message of the first process where it cannot load the function."""
        self._thread = LoopThread("areal-rewards")
        try:
            self.wants_tokens = not _TOKENS.isdisjoint(self._parameters())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._thread.run(self._pool.close())
        finally:
            self._thread.close()

    def _parameters(self) -> list[str]:
        try:
            done = self._thread.run(
                self._pool.run(RewardJob(FunctionTarget(_FUNCTIONS, "takes"), (self._spec,), {}), _LOAD_S)
            )
        except RewardError as error:
            raise ArealError(f"--reward {self._spec}: its process did not start: {error.message}") from error
        answer: dict[str, Any] = done.value or {"error": f"--reward {self._spec}: {done.error}"}
        if "error" in answer:
            raise ArealError(str(answer["error"]), hint=answer.get("hint"))
        return list(answer["takes"])

    def score(self, given: Mapping[str, Any]) -> float:
        """Raises EpisodeFailed. May be called from any thread."""
        job = RewardJob(FunctionTarget(_FUNCTIONS, "scorer", argument=self._spec), (dict(given),), {})
        try:
            done = self._thread.run(self._pool.run(job, self._deadline_s))
            if done.error is not None:
                raise EpisodeFailed(FailureKind.REWARD, done.error)
            return number(done.value)
        except RewardTimeout as error:
            message = f"the reward did not come within {self._deadline_s:g} s"
            raise EpisodeFailed(FailureKind.REWARD_TIMEOUT, message) from error
        except RewardError as error:
            raise EpisodeFailed(FailureKind.REWARD, error.message) from error


_LONGEST_PAUSE_S = 15.0
_PATIENCE = 8  # attempts in a row without an answer, in addition to those that run at the same time

Score = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class CollectionPlan:
    """``samples`` episodes of each example, ``concurrency`` at once. ``retries``: how often a failed one is tried
    again, ``timeout_s``: how long its agent may take, ``tokens``: the reward wants token ids."""

    model: str
    samples: int = 1
    concurrency: int = 32
    retries: int = 1
    timeout_s: float = 600.0
    tokens: bool = False


@dataclass
class _ExampleGroup:
    """One example's samples that are yet to be done. Their sessions are started together, by the first thread."""

    example: Example
    samples: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: dict[int, CollectionSession] = field(default_factory=dict)
    begun: bool = False


@dataclass
class Collection:
    """``score``: None where the agent rewards itself, or rewards are not given. Run it once."""

    service: SessionService
    agent: Agent
    score: Score | None
    output: OutputFolder
    examples: Sequence[Example]
    plan: CollectionPlan

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._broken: list[BaseException] = []
        self._silent = 0  # failures to reach the service since it last answered an episode
        self.progress = CollectionProgress(len(self.examples) * self.plan.samples)

    def run(
        self, interrupted: threading.Event, tick: Callable[[CollectionProgress], None], every_s: float = 0.2
    ) -> None:
        """Run all episodes; after ``interrupted``, only those that run already. Calls ``tick`` periodically."""
        done = self._recovered()
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
        if self._broken:
            raise self._broken[0]

    # -- what an earlier run left

    def _recovered(self) -> set[str]:
        """Names of the episodes that are done. What the folder holds beyond this plan stays there, uncounted."""
        done: set[str] = set()
        left = self.output.previous_run
        for episode in self.output.episodes():
            if episode.prompt < len(self.examples) and episode.sample < self.plan.samples:
                done.add(episode.episode)
                self.progress.outcomes.append(outcome_of(episode))
            if episode.episode in left.sessions and episode.episode not in left.acknowledged:
                self._acknowledge(episode.episode, episode.export_id)
        for example in self.examples:
            for sample in range(self.plan.samples):
                name = _name(example.number, sample)
                if (
                    name in left.sessions
                    and name not in done
                    and self._taken_over(example, sample, left.sessions[name])
                ):
                    done.add(name)
        self.progress.before = len(self.progress.outcomes)
        return done

    def _taken_over(self, example: Example, sample: int, session_id: str) -> bool:
        """Whether the session of an interrupted episode is complete: then its trajectory is written now, without the
        text of the answer, which was not kept."""
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

    # -- episodes

    def _episodes(self, done: set[str]) -> Iterator[tuple[_ExampleGroup, int]]:
        """Remaining episodes in the order of the data set, the samples of an example together."""
        for example in self.examples:
            left = tuple(s for s in range(self.plan.samples) if _name(example.number, s) not in done)
            group = _ExampleGroup(example, left)
            yield from ((group, sample) for sample in left)

    def _work(self, waiting: Iterator[tuple[_ExampleGroup, int]], interrupted: threading.Event) -> None:
        try:
            while not interrupted.is_set() and not self._broken:
                with self._lock:
                    following = next(waiting, None)
                if following is None:
                    return
                self._episode(*following, interrupted)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: a full disk ends the run with its error
            self._broken.append(error)

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
                    last = attempt == self.plan.retries or not failure.worth_retrying or interrupted.is_set()
                    self._count_silence(failure)
                    with self._lock:
                        if last:
                            self.progress.failed[failure.kind] += 1
                            return
                        self.progress.retried += 1
                    if failure.kind is FailureKind.UNREACHABLE:  # who is away now may be back in a moment
                        interrupted.wait(min(_LONGEST_PAUSE_S, 2.0**attempt) * random.uniform(0.5, 1.0))
        finally:
            with self._lock:
                self.progress.running -= 1

    def _count_silence(self, failure: EpisodeFailed) -> None:
        """A service that is away fails every episode in turn: better to stop, and go on when it is back."""
        with self._lock:
            self._silent = self._silent + 1 if failure.kind is FailureKind.UNREACHABLE else 0
            if self._silent >= _PATIENCE + 2 * self.plan.concurrency and not self._broken:
                message = f"the service has not answered {self._silent} attempts in a row: {failure.message}"
                self._broken.append(ArealError(message, hint="areal inf status; then the same command with --resume"))

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
        self._silent = 0
        self._finish(example, sample, exported, result.answer, time.monotonic() - began)

    def _session(self, group: _ExampleGroup, sample: int) -> CollectionSession:
        """The one that was started with its group; for a second attempt, one of its own."""
        with group.lock:
            if sample not in group.sessions:
                together = (sample,) if group.begun else group.samples
                task = f"collect-{self.output.run_id}.{group.example.number}"
                for each, session in zip(together, self._start(task, len(together)), strict=True):
                    group.begun = True
                    group.sessions[each] = session
                    self.output.started(_name(group.example.number, each), session.session_id)
            return group.sessions.pop(sample)

    def _start(self, task: str, count: int) -> list[CollectionSession]:
        """A service that refuses to start a session refuses all of them: its model or its key is another one."""
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
        """Acknowledge an export, as far as the service answers: the episode is on disk, and an unacknowledged export
        expires."""
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
    """The keywords that a reward may take."""
    ours = {
        "prompt": example.prompt,
        "messages": list(example.messages),
        "completion": result.answer,
        "completions": result.answer,
    }
    return {**example.fields, **ours, **result.tokens}
