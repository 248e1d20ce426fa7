from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from areal.http.client import HttpClient, HttpReply
from areal.http.headers import Headers
from areal.services.http.errors import ApiError
from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.services.inference.router.sessions import Placements, SessionPlacing
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


def test_workers_that_keep_no_sessions_get_none() -> None:
    workers = pool(40)
    for worker in workers[1:]:
        worker.report = WorkerReport()
    assert {worker.id for _ in range(50) for worker in Placements().lightest_first(workers)} <= {"w0"}


class NoKeys:
    """Data proxies that know no key. ``meanwhile`` happens while they are asked."""

    def __init__(self, meanwhile: Callable[[], None], answer: Mapping[str, Any]) -> None:
        self._meanwhile = meanwhile
        self._answer = json.dumps(answer).encode()

    async def fetch(self, *args: Any, **options: Any) -> HttpReply:
        self._meanwhile()
        return HttpReply(200, Headers({}), self._answer)


OLD = {"journal": ""}  # an earlier version's answer


async def refusal(
    registry: WorkerRegistry, meanwhile: Callable[[], None] = lambda: None, answer: Mapping[str, Any] = OLD
) -> int:
    """The status with which the router refuses a key that no data proxy has."""
    placing = SessionPlacing(registry, cast(HttpClient, NoKeys(meanwhile, answer)), {})
    with pytest.raises(ApiError) as caught:
        await placing.holder(RouteCall(api_key_digest="00" * 16))
    return caught.value.status


def two_workers() -> tuple[WorkerRegistry, WorkerRecord, WorkerRecord]:
    registry = WorkerRegistry()
    registry.register_model("m", [("w0", "http://h:1"), ("w1", "http://h:2")], expected=2, external=False)
    first, second = registry.workers()
    registry.observe(first, ProbeResult.READY, WorkerReport(journals=("tag-0",)))
    return registry, first, second


async def test_unknown_key_is_404_when_every_data_proxy_was_asked() -> None:
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",)))
    assert await refusal(registry) == 404


async def test_key_is_not_unknown_while_some_journal_was_not_searched() -> None:
    """The data proxy that reported ``tag-0`` has left it meanwhile, and no other one has adopted it yet."""
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",), elsewhere=("tag-0",)))
    left = {"journal": None, "journals": ["tag-1"]}
    assert await refusal(registry, answer=left) == 503
    assert await refusal(registry, answer={"journal": None, "journals": ["tag-0", "tag-1"]}) == 404


async def test_key_is_unknown_only_after_a_data_proxy_that_was_heard_from_meanwhile_was_asked() -> None:
    registry, _, second = two_workers()
    report = WorkerReport(journals=("tag-1",))
    assert await refusal(registry, lambda: registry.observe(second, ProbeResult.READY, report)) == 503
    assert await refusal(registry) == 404


async def test_key_is_not_unknown_while_a_router_learns_who_its_data_proxies_are() -> None:
    registry, _, second = two_workers()
    registry.observe(second, ProbeResult.READY, WorkerReport(journals=("tag-1",)))
    registry.learning = True
    assert await refusal(registry) == 503
    registry.mark_synced()
    assert await refusal(registry) == 404
