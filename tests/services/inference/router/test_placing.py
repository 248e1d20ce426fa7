from __future__ import annotations

from areal.services.inference.router.health import Answer
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.services.inference.router.sessions import Placements


def pool(count: int) -> list[WorkerRecord]:
    registry = WorkerRegistry()
    registry.register_model("m", [(f"w{n}", f"http://h:{n + 1}") for n in range(count)], expected=count, external=False)
    for number, worker in enumerate(registry.workers()):
        registry.observe(worker, Answer.READY, WorkerReport(journals=(f"tag-{number}",)))
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
