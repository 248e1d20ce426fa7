"""What is gone for good, gone together, or comes back knowing nothing: replicas, engines, the whole service."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.asking import CHAT, Line, Reply
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import Fleet, place_of, running_fleet
from tests.reliability.scenes import NOTHING_MORE, RETRY, SERVED, Scene, failure, instruct, scene_at, status_of
from tests.services.inference.running_service import later, refuses_connections
from tests.services.processes import TERM, wait_until

PART = "Permanent and combined losses"
PATIENCE_S = 0.7


@pytest.fixture
def fleet(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    """Two replicas that take over from each other at once."""
    flags = ("--adopt-after", "0.2")
    with running_fleet(tmp_path, tokenizer, replicas=2, behind_gateway=True, proxy_flags=flags) as fleet:
        yield fleet


def scenes_of_both(fleet: Fleet) -> tuple[Scene, Scene]:
    """A session of either replica, the first one's first."""
    found: dict[int, Scene] = {}
    while len(found) < 2:
        scene = scene_at(fleet, turns=2)
        found.setdefault(place_of(fleet, scene.rollout.session_id), scene)
    return found[0], found[1]


@pytest.mark.extended
@fault(PART, "data proxy and its engine lost permanently", "idle")
def test_sessions_of_lost_replica_continue_at_sibling(fleet: Fleet, outcome: Outcome) -> None:
    scene, other = scenes_of_both(fleet)
    rewarded = scene_at(fleet)
    assert rewarded.rollout.post("/rl/set_reward", {"reward": 1.0}).status == 200
    fleet.proxies[0].kill()
    fleet.engines[0].kill()
    assert isinstance(other.ask(), Reply)
    outcome.callers(
        "sessions of the other replica: answered", f"its own sessions: {failure(scene.ask())} by the other replica"
    )
    assert scene.kept() == other.kept() == rewarded.kept() == NOTHING_MORE
    outcome.recorded("everything")
    assert scene.exported() and other.exported() and rewarded.exported()
    outcome.healed("every session is exported from the other replica")


@pytest.mark.slow
@fault(PART, "data proxy terminated (`SIGTERM`)", "in a stream")
def test_drained_data_proxy_finishes_stream_and_moves_sessions(fleet: Fleet, outcome: Outcome) -> None:
    scene, _ = scenes_of_both(fleet)
    engine, proxy = fleet.engines[0], fleet.proxies[0].process
    instruct(engine, hold_after=2)
    line, body = Line(fleet.front), scene.body(stream=True)
    running = later(line.ask, scene.rollout.key, CHAT, body, {"Idempotency-Key": "k"})
    assert line.begun.wait(20)
    proxy.signal(TERM)
    wait_until(lambda: refuses_connections(proxy), what="it drains")
    assert engine.call("POST", "/release").status == 200
    reply = running.result(60)
    outcome.callers(failure(reply))
    assert proxy.wait() == 0
    assert scene.until_answered(body, **{"Idempotency-Key": "k"}, **RETRY) == reply
    outcome.recorded("once" if scene.kept() == NOTHING_MORE else scene.kept())
    assert isinstance(scene.ask(), Reply) and scene.exported()
    outcome.healed("the session continues at the other replica")


@pytest.mark.slow
@fault(PART, "engine lost permanently", "its data proxy is alive")
def test_lost_engine_holds_its_sessions_until_replaced(fleet: Fleet, outcome: Outcome) -> None:
    scene, other = scenes_of_both(fleet)
    fleet.configure(request_timeout_seconds=PATIENCE_S)
    fleet.engines[0].kill()
    wait_until(lambda: fleet.proxies[0].call("GET", "/ready").status == 503, what="noticed")
    outcome.callers(f"a call: {failure(scene.ask())}")
    answer = scene.rollout.post("/rl/set_reward", {"reward": 1.0})
    outcome.callers(f"a reward: {status_of(answer)}", f"sessions of the other replica: {failure(other.ask())}")
    assert scene.kept() == other.kept() == NOTHING_MORE
    assert scene.exported() and other.exported()
    outcome.recorded("everything, and exported without the engine")
    fleet.engines[0].restart()
    fleet.wait_ready()
    assert isinstance(scene_at(fleet).ask(), Reply)
    outcome.healed("served when an engine is back")


