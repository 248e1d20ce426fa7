"""A running agent service: gateway, router and pairs, each a process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.services.processes import Answer, Process, Processes, Stream, wait_ready, wait_until

AGENTS = Path(__file__).parent / "talking_agent.py"
INFERENCE = "http://127.0.0.1:1"
NAME = "helper"


@dataclass
class AgentService:
    processes: Processes
    router: Process
    gateway: Process
    workers: list[Process] = field(default_factory=list)
    proxies: list[Process] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.processes.key

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        return self.gateway.call(method, path, body, key=self.key, **more)

    def respond(self, message: Any, session: str | None = None, **body: Any) -> Answer:
        headers = {"X-AReaL-Session-Key": session} if session is not None else {}
        return self.call("POST", "/v1/responses", {"input": message, **body}, headers=headers)

    def stream(self, message: str, session: str, path: str = "/v1/responses") -> Stream:
        body = {"input": message, "messages": [{"role": "user", "content": message}]}
        return Stream(self.gateway.port, path, {**body, "user": session}, self.key)

    def sdk(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url}/v1", api_key=self.key, max_retries=0)

    def wait_running(self, count: int) -> None:
        """``count`` turns are at their agents."""

        def running() -> bool:
            return sum(worker.call("GET", "/health").json()["turns"] for worker in self.workers) == count

        wait_until(running, what=f"{count} turns run")

    def release(self) -> None:
        """Let all turns end that ``wait``."""
        for number, worker in enumerate(self.workers):
            body = {"message": "release", "session_key": "release", "run_id": f"release-{number}"}
            assert worker.call("POST", "/run", body, key=self.key).status == 200

    def add_pair(self, state: Path, agent: str = "TalkingAgent", *flags: str) -> None:
        start, number = self.processes.service, len(self.proxies)
        worker = start("agent.worker", "--agent", f"{AGENTS}:{agent}")
        own = ("--service", NAME, "--worker-url", worker.url, "--state-dir", str(state), "--health-period", "0.5")
        proxy = start("agent.data_proxy", *own, "--adopt-after", "1", *flags, env={"AREAL_RUN_UID": f"pair-{number}"})
        wait_ready(proxy)
        self.workers.append(worker)
        self.proxies.append(proxy)

    def register(self) -> None:
        self.processes.register(self.router, *self.proxies, model=NAME)
        assert self.router.call("POST", "/synced", {}, key=self.key).status == 200
        wait_ready(self.gateway)


def build(processes: Processes, state: Path, pairs: int) -> AgentService:
    router = processes.router()
    access = f'[{{"addr": "{INFERENCE}", "model": "tiny"}}]'
    flags = ("--router-url", router.url, "--service", NAME, "--inference", access)
    service = AgentService(processes, router, processes.service("agent.gateway", *flags))
    for _ in range(pairs):
        service.add_pair(state)
    service.register()
    return service


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentService]:
    processes = Processes(tmp_path_factory.mktemp("agents"))
    yield build(processes, tmp_path_factory.mktemp("state"), 2)
    processes.stop()


@pytest.fixture
def service(shared: AgentService) -> AgentService:
    """Shared by the tests that break nothing."""
    return shared


@pytest.fixture
def own(processes: Processes, tmp_path: Path) -> AgentService:
    """A service of the test's own, with one pair."""
    return build(processes, tmp_path / "state", 1)
