"""A running inference service for tests: gateway, router, and a data proxy with a scripted engine for each replica."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.processes import Answer, Process, Processes, Stream, engine_calls, script, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ANSWER = "Hello there, friend!"


@dataclass(frozen=True)
class Service:
    """One model, called ``tiny``, with a replica for each engine. ``engine`` and ``proxy`` are the first one's."""

    processes: Processes
    engines: tuple[Process, ...]
    proxies: tuple[Process, ...]
    router: Process
    gateway: Process

    @property
    def engine(self) -> Process:
        return self.engines[0]

    @property
    def proxy(self) -> Process:
        return self.proxies[0]

    @property
    def key(self) -> str:
        return self.processes.key

    def chat(self, **body: Any) -> Answer:
        return self.gateway.call("POST", CHAT, {**_chat_body(), **body}, key=self.key)

    def stream_chat(self, **body: Any) -> Stream:
        return Stream(self.gateway.port, CHAT, {**_chat_body(), **body}, self.key)

    def complete(self, **body: Any) -> Answer:
        return self.gateway.call("POST", COMPLETIONS, {"model": "tiny", "prompt": "Hello", **body}, key=self.key)

    def models(self) -> list[str]:
        """What the gateway lists."""
        models: list[str] = self.gateway.call("GET", "/v1/models", key=self.key).json()["models"]
        return models

    def engine_saw(self) -> dict[str, Any]:
        """The body of the engine's one call since the test began."""
        calls = engine_calls(self.engine)
        assert len(calls) == 1
        body: dict[str, Any] = calls[0]["body"]
        return body

    def tell_router(self, path: str, **body: Any) -> dict[str, Any]:
        """Change something at the router and return once the gateway goes by it."""
        answer = self.router.call("POST", path, body, key=self.key)
        assert answer.status == 200, answer.body
        reply: dict[str, Any] = answer.json()
        wait_until(lambda: self.gateway.call("GET", "/health").json()["table"]["serial"] >= reply["serial"], what=path)
        return reply

    def register(self, *proxies: Process, model: str = "tiny", expected: int | None = None) -> None:
        self.tell_router("/register_model", **self.processes.registration(*proxies, model=model, expected=expected))

    def wait_state(self, worker_id: str, state: str) -> None:
        def reached() -> bool:
            workers = self.router.call("GET", "/workers", key=self.key).json()["workers"]
            return any((worker["worker_id"], worker["state"]) == (worker_id, state) for worker in workers)

        wait_until(reached, what=f"{worker_id} {state}")

    def wait_queued(self, count: int) -> None:
        line = f"areal_gateway_queued {count}.0".encode()
        wait_until(lambda: line in self.gateway.call("GET", "/metrics").body, what=f"{count} queued")

    def reset(self) -> None:
        """Everything as it was when the service was new."""
        for engine in self.engines:
            script(engine, reset=True)
        for model in self.router.call("GET", "/models", key=self.key).json()["models"]:
            if model["name"] != "tiny":
                self.tell_router("/remove_model", model=model["name"])
        limits = {"max_body_bytes": 2**25, "request_timeout_seconds": 600, "max_queued_requests": 10_000}
        self.tell_router("/configure", strategy="auto", limits=limits)
        self.register(*self.proxies)
        self.tell_router("/undrain", worker_id="all")
        for number in range(len(self.proxies)):
            self.wait_state(f"tiny-{number}", "ready")


def _chat_body() -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def build_service(processes: Processes, tokenizer: Path, *gateway_flags: str, replicas: int = 1) -> Service:
    engines = tuple(processes.engine(tokenizer) for _ in range(replicas))
    proxies = tuple(processes.data_proxy(engine, tokenizer) for engine in engines)
    router = processes.router()
    gateway = processes.gateway(router, *gateway_flags)
    processes.register(router, *proxies)
    return Service(processes, engines, proxies, router, gateway)


def later(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run a blocking call beside the test."""
    future: Future[Any] = Future()

    def body() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=body, daemon=True, name="later").start()
    return future


def refuses_connections(process: Process) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", process.port)) == errno.ECONNREFUSED


async def in_thread(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A blocking call beside a server that lives in this loop."""
    return await asyncio.wrap_future(later(work, *args, **kwargs))