@pytest.mark.extended
@fault(PART, "every process killed at once", "in calls")
def test_killed_service_returns_with_everything(fleet: Fleet, outcome: Outcome) -> None:
    scenes = scenes_of_both(fleet)
    for engine in fleet.engines:
        instruct(engine, hold_after=2)
    bodies = [scene.body(stream=True) for scene in scenes]
    lines = [Line(fleet.front) for _ in scenes]
    running = [
        later(line.ask, scene.rollout.key, CHAT, body, {"Idempotency-Key": "k"})
        for scene, line, body in zip(scenes, lines, bodies, strict=True)
    ]
    assert all(line.begun.wait(20) for line in lines)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # at once: else one could tell of another's death
        for member in fleet.members:
            member.process.popen.send_signal(number)
    for member in fleet.members:
        member.process.wait()
    outcome.callers(*(failure(each.result(60)) for each in running))
    for member in fleet.members:
        member.restart()
    fleet.register()
    fleet.wait_ready()
    for scene, body in zip(scenes, bodies, strict=True):
        scene.rollout.front = fleet.front
        scene.until_answered(body, **{"Idempotency-Key": "k"}, **RETRY)
        assert scene.kept() == NOTHING_MORE
        assert scene.exported()
    outcome.recorded("everything; retried calls once")
    outcome.healed("all exported")


@pytest.mark.slow
@fault(PART, "gateway and router restart without state", "before they are configured")
def test_emptied_gateway_and_router_refuse_then_serve(fleet: Fleet, outcome: Outcome) -> None:
    scene, _ = scenes_of_both(fleet)
    fleet.configure(request_timeout_seconds=PATIENCE_S)
    assert fleet.router is not None and fleet.gateway is not None
    for member in (fleet.gateway, fleet.router):
        member.kill()
    fleet.router.restart()
    fleet.gateway.restart()
    scene.rollout.front = fleet.front
    wait_until(lambda: fleet.front.call("GET", "/health").json()["router_connected"], what="it has a table")
    outcome.callers(failure(scene.ask()))
    fleet.register()
    fleet.wait_ready()
    assert isinstance(scene.ask(), Reply)
    assert scene.kept() == NOTHING_MORE
    outcome.recorded("everything")
    assert scene.exported()
    outcome.healed(f"{SERVED} as soon as the router is configured; engines are unchanged")


@pytest.mark.slow
@fault(PART, "one of two data proxies down", "at an export of sessions of both")
def test_export_of_two_replicas_waits_for_both(tmp_path: Path, tokenizer: Path, outcome: Outcome) -> None:
    with running_fleet(tmp_path, tokenizer, replicas=2, behind_gateway=True) as fleet:
        scenes = scenes_of_both(fleet)
        for scene in scenes:
            assert scene.rollout.post("/rl/set_reward", {"reward": 1.0}).status == 200
        request = {"session_ids": [scene.rollout.session_id for scene in scenes]}
        fleet.configure(request_timeout_seconds=PATIENCE_S)
        fleet.proxies[1].kill()
        outcome.callers(status_of(fleet.admin("POST", "/export_trajectories", request)))
        assert scenes[0].kept() == NOTHING_MORE
        fleet.proxies[1].restart()
        fleet.wait_ready()
        answers = [fleet.admin("POST", "/export_trajectories", request).json() for _ in range(2)]
        assert answers[0] == answers[1]
        names = [row["interaction_id"] for row in answers[0]["rows"]]
        assert names == [name for scene in scenes for name in scene.acknowledged]
        outcome.recorded("nothing is exported partially")
        outcome.healed("exported completely when it is back; a repeated export is the same")


@pytest.mark.slow
@fault(PART, "engine dead", "at a pause of all workers")
def test_pause_failing_on_one_worker_is_reported(fleet: Fleet, outcome: Outcome) -> None:
    scene, other = scenes_of_both(fleet)
    fleet.engines[0].kill()
    answer = fleet.admin("POST", "/pause_generation/all", {})
    results = sorted(str(result["status"]) for result in answer.json()["results"])
    outcome.callers(f"{answer.status}; results of the workers: {' and '.join(results)}")
    fleet.engines[0].restart()
    fleet.wait_ready()
    assert fleet.admin("POST", "/continue_generation/all", {}).status == 200
    assert isinstance(scene.ask(), Reply) and isinstance(other.ask(), Reply)
    assert scene.kept() == other.kept() == NOTHING_MORE
    outcome.recorded("everything")
    assert scene.exported() and other.exported()
    outcome.healed(f"{SERVED} after the next continue")
