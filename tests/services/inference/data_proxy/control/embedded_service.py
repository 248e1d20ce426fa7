"""A service with a real embedded engine that serves the example model: router, gateway, data proxy, engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.processes import Answer, Process, Processes, Stream, wait_ready, wait_until

EXAMPLE = Path(__file__).parents[5] / "examples" / "reverse_digits" / "model"
MODEL = "digits"
COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": [1, 5, 6, 7, 8, 14],
    "max_tokens": 100,
    "ignore_eos": True,
    "temperature": 1.0,
}


@dataclass(frozen=True)
class EmbeddedService:
    processes: Processes
    engine: Process
    proxy: Process
    router: Process
    gateway: Process

    @property
    def key(self) -> str:
        return self.processes.key

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Of the gateway, with the admin key."""
        return self.gateway.call(method, path, body, key=self.key)

    def control(self, path: str, body: Any = None) -> list[dict[str, Any]]:
        """A control that must work on every worker; its results."""
        answer = self.ask("POST", path, body or {})
        assert answer.status == 200, answer.body
        results: list[dict[str, Any]] = answer.json()["results"]
        assert results and all(result["ok"] for result in results)
        return results

    def stream(self) -> Stream:
        return Stream(self.gateway.port, COMPLETIONS, {**LONG, "return_token_ids": True}, self.key)

    def tokens(self) -> int:
        """How many tokens the engine has generated."""
        stats = self.engine.call("GET", "/stats", key=self.key).json()
        return int(stats["generated_tokens"])

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.ask("GET", "/workers").json()["workers"]
        return workers


def build_embedded_service(
    processes: Processes, *proxy_flags: str, engine_flags: Sequence[str] = ()
) -> EmbeddedService:
    engine = processes.service("engines.embedded", "--model-path", str(EXAMPLE), *engine_flags)
    wait_ready(engine)
    flags = ("--model", MODEL, "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(EXAMPLE))
    proxy = processes.service("data_proxy", *flags, *proxy_flags)
    router = processes.router()
    gateway = processes.gateway(router)
    wait_ready(proxy)
    processes.register(router, proxy, model=MODEL)
    service = EmbeddedService(processes, engine, proxy, router, gateway)
    wait_until(lambda: MODEL in service.ask("GET", "/v1/models").json()["models"], what="the model is listed")
    return service
