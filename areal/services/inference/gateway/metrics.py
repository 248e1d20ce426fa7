"""What a relay counts beside the requests themselves."""

from __future__ import annotations

from prometheus_client import Histogram

from areal.services.web.metrics import Metrics


class RelayMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._overhead = metrics.overhead
        self._overheads: dict[str, Histogram] = {}
        self.queued = metrics.gauge("areal_gateway_queued", "Model requests waiting for a worker.")
        self.retries = metrics.counter(
            "areal_gateway_retries_total", "Attempts that failed and went to another worker.", ("reason",)
        )

    def overhead_of(self, path: str) -> Histogram:
        found = self._overheads.get(path)
        if found is None:
            found = self._overheads[path] = self._overhead.labels(path)
        return found
