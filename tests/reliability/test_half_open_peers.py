"""Peers that are there and do not do their part: processes held by SIGSTOP, and strangers behind a worker's address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.asking import CHAT, Failed, Line, Reply
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import MODEL, Fleet, place_of, running_fleet
from tests.reliability.peers import MANNERS, Peer, peer
from tests.reliability.scenes import NOTHING_MORE, RETRY, SERVED, Scene, failure, instruct, reached, scene_at
from tests.services.inference.recorder.rollouts import begin
from tests.services.inference.running_service import later
from tests.services.processes import Processes, halted, wait_ready, wait_until

STUCK = "Stopped processes (`SIGSTOP`)"
ENGINE = "Other servers at an engine's address"
WORKER = "Other servers at a data proxy's address"
PATIENCE_S = 0.7
QUICK = (
    "accepts and never answers",
    "resets the connection",
    "sends half a body and closes the connection",
    "speaks another protocol",
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Fleet]:
    """Two replicas, impatient."""
    folder = tmp_path_factory.mktemp("stuck")
    with running_fleet(folder, tokenizer, replicas=2, behind_gateway=True, relays=2) as fleet:
        fleet.configure(request_timeout_seconds=PATIENCE_S)
        yield fleet


def behaviours(part: str) -> list[Any]:
    """Each of them at a call; a few are enough for every day."""
    cases = []
    for name in MANNERS:
        slow = () if name in QUICK else (pytest.mark.slow,)
        cases.append(pytest.param(name, marks=(fault(part, name, "at a call"), *slow)))
    return cases


def scene_of(fleet: Fleet) -> tuple[Scene, int]:
    for engine in fleet.engines:
        instruct(engine)
    scene = scene_at(fleet)
    return scene, place_of(fleet, scene.rollout.session_id)


def neighbour(fleet: Fleet, place: int) -> Scene:
    """A session of the other replica."""
    while place_of(fleet, (other := scene_at(fleet)).rollout.session_id) == place:
        pass
    return other


def serves_on(other: Scene) -> str:
    assert isinstance(other.ask(), Reply)
    return "the other replica continues to serve"


@pytest.mark.parametrize(
    ("phase", "tokens"),
    [
        pytest.param("before the first byte", 0, marks=fault(STUCK, "engine", "before the first byte")),
        pytest.param("in a stream", 2, marks=(fault(STUCK, "engine", "in a stream"), pytest.mark.slow)),
    ],
)
def test_halted_engine_fails_in_time(fleet: Fleet, outcome: Outcome, phase: str, tokens: int) -> None:
    scene, place = scene_of(fleet)
    other = neighbour(fleet, place)
    engine = fleet.engines[place]
    instruct(engine, hold_after=tokens)
    body, line = scene.body(stream=tokens > 0), Line(fleet.front)
    running = later(line.ask, scene.rollout.key, CHAT, body, {"Idempotency-Key": "k"})
    reached(engine, tokens)
    assert tokens == 0 or line.begun.wait(20)
    with halted(engine.process.popen.pid):
        outcome.callers(failure(running.result(60)))
        outcome.recorded(scene.kept())
        outcome.healed(serves_on(other))
    instruct(engine)
    fleet.wait_ready()
    scene.until_answered(body, **{"Idempotency-Key": "k"}, **RETRY)
    assert scene.exported()
    outcome.healed("a retry is answered after it continues")


@pytest.mark.parametrize(
    ("phase", "tokens"),
    [
        pytest.param(
            "before the first byte", 0, marks=(fault(STUCK, "data proxy", "before the first byte"), pytest.mark.slow)
        ),
        pytest.param("in a stream", 2, marks=fault(STUCK, "data proxy", "in a stream")),
    ],
)
def test_halted_data_proxy_fails_in_time(fleet: Fleet, outcome: Outcome, phase: str, tokens: int) -> None:
    scene, place = scene_of(fleet)
    other = neighbour(fleet, place)
    instruct(fleet.engines[place], hold_after=tokens)
    body, line = scene.body(stream=tokens > 0), Line(fleet.front)
    running = later(line.ask, scene.rollout.key, CHAT, body, {"Idempotency-Key": "k"})
    reached(fleet.engines[place], tokens)
    assert tokens == 0 or line.begun.wait(20)
    with halted(fleet.proxies[place].process.popen.pid):
        outcome.callers(failure(running.result(60)))
        outcome.healed(serves_on(other))
    instruct(fleet.engines[place])
    fleet.wait_ready()
    scene.until_answered(body, **{"Idempotency-Key": "k"}, **RETRY)
    outcome.recorded("once" if scene.kept() == NOTHING_MORE else scene.kept())
    assert scene.exported()
    outcome.healed("a retry is answered after it continues")


@fault(STUCK, "router", "while calls are made")
def test_halted_router_does_not_affect_calls(fleet: Fleet, outcome: Outcome) -> None:
    assert fleet.router is not None
    scene, _ = scene_of(fleet)
    with halted(fleet.router.process.popen.pid):
        outcome.callers(failure(scene.ask()))
    outcome.recorded(scene.kept())
    fleet.wait_ready()
    assert isinstance(scene.ask(), Reply) and scene.exported()
    outcome.healed(SERVED)


@fault(STUCK, "one of two relays", "while calls are made")
def test_halted_relay_holds_only_its_callers(fleet: Fleet, outcome: Outcome) -> None:
    scene, _ = scene_of(fleet)
    stuck, free = Line(fleet.front), Line(fleet.front)
    victim = stuck.pid()
    while free.pid() == victim:
        free = Line(fleet.front)
    with halted(victim):
        waiting = later(stuck.ask, scene.rollout.key, CHAT, scene.body(), {})
        assert isinstance(free.ask(scene.rollout.key, CHAT, scene.body(), {"Idempotency-Key": "free"}), Reply)
        assert not waiting.done()
    outcome.callers(
        f"through the other relay: answered; through this one: {failure(waiting.result(60))} after it continues"
    )
    scene.acknowledged = scene.recorded()
    assert len(scene.acknowledged) == 3
    outcome.recorded("each call once")
    assert scene.exported()
    outcome.healed(SERVED)


@pytest.mark.parametrize("manners", behaviours(ENGINE))
def test_foreign_server_at_engine_address_fails_call(
    processes: Processes, tokenizer: Path, tmp_path: Path, outcome: Outcome, manners: str
) -> None:
    with peer(manners) as stranger:
        flags = ("--model", MODEL, "--engine", "embedded", "--engine-url", stranger.url)
        more = ("--state-dir", str(tmp_path / "state"), "--request-timeout", str(PATIENCE_S))
        proxy = processes.service("data_proxy", *flags, "--tokenizer-path", str(tokenizer), *more)
        wait_ready(proxy)
        rollout = begin(proxy, processes.key)
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        reply = Line(proxy).ask(rollout.key, CHAT, body, {})
        streamed = Line(proxy).ask(rollout.key, CHAT, {**body, "stream": True}, {})
    outcome.callers(failure(reply), f"as a stream {failure(streamed)}")
    detail = proxy.call("GET", f"/rl/sessions/{rollout.session_id}", key=processes.key).json()
    assert detail["trajectories"] == []
    outcome.recorded("nothing")
    wait_until(lambda: proxy.call("GET", "/health").json()["in_flight"] == 0, what="nothing is left running")
    outcome.healed("no call remains running")


@pytest.mark.parametrize("manners", behaviours(WORKER))
def test_foreign_server_at_proxy_address_fails_only_its_calls(fleet: Fleet, outcome: Outcome, manners: str) -> None:
    """It is asked beside a good one, by calls that have no session; what it did not begin is done elsewhere."""
    with peer(manners) as stranger:
        fleet.register(stranger.url)
        running = _call_that_meets(fleet, stranger)
        with contextlib.suppress(TimeoutError):
            running.result(4 * PATIENCE_S)
        if not running.done():  # the data proxy of a worker that is ready is trusted to keep the deadline
            outcome.callers("waits while the router considers the worker ready")
        stranger.close()
        outcome.callers(failure(running.result(60)) + " by another worker")
    fleet.register()
    outcome.recorded("nothing at the other server")
    assert isinstance(scene_at(fleet).ask(), Reply)
    outcome.healed(SERVED)


def _call_that_meets(fleet: Fleet, stranger: Peer) -> Future[Reply | Failed]:
    """The first of many calls that the stranger was given; equal ones would all go the same way."""
    for number in range(200):
        messages = [{"role": "user", "content": f"{number} bottles"}]
        body = {"messages": messages, "store": False, "return_token_ids": True}
        running = later(Line(fleet.front).ask, fleet.key, CHAT, body, {})
        wait_until(lambda running=running: stranger.calls or running.done(), what="somebody has it")
        if stranger.calls:
            return running
    raise AssertionError("the stranger was given nothing")
