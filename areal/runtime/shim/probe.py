"""The liveness probe: one HTTP GET at a time on a non-blocking socket, driven by the shim's own poll loop.

There is no thread and no blocking call, so that a component that hangs can delay neither its log nor a stop. A
component is judged only after its first answer: until then it is starting, and the process that waits for it decides
how long that may take (a model load takes minutes).
"""

from __future__ import annotations

import select

from areal.runtime.exchange import HttpExchange

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_SEARCH_PERIOD_S = 1.0  # until the first answer: a component that hangs soon after it was ready is judged too


class LivenessCheck:
    """Call ``tick`` with the time, and ``on_ready`` when ``fd`` is ready. ``failed``: the component must be ended.
    ``healthy_since``: its first healthy answer."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._url = str(record["url"])
        self._period_s = float(record["period_s"])
        self._timeout_s = float(record["timeout_s"])
        self._threshold = int(record["failure_threshold"])
        self._exchange: HttpExchange | None = None
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget everything: a new component has started."""
        self._close()
        self._answered_once = False
        self.healthy_since: float | None = None
        self._failures = 0
        self._due = now + min(self._period_s, _SEARCH_PERIOD_S)

    @property
    def failed(self) -> bool:
        return self._answered_once and self._failures >= self._threshold

    @property
    def due(self) -> float:
        """The time of the next ``tick``: the start of a probe, or its timeout."""
        return self._due

    @property
    def interest(self) -> tuple[int, int] | None:
        """The descriptor to poll and for what, while a probe is under way."""
        if self._exchange is None or self._exchange.peer is None:
            return None
        return self._exchange.peer.fileno(), select.POLLIN if self._exchange.sent else select.POLLOUT

    def tick(self, now: float) -> None:
        if now < self._due:
            return
        if self._exchange is not None:
            self._settle(False, now)
            return
        self._due = now + self._timeout_s
        self._exchange = HttpExchange(self._url, {}, 0)
        if self._exchange.connect() is None:
            self._settle(False, now)

    def on_ready(self, now: float) -> None:
        if self._exchange is None:
            return
        self._exchange.step()
        if self._exchange.has_ended:
            answer = self._exchange.answer
            self._settle(answer is not None and answer[0] == 200, now)

    def _settle(self, healthy: bool, now: float) -> None:
        self._close()
        self._failures = 0 if healthy else self._failures + 1
        if healthy and not self._answered_once:
            self._answered_once, self.healthy_since = True, now
        self._due = now + (self._period_s if self._answered_once else min(self._period_s, _SEARCH_PERIOD_S))

    def _close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
