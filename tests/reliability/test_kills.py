"""``kill -9`` of each process in each phase of its work: what callers see, what is recorded, and that it heals.

The processes live as long as the module. Who is killed comes back on its port as its supervisor would bring it back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.reliability.asking import CHAT, Failed, Line, Reply
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import Fleet, Member, place_of, running_fleet
from tests.reliability.scenes import NOTHING_MORE, RETRY, Scene, failure, instruct, reached, scene_at
from tests.services.inference.running_service import later, refuses_connections
from tests.services.processes import wait_until

PART = "Killed processes (`kill -9`)"
BURST = 16


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("kills"), tokenizer, replicas=2, behind_gateway=True, relays=2) as fleet:
        yield fleet


@dataclass
class Stage:
    """A session on one of two replicas, and the connection on which its next call goes."""

    fleet: Fleet
    scene: Scene
    place: int
    line: Line
    relay: int
    calls: dict[str, tuple[dict[str, Any], Future[Any]]] = field(default_factory=dict)
    exports: tuple[Scene, dict[str, Any], list[Future[Any]]] | None = None

    @property
    def engine(self) -> Member:
        return self.fleet.engines[self.place]

    def run(self, line: Line | None = None, **more: Any) -> None:
        """A call in the background, with a key of its own."""
        scene, key = self.scene, f"key-{len(self.calls)}"
        scene.calls += 1
        body = scene.body(**more)
        front = line or Line(self.fleet.front)
        running = later(front.ask, scene.rollout.key, CHAT, body, {"Idempotency-Key": key})
        self.calls[key] = (body, running)

    def outcomes(self) -> list[Reply | Failed]:
        return [running.result(60) for _, running in self.calls.values()]

    def try_again(self) -> None:
        """Each call until it is answered; one that was answered before gets the same answer."""
        for key, (body, running) in self.calls.items():
            reply = self.scene.until_answered(body, **{"Idempotency-Key": key}, **RETRY)
            first = running.result(60)
            assert isinstance(first, Failed) or first == reply


@pytest.fixture
def stage(fleet: Fleet) -> Iterator[Stage]:
    for engine in fleet.engines:
        instruct(engine)
    scene = scene_at(fleet)
    line = Line(fleet.front)
    yield Stage(fleet, scene, place_of(fleet, scene.rollout.session_id), line, line.pid())
    for engine in fleet.engines:
        engine.call("POST", "/continue_generation")


# -- what is killed


def _kill_relay(stage: Stage) -> None:
    os.kill(stage.relay, 9)
    wait_until(lambda: not psutil.pid_exists(stage.relay), what="it is gone")


def _kill_supervisor(stage: Stage) -> None:
    """Its relays end with it, after their streams."""
    _kill_member(_CHOICES["gateway's supervisor"])(stage)
    wait_until(lambda: refuses_connections(stage.fleet.front), what="the port is closed")


def _kill_member(choose: Callable[[Stage], Member | None]) -> Callable[[Stage], None]:
    def kill(stage: Stage) -> None:
        member = choose(stage)
        assert member is not None
        member.kill()

    return kill


def _restart(choose: Callable[[Stage], Member | None]) -> Callable[[Stage], None]:
    def restart(stage: Stage) -> None:
        member = choose(stage)
        assert member is not None
        member.restart()
        stage.scene.rollout.front = stage.fleet.front
        stage.fleet.heal(member)

    return restart


def _relay_is_back(stage: Stage) -> None:
    def others() -> bool:
        with contextlib.suppress(OSError):
            return Line(stage.fleet.front).pid() != stage.relay
        return False

    wait_until(others, what="another relay")


_CHOICES: dict[str, Callable[[Stage], Member | None]] = {
    "gateway's supervisor": lambda stage: stage.fleet.gateway,
    "router": lambda stage: stage.fleet.router,
    "data proxy": lambda stage: stage.fleet.proxies[stage.place],
    "engine": lambda stage: stage.engine,
}
VICTIMS = {name: (_kill_member(choose), _restart(choose)) for name, choose in _CHOICES.items()}
VICTIMS["gateway's supervisor"] = (_kill_supervisor, VICTIMS["gateway's supervisor"][1])
VICTIMS = {"gateway's relay": (_kill_relay, _relay_is_back), **VICTIMS}


# -- when: each starts what is going on, and returns when it is


def _idle(stage: Stage) -> None:
    """Nothing; the next call comes while the process is away."""


def _before_the_first_byte(stage: Stage) -> None:
    instruct(stage.engine, hold_after=0)
    stage.run(stage.line)
    reached(stage.engine, 0)


def _in_a_stream(stage: Stage) -> None:
    instruct(stage.engine, hold_after=2)
    stage.run(stage.line, stream=True)
    assert stage.line.begun.wait(20)


def _while_recording(stage: Stage) -> None:
    for number in range(BURST):
        stage.run(stage.line if number == 0 else None)
    wait_until(lambda: any(running.done() for _, running in stage.calls.values()), what="the first is acknowledged")


def _in_an_export(stage: Stage) -> None:
    """Of a session of its own, so that the first one has what it had."""
    other = scene_at(stage.fleet, turns=2)
    assert other.rollout.post("/rl/set_reward", {"reward": 0.5}).status == 200
    request = {"session_ids": [other.rollout.session_id]}
    answers = [later(stage.fleet.admin, "POST", "/export_trajectories", request) for _ in range(BURST)]
    wait_until(lambda: any(answer.done() for answer in answers), what="the first export is answered")
    stage.exports = (other, request, answers)


def _in_a_pause(stage: Stage) -> None:
    assert stage.fleet.admin("POST", "/pause_generation/all", {}).status == 200
    stage.run(stage.line)
    reached(stage.engine, 0)


PHASES = {
    "idle": _idle,
    "before the first byte": _before_the_first_byte,
    "in a stream": _in_a_stream,
    "while it records": _while_recording,
    "in an export": _in_an_export,
    "in a pause": _in_a_pause,
}
QUICK = {*(("data proxy", phase) for phase in PHASES), *((victim, "in a stream") for victim in VICTIMS)}
CASES = [
    pytest.param(
        victim,
        phase,
        marks=(fault(PART, victim, phase), *(() if (victim, phase) in QUICK else (pytest.mark.slow,))),
        id=f"{victim}, {phase}",
    )
    for victim in VICTIMS
    for phase in PHASES
]


@pytest.mark.parametrize(("victim", "phase"), CASES)
def test_killed_process_loses_nothing_acknowledged(stage: Stage, outcome: Outcome, victim: str, phase: str) -> None:
    kill, heal = VICTIMS[victim]
    PHASES[phase](stage)
    kill(stage)
    if phase == "idle":
        stage.run()
    with contextlib.suppress(OSError):  # the engine itself may be the one
        stage.engine.call("POST", "/release")
    heal(stage)
    if phase == "in a pause":
        assert stage.fleet.admin("POST", "/continue_generation/all", {}).status == 200
    _tell_callers(stage, outcome, phase)
    stage.try_again()
    if sorted(stage.scene.recorded()) == sorted(stage.scene.acknowledged):
        stage.scene.acknowledged = stage.scene.recorded()
    assert stage.scene.kept() == NOTHING_MORE
    outcome.recorded("each call once")
    assert stage.scene.exported()
    outcome.healed("every retry is answered; everything is exported")


@pytest.mark.parametrize("victim", ["data proxy", "engine"])
def test_second_sample_is_kept_distinct_when_process_is_killed(stage: Stage, victim: str) -> None:
    """The relay tries again what no caller has repeated."""
    kill, heal = VICTIMS[victim]
    body = stage.scene.body()
    assert isinstance(stage.scene.ask(body), Reply)
    instruct(stage.engine, hold_after=0)
    second = later(stage.scene.ask, body)
    reached(stage.engine, 0)
    kill(stage)
    if victim != "engine":
        stage.engine.call("POST", "/release")
    heal(stage)
    assert isinstance(second.result(60), Reply)
    assert len(set(stage.scene.acknowledged)) == 3
    assert stage.scene.kept() == NOTHING_MORE


def _tell_callers(stage: Stage, outcome: Outcome, phase: str) -> None:
    if phase == "in an export":
        _tell_exports(stage, outcome)
        return
    outcomes = stage.outcomes()
    if phase != "while it records":
        outcome.callers(*map(failure, outcomes))
        return
    assert any(isinstance(each, Reply) for each in outcomes)
    outcome.callers("answered, or an error")


def _tell_exports(stage: Stage, outcome: Outcome) -> None:
    assert stage.exports is not None
    other, request, exports = stage.exports
    answers = [each.result().json() for each in exports if each.exception() is None and each.result().status == 200]
    again = stage.fleet.admin("POST", "/export_trajectories", request)
    assert all(each == again.json() for each in answers)
    assert [row["interaction_id"] for row in again.json()["rows"]] == other.acknowledged
    outcome.callers("the same answer for every request, also later")
