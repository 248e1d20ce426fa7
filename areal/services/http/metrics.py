"""Prometheus metrics of a service process.

Several relay processes share one port, and a scrape reaches any of them: when their supervisor sets
``PROMETHEUS_MULTIPROC_DIR``, ``exposition`` sums over all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
OVERHEAD_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1)


class _EveryProcess(Collector):
    """The metrics that all processes wrote into ``folder``. The file of a process that just starts is empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        written = [str(file) for file in self._folder.glob("*.db") if _size(file)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(written)  # type: ignore[no-untyped-call]
        return merged


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # its process has just ended
        return 0


class RouteMetrics:
    """The metrics of one route's requests, looked up once."""

    def __init__(self, metrics: Metrics, route: str) -> None:
        self._requests = metrics.requests
        self._route = route
        self._seconds = metrics.seconds.labels(route)
        self._in_flight = metrics.in_flight
        self._by_status: dict[int, Counter] = {}

    def began(self) -> None:
        self._in_flight.inc()

    def ended(self, status: int, seconds: float) -> None:
        self._in_flight.dec()
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(self._route, str(status))
        counter.inc()
        self._seconds.observe(seconds)


class Metrics:
    """The registry of one process; every name begins with ``areal_``."""

    def __init__(self) -> None:
        self._shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry = CollectorRegistry()
        self.requests = self.counter("areal_http_requests_total", "Requests answered.", ("route", "status"))
        self.seconds = self.histogram("areal_http_request_seconds", "From the first byte in to the last byte out.")
        self.overhead = self.histogram(
            "areal_overhead_seconds", "This process's own time in a proxied request.", OVERHEAD_SECONDS
        )
        self.in_flight = self.gauge("areal_http_in_flight", "Model requests being answered now.")

    def of_route(self, route: str) -> RouteMetrics:
        return RouteMetrics(self, route)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def gauge(
        self, name: str, text: str, labels: Sequence[str] = (), across: Literal["livesum", "livemax"] = "livesum"
    ) -> Gauge:
        """``across`` says how the processes that share a port add up."""
        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode=across)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float] = SECONDS, labels: Sequence[str] = ("route",)
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def exposition(self) -> bytes:
        registry = self._registry
        if self._shared:
            registry = CollectorRegistry()
            registry.register(_EveryProcess(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])))
        return generate_latest(registry)
