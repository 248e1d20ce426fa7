"""A gateway, a router and data proxies that keep journals in one folder, as one model's replicas do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.services.inference.recorder.session import HITL, SessionName
from tests.services.inference.recorder.rollouts import Rollout, begin, begin_group
from tests.services.inference.running_service import Service
from tests.services.processes import Answer, Process, Processes, wait_until


@dataclass(frozen=True)
class RecordingService(Service):
    tokenizer: Path
    state: Path

    def admin(self, method: str, path: str, body: Any = None) -> Answer:
        return self.gateway.call(method, path, body, key=self.key)

    def begin(self, **more: Any) -> Rollout:
        return begin(self.gateway, self.key, **more)

    def begin_group(self, size: int, **more: Any) -> list[Rollout]:
        return begin_group(self.gateway, self.key, size, **more)

    def spread(self, rollouts: Iterable[Rollout]) -> Counter[str]:
        """How many of the sessions are recorded in which journal."""
        return Counter(tag_of(rollout.session_id) for rollout in rollouts)

    def start_proxy(self, number: int) -> Process:
        """The process of replica ``number``: a later one is found again by its run's uid, as a restarted one is."""
        return start_proxy(self.processes, self.engines[number], self.tokenizer, self.state, number)

    def end_all(self) -> None:
        """End what other tests started, and return once the router knows."""
        while True:
            page = self.admin("GET", "/rl/sessions?limit=1000").json()["sessions"]
            active = [each for each in page if each["state"] == "active" and not each["session_id"].startswith(HITL)]
            for each in active:
                self.admin("POST", "/rl/end_session", {"session_id": each["session_id"]})
            if not active:
                break
        wait_until(lambda: sum(worker["sessions"] for worker in self.workers()) == 0, what="no session is active")

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.router.call("GET", "/workers", key=self.key).json()["workers"]
        return workers

    def on_each_replica(self, **more: Any) -> list[Rollout]:
        """A session on every replica."""
        found: dict[str, Rollout] = {}

        def enough() -> bool:
            rollout = self.begin(**more)
            found.setdefault(tag_of(rollout.session_id), rollout)
            return len(found) == len(self.proxies)

        wait_until(enough, what="a session on each replica")
        return list(found.values())


def tag_of(session_id: str) -> str:
    name = SessionName.parse(session_id)
    assert name is not None, session_id
    return name.tag


def start_proxy(
    processes: Processes, engine: Process, tokenizer: Path, state: Path, number: int, *flags: str
) -> Process:
    argv = ("--model", "tiny", "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(tokenizer))
    kept = ("--state-dir", str(state), "--adopt-after", "1", *flags)
    process = processes.service("data_proxy", *argv, *kept, env={"AREAL_RUN_UID": f"replica-{number}"})
    wait_until(lambda: process.call("GET", "/ready").status == 200, what="ready")
    return process


def build_recording_service(
    processes: Processes,
    tokenizer: Path,
    state: Path,
    *gateway_flags: str,
    replicas: int = 2,
    proxy_flags: tuple[str, ...] = (),
) -> RecordingService:
    engines = tuple(processes.engine(tokenizer) for _ in range(replicas))
    proxies = tuple(
        start_proxy(processes, engine, tokenizer, state, number, *proxy_flags) for number, engine in enumerate(engines)
    )
    router = processes.router()
    gateway = processes.gateway(router, *gateway_flags)
    processes.register(router, *proxies)
    service = RecordingService(processes, engines, proxies, router, gateway, tokenizer, state)
    relays = int(gateway_flags[gateway_flags.index("--relays") + 1]) if "--relays" in gateway_flags else 1
    following: set[int] = set()

    def all_heard() -> bool:
        """Whoever of the relays is asked: each has the table, and the table has the journals."""
        table = service.router.call("GET", "/table", key=service.key).json()
        workers = [worker for model in table["models"].values() for worker in model["workers"]]
        health = service.gateway.call("GET", "/health").json()
        if all(worker["journals"] for worker in workers) and health["table"]["serial"] >= table["serial"]:
            following.add(health["pid"])
        return len(following) == relays

    wait_until(lambda: service.admin("GET", "/rl/sessions").status == 200 and all_heard(), what="journals known")
    return service
