"""How a load generator runs: as many callers as connections on one loop, and what their calls took."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

_DEADLINE_S = 170.0
Seconds: TypeAlias = list[float]
Tickets: TypeAlias = list[int]


class Caller(Protocol):
    """Asks until the tickets are gone, then ends its future. ``failed`` counts answers that were none."""

    failed: int

    def ask(self) -> None: ...


C = TypeVar("C", bound=Caller)
Make = Callable[[Tickets, Seconds, "asyncio.Future[None]"], C]


async def _drive(order: dict[str, Any], make: Make[Any]) -> None:
    loop = asyncio.get_running_loop()
    seconds, tickets = Seconds(), list(range(order["requests"]))
    ends = [loop.create_future() for _ in range(order["connections"])]
    callers = []
    for ended in ends:
        _, caller = await loop.create_connection(
            lambda ended=ended: make(tickets, seconds, ended),  # type: ignore[misc]
            "127.0.0.1",
            order["port"],
        )
        callers.append(caller)
    began = time.perf_counter()
    for caller in callers:
        caller.ask()
    async with asyncio.timeout(_DEADLINE_S):
        await asyncio.gather(*ends)
    took = time.perf_counter() - began
    cuts = statistics.quantiles(seconds, n=100)
    found = {"mean_us": statistics.fmean(seconds) * 1e6, "p50_us": cuts[49] * 1e6, "p99_us": cuts[98] * 1e6}
    print(json.dumps({**found, "failed": sum(caller.failed for caller in callers), "seconds": took}))


def run(maker: Callable[[dict[str, Any]], Make[Any]]) -> None:
    """``maker`` makes of the orders on stdin what makes a caller."""
    order = json.loads(sys.stdin.read())
    try:
        import uvloop
    except ImportError:
        asyncio.run(_drive(order, maker(order)))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_drive(order, maker(order)))
