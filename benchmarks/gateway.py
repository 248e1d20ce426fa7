"""What the gateway costs: CPU time a request, and the latency it adds, beside a bare aiohttp relay and nginx.

    python benchmarks/gateway.py [--rounds 3] [--quick] [--write]

Every system relays the same requests from one load generator to one mock worker, all processes on loopback: a plain
call (2 KB in, 12 KB of JSON out) and a stream of 64 server-sent events, at 1, 16, 128 and 512 connections. CPU is the
system's own (all its threads, from the kernel's scheduler statistics); the mock, the load and the router do not count.
Added latency is the mean through the system minus the mean direct of the same round. Systems take turns in each round,
the order turns from round to round, the first round warms up, medians count. Streams are paced so that about 3,000
events a second arrive at any number of connections, each alone, as from an engine. ``gateway + data proxy`` has a
tokenizer (trained here) and a mock engine that speaks the embedded engine's contract: 64 tokens a call.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.reporting import header, publish, table

PARTS = Path(__file__).resolve().parent / "relaying"
KEY = "benchmark-key-0123456789"
CONNECTIONS = (1, 16, 128, 512)
PLAIN = {1: 400, 16: 2000, 128: 2000, 512: 3072}
STREAMS = {1: 15, 16: 96, 128: 128, 512: 512}
EVENTS_A_SECOND = 3000
DIRECT = "direct"
TARGETS = {("plain", 16): 100, ("plain", 512): 200, ("stream", 16): 700}

NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 32m; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
  fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e; keepalive_requests 100000000;
  upstream mock {{ server 127.0.0.1:{mock}; keepalive 1024; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096; location / {{
    proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_buffer_size 16k; proxy_buffers 8 16k; client_body_buffer_size 64k; }} }}
}}
"""


@dataclass
class System:
    """``processes`` count, by what they are called."""

    name: str
    port: int
    processes: dict[str, int] = field(default_factory=dict)

    def cpu_us(self) -> dict[str, float]:
        return {name: cpu_us(pid) for name, pid in self.processes.items()}


