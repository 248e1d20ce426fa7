"""Random histories over a real engine: each token also has the log-probability that its version's weights give it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.machine import machine_of
from tests.reliability.profiles import profile
from tests.reliability.witness import Sampled

torch = pytest.importorskip("torch")
support = pytest.importorskip("tests.services.engine_embedded.support")

_SHAPE = {"vocab_size": 320, "eos_token_id": 2, "max_position_embeddings": 4096}
_CLOSE = 2e-3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Two sets of weights of one small model: their folders, and as transformers has them."""
    folders = [tmp_path_factory.mktemp(f"weights-{seed}") for seed in range(2)]
    return [(folder, support.make_model(folder, seed=seed, **_SHAPE)) for seed, folder in enumerate(folders)]


@pytest.fixture
def fleet(tmp_path: Path, tokenizer: Path, checkpoints: list[tuple[Path, Any]]) -> Iterator[Fleet]:
    weights = tuple(folder for folder, _ in checkpoints)
    with running_fleet(tmp_path, tokenizer, behind_gateway=True, weights=weights) as fleet:
        yield fleet


def logprobs(model: Any, prompt: list[int], made: Sampled) -> Any:
    """What a plain forward pass gives each sampled token."""
    rows = support.plain_logits(model, prompt + made.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_histories_over_an_embedded_engine_agree_with_the_model(
    fleet: Fleet, checkpoints: list[tuple[Path, Any]]
) -> None:
    run_state_machine_as_test(machine_of(fleet, kills=1), settings=profile(30, 30))
    compared = 0
    for seen in fleet.witness.calls().values():
        for made in seen.choices:
            if made.token_ids and len(set(made.versions)) == 1:
                model = checkpoints[made.versions[0] % 2][1]
                gaps = (logprobs(model, seen.input_ids, made) - torch.tensor(made.logprobs)).abs()
                assert float(gaps.max()) < _CLOSE
                compared += 1
    assert compared > 10
