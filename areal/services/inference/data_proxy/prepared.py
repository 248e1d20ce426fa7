"""A call that is ready to run, and whose time goes where while it does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from areal.services.inference.data_proxy.asks import Ask
from areal.services.inference.data_proxy.generation import Drive
from areal.services.inference.data_proxy.shapes import Frame, Shape
from areal.services.inference.data_proxy.visits import Visit
from areal.services.web import headers as names
from areal.services.web.server import Request, StreamResponse


@dataclass
class Clock:
    """Whose time it is: ours, or the engine's. Seconds of ``time.perf_counter``."""

    started: float
    engine_s: float = 0.0
    first: float = 0.0  # when the first token was here
    last: float = 0.0

    def heard(self, since: float, after_first_s: float = 0.0) -> None:
        """The engine says something, for the first time since ``since``, or since it was heard last. It had its first
        token ``after_first_s`` ago, if this is the first that it says."""
        now = time.perf_counter()
        self.engine_s += now - since
        self.first = self.first or max(since, now - after_first_s)
        self.last = now

    def overhead_us(self) -> int:
        return int((time.perf_counter() - self.started - self.engine_s) * 1e6)


@dataclass(frozen=True)
class Prepared:
    request: Request
    ask: Ask
    frame: Frame
    shape: Shape
    drives: tuple[Drive, ...]
    idle_s: float
    clock: Clock
    visit: Visit
    prompt_text: str | None

    def headers(self) -> dict[str, str]:
        headers = {names.OVERHEAD: str(self.clock.overhead_us())}
        if self.ask.ignored:
            headers[names.IGNORED] = ", ".join(self.ask.ignored)
        return headers

    def open_stream(self, first: bytes = b"") -> StreamResponse:
        """``first``: what the stream begins with. Raises ConnectionResetError when the caller is gone."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **self.headers()}
        out = StreamResponse(headers=headers)
        out.begin(self.request, first)
        return out
