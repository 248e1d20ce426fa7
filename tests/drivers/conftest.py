"""A small model that is served, and where a driver finds it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.processes import Process, Processes
from tests.services.weight_update.conftest import embedded_worker


@dataclass(frozen=True)
class Service:
    gateway: Process
    key_file: Path

    def environment(self, model: str = "m") -> dict[str, str]:
        """What a job of this service gets."""
        return {
            "AREAL_INFERENCE_ADDR": self.gateway.url,
            "AREAL_INFERENCE_KEY_FILE": str(self.key_file),
            "AREAL_INFERENCE_MODEL": model,
        }


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of GSM8K's form that the small model can spell."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in (("train", 12), ("test", 4)):
        rows = [
            {"question": str(number), "answer": f"#### {str(number)[::-1]}"} for number in range(1234, 1234 + count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    processes = Processes(folder)
    try:
        _, proxy = embedded_worker(processes, "--state-dir", str(folder / "state"))
        router = processes.router()
        gateway = processes.gateway(router)
        processes.register(router, proxy, model="m")
        yield Service(gateway, processes.key_file)
    finally:
        processes.stop()
