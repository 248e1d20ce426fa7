"""What a relay counts beside the requests themselves."""

from __future__ import annotations

from areal.services.web.metrics import Metrics


class RelayMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.overhead = metrics.overhead
        self.queued = metrics.gauge("areal_gateway_queued", "Model requests waiting for a worker.")
        self.retries = metrics.counter(
            "areal_gateway_retries_total", "Attempts that failed and went to another worker.", ("reason",)
        )
