"""What is measured and what it needs, as processes on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).resolve().parent
KEY = "benchmark-key-0123456789"
MODEL = "mock"
_CPUCLOCK_SCHED = 2  # of <linux/posix-timers.h>: a process's clock is named by its pid and this
_T = TypeVar("_T")


@dataclass
class System:
    """``processes`` count, by what they are called. ``slow``: it gets a tenth of the requests."""

    name: str
    port: int
    processes: dict[str, int] = field(default_factory=dict)
    slow: bool = False

    def cpu_us(self) -> dict[str, float]:
        return {name: cpu_us(pid) for name, pid in self.processes.items()}


def cpu_us(pid: int) -> float:
    """Microseconds on a CPU, of all its threads, those that ended too."""
    clock = (~pid << 3) | _CPUCLOCK_SCHED
    return time.clock_gettime_ns(clock) / 1e3


def resident_bytes(pid: int) -> int:
    line = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(line[1]) * 1024 if line else 0


def children(pid: int) -> list[int]:
    """Those that any of its threads has started."""
    return [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]


class Floor:
    """Starts processes; ``close`` ends all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._key_file = folder / "key"
        self._key_file.write_text(KEY)
        self._key_file.chmod(0o600)

    def start(self, *argv: str, says: str = r"^(\d+)$", **env: str) -> tuple[int, int]:
        """(pid, port): ``says`` finds the port in what the process writes."""
        log = self.folder / f"log-{len(self._children)}"
        own = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **env}
        with log.open("wb") as out:
            child = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=own, cwd=self.folder)
        self._children.append(child)

        def port() -> int | None:
            if child.poll() is not None:
                raise RuntimeError(f"{argv} did not start:\n{log.read_text()}")
            found = re.search(says, log.read_text(), re.MULTILINE)
            return None if found is None else int(found[1]) if found.groups() else 0

        return child.pid, until(port, f"{argv} to say where it listens")

    def service(self, module: str, *argv: str) -> tuple[int, int]:
        return self.keyed(sys.executable, "-m", f"areal.services.inference.{module}", *argv)

    def keyed(self, *argv: str) -> tuple[int, int]:
        """A service of ours, by its command: it takes any free port, and the admin key."""
        flags = ("--port", "0", "--admin-key-file", str(self._key_file))
        return self.start(*argv, *flags, says=r"listens on \S+ port (\d+)")

    def router(self, *workers: str) -> int:
        """The port of a router whose one model has these workers."""
        _, router = self.service("router")
        listed = [{"worker_id": f"mock-{place}", "worker_addr": url} for place, url in enumerate(workers)]
        ask(router, "POST", "/register_model", {"model": MODEL, "workers": listed})
        until(lambda: all_ready(router, len(workers)) or None, "all workers to be ready")
        return router

    def gateway(self, *workers: str, relays: int = 1) -> tuple[int, int]:
        """A gateway whose one model has these workers, all of them ready."""
        url = f"http://127.0.0.1:{self.router(*workers)}"
        return self.serving(*self.service("gateway", "--router-url", url, "--relays", str(relays)))

    def serving(self, pid: int, port: int) -> tuple[int, int]:
        """The same gateway, once it serves its model."""
        until(lambda: answers(port, "/ready") or None, "the gateway to have a routing table")
        until(lambda: MODEL in ask(port, "GET", "/v1/models")["models"] or None, "the gateway to list its model")
        return pid, port

    def data_proxy(self, engine: int, tokenizer: Path) -> tuple[int, int]:
        """One that records, before the mock engine at port ``engine``."""
        flags = ("--model", MODEL, "--engine", "embedded", "--engine-url", f"http://127.0.0.1:{engine}")
        state = self.folder / f"state-{len(self._children)}"
        pid, port = self.service("data_proxy", *flags, "--tokenizer-path", str(tokenizer), "--state-dir", str(state))
        until(lambda: answers(port, "/ready") or None, "the data proxy to be ready")
        return pid, port

    def close(self) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def until(look: Callable[[], _T | None], what: str, seconds: float = 120.0) -> _T:
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited for {what} for {seconds:g} s")
        time.sleep(0.05)
    return found


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def answers(port: int, path: str) -> bool:
    with contextlib.suppress(RuntimeError, OSError, http.client.HTTPException):
        ask(port, "GET", path)
        return True
    return False


def all_ready(router: int, count: int) -> bool:
    workers = ask(router, "GET", "/workers")["workers"]
    ready = [worker for worker in workers if worker["state"] == "ready" and worker["healthy"]]
    return len(ready) == count


def ask(port: int, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        text = answer.read()
        if not 200 <= answer.status < 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]!r}")
        try:
            return json.loads(text)
        except ValueError:
            return text
