"""Whether the cost of a request stays what it is: with a thousand workers, with a hundred thousand sessions, with more
relays."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.relaying.floor import (
    MODEL,
    PARTS,
    Floor,
    System,
    all_ready,
    ask,
    children,
    cpu_us,
    resident_bytes,
    until,
)
from benchmarks.relaying.loads import Spent, relayed, start_sessions, talked
from benchmarks.relaying.mock import host as mock_host

CONNECTIONS = 16
_REQUESTS = 2000
_AT_A_TIME = 5000
_RELAY_CONNECTIONS = 64
_RELAY_REQUESTS = 12000


def workers(floor: Floor, counts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """CPU of a relayed call, by how many workers the table holds: as many loopback addresses of one mock."""
    systems = []
    _, mock = floor.start(sys.executable, str(PARTS / "mock.py"), str(max(counts)))
    for count in counts:
        pid, port = floor.gateway(*(f"http://{mock_host(place)}:{mock}" for place in range(count)))
        systems.append((count, System(f"{count} workers", port, {"gateway": pid})))
    spent: dict[int, list[float]] = {count: [] for count, _ in systems}
    for number in range(rounds + 1):
        for count, system in systems:
            with Spent(system, _REQUESTS) as found:
                relayed(system.port, CONNECTIONS, _REQUESTS)
            if number:
                spent[count].append(found.cpu_us)
    return [{"workers": count, "cpu_us": round(statistics.median(each), 1)} for count, each in spent.items()]


def registered(floor: Floor, count: int) -> dict[str, Any]:
    """How long it takes until as many workers, declared at once, are all ready. Two mocks: one has not enough
    descriptors."""
    half = -(-count // 2)
    mocks = [floor.start(sys.executable, str(PARTS / "mock.py"), str(half))[1] for _ in range(2)]
    urls = [f"http://{mock_host(place // 2)}:{mocks[place % 2]}" for place in range(count)]
    pid, router = floor.service("router")
    listed = [{"worker_id": f"mock-{place}", "worker_addr": url} for place, url in enumerate(urls)]
    before, began = cpu_us(pid), time.monotonic()
    ask(router, "POST", "/register_model", {"model": MODEL, "workers": listed})
    until(lambda: all_ready(router, count) or None, f"{count} workers to be ready")
    return {
        "workers": count,
        "seconds_until_ready": round(time.monotonic() - began, 1),
        "router_cpu_seconds": round((cpu_us(pid) - before) / 1e6, 2),
    }


def sessions(floor: Floor, mock: int, tokenizer: Path, count: int, rounds: int) -> dict[str, Any]:
    """A turn's CPU and the memory of a session that talked once and is idle now."""
    proxy, worker = floor.data_proxy(mock, tokenizer)
    gateway, port = floor.gateway(f"http://127.0.0.1:{worker}")
    system = System("whole path", port, {"gateway": gateway, "data proxy": proxy})
    few = start_sessions(port, CONNECTIONS)
    alone = _turns(system, few, rounds)
    before = resident_bytes(proxy)
    many = start_sessions(port, count)
    for first in range(0, count, _AT_A_TIME):
        some = many[first : first + _AT_A_TIME]
        talked(port, some, 64, len(some), turns=1)
    held = resident_bytes(proxy) - before
    among = _turns(system, few, rounds)
    return {
        "sessions": count,
        "cpu_us_alone": alone,
        "cpu_us_among_them": among,
        "memory_bytes_a_session": round(held / count),
    }


def _turns(system: System, keys: list[str], rounds: int) -> float:
    spent = []
    for number in range(rounds + 1):
        with Spent(system, _REQUESTS) as found:
            talked(system.port, keys, CONNECTIONS, _REQUESTS)
        if number:
            spent.append(found.cpu_us)
    return round(statistics.median(spent), 1)


def relays(floor: Floor, mock: int, counts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Calls a second through one and more relays on one port, and their CPU a call: while the second does not rise,
    what more relays carry is bounded by cores alone, of which the load and the mock take their share here."""
    systems = []
    for count in counts:
        pid, port = floor.gateway(f"http://127.0.0.1:{mock}", relays=count)
        pids = children(pid) or [pid]
        systems.append((count, System(f"{count} relays", port, {f"relay {n}": each for n, each in enumerate(pids)})))
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count, _ in systems}
    for number in range(rounds + 1):
        for count, system in systems:
            with Spent(system, _RELAY_REQUESTS) as spent:
                answer = relayed(system.port, _RELAY_CONNECTIONS, _RELAY_REQUESTS)
            share = max(spent.parts.values()) / spent.cpu_us
            if number:
                found[count].append((_RELAY_REQUESTS / answer["seconds"], spent.cpu_us, share))
    middle: Callable[[int, int], float] = lambda count, place: statistics.median(each[place] for each in found[count])  # noqa: E731
    return [
        {
            "relays": count,
            "calls_a_second": round(middle(count, 0)),
            "cpu_us": round(middle(count, 1), 1),
            "busiest_share": round(middle(count, 2), 2),
        }
        for count in found
    ]
