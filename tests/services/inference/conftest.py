"""One house of services for all tests that break nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.services.processes import Answer, Process, Processes, Stream, engine_calls, script

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class House:
    """Gateway, router, data proxy and scripted engine of one model, called ``tiny``."""

    engine: Process
    proxy: Process
    router: Process
    gateway: Process
    key: str

    def chat(self, **body: Any) -> Answer:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **body}
        return self.gateway.call("POST", CHAT, body, key=self.key)

    def stream_chat(self, **body: Any) -> Stream:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], **body}
        return Stream(self.gateway.port, CHAT, body, self.key)

    def complete(self, **body: Any) -> Answer:
        return self.gateway.call("POST", COMPLETIONS, {"model": "tiny", "prompt": "Hello", **body}, key=self.key)

    def engine_saw(self) -> dict[str, Any]:
        """The body of the engine's one call since the test began."""
        calls = engine_calls(self.engine)
        assert len(calls) == 1
        body: dict[str, Any] = calls[0]["body"]
        return body


def build_house(processes: Processes, tokenizer: Path, *gateway_flags: str) -> House:
    engine = processes.engine(tokenizer)
    proxy = processes.data_proxy(engine, tokenizer)
    router = processes.router()
    gateway = processes.gateway(router, *gateway_flags)
    processes.register(router, proxy)
    return House(engine, proxy, router, gateway, processes.key)


@pytest.fixture(scope="session")
def shared_house(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[House]:
    processes = Processes(tmp_path_factory.mktemp("house"))
    yield build_house(processes, tokenizer)
    processes.stop()


@pytest.fixture
def house(shared_house: House) -> House:
    """The shared house with the engine's script as new."""
    script(shared_house.engine, reset=True)
    return shared_house
