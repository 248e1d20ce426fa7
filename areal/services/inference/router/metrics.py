"""What a router tells of its table, read when it is scraped."""

from __future__ import annotations

from functools import partial

from areal.services.inference.router.registry import Registry
from areal.services.inference.router.table import CORDONED, DEAD, DRAINING, READY
from areal.services.web.metrics import Metrics


def count_workers(metrics: Metrics, registry: Registry) -> None:
    workers = metrics.gauge("areal_router_workers", "Data proxies, by what the router makes of them.", ("state",))
    for state in (READY, CORDONED, DRAINING, DEAD):
        workers.labels(state).set_function(partial(_in_state, registry, state))


def _in_state(registry: Registry, state: str) -> float:
    return float(sum(worker.state == state for worker in registry.workers()))
