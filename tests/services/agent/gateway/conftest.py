"""A running agent service: gateway, router and data proxies, each a process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.services.processes import Answer, Process, Processes, Stream, wait_ready, wait_until

STANDIN = Path(__file__).parent / "standin_data_proxy.py"
INFERENCE = "http://127.0.0.1:1"
ACCESS = f'[{{"addr": "{INFERENCE}", "model": "tiny"}}]'


@dataclass(frozen=True)
class AgentService:
    processes: Processes
    router: Process
    gateway: Process
    proxies: list[Process]

    @property
    def key(self) -> str:
        return self.processes.key

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        return self.gateway.call(method, path, body, key=self.key, **more)

    def respond(self, message: Any, session: str | None = None, **body: Any) -> Answer:
        headers = {"X-AReaL-Session-Key": session} if session is not None else {}
        return self.call("POST", "/v1/responses", {"input": message, **body}, headers=headers)

    def stream(self, message: str, session: str, path: str = "/v1/responses") -> Stream:
        said = {"input": message, "messages": [{"role": "user", "content": message}]}
        return Stream(self.gateway.port, path, {**said, "user": session}, self.key)

    def sdk(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url}/v1", api_key=self.key, max_retries=0)

    def wait_running(self, count: int) -> None:
        """Turns that say ``wait`` and have begun, in all data proxies."""

        def waiting() -> bool:
            return sum(proxy.call("GET", "/health").json()["waiting"] for proxy in self.proxies) == count

        wait_until(waiting, what=f"{count} turns wait")

    def release(self) -> None:
        for proxy in self.proxies:
            proxy.call("POST", "/release", key=self.key)


def standin(processes: Processes) -> Process:
    process = processes.spawn(str(STANDIN), "--admin-key-file", str(processes.key_file))
    process.port = int(process.wait_log(r"listens on \S+ port (\d+)")[1])
    wait_ready(process)
    return process


def build(processes: Processes, pairs: int = 2, *gateway_flags: str) -> AgentService:
    router = processes.router()
    proxies = [standin(processes) for _ in range(pairs)]
    flags = ("--router-url", router.url, "--service", "helper", "--inference", ACCESS)
    gateway = processes.service("agent.gateway", *flags, *gateway_flags)
    processes.register(router, *proxies, model="helper")
    assert router.call("POST", "/synced", {}, key=processes.key).status == 200
    wait_ready(gateway)
    return AgentService(processes, router, gateway, proxies)


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentService]:
    processes = Processes(tmp_path_factory.mktemp("agents"))
    yield build(processes)
    processes.stop()


@pytest.fixture
def service(shared: AgentService) -> AgentService:
    """Shared by the tests that break nothing."""
    return shared


@pytest.fixture
def own(processes: Processes) -> AgentService:
    """A service of the test's own, with one pair."""
    return build(processes, 1)
