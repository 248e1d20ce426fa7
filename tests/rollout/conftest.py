"""Controllers before a scripted engine (which the test prescribes) and before a real one that samples digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import InferenceEngineConfig
from areal.client import RolloutController
from tests.client.conftest import Place, place, shared_place, tokenizer
from tests.services.inference.engines.embedded.process import EXAMPLE
from tests.services.processes import Processes, wait_ready

__all__ = ["place", "shared_place", "tokenizer"]

Make = Callable[..., RolloutController]


@pytest.fixture
def make(place: Place) -> Iterator[Make]:
    """Controllers of the scripted place, closed at the end."""
    made: list[RolloutController] = []

    def controller(**fields: Any) -> RolloutController:
        given = {"consumer_batch_size": 2, "request_timeout": 20.0, "request_retries": 1, "setup_timeout": 20.0}
        config = InferenceEngineConfig(**(given | fields))
        made.append(RolloutController(config, gateway_addr=place.proxy.url, admin_api_key=place.key, model="tiny"))
        made[-1].initialize()
        return made[-1]

    yield controller
    for each in made:
        each.destroy()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The reverse-digits example on the embedded engine, behind a data proxy that records."""
    folder = tmp_path_factory.mktemp("digits")
    processes = Processes(folder)
    try:
        engine = processes.service("engines.embedded", "--model-path", str(EXAMPLE))
        wait_ready(engine)
        flags = ("--model", "digits", "--engine", "embedded", "--engine-url", engine.url)
        state = ("--tokenizer-path", str(EXAMPLE), "--state-dir", str(folder / "state"))
        proxy = processes.service("data_proxy", *flags, *state)
        wait_ready(proxy)
        yield Place(processes, engine, proxy, Path(EXAMPLE))
    finally:
        processes.stop()
