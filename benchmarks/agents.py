"""What an agent service costs: CPU a turn, the delay of a streamed one, an episode of a controller, memory.

    python benchmarks/agents.py [--rounds 3] [--quick] [--write]

All processes are on loopback: router, gateway, one pair; the load comes from a process of its own. Only the CPU of
router, gateway and data proxy counts, by the kernel's clock of each process: the worker runs the agent, a scripted one
(``relaying/scripted_agent.py``).

    turn        POST /v1/responses, not streamed: one turn of a session with its history, on disk before the answer
    first event of a streamed turn: its mean through gateway and data proxy, minus that of the worker alone
    episode     ``AgentController``: a session, 4 turns with a model call each, an export with its reward. All counts
                but the worker and the engine: also the controller, and the inference service's gateway, router, data
                proxy. One after the other, and 16 at once: a process that wakes for one call alone pays for it
    sockets     resident memory of the gateway for each idle WebSocket
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.relaying.floor import KEY, PARTS, Floor, System, all_ready, ask, cpu_us, resident_bytes, until
from benchmarks.relaying.loads import Spent, repeated
from benchmarks.relaying.vocabulary import write_vocabulary
from benchmarks.reporting import header, publish, table

CONNECTIONS = {1: 300, 16: 1600, 512: 2048}
SERVICE = "bench"
AGENT = "benchmarks.relaying.scripted_agent:Scripted"
HEADER = "X-AReaL-Session-Key"
FIRST_EVENTS, EPISODES, TURNS, SOCKETS = 100, 40, 4, 1000
AT_ONCE = 16  # episodes


class Bench:
    """An agent service with one pair; ``inference``: the arguments by which its sessions are recorded."""

    def __init__(self, floor: Floor, *inference: str, gateway: tuple[str, ...] = ()) -> None:
        def service(module: str, *argv: str) -> tuple[int, int]:
            return floor.keyed(sys.executable, "-m", f"areal.services.{module}", *argv)

        _, self.worker = service("agent.worker", "--agent", AGENT)
        state = floor.folder / f"sessions-{self.worker}"
        worker = f"http://127.0.0.1:{self.worker}"
        flags = ("--service", SERVICE, "--worker-url", worker, "--state-dir", str(state), "--max-concurrent", "1024")
        proxy, proxy_port = service("agent.data_proxy", *flags, *inference)
        router, router_port = service("inference.router")
        workers = [{"worker_id": "pair-0", "worker_addr": f"http://127.0.0.1:{proxy_port}"}]
        ask(router_port, "POST", "/register_model", {"model": SERVICE, "workers": workers})
        until(lambda: all_ready(router_port, 1) or None, "the pair to be ready")
        url = f"http://127.0.0.1:{router_port}"
        pid, self.port = service("agent.gateway", "--service", SERVICE, "--router-url", url, *gateway)
        until(lambda: _ready(self.port) or None, "the gateway to be ready")
        self.system = System(SERVICE, self.port, {"gateway": pid, "router": router, "data proxy": proxy})


def _ready(port: int) -> bool:
    with contextlib.suppress(RuntimeError, OSError):
        ask(port, "GET", "/ready")
        return True
    return False


def turns(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    found = []
    body = json.dumps({"input": "what comes after seven?"})
    for count, requests in CONNECTIONS.items():
        keys = [f"bench-{count}-{number}" for number in range(count)]
        for key in keys:
            ask(bench.port, "POST", "/sessions", {"session_key": key})
        own = [{HEADER: key} for key in keys]
        seen = []
        for number in range(rounds + 1):
            with Spent(bench.system, requests) as spent:
                answer = repeated(bench.port, "/v1/responses", body, count, requests, own)
            if number:
                seen.append({"cpu_us": spent.cpu_us, **spent.parts, "p50_us": answer["p50_us"]})
        medians = {name: round(statistics.median(each[name] for each in seen), 1) for name in seen[0]}
        found.append({"sessions": count, **medians})
        for key in keys:
            ask(bench.port, "POST", "/sessions/close", {"session_key": key})
    return found


def first_events(bench: Bench) -> dict[str, float]:
    """Milliseconds to the first delta, the sessions new each time."""

    def once(port: int, path: str, body: dict[str, Any]) -> float:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began = time.perf_counter()
            sock.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            got = b""
            while b"four words" not in got:
                part = sock.recv(65536)
                if not part:
                    raise RuntimeError(f"no delta came: {got[-500:]!r}")
                got += part
            took = time.perf_counter() - began
            while sock.recv(65536):
                pass
        return took * 1e3

    ask(bench.port, "POST", "/sessions", {"session_key": "first"})
    run = {"message": "what?", "session_key": "first", "run_id": "run-1"}
    through, direct = [], []
    for _ in range(FIRST_EVENTS):
        body = {"input": "what?", "stream": True, "user": "first"}
        direct.append(once(bench.worker, "/run", run))
        through.append(once(bench.port, "/v1/responses", body))
    return {
        "through_ms": round(statistics.fmean(through), 3),
        "worker_ms": round(statistics.fmean(direct), 3),
        "added_ms": round(statistics.median(through) - statistics.median(direct), 3),
    }


def episodes(floor: Floor) -> dict[str, Any]:
    from areal.api.cli_args import AgentServiceConfig
    from areal.client import AgentController

    _, mock = floor.start(sys.executable, str(PARTS / "mock.py"))
    proxy, proxy_port = floor.data_proxy(mock, write_vocabulary(floor.folder / "tokenizer"))
    gateway, port = floor.gateway(f"http://127.0.0.1:{proxy_port}")
    access = {"addr": f"http://127.0.0.1:{port}", "admin_key_file": str(floor.folder / "key")}
    bench = Bench(floor, "--inference", json.dumps(access))
    processes = {"inference gateway": gateway, "inference data proxy": proxy, **bench.system.processes}

    def clocks() -> dict[str, float]:
        return {**{name: cpu_us(pid) for name, pid in processes.items()}, "controller": time.process_time() * 1e6}

    async def episode(controller: AgentController) -> None:
        session = (await controller.start_session("bench"))["session_id"]
        for turn in range(TURNS):
            await controller.step(f"question {turn}", session)
        exported = await controller.export_trajectory(session, reward=1.0)
        if len(exported.token_rows) != TURNS:
            raise RuntimeError(f"{len(exported.token_rows)} rows were exported, not {TURNS}")
        await controller.close_session(session)

    async def play(controller: AgentController, count: int, at_once: int) -> None:
        for _ in range(count // at_once):
            await asyncio.gather(*(episode(controller) for _ in range(at_once)))

    found: dict[str, Any] = {}
    config = AgentServiceConfig(gateway_addr=f"http://127.0.0.1:{bench.port}", admin_api_key=KEY)
    with AgentController(config) as controller:
        for name, count, at_once in (("alone", EPISODES, 1), ("at_once", 4 * EPISODES, AT_ONCE)):
            asyncio.run(play(controller, at_once * 3, at_once))
            before = clocks()
            asyncio.run(play(controller, count, at_once))
            spent = {part: (now - before[part]) / 1e3 / count for part, now in clocks().items()}
            found[name] = {
                "cpu_ms": round(sum(spent.values()), 2),
                **{part: round(ms, 2) for part, ms in spent.items()},
            }
    return found


def sockets(bench: Bench) -> float:
    """Kilobytes for each idle one."""
    head = (
        "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    ).encode()
    pid = bench.system.processes["gateway"]
    with contextlib.ExitStack() as stack:

        def opened() -> None:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", bench.port)))
            sock.sendall(head)
            if b" 101 " not in (said := sock.recv(4096)):
                raise RuntimeError(f"no WebSocket: {said!r}")

        for _ in range(50):
            opened()
        before = resident_bytes(pid)
        for _ in range(SOCKETS):
            opened()
        return round((resident_bytes(pid) - before) / SOCKETS / 1024, 1)


def text(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['sessions']} sessions",
            *(row[name] for name in ("cpu_us", "cpu gateway", "cpu router", "cpu data proxy", "p50_us")),
        ]
        for row in found["turns"]
    ]
    first, episode, memory = found["first_event"], found["episode"], found["resident_mib"]
    by_sessions = {row["sessions"]: row["cpu_us"] for row in found["turns"]}
    growth, parts = by_sessions[512] / by_sessions[16], ["all", *list(episode["alone"])[1:]]
    return "\n\n".join(
        (
            table(("a turn", "CPU us", "gateway", "router", "data proxy", "p50 us"), rows),
            table(("an episode, CPU ms", *parts), [[name, *episode[name].values()] for name in ("alone", "at_once")]),
            table(
                ("what", "target", "seen"),
                (
                    ("CPU a turn, 16 sessions", "500 us", f"{by_sessions[16]:.0f} us"),
                    ("the same at 512", "1.5x", f"{growth:.2f}x"),
                    ("first event, added", "2 ms", f"{first['added_ms']} ms"),
                    ("episode of 4 turns", "8 ms", f"{episode['alone']['cpu_ms']} ms"),
                    (f"the same, {AT_ONCE} at once", "8 ms", f"{episode['at_once']['cpu_ms']} ms"),
                    ("an idle WebSocket", "20 kB", f"{found['socket_kib']} KiB"),
                    *((f"resident: {name}", "60 MB", f"{size} MiB") for name, size in memory.items()),
                ),
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    found: dict[str, Any] = header("agents")
    with tempfile.TemporaryDirectory() as name:
        floor = Floor(Path(name))
        try:
            bench = Bench(floor)
            found["turns"] = turns(bench, 1 if options.quick else options.rounds)
            found["first_event"] = first_events(bench)
            memory = {name: resident_bytes(pid) for name, pid in bench.system.processes.items()}
            found["resident_mib"] = {name: round(size / 2**20, 1) for name, size in memory.items()}
            found["socket_kib"] = sockets(bench)
            found["episode"] = episodes(floor)
        finally:
            floor.close()
    publish(found, text(found), options.write)


if __name__ == "__main__":
    main()
