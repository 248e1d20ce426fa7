from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.http.client import HttpClient, HttpReply
from areal.http.headers import Headers
from areal.services.http.errors import ApiError
from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.services.inference.router.sessions import _MOST_PLACED, Placements, SessionPlacement, SessionPlacing
from areal.wire.bodies import RouteCall


def pool(count: int) -> list[WorkerRecord]:
    registry = WorkerRegistry()
    registry.register_model("m", [(f"w{n}", f"http://h:{n + 1}") for n in range(count)], expected=count, external=False)
    for number, worker in enumerate(registry.workers()):
        registry.observe(worker, ProbeResult.READY, WorkerReport(journals=(f"tag-{number}",)))
    return registry.workers()


def start_sessions(workers: list[WorkerRecord], count: int) -> list[int]:
    """How many sessions each worker has, once they are all placed."""
    placements = Placements()
    for _ in range(count):
        with placements.placing(placements.lightest_first(workers)[0], 1):
            pass
    return [placements.sessions(worker) for worker in workers]


def test_sessions_are_spread_evenly_over_a_small_pool() -> None:
    assert start_sessions(pool(8), 40) == [5] * 8


def test_sessions_are_spread_almost_evenly_over_a_large_pool() -> None:
    sessions = start_sessions(pool(100), 1000)
    assert sum(sessions) == 1000
    assert max(sessions) <= 13


def test_workers_without_session_support_get_none() -> None:
    workers = pool(40)
    for worker in workers[1:]:
        worker.report = WorkerReport()
    assert {worker.id for _ in range(50) for worker in Placements().lightest_first(workers)} <= {"w0"}


class Pairs:
    """Data proxies that start sessions, answer and report, each at a time of its own."""

    def __init__(self, count: int) -> None:
        self.workers = pool(count)
        self.placements = Placements()
        self.sessions = dict.fromkeys((each.addr for each in self.workers), 0)
        self.asked: list[tuple[WorkerRecord, ExitStack, SessionPlacement]] = []
        self.running: list[tuple[WorkerRecord, ExitStack, SessionPlacement, int]] = []
        self.taken = {each.addr: replace(each.report, started=0) for each in self.workers}

    def ask(self) -> None:
        worker, stack = self.placements.lightest_first(self.workers)[0], ExitStack()
        self.asked.append((worker, stack, stack.enter_context(self.placements.placing(worker, 1))))

    def start(self, number: int) -> None:
        if self.asked:
            worker, stack, placed = self.asked.pop(number % len(self.asked))
            self.sessions[worker.addr] += 1
            self.running.append((worker, stack, placed, self.sessions[worker.addr]))

    def answer(self, number: int) -> None:
        if self.running:
            _, stack, placed, started = self.running.pop(number % len(self.running))
            placed.started = started
            stack.close()

    def take_report(self, number: int) -> None:
        worker = self.workers[number % len(self.workers)]
        count = self.sessions[worker.addr]
        self.taken[worker.addr] = replace(worker.report, sessions=count, started=count)

    def report(self, number: int) -> None:
        """The newest report that was taken arrives; it may be an old one by now."""
        worker = self.workers[number % len(self.workers)]
        worker.report = replace(self.taken[worker.addr], asked_at=time.monotonic())

    def expected(self, worker: WorkerRecord) -> int:
        """The sessions that the worker will have."""
        return self.sessions[worker.addr] + sum(asked[0] is worker for asked in self.asked)


_VERBS = ("ask", "ask", "start", "answer", "take_report", "report")


@settings(deadline=None)
@given(st.integers(2, 5), st.lists(st.tuples(st.sampled_from(_VERBS), st.integers(0, 9)), max_size=120))
def test_placement_is_even_for_any_event_order(count: int, events: list[tuple[str, int]]) -> None:
    pairs, unanswered = Pairs(count), 0
    for verb, number in events:
        pairs.ask() if verb == "ask" else getattr(pairs, verb)(number)
        unanswered = max(unanswered, len(pairs.running))
        for worker in pairs.workers:
            counted = pairs.placements.sessions(worker) - pairs.expected(worker)
            assert 0 <= counted <= sum(each[0] is worker for each in pairs.running), "no session is missed or doubled"
    held = [pairs.expected(worker) for worker in pairs.workers]
    assert max(held) - min(held) <= 1 + unanswered


@settings(deadline=None)
@given(st.integers(2, 5), st.lists(st.tuples(st.sampled_from(_VERBS), st.integers(0, 9)), max_size=120))
def test_placement_is_even_within_one_when_answered_at_once(count: int, events: list[tuple[str, int]]) -> None:
    pairs = Pairs(count)
    for verb, number in events:
        pairs.ask() if verb == "ask" else getattr(pairs, verb)(number)
        while pairs.running:
            pairs.answer(0)
    held = [pairs.expected(worker) for worker in pairs.workers]
    assert max(held) - min(held) <= 1


def test_older_reports_count_by_time() -> None:
    (worker,) = pool(1)
    placements = Placements()
    with placements.placing(worker, 2) as placed:
        placed.started = 7
    worker.report = replace(worker.report, sessions=2, asked_at=time.monotonic())
    assert placements.sessions(worker) == 2
    worker.report = replace(worker.report, sessions=2, started=6)
    with placements.placing(worker, 2):
        pass
    worker.report = replace(worker.report, asked_at=time.monotonic() - 0.1)
    assert placements.sessions(worker) == 4