def cpu_us(pid: int) -> float:
    """Microseconds on a CPU, of all living threads."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e3


def resident_mb(pid: int) -> float:
    line = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(line[1]) / 1024 if line else 0.0


class Floor:
    """Starts what is measured and what it needs; ``close`` ends all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._key_file = folder / "key"
        self._key_file.write_text(KEY)
        self._key_file.chmod(0o600)

    def start(self, *argv: str, says: str = r"^(\d+)$") -> tuple[int, int]:
        """(pid, port): ``says`` finds the port in what the process writes."""
        log = self.folder / f"log-{len(self._children)}"
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            child = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=self.folder)
        self._children.append(child)
        deadline = time.monotonic() + 30
        while not (found := re.search(says, log.read_text(), re.MULTILINE)):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv} did not start:\n{log.read_text()}")
            time.sleep(0.02)
        return child.pid, int(found[1]) if found.groups() else 0

    def service(self, module: str, *argv: str) -> tuple[int, int]:
        keyed = ("--port", "0", "--admin-key-file", str(self._key_file))
        name = f"areal.services.inference.{module}"
        return self.start(sys.executable, "-m", name, *keyed, *argv, says=r"listens on \S+ port (\d+)")

    def gateway(self, worker: int) -> tuple[int, int]:
        """A gateway whose one model, ``mock``, has the one worker."""
        _, router = self.service("router")
        workers = [{"worker_id": "mock-0", "worker_addr": f"http://127.0.0.1:{worker}"}]
        ask(router, "POST", "/register_model", {"model": "mock", "workers": workers})
        pid, port = self.service("gateway", "--router-url", f"http://127.0.0.1:{router}")
        deadline = time.monotonic() + 30
        while ask(port, "GET", "/v1/models")["models"] != ["mock"] or not _ready(worker):
            if time.monotonic() > deadline:
                raise RuntimeError("the gateway never listed its model")
            time.sleep(0.05)
        return pid, port

    def nginx(self, mock: int) -> tuple[int, int] | None:
        """None where nginx is not installed."""
        program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
        if program is None:
            return None
        port = _free_port()
        config = self.folder / "nginx.conf"
        config.write_text(NGINX.format(folder=self.folder, mock=mock, port=port))
        master, _ = self.start(program, "-c", str(config), says=r"")
        deadline = time.monotonic() + 10
        children = Path(f"/proc/{master}/task/{master}/children")
        while not (workers := children.read_text().split()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return int(workers[0]), port

    def close(self) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _free_port() -> int:
    import socket

    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready(port: int) -> bool:
    with contextlib.suppress(RuntimeError):
        ask(port, "GET", "/ready")
        return True
    return False


def ask(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {text!r}")
        return json.loads(text)


@contextlib.contextmanager
def systems() -> Iterator[tuple[int, list[System]]]:
    """(the mock's port, the systems); direct is the first of them."""
    from tests.services.tokenizer_folder import write_tokenizer

    with tempfile.TemporaryDirectory() as name:
        floor = Floor(Path(name))
        try:
            _, mock = floor.start(sys.executable, str(PARTS / "mock.py"))
            found = [System(DIRECT, mock)]
            gateway, port = floor.gateway(mock)
            found.append(System("gateway", port, {"gateway": gateway}))
            tokenizer = str(write_tokenizer(Path(name) / "tokenizer"))
            flags = ("--model", "mock", "--engine", "embedded", "--engine-url", f"http://127.0.0.1:{mock}")
            proxy, proxy_port = floor.service("data_proxy", *flags, "--tokenizer-path", tokenizer)
            gateway, port = floor.gateway(proxy_port)
            found.append(System("gateway + data proxy", port, {"gateway": gateway, "data proxy": proxy}))
            bare, port = floor.start(sys.executable, str(PARTS / "bare.py"), f"http://127.0.0.1:{mock}")
            found.append(System("bare aiohttp relay", port, {"relay": bare}))
            if (nginx := floor.nginx(mock)) is not None:
                found.append(System("nginx", nginx[1], {"worker": nginx[0]}))
            yield mock, found
        finally:
            floor.close()


def request_body(stream: bool) -> str:
    """About 2 KB."""
    text = "the quick brown fox jumps over the lazy dog " * 44
    body: dict[str, Any] = {"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    if stream:
        body["stream"] = True
    return json.dumps(body, separators=(",", ":"))


def load(port: int, shape: str, connections: int, requests: int) -> dict[str, float]:
    order = {
        "port": port,
        "path": "/v1/chat/completions",
        "headers": {"Authorization": f"Bearer {KEY}"},
        "body": request_body(shape == "stream"),
        "connections": connections,
        "requests": requests,
    }
    argv = [sys.executable, str(PARTS / "load.py")]
    ran = subprocess.run(argv, input=json.dumps(order).encode(), stdout=subprocess.PIPE, timeout=180, check=True)
    found: dict[str, float] = json.loads(ran.stdout)
    if found["failed"]:
        raise RuntimeError(f"{found['failed']:.0f} of {requests} requests failed at port {port}")
    return found


def measure(
    rounds: int, connections: tuple[int, ...], only: str | None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    found: defaultdict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)
    with systems() as (mock, each):
        if only:
            each = [system for system in each if system.name in (DIRECT, only)]
        idle = {f"{system.name}: {name}": resident_mb(pid) for system in each for name, pid in system.processes.items()}
        for number in range(rounds + 1):
            for shape, counts in (("plain", PLAIN), ("stream", STREAMS)):
                for count in connections:
                    ask(mock, "POST", "/pace", {"gap_s": count / EVENTS_A_SECOND if shape == "stream" else 0})
                    turned = [each[0], *(each[1:] * 2)[number % len(each[1:]) :][: len(each[1:])]]
                    for system, spent in one_turn(turned, shape, count, counts[count]):
                        if number:
                            found[shape, count, system].append(spent)
            print(f"round {number} of {rounds}", file=sys.stderr)
    rows = [
        {"shape": shape, "connections": count, "system": system, **_medians(spent)}
        for (shape, count, system), spent in found.items()
    ]
    return rows, {name: round(size, 1) for name, size in idle.items()}


def one_turn(each: list[System], shape: str, count: int, requests: int) -> Iterator[tuple[str, dict[str, float]]]:
    direct = 0.0
    for system in each:
        before = system.cpu_us()
        answer = load(system.port, shape, count, requests)
        after = system.cpu_us()
        direct = direct or answer["mean_us"]
        parts = {f"cpu {name}": (after[name] - before[name]) / requests for name in after}
        latency = {"mean_us": answer["mean_us"], "added_us": answer["mean_us"] - direct}
        yield system.name, {"cpu_us": sum(parts.values()), **parts, **latency}


def _medians(spent: list[dict[str, float]]) -> dict[str, float]:
    found = {name: round(statistics.median(one[name] for one in spent), 1) for name in spent[0]}
    return {**found, "cpu_us_lowest": round(min(one["cpu_us"] for one in spent), 1)}


def text(rows: list[dict[str, Any]], idle: dict[str, float]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row["shape"], row["connections"])):
        if row["system"] == DIRECT:
            continue
        target = TARGETS.get((row["shape"], row["connections"])) if row["system"] == "gateway" else None
        parts = [f"{name[4:]} {value:.0f}" for name, value in row.items() if name.startswith("cpu ")]
        cpu = f"{row['cpu_us']:.0f}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")
        lines.append(
            (row["shape"], row["connections"], row["system"], cpu, target or "", f"{row['added_us'] / 1e3:.2f}")
        )
    columns = ("shape", "connections", "system", "CPU us a request", "target", "added latency, ms")
    sizes = ", ".join(f"{name} {size:.0f} MB" for name, size in idle.items())
    return f"{table(columns, lines)}\n\nIdle, resident: {sizes}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="16 connections only")
    parser.add_argument("--only", help="one system beside the direct path, by its name in the table")
    parser.add_argument("--write", action="store_true", help="keep the table and the JSON in benchmarks/results")
    options = parser.parse_args()
    rows, idle = measure(options.rounds, (16,) if options.quick else CONNECTIONS, options.only)
    found = header("gateway", aiohttp=version("aiohttp"))
    publish({**found, "rounds": options.rounds, "idleMb": idle, "rows": rows}, text(rows, idle), options.write)
    over = [
        row
        for row in rows
        if row["system"] == "gateway" and row["cpu_us"] >= TARGETS.get((row["shape"], row["connections"]), float("inf"))
    ]
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
