"""One run of a driver against a service of its own, step by step: reward, wall time, CPU time of all processes.

The service (router, gateway, data proxy, embedded engine) is up before the driver starts, and all count: the CPU time
of a step is that of the five processes and of whatever the driver starts. It is read while the run goes on, each time
the run's ``metrics.jsonl`` has a new line, so it is right to about a step's length.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.relaying.floor import KEY, MODEL, REPOSITORY, Floor, all_ready, ask, children, cpu_us, until

_PERIOD_S = 0.02


@dataclass(frozen=True)
class Point:
    """After ``step`` steps, since before the first one: seconds. ``metrics`` are the step's own."""

    step: int
    wall: float
    cpu: float
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return float(self.metrics["reward/mean"])


@dataclass(frozen=True)
class Course:
    """``start_cpu``: CPU seconds that the driver took before its first step. ``cpu_by`` process, of the run's steps."""

    points: tuple[Point, ...]
    start_cpu: float
    cpu_by: dict[str, float]

    def rate(self) -> tuple[float, float]:
        """Steps a second of wall and of CPU time, the first tenth apart."""
        first, last = self.points[len(self.points) // 10], self.points[-1]
        steps = last.step - first.step
        return steps / (last.wall - first.wall), steps / (last.cpu - first.cpu)

    def reached(self, reward: float, over: int = 10) -> Point | None:
        """The first step at which the mean reward of the last ``over`` was so high."""
        for place in range(over, len(self.points) + 1):
            if sum(each.reward for each in self.points[place - over : place]) / over >= reward:
                return self.points[place - 1]
        return None

    def last_reward(self, over: int = 20) -> float:
        return sum(each.reward for each in self.points[-over:]) / over


@dataclass(frozen=True)
class Place:
    """A service that is up; ``processes`` by name."""

    gateway: int
    processes: dict[str, int]


@contextlib.contextmanager
def service(folder: Path, model: Path, *engine_flags: str) -> Iterator[Place]:
    """The inference service of one model, in ``folder``, which is empty or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    floor = Floor(folder)
    try:
        engine, engine_port = floor.service("engines.embedded", "--model-path", str(model), *engine_flags)
        until(lambda: _loaded(engine_port) or None, "the engine to load its model")
        proxy, proxy_port = floor.data_proxy(engine_port, model)
        router, router_port = floor.service("router")
        worker = {"worker_id": "one", "worker_addr": f"http://127.0.0.1:{proxy_port}"}
        ask(router_port, "POST", "/register_model", {"model": MODEL, "workers": [worker]})
        gateway, port = floor.service("gateway", "--router-url", f"http://127.0.0.1:{router_port}", "--relays", "1")
        until(lambda: all_ready(router_port, 1) or None, "the worker to be ready")
        named = {"engine": engine, "data proxy": proxy, "router": router, "gateway": gateway}
        yield Place(port, named)
    finally:
        floor.close()


def _loaded(port: int) -> bool:
    with contextlib.suppress(RuntimeError, OSError):
        ask(port, "GET", "/ready")
        return True
    return False


def course(place: Place | None, folder: Path, driver: str, arguments: Sequence[str]) -> Course:
    """Run ``driver`` to its end, alone where it needs no service. Raises RuntimeError with its last words where it
    fails."""
    folder.mkdir(parents=True, exist_ok=True)
    key, log = folder / "key", folder / "driver.log"
    key.write_text(KEY)
    overrides = [f"cluster.fileroot={folder}", "experiment_name=bench", "trial_name=run"]
    if place is not None:
        address = f"rollout.gateway_addr=http://127.0.0.1:{place.gateway}"
        overrides += [address, f"rollout.admin_api_key_file={key}", f"rollout.model={MODEL}"]
    argv = [sys.executable, "-m", "areal.training", "--driver", driver, "--", *arguments, *overrides]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=_environment())
    try:
        found = _watched(process, place.processes if place else {}, folder / "runs" / "bench" / "run" / "metrics.jsonl")
    finally:
        process.kill()
        process.wait()
    if process.returncode or found is None:
        raise RuntimeError(f"{driver} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "AREAL_LOG_LEVEL": "ERROR"}


def _watched(process: subprocess.Popen[bytes], services: dict[str, int], metrics: Path) -> Course | None:
    """Time begins when the first step has ended: what comes before it is starting. So step 1 is left out."""
    seen, points = 0, []
    first: tuple[float, dict[str, float]] | None = None
    start_cpu, spent = 0.0, {}
    while process.poll() is None:
        time.sleep(_PERIOD_S)
        lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
        steps = [line for line in map(json.loads, lines[seen:]) if "reward/mean" in line or "loss" in line]
        seen = len(lines)
        if not steps:
            continue
        spent = _spent(services, process.pid)
        if first is None:
            first, start_cpu = (steps[-1]["time"], spent), spent["driver"]
        began, before = first
        cpu = sum(spent.values()) - sum(before.values())
        points += [Point(step["step"], step["time"] - began, cpu, step) for step in steps]
    if first is None or process.returncode:
        return None
    by = {name: spent[name] - first[1][name] for name in spent}
    return Course(tuple(points), start_cpu, by)


def _spent(services: dict[str, int], driver: int) -> dict[str, float]:
    """CPU seconds by process; the driver's with those that it started."""
    found = {name: cpu_us(pid) / 1e6 for name, pid in services.items()}
    found["driver"] = sum(_cpu(pid) for pid in [driver, *_descendants(driver)])
    return found


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [each for child in children(pid) for each in (child, *_descendants(child))]
    return []


def _cpu(pid: int) -> float:
    with contextlib.suppress(OSError):
        return cpu_us(pid) / 1e6
    return 0.0
