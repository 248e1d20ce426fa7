"""Runs the episodes of a collection: threads that each take the next one, until none is left.

The order within an episode is what makes a kill harmless: its session is noted before anything is asked of it, its
export is written to disk before it is acknowledged, and what is written decides what is done.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.collect.agents import Access, Agent, Said
from areal.collect.dataset import Example
from areal.collect.failures import EpisodeFailed, Kind
from areal.collect.output import OutputFolder
from areal.collect.sessions import Exported, Session, SessionService, in_order
from areal.collect.statistics import Tally, outcome_of
from areal.errors import ArealError, NotFound
from areal.trajectories.record import Episode, total_reward

_LONGEST_PAUSE_S = 15.0
_PATIENCE = 8  # attempts in a row without an answer, beside those that run at the same time

Score = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Plan:
    """``samples`` episodes of each example, ``concurrency`` at once. ``retries``: how often a failed one is tried
    again, ``timeout_s``: how long its agent may take, ``tokens``: the reward wants token ids."""

    model: str
    samples: int = 1
    concurrency: int = 32
    retries: int = 1
    timeout_s: float = 600.0
    tokens: bool = False


@dataclass
class _Group:
    """One example's samples that are yet to be done. Their sessions are started together, by whoever comes first."""

    example: Example
    samples: tuple[int, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: dict[int, Session] = field(default_factory=dict)
    begun: bool = False


class Collection:
    """``score``: None where the agent rewards itself, or nobody does. Run it once."""

    def __init__(
        self,
        service: SessionService,
        agent: Agent,
        score: Score | None,
        output: OutputFolder,
        examples: Sequence[Example],
        plan: Plan,
    ) -> None:
        self._service = service
        self._agent = agent
        self._score = score
        self._output = output
        self._examples = examples
        self._plan = plan
        self._lock = threading.Lock()
        self._broken: list[BaseException] = []
        self._silent = 0  # failures to reach the service since it last answered an episode
        self.tally = Tally(len(examples) * plan.samples)

    def run(self, interrupted: threading.Event, tick: Callable[[Tally], None], every_s: float = 0.2) -> None:
        """Until all is done, or until what runs has ended after ``interrupted``. Calls ``tick`` now and then."""
        done = self._recovered()
        waiting = self._episodes(done)
        threads = [
            threading.Thread(target=self._work, args=(waiting, interrupted), name=f"collect-{number}", daemon=True)
            for number in range(min(self._plan.concurrency, max(1, self.tally.planned - len(done))))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(every_s)
                tick(self.tally)
        if self._broken:
            raise self._broken[0]

    # -- what an earlier run left

    def _recovered(self) -> set[str]:
        """Names of the episodes that are done. What the folder holds beyond this plan stays there, uncounted."""
        done: set[str] = set()
        left = self._output.left
        for episode in self._output.episodes():
            if episode.prompt < len(self._examples) and episode.sample < self._plan.samples:
                done.add(episode.episode)
                self.tally.outcomes.append(outcome_of(episode))
            if episode.episode in left.sessions and episode.episode not in left.acknowledged:
                self._acknowledge(episode.episode, episode.export_id)
        for example in self._examples:
            for sample in range(self._plan.samples):
                name = _name(example.number, sample)
                if (
                    name in left.sessions
                    and name not in done
                    and self._taken_over(example, sample, left.sessions[name])
                ):
                    done.add(name)
        self.tally.before = len(self.tally.outcomes)
        return done

    def _taken_over(self, example: Example, sample: int, session_id: str) -> bool:
        """Whether the session of an episode that was under way had come to its end: then it is written now, without the
        text of its answer, which nobody kept."""
        session, name = Session(session_id), _name(example.number, sample)
        try:
            exported = self._service.export(session)
        except EpisodeFailed as failure:
            if failure.kind is not Kind.LOST:
                raise ArealError(f"session {session_id} of an earlier run: {failure.message}") from failure
            return False
        if exported is None or (self._score is not None and not exported.rewarded):
            self._drop(name, session)
            return False
        self._finish(example, sample, exported, None, 0.0)
        return True

    # -- episodes

    def _episodes(self, done: set[str]) -> Iterator[tuple[_Group, int]]:
        """In the data set's order, the samples of an example together."""
        for example in self._examples:
            left = tuple(s for s in range(self._plan.samples) if _name(example.number, s) not in done)
            group = _Group(example, left)
            yield from ((group, sample) for sample in left)

    def _work(self, waiting: Iterator[tuple[_Group, int]], interrupted: threading.Event) -> None:
        try:
            while not interrupted.is_set() and not self._broken:
                with self._lock:
                    following = next(waiting, None)
                if following is None:
                    return
                self._episode(*following, interrupted)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: a full disk ends the run, and is told
            self._broken.append(error)

    def _episode(self, group: _Group, sample: int, interrupted: threading.Event) -> None:
        name = _name(group.example.number, sample)
        with self._lock:
            self.tally.running += 1
        try:
            for attempt in range(self._plan.retries + 1):
                try:
                    self._attempt(group, sample)
                    return
                except EpisodeFailed as failure:
                    self._output.failed(name, attempt, failure)
                    last = attempt == self._plan.retries or not failure.worth_retrying or interrupted.is_set()
                    self._count_silence(failure)
                    with self._lock:
                        if last:
                            self.tally.failed[failure.kind] += 1
                            return
                        self.tally.retried += 1
                    if failure.kind is Kind.UNREACHABLE:  # who is away now may be back in a moment
                        interrupted.wait(min(_LONGEST_PAUSE_S, 2.0**attempt) * random.uniform(0.5, 1.0))
        finally:
            with self._lock:
                self.tally.running -= 1

    def _count_silence(self, failure: EpisodeFailed) -> None:
        """A service that is away fails every episode in turn: better to stop, and go on when it is back."""
        with self._lock:
            self._silent = self._silent + 1 if failure.kind is Kind.UNREACHABLE else 0
            if self._silent >= _PATIENCE + 2 * self._plan.concurrency and not self._broken:
                message = f"the service has not answered {self._silent} attempts in a row: {failure.message}"
                self._broken.append(ArealError(message, hint="areal inf status; then the same command with --resume"))

    def _attempt(self, group: _Group, sample: int) -> None:
        began, example = time.monotonic(), group.example
        session = self._session(group, sample)
        try:
            said = self._said(example, session)
            self._reward(example, session, said)
            exported = self._service.export(session)
            if exported is None:
                raise EpisodeFailed(Kind.NO_INTERACTION, "the agent ended without an answer of the model")
        except EpisodeFailed:
            self._drop(_name(example.number, sample), session)
            raise
        self._silent = 0
        self._finish(example, sample, exported, said.answer, time.monotonic() - began)

    def _session(self, group: _Group, sample: int) -> Session:
        """The one that was started with its group; for a second attempt, one of its own."""
        with group.lock:
            if sample not in group.sessions:
                together = (sample,) if group.begun else group.samples
                task = f"collect-{self._output.run_id}.{group.example.number}"
                for each, session in zip(together, self._start(task, len(together)), strict=True):
                    group.begun = True
                    group.sessions[each] = session
                    self._output.started(_name(group.example.number, each), session.session_id)
            return group.sessions.pop(sample)

    def _start(self, task: str, count: int) -> list[Session]:
        """A service that refuses to start a session refuses all of them: its model or its key is another one."""
        try:
            return self._service.start(task, count, self._plan.model)
        except EpisodeFailed as failure:
            if failure.kind is Kind.UNREACHABLE:
                raise
            problem = NotFound if failure.status == 404 else ArealError
            raise problem(
                f"the service does not start sessions of {self._plan.model}: {failure.message}",
                hint="areal inf models lists its models; the key has to be the service's own",
            ) from failure

    def _said(self, example: Example, session: Session) -> Said:
        plan = self._plan
        access = Access(f"{self._service.url}/v1", session.key, plan.model, plan.timeout_s, plan.tokens)
        return self._agent(example, access)

    def _reward(self, example: Example, session: Session, said: Said) -> None:
        """Rewards what there is to reward, and seals the trajectory."""
        rewards = dict(said.rewards)
        if self._score is not None:
            rewards = {"": self._score(_fields(example, said))}
        if len(rewards) > 1:
            rewards = dict(in_order(rewards, self._service.interactions(session)))
        sealed = False
        for interaction, value in rewards.items():
            sealed = self._given(session, value, interaction)
        if not sealed:
            self._service.end(session)

    def _given(self, session: Session, value: float, interaction: str) -> bool:
        try:
            return self._service.reward(session, value, interaction)
        except EpisodeFailed as failure:
            if failure.status == 400 and not interaction:
                raise EpisodeFailed(Kind.NO_INTERACTION, failure.message) from failure
            raise

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
        self._output.write(episode)
        with self._lock:
            self.tally.outcomes.append(outcome_of(episode))
        self._acknowledge(episode.episode, episode.export_id)

    def _acknowledge(self, name: str, export_id: str) -> None:
        """What is not acknowledged expires: a service that is away now is no reason to fail an episode that is here."""
        try:
            self._service.acknowledge(export_id)
        except EpisodeFailed:
            return
        self._output.acknowledged(name)

    def _drop(self, name: str, session: Session) -> None:
        self._output.dropped(name, session.session_id)
        self._service.drop(session)


def _name(number: int, sample: int) -> str:
    return f"{number}-{sample}"


def _fields(example: Example, said: Said) -> dict[str, Any]:
    """What a reward may ask for."""
    ours = {
        "prompt": example.prompt,
        "messages": list(example.messages),
        "completion": said.answer,
        "completions": said.answer,
    }
    return {**example.fields, **ours, **said.tokens}
