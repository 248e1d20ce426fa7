"""Probes: how many a router makes, and how often in the rhythm of each model."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

from areal.http.client import HttpClient
from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.prober import Prober
from areal.services.inference.router.registry import WorkerRegistry
from tests.services.processes import Process, Processes, wait_until

COUNT = 2_000


class Asked(Prober):
    """Notes whom it would ask."""

    def __init__(self, registry: WorkerRegistry, http: HttpClient) -> None:
        super().__init__(registry, http, {})
        self.asked: list[str] = []

    async def probe(self, workers: object) -> None:
        self.asked += [worker.id for worker in workers]  # type: ignore[attr-defined]


async def test_probe_pass_asks_only_due_workers() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [(f"w{n}", f"http://h:{n + 1}") for n in range(COUNT)], expected=1, external=False)
    now = time.monotonic()
    for worker in registry.workers():
        worker.probed_at = now
        registry.observe(worker, ProbeResult.READY, None)
    late, doubted, slow = registry.workers()[:3]
    late.probed_at = now - 5.0  # 2,000 are asked every 4 seconds
    doubted.probed_at = slow.probed_at = now - 2.0
    registry.observe(doubted, ProbeResult.LOST, None)  # and one that may be dead every second
    async with HttpClient() as http:
        asked = Asked(registry, http)
        async with asyncio.TaskGroup() as probes:
            wait_s = asked._probe_due(probes)
    assert asked.asked == ["w0", "w1"]
    assert 0 < wait_s < math.inf


async def test_worker_addresses_are_parsed_once() -> None:
    async with HttpClient() as http:
        first = [http.send(f"http://127.0.0.1:{n + 1}", "GET ", "/", b"", b"")._address for n in range(COUNT)]
        again = [http.send(f"http://127.0.0.1:{n + 1}", "GET ", "/", b"", b"")._address for n in range(COUNT)]
    assert all(one is other for one, other in zip(first, again, strict=True))


def states(router: Process, key: str) -> dict[str, str]:
    workers = router.call("GET", "/workers", key=key).json()["workers"]
    return {worker["worker_id"]: worker["state"] for worker in workers}


def test_models_are_probed_at_their_own_period(processes: Processes, tokenizer: Path) -> None:
    engine = processes.engine(tokenizer)
    quick, slow = (processes.data_proxy(engine, tokenizer, model=name) for name in ("quick", "slow"))
    router = processes.router()
    often = {"period_seconds": 0.05, "timeout_seconds": 1, "failure_threshold": 2, "success_threshold": 1}
    seldom = {**often, "period_seconds": 3600}
    for proxy, name, readiness in ((quick, "quick", often), (slow, "slow", seldom)):
        body = {**processes.registration(proxy, model=name, expected=None), "readiness": readiness}
        assert router.call("POST", "/register_model", body, key=processes.key).status == 200
    assert states(router, processes.key) == {"quick-0": "ready", "slow-0": "ready"}
    quick.kill()
    slow.kill()
    wait_until(lambda: states(router, processes.key)["quick-0"] == "dead", what="the quick one is found dead")
    assert states(router, processes.key)["slow-0"] == "ready", "it has not been asked yet"

    body = {**processes.registration(slow, model="slow", expected=None), "readiness": often}
    assert router.call("POST", "/register_model", body, key=processes.key).status == 200
    wait_until(lambda: states(router, processes.key)["slow-0"] == "dead", what="the slow one is asked now")


def test_invalid_readiness_is_refused(processes: Processes) -> None:
    router = processes.router()
    body = {"model": "m", "workers": [], "readiness": {"period_seconds": -1}}
    answer = router.call("POST", "/register_model", body, key=processes.key)
    assert answer.status == 400 and "readiness.period_seconds must be above 0" in answer.json()["error"]["message"]
