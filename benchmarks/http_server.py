"""areal's HTTP server against uvicorn and granian: CPU time of one handler's answers, and of the gateway's hop.

    python benchmarks/http_server.py [--rounds 5] [--quick] [--write]

The same handler (``benchmarks/relaying/handler.py``) runs under each server: a small JSON request, and a stream of 64
server-sent events, each sent alone as from an engine. uvicorn runs a bare ASGI application with httptools and uvloop,
granian one with uvloop, once as ASGI and once by its own interface RSGI. The gateway relays a plain call and a 64-event
stream in the same rounds: on areal's server, on uvicorn and on granian (``benchmarks/relaying/hosted_gateway.py``).
Systems take turns, the first round warms up, medians count; only the system's own CPU counts (all its threads). areal's
server is to save 15 % of the gateway's hop: ``docs/dependencies.md`` has the decision, ``benchmarks/README.md`` the
peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.relaying import peers, verdicts
from benchmarks.relaying.floor import PARTS, Floor, System, ask
from benchmarks.relaying.loads import Spent, relayed, repeated
from benchmarks.reporting import header, publish, table

CONNECTIONS = (1, 16, 128)
REQUESTS = {1: 1000, 16: 4000, 128: 4000}
STREAMS = {1: 15, 16: 96, 128: 256}
EVENTS_A_SECOND = 3000
OWN = ("areal", "gateway")
SAVED_SHARE = 0.15  # of the gateway's hop


class Bench:
    """``servers`` have the handler; ``gateways`` relay to the mock worker at port ``mock``."""

    def __init__(self, floor: Floor) -> None:
        _, self.mock = floor.start(sys.executable, str(PARTS / "mock.py"))
        pid, port = floor.start(sys.executable, str(PARTS / "handler.py"))
        self.servers = [System("areal", port, {"server": pid}), *peers.http_servers(floor)]
        router = floor.router(f"http://127.0.0.1:{self.mock}")
        pid, port = floor.serving(*floor.service("gateway", "--router-url", f"http://127.0.0.1:{router}"))
        self.gateways = [System("gateway", port, {"gateway": pid}), *peers.hosted_gateways(floor, router)]

    def round(self, count: int, number: int) -> Iterator[tuple[str, str, float]]:
        """Shape, system and its CPU us a request: each system once, in an order that turns from round to round."""
        gap_s = count / EVENTS_A_SECOND
        ask(self.mock, "POST", "/pace", {"gap_s": gap_s})
        body = json.dumps({"model": "mock", "max_tokens": 64, "gap_s": gap_s})
        for streamed, requests in ((False, REQUESTS[count]), (True, STREAMS[count])):
            for system in _turned(self.servers, number):
                with Spent(system, requests) as spent:
                    repeated(system.port, "/events" if streamed else "/request", body, count, requests)
                yield "events" if streamed else "request", system.name, spent.cpu_us
            for system in _turned(self.gateways, number):
                with Spent(system, requests) as spent:
                    relayed(system.port, count, requests, stream=streamed)
                yield "stream" if streamed else "plain", system.name, spent.cpu_us


def _turned(systems: list[System], number: int) -> list[System]:
    first = number % len(systems)
    return systems[first:] + systems[:first]


def measure(rounds: int, connections: tuple[int, ...]) -> list[dict[str, Any]]:
    found: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Floor(Path(folder))) as floor:
        bench = Bench(floor)
        for number in range(rounds + 1):
            for count in connections:
                for shape, system, cpu_us in bench.round(count, number):
                    if number:
                        found[shape, count, system].append(cpu_us)
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return [
        {
            "shape": shape,
            "connections": count,
            "system": system,
            "cpu_us": round(statistics.median(spent), 1),
            "cpu_us_lowest": round(min(spent), 1),
        }
        for (shape, count, system), spent in sorted(found.items(), key=lambda each: (each[0][0], each[0][1], each[1]))
    ]


def of_hops(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What areal's server saves of the gateway's hop on another one."""
    hops = {(row["shape"], row["connections"]): row["cpu_us"] for row in rows if row["system"] == "gateway"}
    found = []
    for row in rows:
        if row["system"].startswith("gateway on "):
            hop = hops[row["shape"], row["connections"]]
            what = f"{row['shape']}, {row['connections']} connections, {row['system']}: more than areal's, of the hop"
            share = round((row["cpu_us"] - hop) / hop, 2)
            wanted, met = f"over {SAVED_SHARE:g}", share > SAVED_SHARE
            found.append({"what": what, "measured": share, "wanted": wanted, "met": met})
    return found


def text(found: dict[str, Any]) -> str:
    own = {(row["shape"], row["connections"]): row["cpu_us"] for row in found["rows"] if row["system"] in OWN}
    lines = [
        (
            row["shape"],
            row["connections"],
            row["system"],
            f"{row['cpu_us']:.1f}",
            f"{row['cpu_us_lowest']:.1f}",
            f"{row['cpu_us'] / own[row['shape'], row['connections']]:.2f}",
        )
        for row in found["rows"]
    ]
    columns = ("shape", "connections", "system", "CPU us", "lowest", "x areal")
    return f"{table(columns, lines)}\n\n{verdicts.text(found['verdicts'])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="16 connections only")
    parser.add_argument("--write", action="store_true", help="keep the table and the JSON in benchmarks/results")
    options = parser.parse_args()
    found = header("http_server", **peers.http_server_versions())
    found["rounds"] = options.rounds
    found["rows"] = measure(options.rounds, (16,) if options.quick else CONNECTIONS)
    found["verdicts"] = of_hops(found["rows"])
    publish(found, text(found), options.write)
    return 0 if all(verdict["met"] for verdict in found["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
