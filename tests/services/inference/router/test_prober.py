"""Work that a router does for its workers, counted."""

from __future__ import annotations

import asyncio
import math
import time

from areal.services.http.client import HttpClient
from areal.services.inference.router.prober import Prober
from areal.services.inference.router.registry import Answer, WorkerRegistry

COUNT = 2_000


class Asked(Prober):
    """Notes whom it would ask."""

    def __init__(self, registry: WorkerRegistry, http: HttpClient) -> None:
        super().__init__(registry, http, {})
        self.asked: list[str] = []

    async def probe(self, workers: object) -> None:
        self.asked += [worker.id for worker in workers]  # type: ignore[attr-defined]


async def test_one_look_at_many_workers_asks_only_those_that_are_due_and_rests_after_it() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [(f"w{n}", f"http://h:{n + 1}") for n in range(COUNT)], expected=1, external=False)
    now = time.monotonic()
    for worker in registry.workers():
        worker.probed_at = now
        registry.observe(worker, Answer.READY, None)
    late, doubted, slow = registry.workers()[:3]
    late.probed_at = now - 5.0  # 2,000 are asked every 4 seconds
    doubted.probed_at = slow.probed_at = now - 2.0
    registry.observe(doubted, Answer.LOST, None)  # and one that may be dead every second
    async with HttpClient() as http:
        asked = Asked(registry, http)
        async with asyncio.TaskGroup() as probes:
            wait_s = asked._ask_due(probes)
    assert asked.asked == ["w0", "w1"]
    assert 0 < wait_s < math.inf


async def test_addresses_of_many_workers_are_parsed_once() -> None:
    async with HttpClient() as http:
        first = [http.send(f"http://127.0.0.1:{n + 1}", "GET ", "/", b"", b"")._address for n in range(COUNT)]
        again = [http.send(f"http://127.0.0.1:{n + 1}", "GET ", "/", b"", b"")._address for n in range(COUNT)]
    assert all(one is other for one, other in zip(first, again, strict=True))
