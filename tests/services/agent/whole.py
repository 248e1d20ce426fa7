"""A whole agent service, each part a process: gateway, router, pairs of data proxy and worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services.processes import Process, Processes, wait_ready

AGENT = Path(__file__).with_name("helper_agent.py")


@dataclass(frozen=True)
class WholeService:
    processes: Processes
    gateway: Process
    proxies: list[Process]

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def key(self) -> str:
        return self.processes.key


def start_agents(
    processes: Processes,
    folder: Path,
    inference: Process | None = None,
    *,
    pairs: int = 1,
    service: str = "helper",
    agent: str = f"{AGENT}:Helper",
    kwargs: dict[str, Any] | None = None,
) -> WholeService:
    """``inference``: a gateway or a data proxy that serves the model ``tiny`` and records."""
    access = {"addr": inference.url, "admin_key_file": str(processes.key_file), "model": "tiny"} if inference else None
    router = processes.router()
    proxies = []
    for number in range(pairs):
        worker = processes.service("agent.worker", "--agent", agent, *_json("--kwargs", kwargs), keyed=False)
        flags = ["--service", service, "--worker-url", worker.url, "--state-dir", str(folder / f"state-{number}")]
        proxy = processes.service("agent.data_proxy", *flags, *_json("--inference", access))
        proxies.append(proxy)
    known = [access] if access is not None else None
    gateway = processes.service(
        "agent.gateway", "--router-url", router.url, "--service", service, *_json("--inference", known)
    )
    for proxy in proxies:
        wait_ready(proxy)
    processes.register(router, *proxies, model=service)
    assert router.call("POST", "/synced", {}, key=processes.key).status == 200
    wait_ready(gateway)
    return WholeService(processes, gateway, proxies)


def _json(flag: str, value: object) -> list[str]:
    return [flag, json.dumps(value)] if value is not None else []
