"""A data proxy before a scripted engine, and the command line against it. It serves the session routes itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Areal, Result, areal, clean_environment, spawn
from tests.services.conftest import module_processes, tokenizer
from tests.services.processes import Process, Processes, script

__all__ = ["areal", "clean_environment", "module_processes", "spawn", "tokenizer"]


@dataclass(frozen=True)
class Bench:
    processes: Processes
    engine: Process
    proxy: Process

    @property
    def key(self) -> str:
        return self.processes.key

    def sessions(self) -> list[dict[str, Any]]:
        page = self.proxy.call("GET", "/rl/sessions?limit=1000", key=self.key).json()
        found: list[dict[str, Any]] = page["sessions"]
        return found


@pytest.fixture(scope="module")
def shared(module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    engine = module_processes.engine(tokenizer)
    state = tmp_path_factory.mktemp("state")
    yield Bench(module_processes, engine, module_processes.data_proxy(engine, tokenizer, "--state-dir", str(state)))


@pytest.fixture
def bench(shared: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("AREAL_GATEWAY", shared.proxy.url)
    monkeypatch.setenv("AREAL_API_KEY", shared.key)
    script(shared.engine, reset=True)
    return shared


@dataclass
class Collecting:
    """``areal inf collect`` in a folder of its own."""

    areal: Areal
    folder: Path

    def data(self, *examples: dict[str, Any], name: str = "data.jsonl") -> str:
        path = self.folder / name
        path.write_text("".join(json.dumps(each) + "\n" for each in examples), encoding="utf-8")
        return str(path)

    def code(self, text: str, name: str = "user.py") -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def arguments(self, data: str, *words: str) -> list[str]:
        return ["inf", "collect", "--dataset", data, "--output", str(self.output), *words]

    def __call__(self, data: str, *words: str) -> Result:
        return self.areal(*self.arguments(data, "-o", "json", *words))

    def lines(self) -> list[dict[str, Any]]:
        text = (self.output / "trajectories.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def failures(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "failures.jsonl").read_text().splitlines()]


@pytest.fixture
def collecting(areal: Areal, tmp_path: Path) -> Collecting:
    return Collecting(areal, tmp_path)
