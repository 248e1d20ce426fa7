"""What the data plane costs: CPU time a request and the latency it adds, beside other proxies in the same run.

    python benchmarks/gateway.py [--rounds 3] [--quick] [--only NAME] [--without scale] [--write]

All processes are on loopback, load generators and mocks are processes of their own, and only the system's own CPU
counts (all its threads, by the kernel's clock of the process). Seven shapes, the first four at 1, 16, 128 and 512
connections:

    plain         2 KB in, 12 KB of JSON out: the gateway, nginx, sglang-router and LiteLLM before one mock worker
    stream        the same call, answered by 64 server-sent events
    turn          gateway and data proxy before a mock engine: a short turn of a conversation in a session, templated,
                  tokenised (8,000 tokens, trained here), 64 tokens sampled one by one as an engine does, recorded on
                  disk before the last byte
    turn stream   the same, streamed to the caller, from an engine that sends what it sampled in 50 ms, for all calls at
                  once, as the embedded one does
    turn token stream  the same from an engine that sends token by token, as a vLLM before 0.32; tokens that the data
                  proxy has within 20 ms are one event
    turn at once  the same turn from an engine that answers at once, so that the services never wait
    episode       of an RL run, 64 at once: a session's start, 4 such turns, a reward, the export

Added latency is the mean through the system minus the mean direct of the same round (its p50 at one connection too).
Systems take turns in each round, the order turns from round to round, the first round warms up, medians count. Streams
are paced so that about 3,000 events a second arrive, each alone, as from an engine. ``scale`` adds a table of 1,000
workers, 10,000 that are registered at once, 100,000 sessions and two relays. How to install the peers:
``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.relaying import peers, scale, verdicts
from benchmarks.relaying.floor import KEY, PARTS, Floor, System, ask, resident_bytes
from benchmarks.relaying.loads import Spent, relayed, start_sessions, talked
from benchmarks.relaying.vocabulary import write_vocabulary
from benchmarks.reporting import header, publish, table

CONNECTIONS = (1, 16, 128, 512)
PLAIN = {1: 400, 16: 2000, 128: 2000, 512: 3072}
STREAMS = {1: 15, 16: 96, 128: 128, 512: 512}
SLOW_SHARE = 10  # of the requests, for what needs so long that it would be most of the run
SLOW_STREAMS = 128  # at once
EVENTS_A_SECOND = 3000
TOKEN_S = 0.001  # between two tokens of a turn that is not streamed: so fast is a small model
DIRECT, GATEWAY, WHOLE = "direct", "gateway", "gateway + data proxy"
AT_ONCE = {16: 2000, 64: 2000, 128: 2000}
SHAPES = {"plain": PLAIN, "stream": STREAMS, "turn": PLAIN, "turn stream": STREAMS}
SHAPES |= {"turn token stream": {16: STREAMS[16]}, "turn at once": AT_ONCE, "episode": {64: 512}}


class Bench:
    """The systems of one run, and a mock behind them."""

    def __init__(self, floor: Floor, only: str | None) -> None:
        self.floor = floor
        _, self.mock = floor.start(sys.executable, str(PARTS / "mock.py"))
        self.tokenizer = write_vocabulary(floor.folder / "tokenizer")
        pid, port = floor.gateway(f"http://127.0.0.1:{self.mock}")
        relays = [System(GATEWAY, port, {"gateway": pid})]
        relays += filter(None, (start(floor, self.mock) for start in (peers.nginx, peers.sglang_router, peers.litellm)))
        proxy, worker = floor.data_proxy(self.mock, self.tokenizer)
        pid, port = floor.gateway(f"http://127.0.0.1:{worker}")
        whole = System(WHOLE, port, {"gateway": pid, "data proxy": proxy})
        wanted = lambda system: only in (None, system.name)  # noqa: E731
        self.relays, self.whole = list(filter(wanted, relays)), list(filter(wanted, [whole]))
        self.keys = start_sessions(port, max(CONNECTIONS))

    def idle(self) -> dict[str, float]:
        each = [*self.relays, *self.whole]
        sizes = {f"{one.name}: {name}": resident_bytes(pid) for one in each for name, pid in one.processes.items()}
        return {name: round(size / 2**20, 1) for name, size in sizes.items()}

    def turn(self, shape: str, count: int, requests: int, number: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Each system once, those of a shape in an order that turns."""
        streamed = shape.endswith("stream")
        gap_s = count / EVENTS_A_SECOND if streamed else 0.0 if shape in ("turn at once", "episode") else TOKEN_S
        line = {"line_s": 0} if shape == "turn token stream" else {}
        ask(self.mock, "POST", "/pace", {"gap_s": gap_s, **line})
        if shape.startswith(("turn", "episode")):
            whole = shape == "episode"
            keys, turns = ([KEY], 4) if whole else (self.keys[:count], 8)
            for system in self.whole:
                with Spent(system, requests) as spent:
                    answer = talked(system.port, keys, count, requests, stream=streamed, turns=turns, episodes=whole)
                yield system.name, {"cpu_us": spent.cpu_us, **spent.parts, **_latency(answer)}
            return
        direct = relayed(self.mock, count, requests, stream=streamed)
        yield DIRECT, _latency(direct)
        turned = (self.relays * 2)[number % len(self.relays) :][: len(self.relays)] if self.relays else []
        for system in turned:
            if system.slow and streamed and count > SLOW_STREAMS:
                continue
            asked = max(count, requests // SLOW_SHARE, 5) if system.slow else requests
            with Spent(system, asked) as spent:
                answer = relayed(system.port, count, asked, stream=streamed)
            added = {f"added_{name}": answer[name] - direct[name] for name in ("mean_us", "p50_us")}
            yield system.name, {"cpu_us": spent.cpu_us, **spent.parts, **_latency(answer), **added}


def _latency(answer: dict[str, float]) -> dict[str, float]:
    return {name: answer[name] for name in ("mean_us", "p50_us", "p99_us")}


@contextlib.contextmanager
def opened(only: str | None = None) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as name:
        floor = Floor(Path(name))
        try:
            yield Bench(floor, only)
        finally:
            floor.close()


def measure(bench: Bench, rounds: int, connections: tuple[int, ...]) -> list[dict[str, Any]]:
    found: defaultdict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for shape, counts in SHAPES.items():
            for count in (each for each in counts if each in connections or each == 64):
                for system, spent in bench.turn(shape, count, counts[count], number):
                    if number:
                        found[shape, count, system].append(spent)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return [
        {"shape": shape, "connections": count, "system": system, **_medians(spent)}
        for (shape, count, system), spent in found.items()
    ]


def _medians(spent: list[dict[str, float]]) -> dict[str, float]:
    found = {name: round(statistics.median(one[name] for one in spent), 1) for name in spent[0]}
    if "cpu_us" in found:
        found["cpu_us_lowest"] = round(min(one["cpu_us"] for one in spent), 1)
    return found


def at_scale(bench: Bench, rounds: int, *, quick: bool) -> dict[str, Any]:
    ask(bench.mock, "POST", "/pace", {"gap_s": TOKEN_S})
    most_workers, most_sessions = (50, 2_000) if quick else (1_000, 100_000)
    return {
        "workers": scale.workers(bench.floor, (1, most_workers), rounds),
        "registered": scale.registered(bench.floor, 500 if quick else 10_000),
        "relays": scale.relays(bench.floor, bench.mock, (1, 2), rounds),
        "sessions": scale.sessions(bench.floor, bench.mock, bench.tokenizer, most_sessions, rounds),
    }


def text(found: dict[str, Any]) -> str:
    rows = found["rows"]
    nginx = {(row["shape"], row["connections"]): row["cpu_us"] for row in rows if row["system"] == "nginx"}
    lines = []
    for row in rows:
        if row["system"] == DIRECT:
            continue
        parts = [f"{name[4:]} {value:.0f}" for name, value in row.items() if name.startswith("cpu ")]
        cpu = f"{row['cpu_us']:.0f}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")
        like = "stream" if row["shape"].endswith("stream") else "plain"
        beside = nginx.get((like, row["connections"])) if row["shape"] != "episode" else None
        ratio = f"{row['cpu_us'] / beside:.1f}" if beside else ""
        added = [f"{row[name] / 1e3:.2f}" if name in row else "" for name in ("added_mean_us", "added_p50_us")]
        lines.append(
            (row["shape"], row["connections"], row["system"], cpu, ratio, *added, f"{row['mean_us'] / 1e3:.2f}")
        )
    columns = ("shape", "connections", "system", "CPU us", "x nginx", "added mean, ms", "added p50, ms", "mean, ms")
    said = [table(columns, lines), verdicts.text(verdicts.of(found))]
    if "scale" in found:
        said.append(verdicts.scale_text(found["scale"]))
    sizes = ", ".join(f"{name} {size:.0f} MB" for name, size in found["idleMb"].items())
    return "\n\n".join([*said, f"Idle, resident: {sizes}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="16 connections, 50 workers, 2,000 sessions")
    parser.add_argument("--only", help="one system beside the direct path, by its name in the table")
    parser.add_argument("--without", choices=["scale"], help="leave a part out")
    parser.add_argument("--write", action="store_true", help="keep the table and the JSON in benchmarks/results")
    options = parser.parse_args()
    found = header("gateway", aiohttp=version("aiohttp"), uvloop=version("uvloop"), **peers.versions())
    with opened(options.only) as bench:
        found |= {"rounds": options.rounds, "idleMb": bench.idle()}
        found["rows"] = measure(bench, options.rounds, (16,) if options.quick else CONNECTIONS)
        found["verdicts"] = verdicts.of(found)
        publish(found, text(found), options.write)
        if options.without != "scale":
            found["scale"] = at_scale(bench, options.rounds, quick=options.quick)
            found["verdicts"] = verdicts.of(found)
            publish(found, text(found), options.write)
    return 0 if all(verdict["met"] for verdict in found["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
