"""What traces cost: CPU of gateway, router and data proxy for a recorded turn and an episode of 4 turns, with spans
exported to a collector that discards them, over the same without export.

    python benchmarks/traces.py [--rounds 7] [--connections 16] [--requests 800] [--write]

Both paths serve the same mock engine, which answers at once, and take turns within a round; the first round warms up.
A turn has three spans (gateway, data proxy, call of the engine). ``sampled``: one trace of a hundred is recorded. The
engine and the collector do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.relaying.floor import KEY, PARTS, Floor, System
from benchmarks.relaying.loads import Spent, start_sessions, talked
from benchmarks.relaying.vocabulary import write_vocabulary
from benchmarks.reporting import header, publish, table

OFF = "off"
_EPISODE_TURNS = 4


class Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def settings(port: int) -> dict[str, dict[str, str]]:
    on = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_MAX_QUEUE_SIZE": "100000"}
    sampled = {**on, "OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    return {OFF: {}, "on": on, "sampled": sampled}


def start(floor: Floor, engine: int, tokenizer: Path, name: str, variables: dict[str, str]) -> System:
    os.environ.update(variables)
    try:
        proxy, worker = floor.data_proxy(engine, tokenizer)
        gateway, port = floor.gateway(f"http://127.0.0.1:{worker}")
    finally:
        for each in variables:
            del os.environ[each]
    return System(name, port, {"gateway": gateway, "data proxy": proxy})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    spent_us: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        floor = Floor(Path(folder))
        try:
            tokenizer = write_vocabulary(Path(folder) / "tokenizer")
            _, engine = floor.start(sys.executable, str(PARTS / "mock.py"))
            every = settings(collector.server_port)
            systems = [start(floor, engine, tokenizer, name, variables) for name, variables in every.items()]
            keys = {system.name: start_sessions(system.port, options.connections) for system in systems}
            for number in range(options.rounds + 1):
                for load, requests in (("turn", options.requests), ("episode of 4 turns", options.requests // 5)):
                    for system in systems:
                        said = keys[system.name] if load == "turn" else [KEY]
                        turns, episodes = (8, False) if load == "turn" else (_EPISODE_TURNS, True)
                        with Spent(system, requests) as spent:
                            talked(system.port, said, options.connections, requests, turns=turns, episodes=episodes)
                        if number:
                            spent_us[load, system.name].append(spent.cpu_us)
        finally:
            floor.close()
            collector.shutdown()
            collector.server_close()
    rows = []
    for (load, name), found in spent_us.items():
        ratios = [mine / plain for mine, plain in zip(found, spent_us[load, OFF], strict=True)]
        rows.append(
            {
                "load": load,
                "traces": name,
                "cpu_us": round(statistics.median(found)),
                "over_off": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        )
    columns = ("load", "traces", "CPU us", "over off, median of pairs", "least", "most")
    text = table(columns, [list(row.values()) for row in rows])
    publish({**header("traces"), "connections": options.connections, "loads": rows}, text, options.write)


if __name__ == "__main__":
    main()
