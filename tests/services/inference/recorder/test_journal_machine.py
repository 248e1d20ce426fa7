"""Generated histories of one journal against a simple model, with kills and restarts at any point.

The model is plain lists in memory. After every step the journal must say what the model says: nothing acknowledged is
lost, nothing is there twice, and what is exported are exactly the tokens and versions that the engine saw.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.rows import Style
from areal.services.inference.recorder.session import ExportName
from tests.services.inference.recorder.support import Calls, Clock, check_warm, journal_in, start

TIMEOUT_S = 10.0
RETENTION_S = 600.0


@dataclass
class ModelTurn:
    prompt: list[int]
    output: list[int]
    version: int
    name: str
    reward: float | None = None


@dataclass
class ModelTrajectory:
    turns: list[ModelTurn] = field(default_factory=list)
    due: float | None = None
    ready: bool = False
    taken: bool = False

    def settle(self, now: float) -> None:
        if self.due is not None and self.due <= now:
            self.ready, self.due = True, None


@dataclass
class ModelSession:
    number: int
    session_id: str
    trajectories: list[ModelTrajectory] = field(default_factory=list)
    ended: bool = False
    removed: bool = False

    def settle(self, now: float) -> None:
        for trajectory in self.trajectories:
            trajectory.settle(now)

    def is_open(self) -> bool:
        return bool(self.trajectories) and not self.trajectories[-1].ready and self.trajectories[-1].due is None

    def ready(self) -> list[int]:
        return [number for number, each in enumerate(self.trajectories) if each.ready and not each.taken]


@dataclass
class ModelExport:
    name: ExportName
    request: ExportRequest
    traj: dict[str, Any]
    until: float


class JournalMachine(RuleBasedStateMachine):
    finish_timeout_s = 0.0

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="journal-machine-"))
        self.clock = Clock()
        self.calls = Calls()
        self.opened = 0
        self.sessions: list[ModelSession] = []
        self.exports: list[ModelExport] = []
        self.journal = self._open(self.root / "0")

    def _open(self, path: Path) -> Any:
        return self.runner.run(
            journal_in(path, self.clock, reward_finish_timeout=self.finish_timeout_s, ready_ttl=1e9, session_ttl=1e9)
        )

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.runner.run(self.journal.close())
            self.runner.close()
            shutil.rmtree(self.root)

    def run(self, awaitable: Any) -> Any:
        return self.runner.run(awaitable)

    def status(self, awaitable: Any) -> int:
        with pytest.raises(ApiError) as caught:
            self.run(awaitable)
        return caught.value.status

    def live(self) -> list[ModelSession]:
        return [session for session in self.sessions if not session.removed]

    def pick(self, data: st.DataObject) -> ModelSession:
        return data.draw(st.sampled_from(self.live()))

    # -- what callers do

    @rule()
    @precondition(lambda self: len(self.sessions) < 4)
    def start(self) -> None:
        number, session_id = self.run(start(self.journal))
        self.sessions.append(ModelSession(number, session_id))

    @rule(data=st.data(), n=st.integers(1, 2), length=st.integers(1, 4), version=st.integers(0, 3))
    @precondition(lambda self: self.live())
    def chat(self, data: st.DataObject, n: int, length: int, version: int) -> None:
        session = self.pick(data)
        earlier = session.trajectories[-1].turns if session.trajectories else []
        follows = bool(earlier) and data.draw(st.booleans())
        before = data.draw(st.sampled_from(earlier)) if follows else None
        prompt = [*(before.prompt + before.output if before else []), *range(length)]
        call = self.calls.tokens(prompt, list(range(length)), n=n, version=version)
        if session.ended:
            assert self.status(self.journal.record(session.number, call)) == 409
            return
        recorded = self.run(self.journal.record(session.number, call))
        session.settle(self.clock.now)
        if not session.is_open():
            for trajectory in session.trajectories[-1:]:
                trajectory.ready, trajectory.due = True, None
            session.trajectories.append(ModelTrajectory())
        assert recorded.trajectory == len(session.trajectories) - 1
        session.trajectories[-1].turns += [
            ModelTurn(prompt, [*range(length), choice], version, call.interaction_id(choice)) for choice in range(n)
        ]

    @rule(data=st.data(), value=st.sampled_from([0.0, 0.5, 1.0]), named=st.booleans())
    @precondition(lambda self: self.live())
    def reward(self, data: st.DataObject, value: float, named: bool) -> None:
        session = self.pick(data)
        session.settle(self.clock.now)
        held = [each for each in session.trajectories if each.turns]
        if not held:
            assert self.status(self.journal.reward(session.number, value)) == 400
            return
        trajectory = data.draw(st.sampled_from(held)) if named else held[-1]
        turn = data.draw(st.sampled_from(trajectory.turns)) if named else trajectory.turns[-1]
        newest = turn is trajectory.turns[-1]
        wanted = self.journal.reward(session.number, value, turn.name if named else None)
        if (trajectory.ready or trajectory.taken) and turn.reward != value:
            assert self.status(wanted) == 409
            return
        answered = self.run(wanted)
        transition = not trajectory.ready and newest and self.finish_timeout_s == 0
        if not trajectory.ready:
            turn.reward = value
            trajectory.ready = transition
            if self.finish_timeout_s and (newest or trajectory.due is not None):
                trajectory.due = self.clock.now + self.finish_timeout_s
        assert answered.trajectory_ready == trajectory.ready
        assert answered.ready_transition or not transition
        assert answered.interaction_count == len(trajectory.turns)

    @rule(data=st.data())
    @precondition(lambda self: self.live())
    def end(self, data: st.DataObject) -> None:
        session = self.pick(data)
        session.settle(self.clock.now)
        ended = self.run(self.journal.end(session.number))
        for trajectory in session.trajectories[-1:]:
            trajectory.ready, trajectory.due = True, None
        session.ended = True
        assert list(ended.ready) == session.ready()

    @rule(data=st.data(), remove=st.booleans(), style=st.sampled_from(Style))
    @precondition(lambda self: self.live())
    def export(self, data: st.DataObject, remove: bool, style: Style) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.live()), min_size=1, unique_by=lambda each: each.number))
        request = ExportRequest(tuple(each.session_id for each in chosen), style=style, remove=remove)
        if any(request == kept.request for kept in self.exports if kept.until > self.clock.now):
            return  # that is the rule ``repeat``
        for session in chosen:
            session.settle(self.clock.now)
        if unready := [session for session in chosen if not session.ready()]:
            # what has ended without a trajectory will never have one
            expected = {404 if session.ended else 425 for session in unready}
            assert self.status(self.journal.export(request)) in expected
            return
        kept, export = self.run(self.journal.export(request))
        self._check_rows(chosen, export.traj(), style)
        self.exports = [each for each in self.exports if each.request != request]
        self.exports.append(ModelExport(kept.name, request, export.traj(), self.clock.now + RETENTION_S))
        for session in chosen:
            for number in session.ready():
                session.trajectories[number].taken = True
            session.removed = remove and all(each.taken for each in session.trajectories)

    def _check_rows(self, chosen: list[ModelSession], traj: dict[str, Any], style: Style) -> None:
        """What the engine saw and sampled, token by token."""
        turns = [
            turn for session in chosen for number in session.ready() for turn in session.trajectories[number].turns
        ]
        rows = []
        for place, mask in enumerate(traj["attention_mask"]):
            length = sum(mask)
            columns = ("input_ids", "loss_mask", "versions", "logprobs")
            rows.append(list(zip(*(traj[name][place][:length] for name in columns), strict=True)))
        if style is Style.INDIVIDUAL:
            expected = [
                [(token, 0, -1, 0.0) for token in turn.prompt]
                + [(token, 1, turn.version, -0.5) for token in turn.output]
                for turn in turns
            ]
            assert rows == expected
            assert traj["original_rewards"] == [turn.reward or 0.0 for turn in turns]
            return
        whole = sorted([token for token, *_ in row] for row in rows)
        assert all(row in [turn.prompt + turn.output for turn in turns] for row in whole)
        for turn in turns:  # each turn's own tokens stand, generated, in some row
            ids, start_at = turn.prompt + turn.output, len(turn.prompt)
            assert any(
                [token for token, *_ in row[: len(ids)]] == ids
                and all(item[1:3] == (1, turn.version) for item in row[start_at : len(ids)])
                for row in rows
            )

    @rule(data=st.data())
    @precondition(lambda self: self.exports)
    def repeat(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.exports))
        if kept.until <= self.clock.now:
            return
        again, export = self.run(self.journal.export(kept.request))
        assert (again.name, export.traj()) == (kept.name, kept.traj)

    @rule(data=st.data())
    @precondition(lambda self: self.exports)
    def acknowledge(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.exports))
        self.run(self.journal.acknowledge(kept.name))
        self._gone(kept)

    def _gone(self, kept: ModelExport) -> None:
        self.exports.remove(kept)
        named = set(kept.request.session_ids)
        held = {session_id for each in self.exports for session_id in each.request.session_ids}
        for session in self.sessions:
            if session.session_id in named and session.session_id not in held:
                for trajectory in session.trajectories:
                    if trajectory.taken:
                        trajectory.turns = []

    # -- what happens to the process

    @rule(seconds=st.sampled_from([1.0, 11.0, 601.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        while self.run(self.journal.sweep()):
            pass
        for kept in [each for each in self.exports if each.until <= self.clock.now]:
            self._gone(kept)

    @rule()
    def restart(self) -> None:
        self.run(self.journal.close())
        self.journal = self._open(self.root / str(self.opened))

    @rule()
    def killed(self) -> None:
        """A copy of the files as they lie there now is all that a killed process leaves."""
        self.opened += 1
        shutil.copytree(self.root / str(self.opened - 1), self.root / str(self.opened))
        self.run(self.journal.close())
        self.journal = self._open(self.root / str(self.opened))

    @invariant()
    def journal_agrees(self) -> None:
        if not hasattr(self, "journal"):
            return
        check_warm(self.journal)
        for session in self.sessions:
            stored = self.journal.session(session.number)
            if session.removed:
                continue
            assert stored is not None
            held = {each.number: each for each in self.journal.trajectories(session.number)}
            for number, trajectory in enumerate(session.trajectories):
                if not trajectory.turns:
                    continue
                turns = self.run(self.journal.turns(stored, held[number])).turns
                assert [(turn.interaction_id, turn.reward) for turn in turns] == [
                    (turn.name, turn.reward) for turn in trajectory.turns
                ]


class SlowSealingMachine(JournalMachine):
    finish_timeout_s = TIMEOUT_S


_SETTINGS = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestAtOnce = JournalMachine.TestCase
TestAtOnce.settings = _SETTINGS
TestSlowSealing = pytest.mark.extended(SlowSealingMachine.TestCase)
TestSlowSealing.settings = _SETTINGS
