"""Loads, each from a process of its own, and what a system under one of them costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.relaying.floor import KEY, REPOSITORY, System, ask

_LONGEST_S = 240.0
_GROUP = 1024


def request_body(stream: bool) -> str:
    """About 2 KB."""
    text = "the quick brown fox jumps over the lazy dog " * 44
    body: dict[str, Any] = {"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 64}
    if stream:
        body["stream"] = True
    return json.dumps(body, separators=(",", ":"))


def relayed(port: int, connections: int, requests: int, *, stream: bool = False) -> dict[str, float]:
    return repeated(port, "/v1/chat/completions", request_body(stream), connections, requests)


def repeated(
    port: int, path: str, body: str, connections: int, requests: int, own_headers: Sequence[Mapping[str, str]] = ()
) -> dict[str, float]:
    """The same call again and again. ``own_headers``: further headers of each connection."""
    order = {
        "port": port,
        "path": path,
        "headers": {"Authorization": f"Bearer {KEY}"},
        "own_headers": list(own_headers),
        "body": body,
        "connections": connections,
        "requests": requests,
    }
    return _run("load", order, requests)


def talked(
    port: int,
    keys: Sequence[str],
    connections: int,
    requests: int,
    *,
    stream: bool = False,
    turns: int = 8,
    episodes: bool = False,
) -> dict[str, float]:
    """Short turns of conversations in sessions. With ``episodes`` a request is an episode of so many turns."""
    order = {
        "port": port,
        "keys": keys,
        "connections": connections,
        "requests": requests,
        "turns": turns,
        "stream": stream,
        "episodes": episodes,
    }
    return _run("turns", order, requests)


def _run(module: str, order: dict[str, Any], requests: int) -> dict[str, float]:
    argv = [sys.executable, "-m", f"benchmarks.relaying.{module}"]
    data = json.dumps(order).encode()
    ran = subprocess.run(argv, input=data, stdout=subprocess.PIPE, timeout=_LONGEST_S, check=True, cwd=REPOSITORY)
    found: dict[str, float] = json.loads(ran.stdout)
    if found["failed"]:
        raise RuntimeError(f"{found['failed']:.0f} of {requests} requests failed at port {order['port']}")
    return found


def start_sessions(port: int, count: int) -> list[str]:
    """Their keys."""
    keys: list[str] = []
    while len(keys) < count:
        body = {"task_id": f"bench-{len(keys)}", "group_size": min(_GROUP, count - len(keys))}
        started = ask(port, "POST", "/rl/start_session", body)
        keys += [session["session_api_key"] for session in started["sessions"]]
    return keys


class Spent:
    """What ``system`` spends on a load: enter, run it, leave."""

    def __init__(self, system: System, requests: int) -> None:
        self._system = system
        self._requests = requests
        self.parts: dict[str, float] = {}

    def __enter__(self) -> Spent:
        self._before = self._system.cpu_us()
        return self

    def __exit__(self, *error: object) -> None:
        after = self._system.cpu_us()
        self.parts = {f"cpu {name}": (after[name] - self._before[name]) / self._requests for name in after}

    @property
    def cpu_us(self) -> float:
        return sum(self.parts.values())
