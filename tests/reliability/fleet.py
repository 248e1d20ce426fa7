"""Real processes that may be killed and come back where they were, as their supervisor would bring them back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.witness import Witness
from tests.services.processes import Process, Processes, wait_ready, wait_until

HERE = Path(__file__).parent
MODEL = "tiny"


@dataclass
class Member:
    """One process of a fleet. ``start`` starts it on a port; 0 is any."""

    name: str
    start: Callable[[int], Process]
    process: Process = field(init=False)

    def __post_init__(self) -> None:
        self.process = self.start(0)

    def kill(self) -> None:
        """As ``kill -9`` does."""
        self.process.kill()

    def restart(self) -> None:
        """On the same port, with the same flags."""
        self.process = self.start(self.process.port)

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        return self.process.call(method, path, body, **more)


class Watched(Member):
    """A real engine behind a relay that keeps its minutes: calls go to the relay, kills to the engine."""

    def __init__(self, name: str, engine: Member, start: Callable[[int], Process]) -> None:
        self.engine = engine
        super().__init__(name, start)

    def kill(self) -> None:
        self.engine.kill()

    def restart(self) -> None:
        self.engine.restart()


@dataclass
class Fleet:
    """Replicas of one model that record in one folder, alone or behind a gateway. ``front`` is where callers go."""

    processes: Processes
    folder: Path
    tokenizer: Path
    replicas: int = 1
    behind_gateway: bool = False
    relays: int = 1
    proxy_flags: tuple[str, ...] = ()
    warped_by: Path | None = None  # a file that moves the data proxies' clocks
    weights: tuple[Path, ...] = ()  # checkpoints of one model, for an embedded engine in place of the scripted one

    def __post_init__(self) -> None:
        make = self._embedded if self.weights else self._engine
        self.engines = [make(number) for number in range(self.replicas)]
        self.witness = Witness(
            self.tokenizer, *(self.folder / f"engine-{number}.log" for number in range(self.replicas))
        )
        self.proxies = [self._proxy(number) for number in range(self.replicas)]
        self.router: Member | None = None
        self.gateway: Member | None = None
        if self.behind_gateway:
            self.router = Member("router", lambda port: self.processes.router("--port", str(port)))
            self.gateway = Member("gateway", self._start_gateway)
            self.register()
            self.wait_ready()

    @property
    def key(self) -> str:
        return self.processes.key

    @property
    def front(self) -> Process:
        return (self.gateway or self.proxies[0]).process

    @property
    def members(self) -> list[Member]:
        return [*self.engines, *self.proxies, *filter(None, (self.router, self.gateway))]

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        return self.front.call(method, path, body, key=self.key)

    def wait_ready(self) -> None:
        """Every process serves, and the gateway knows of all."""
        for proxy in self.proxies:
            wait_ready(proxy.process)
        if self.router is None or self.gateway is None:
            return
        router = self.router.process
        wait_until(lambda: self._states(router) == ["ready"] * self.replicas, what="the router sees the workers")
        self.wait_known()

    def _states(self, router: Process) -> list[str]:
        workers = router.call("GET", "/workers", key=self.key).json()["workers"]
        return [worker["state"] for worker in workers]

    def heal(self, member: Member) -> None:
        """``member`` is back: what it forgot is sent again, as the reconciler does."""
        if member is self.router:
            self.register()
        self.wait_ready()

    def register(self, *strangers: str) -> None:
        """What the reconciler tells a router that knows of nothing; ``strangers`` are other workers' addresses."""
        assert self.router is not None
        known = self.processes.registration(*(proxy.process for proxy in self.proxies), model=MODEL, expected=None)
        known["workers"] += [{"worker_id": f"stranger-{url[-5:]}", "worker_addr": url} for url in strangers]
        assert self.router.call("POST", "/register_model", known, key=self.key).status == 200
        assert self.router.call("POST", "/synced", {}, key=self.key).status == 200
        self.wait_known()

    def configure(self, **limits: float) -> None:
        assert self.router is not None
        assert self.router.call("POST", "/configure", {"limits": limits}, key=self.key).status == 200
        self.wait_known()

    def wait_known(self) -> None:
        """Each relay goes by what the router knows now."""
        if self.router is None or self.gateway is None:
            return
        serial = self.router.call("GET", "/table", key=self.key).json()["serial"]
        known: set[int] = set()  # relays that have the table

        def all_know() -> bool:
            health = self.front.call("GET", "/health").json()
            if health["table"]["serial"] >= serial:
                known.add(health["pid"])
            return len(known) >= self.relays

        wait_until(all_know, what="each relay has the table")

    def _engine(self, number: int) -> Member:
        flags = ("--tokenizer", str(self.tokenizer))
        return Member(f"engine-{number}", lambda port: self._witness("witness_engine.py", number, port, *flags))

    def _embedded(self, number: int) -> Member:
        def start(port: int) -> Process:
            flags = ("--model-path", str(self.weights[0]), "--threads", "1", "--port", str(port))
            process = self.processes.service("engines.embedded", *flags, keyed=False)
            wait_ready(process)
            return process

        engine = Member(f"embedded-{number}", start)
        flags = ("--engine", engine.process.url)
        return Watched(f"engine-{number}", engine, lambda port: self._witness("witness_relay.py", number, port, *flags))

    def _witness(self, script: str, number: int, port: int, *flags: str) -> Process:
        log = str(self.folder / f"engine-{number}.log")
        process = self.processes.spawn(str(HERE / script), "--port", str(port), "--log", log, *flags)
        process.port = int(process.wait_log(r"^(\d+)$")[1])
        return process

    def load(self, version: int) -> None:
        """Other weights in every engine; which, the version says."""
        path = str(self.weights[version % len(self.weights)]) if self.weights else "any"
        for engine in self.engines:
            answer = engine.call("POST", "/load_weights", {"path": path, "version": version})
            assert answer.status == 200, answer.body

    def _proxy(self, number: int) -> Member:
        def start(port: int) -> Process:
            return self._start_proxy(self._proxy_flags(number, port), {"AREAL_RUN_UID": f"run-{number}"})

        member = Member(f"data-proxy-{number}", start)
        wait_ready(member.process)
        return member

    def _proxy_flags(self, number: int, port: int) -> tuple[str, ...]:
        engine = self.engines[number].process
        return (
            *("--port", str(port), "--model", MODEL, "--tokenizer-path", str(self.tokenizer)),
            *("--engine", "embedded", "--engine-url", engine.url),
            *("--state-dir", str(self.folder / "state"), "--adopt-after", "3600", *self.proxy_flags),
        )

    def _start_proxy(self, flags: tuple[str, ...], env: dict[str, str]) -> Process:
        if self.warped_by is None:
            return self.processes.service("data_proxy", *flags, env=env)
        argv = (str(HERE / "warped.py"), str(self.warped_by), "areal.services.inference.data_proxy")
        process = self.processes.spawn(*argv, *flags, "--admin-key-file", str(self.processes.key_file), env=env)
        process.port = int(process.wait_log(r"listens on \S+ port (\d+)")[1])
        return process

    def _start_gateway(self, port: int) -> Process:
        assert self.router is not None
        flags = ("--router-url", self.router.process.url, "--port", str(port), "--relays", str(self.relays))
        return self.processes.service("gateway", *flags)


@contextlib.contextmanager
def running_fleet(folder: Path, tokenizer: Path, **what: Any) -> Iterator[Fleet]:
    """A fleet that is gone afterwards, whatever happens."""
    processes = Processes(folder)
    try:
        yield Fleet(processes, folder, tokenizer, **what)
    finally:
        processes.stop()


def place_of(fleet: Fleet, session_id: str) -> int:
    """Which replica has the session."""
    tag = session_id.rsplit("-", 2)[1]
    held = [tag in proxy.call("GET", "/ready").json()["journals"] for proxy in fleet.proxies]
    return held.index(True)
