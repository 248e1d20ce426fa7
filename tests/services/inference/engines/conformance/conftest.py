"""Engines of a kind start once for all tests; before each one they have their first weights again, as version 0."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal.http.client import HttpClient
from areal.services.inference.engines.base import EngineCall, EngineDelta, TokenEngine
from areal.wire.sampling import SamplingParams
from tests.services.inference.engines.conformance.engines import KINDS, REAL, EngineProcess, start
from tests.services.inference.engines.conformance.models import VOCAB, Models, make_models


@dataclass
class Subject:
    """An engine, driven by its client, and the models that it can be asked to serve."""

    process: EngineProcess
    client: TokenEngine
    http: HttpClient
    models: Models
    calls: int = 0

    @property
    def kind(self) -> str:
        return self.process.kind

    def call(self, prompt: list[int], *, adapter: str | None = None, **sampling: object) -> EngineCall:
        self.calls += 1
        return EngineCall(
            f"call-{os.getpid()}-{id(self)}-{self.calls}", (tuple(prompt),), _sampling(sampling), adapter=adapter
        )

    async def run(self, prompt: list[int], **options: object) -> list[EngineDelta]:
        """By ``pour``, which is what a data proxy uses."""
        deltas: list[EngineDelta] = []
        await self.client.stream_to(self.call(prompt, **options), deltas.append, lambda flow: None)  # type: ignore[arg-type]
        return deltas

    def needs(self, ability: str) -> None:
        if ability in self.process.lacks:
            pytest.skip(f"{self.kind} has no {ability} on this machine")

    async def idle(self) -> None:
        """Return once the engine has nothing left to do."""
        async with asyncio.timeout(20):
            while await self.process.unfinished(self.http):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # another process's state has no event to wait for


def _sampling(options: dict[str, object]) -> SamplingParams:
    return SamplingParams(**options)  # type: ignore[arg-type]


def kind_params() -> list[object]:
    return [pytest.param(kind, marks=[getattr(pytest.mark, kind)] if kind in REAL else []) for kind in KINDS]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Models]:
    made: dict[bool, Models] = {}

    def get(tied: bool) -> Models:
        if tied not in made:
            made[tied] = make_models(tmp_path_factory.mktemp("tied" if tied else "untied"), tied=tied)
        return made[tied]

    return get


@pytest.fixture(scope="session")
def engine_processes(
    models: Callable[[bool], Models], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, bool], EngineProcess]]:
    running: dict[tuple[str, bool], EngineProcess] = {}

    def get(kind: str, tied: bool) -> EngineProcess:
        variable = REAL.get(kind)
        if variable and not os.environ.get(variable):
            pytest.skip(f"{variable} names no Python that has {kind}")
        if (kind, tied) not in running:
            which = models(tied)
            log = tmp_path_factory.mktemp(kind) / "log"
            running[kind, tied] = start(kind, which.folders[0], log, which.adapters)
        return running[kind, tied]

    yield get
    for process in running.values():
        process.stop()


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    client.close()


@pytest.fixture(params=kind_params())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tied() -> bool:
    return False


@pytest.fixture
async def engine(
    kind: str,
    tied: bool,
    models: Callable[[bool], Models],
    engine_processes: Callable[[str, bool], EngineProcess],
    http: HttpClient,
) -> Subject:
    process = engine_processes(kind, tied)
    await process.wait_ready(http)
    client = process.open(http)
    client.capabilities.vocab_size = VOCAB  # as a data proxy does
    await client.state()
    await client.pause()
    await client.load_weights(str(models(tied).folders[0]), 0)
    await client.resume()
    return Subject(process, client, http, models(tied))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"