def test_reported_placements_are_forgotten() -> None:
    (worker,) = pool(1)
    placements = Placements()
    for number in range(1, 100):
        with placements.placing(worker, 1) as placed:
            placed.started = number
        worker.report = replace(worker.report, sessions=number, started=number)
        assert sum(map(len, placements._placed.values())) <= 1


def test_placements_of_removed_replicas_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.services.inference.router.sessions._KEPT_S", 0.0)
    placements = Placements()
    for number in range(_MOST_PLACED * 2):
        with placements.placing(WorkerRecord("w", f"http://h:{number}"), 1):
            pass
    assert len(placements._placed) <= _MOST_PLACED + 1


class NoKeys:
    """Data proxies that know no key. ``meanwhile`` happens while they are asked."""

    def __init__(self, meanwhile: Callable[[], None], answer: Mapping[str, Any]) -> None:
        self._meanwhile = meanwhile
        self._answer = json.dumps(answer).encode()

    async def fetch(self, *args: Any, **options: Any) -> HttpReply:
        self._meanwhile()
        return HttpReply(200, Headers({}), self._answer)


UNKNOWN, AWAY = (404, "session_not_found"), (503, "session_away")
SEARCHED = {"journal": None, "journals": ["tag-0", "tag-1"], "elsewhere": []}


async def refusal(
    registry: WorkerRegistry, meanwhile: Callable[[], None] = lambda: None, answer: Mapping[str, Any] = SEARCHED
) -> tuple[int, str | None]:
    """The status and code with which the router refuses a key that no data proxy has."""
    placing = SessionPlacing(registry, cast(HttpClient, NoKeys(meanwhile, answer)), {})
    with pytest.raises(ApiError) as caught:
        await placing.holder(RouteCall(api_key_digest="00" * 16))
    return caught.value.status, caught.value.code


def two_workers() -> tuple[WorkerRegistry, WorkerRecord, WorkerRecord]:
    registry = WorkerRegistry()
    registry.register_model("m", [("w0", "http://h:1"), ("w1", "http://h:2")], expected=2, external=False)
    first, second = registry.workers()
    registry.observe(first, ProbeResult.READY, WorkerReport(journals=("tag-0",)))
    return registry, first, second


async def test_unknown_key_is_404_once_all_data_proxies_answered() -> None:
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",)))
    assert await refusal(registry) == UNKNOWN


async def test_key_is_503_while_some_journal_is_unsearched() -> None:
    """The data proxy that reported ``tag-0`` has left it meanwhile, and no other one has adopted it yet."""
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",), elsewhere=("tag-0",)))
    left = {"journal": None, "journals": ["tag-1"], "elsewhere": ["tag-0"]}
    assert await refusal(registry, answer=left) == AWAY
    assert await refusal(registry) == UNKNOWN


async def test_unknown_key_is_refused_naming_model_without_replicas() -> None:
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",)))
    registry.register_model("idle", [("w2", "http://h:3")], expected=1, external=False)
    (third,) = registry.workers("idle")
    registry.observe(third, ProbeResult.READY, WorkerReport(journals=("tag-2",)))
    registry.register_model("idle", [], expected=1, external=False)
    assert await refusal(registry) == AWAY
    registry.register_model("idle", [], expected=0, external=False)
    assert await refusal(registry) == (503, "model_has_no_replicas")


async def test_key_is_404_only_after_late_data_proxy_is_asked() -> None:
    registry, _, second = two_workers()
    report = WorkerReport(journals=("tag-1",))
    assert await refusal(registry, lambda: registry.observe(second, ProbeResult.READY, report)) == AWAY
    assert await refusal(registry) == UNKNOWN


async def test_key_is_503_until_router_is_synced() -> None:
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",)))
    registry.learning = True
    assert await refusal(registry) == AWAY
    registry.mark_synced()
    assert await refusal(registry) == UNKNOWN


class OneSession(NoKeys):
    """Data proxies where the first start takes a moment, and that know its key afterwards."""

    def __init__(self) -> None:
        super().__init__(lambda: None, {})
        self.calls: list[str] = []
        self.begun = asyncio.Event()
        self.holder: str | None = None

    async def fetch(self, method: str, base: str, path: str, **options: Any) -> HttpReply:
        self.calls.append(f"{base}{path}")
        if path == "/rl/find_key":
            found = {
                "journal": "tag-0" if base == self.holder else None,
                "journals": ["tag-0", "tag-1"],
                "elsewhere": [],
            }
            return HttpReply(200, Headers({}), json.dumps(found).encode())
        self.begun.set()
        await asyncio.sleep(0.01)
        self.holder = self.holder or base
        return HttpReply(201, Headers({}), b"{}")


async def test_starts_with_one_key_share_data_proxy() -> None:
    registry, first, second = two_workers()
    proxies, key = OneSession(), {"api_key": "callers-key", "model": "m"}
    placing = SessionPlacing(registry, cast(HttpClient, proxies), {})
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",)))
    for worker in (first, second):  # alone in turn, so that one of them is not the other one's choice
        registry.observe(worker, ProbeResult.NOT_READY, None)
        begun = asyncio.create_task(placing.start(key, "a"))
        await proxies.begun.wait()
        for _ in range(2):
            registry.observe(worker, ProbeResult.READY, None)
        await asyncio.gather(begun, placing.start(key, "b"))
        assert len({call for call in proxies.calls if "start_session" in call}) == 1
        proxies.calls.clear()
        proxies.begun.clear()
        proxies.holder = None
