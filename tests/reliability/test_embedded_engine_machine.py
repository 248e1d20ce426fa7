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

_SHAPE: dict[str, Any] = {"vocab_size": 320, "eos_token_id": 2, "max_position_embeddings": 4096}
_CLOSE = 2e-3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Two sets of weights of one small model: their folders, and as transformers has them."""
    pytest.importorskip("torch")
    from tests.services.inference.engines.embedded.support import make_model

    folders = [tmp_path_factory.mktemp(f"weights-{seed}") for seed in range(2)]
    return [(folder, make_model(folder, seed=seed, **_SHAPE)) for seed, folder in enumerate(folders)]


@pytest.fixture
def fleet(tmp_path: Path, tokenizer: Path, checkpoints: list[tuple[Path, Any]]) -> Iterator[Fleet]:
    weights = tuple(folder for folder, _ in checkpoints)
    with running_fleet(tmp_path, tokenizer, behind_gateway=True, weights=weights) as fleet:
        yield fleet


def gap(model: Any, prompt: list[int], made: Sampled) -> float:
    """The largest difference between the log-probabilities of a call and those of a plain forward pass."""
    import torch

    from tests.services.inference.engines.embedded.support import plain_logits

    rows = plain_logits(model, prompt + made.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
    plain = rows.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
    return float((plain - torch.tensor(made.logprobs)).abs().max())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_embedded_engine_histories_match_model(fleet: Fleet, checkpoints: list[tuple[Path, Any]]) -> None:
    run_state_machine_as_test(machine_of(fleet, kills=1), settings=profile(30, 30))
    compared = 0
    for seen in fleet.witness.calls().values():
        for made in seen.choices:
            if made.token_ids and len(set(made.versions)) == 1:
                assert gap(checkpoints[made.versions[0] % 2][1], seen.input_ids, made) < _CLOSE
                compared += 1
    assert compared > 10
