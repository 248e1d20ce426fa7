"""Callers that dawdle, leave, crowd, or do not listen: they slow themselves, and no other caller."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.reliability.asking import CHAT, Line, Reply, ask
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.raw import dial, read_answer, request
from tests.reliability.scenes import SERVED, Scene, failure, furthest, instruct, reached, scene_at
from tests.services.inference.running_service import later
from tests.services.processes import Stream, wait_until

PART = "Slow, disconnecting and many callers"
IDLE = 10_000
STORM = 32


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("slow"), tokenizer, behind_gateway=True) as fleet:
        yield fleet


@pytest.fixture
def scene(fleet: Fleet) -> Scene:
    instruct(fleet.engines[0])
    return scene_at(fleet)


def served(scene: Scene) -> str:
    assert isinstance(scene.ask(), Reply)
    assert scene.exported()
    return SERVED


def nothing_runs(fleet: Fleet) -> None:
    for process in (fleet.front, fleet.proxies[0].process):
        wait_until(lambda: process.call("GET", "/health").json()["in_flight"] == 0, what="nothing runs")  # noqa: B023


@pytest.mark.parametrize(
    ("tokens", "stream"),
    [
        pytest.param(0, False, marks=fault(PART, "caller disconnects", "before the first byte")),
        pytest.param(2, True, marks=fault(PART, "caller disconnects", "in a stream")),
    ],
)
def test_caller_disconnect_ends_its_call(
    fleet: Fleet, scene: Scene, outcome: Outcome, tokens: int, stream: bool
) -> None:
    engine = fleet.engines[0]
    instruct(engine, hold_after=tokens)
    headers = {"Authorization": f"Bearer {scene.rollout.key}"}
    with contextlib.closing(dial(fleet.front)) as sock:
        sock.sendall(
            request(
                CHAT,
                headers,
                b'{"messages": [{"role": "user", "content": "x"}], "stream": %s}' % str(stream).lower().encode(),
            )
        )
        reached(engine, tokens)
        if stream:
            assert sock.recv(1)
    nothing_runs(fleet)
    assert engine.call("POST", "/release").status == 200
    outcome.callers("nothing (disconnected)")
    outcome.recorded(scene.kept())
    outcome.healed("the engine stops the call; " + served(scene))


@fault(PART, "caller half-closes the connection after its request", "before the first byte")
def test_half_closed_caller_is_answered(fleet: Fleet, scene: Scene, outcome: Outcome) -> None:
    instruct(fleet.engines[0], hold_after=0)
    headers = {"Authorization": f"Bearer {scene.rollout.key}"}
    with contextlib.closing(dial(fleet.front)) as sock:
        sock.sendall(request(CHAT, headers, b'{"messages": [{"role": "user", "content": "x"}]}'))
        reached(fleet.engines[0], 0)
        sock.shutdown(socket.SHUT_WR)
        outcome.callers(read_answer(sock.makefile("rb")))
    nothing_runs(fleet)
    assert fleet.engines[0].call("POST", "/release").status == 200
    outcome.recorded(scene.kept())
    outcome.healed(served(scene))


@fault(PART, "two requests sent at once on one connection", "at a call")
def test_pipelined_requests_are_answered_in_their_order(fleet: Fleet, scene: Scene, outcome: Outcome) -> None:
    headers = {"Authorization": f"Bearer {scene.rollout.key}"}
    chat = request(CHAT, headers, b'{"messages": [{"role": "user", "content": "x"}]}')
    with contextlib.closing(dial(fleet.front)) as sock:
        sock.sendall(chat + request("/v1/models", headers, method="GET"))
        reader = sock.makefile("rb")
        outcome.callers(f"{read_answer(reader)}, then {read_answer(reader)}")
    outcome.recorded(f"{len(scene.recorded()) - 1} interaction")
    scene.acknowledged = scene.recorded()
    outcome.healed(served(scene))


@fault(PART, f"{STORM} concurrent attempts of one call", "at a call")
def test_retry_storm_is_one_sample(fleet: Fleet, scene: Scene, outcome: Outcome) -> None:
    instruct(fleet.engines[0], hold_after=1)
    body = scene.body()
    calls = len(fleet.witness.calls())
    tries = [later(ask, fleet.front, scene.rollout.key, CHAT, body, {"Idempotency-Key": "k"}) for _ in range(STORM)]
    reached(fleet.engines[0], 1)
    assert fleet.engines[0].call("POST", "/release").status == 200
    answers = {each.result(60) for each in tries}
    assert len(answers) == 1
    outcome.callers("all get the same answer" if failure(answers.pop()) == "answered" else "not answered")
    assert len(fleet.witness.calls()) == calls + 1
    scene.acknowledged = scene.recorded()
    assert len(scene.acknowledged) == 2
    outcome.recorded("once")
    outcome.healed(served(scene))


@pytest.mark.slow
@fault(PART, "caller does not read its stream", "in a stream of eight times 50,000 tokens")
def test_slow_reader_slows_engine_only_for_itself(fleet: Fleet, scene: Scene, outcome: Outcome) -> None:
    tokens = 50_000
    instruct(fleet.engines[0], at_least=tokens)
    proxy = psutil.Process(fleet.proxies[0].process.popen.pid)
    before = proxy.memory_info().rss
    stream = Stream(fleet.front.port, CHAT, scene.body(logprobs=True, n=8), scene.rollout.key)
    events = stream.events()
    next(events)
    seen = -1
    while (now := furthest(fleet.engines[0])) != seen:  # until it is held back
        seen = now
        assert isinstance(scene_at(fleet, turns=0).ask(scene.body(max_tokens=4)), Reply)
    assert 0 < seen < tokens and proxy.memory_info().rss - before < 100e6
    outcome.callers("only its own engine slows down; other callers are served")
    assert list(events)[-1] == "[DONE]"
    stream.close()
    scene.acknowledged = scene.recorded()
    outcome.recorded("everything, when it is finally read")
    instruct(fleet.engines[0])
    outcome.healed(served(scene))


HALF_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-a: "
HALF_BODY = request(CHAT, {"Content-Length": "1000"}, b'{"messages": ')


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(HALF_HEAD, marks=fault(PART, "200 callers stop in the middle of their headers", "in a request")),
        pytest.param(HALF_BODY, marks=fault(PART, "200 callers stop in the middle of their body", "in a request")),
    ],
)
@pytest.mark.slow
def test_callers_with_unfinished_requests_are_disconnected(
    fleet: Fleet, scene: Scene, outcome: Outcome, words: bytes
) -> None:
    """Slow-loris: each holds a connection by saying next to nothing."""
    body = words is HALF_BODY
    sockets = [dial(fleet.front) for _ in range(200)]
    for sock in sockets:
        head = (
            words.replace(b"Host:", b"Authorization: Bearer " + scene.rollout.key.encode() + b"\r\nHost:")
            if body
            else words
        )
        sock.sendall(head)
    assert isinstance(scene.ask(), Reply)
    outcome.callers(*sorted({read_answer(sock.makefile("rb")) for sock in sockets}))
    for sock in sockets:
        sock.close()
    outcome.callers("others are served meanwhile")
    outcome.recorded(scene.kept())
    outcome.healed(served(scene))


@pytest.mark.slow
@fault(PART, "10,000 idle connections", "while calls are made")
def test_ten_thousand_idle_connections_have_no_effect(fleet: Fleet, scene: Scene, outcome: Outcome) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 1000:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gateway = psutil.Process(fleet.front.popen.pid)
    before = gateway.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            stack.callback(dial(fleet.front).close)
        wait_until(lambda: gateway.num_fds() > IDLE, what="all are accepted")
        answers = {
            failure(Line(fleet.front).ask(scene.rollout.key, CHAT, scene.body(store=False), {})) for _ in range(20)
        }
        outcome.callers(*sorted(answers))
        assert gateway.memory_info().rss - before < IDLE * 10_000, "more than 10 KB a connection"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: gateway.num_fds() < 1000, what="they are gone")
    outcome.recorded(scene.kept())
    outcome.healed("their file descriptors are closed; " + served(scene))
