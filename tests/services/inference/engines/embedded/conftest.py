from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .support import Harness, make_model, open_runner

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny untied Llama: its folder, and as transformers sees it."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_model(folder)


@pytest.fixture
def start() -> Iterator[Callable[..., Harness]]:
    """Start engines that end with the test."""
    started: list[Harness] = []

    def start_engine(folder: Path, **options: Any) -> Harness:
        harness = Harness(open_runner(folder, **options), **{k: v for k, v in options.items() if k == "limits"})
        started.append(harness)
        return harness

    yield start_engine
    for harness in started:
        harness.close()
