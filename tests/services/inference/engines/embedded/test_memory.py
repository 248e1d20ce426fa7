"""Released memory: weights and cache go, and come back as they were; what waited goes on."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.errors import ArealError, Conflict
from areal.services.inference.engines.embedded.engine import Engine
from areal.services.inference.engines.embedded.scheduler import SchedulerLimits
from areal.services.inference.engines.embedded.transformers_runner import TransformersRunner

from .support import LIMITS, Harness, gap, make_adapter, make_model

Start = Callable[..., Harness]
CPU = torch.device("cpu")


def weights_of(harness: Harness) -> list[weakref.ref[torch.Tensor]]:
    """The tensors that hold the memory: each of them is gone once nothing refers to it any more."""
    runner: Any = harness.engine._runner
    matrices = [
        each for matrix in runner._decoder._matrices.values() for each in (matrix._held.plain, matrix._held.blocked)
    ]
    held = [runner._decoder._tensors["embed"], *matrices, *runner._cache.layers]
    return [weakref.ref(each) for each in held if each is not None and each.numel()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_release_frees_memory_and_restore_reloads_same_model(
    tmp_path: Path, start: Start, tied: bool, dtype: torch.dtype
) -> None:
    make_model(tmp_path, "Qwen3", tie_word_embeddings=tied)
    harness = start(tmp_path, dtype=dtype)
    (before,) = harness.run([5, 6, 7], max_new_tokens=20, seed=3)
    held = weights_of(harness)
    assert len(held) > 10
    harness.engine.release_memory().result(10)
    harness.engine.release_memory().result(10)  # idempotent
    assert [each for each in held if each() is not None] == []
    waiting = harness.submit([5, 6, 7], max_new_tokens=20, seed=3)
    assert harness.engine.stats().result(10).memory_released and waiting.produced == 0
    harness.engine.restore_memory().result(10)
    harness.wait(waiting)
    assert (waiting.output, waiting.logprobs) == (before.output, before.logprobs)


def test_running_sequences_continue_after_release_and_restore(tmp_path: Path, start: Start) -> None:
    model = make_model(tmp_path / "base")
    merged = make_adapter(tmp_path / "lora", model)
    harness = start(tmp_path / "base")
    adapter = harness.engine.read_adapter("a", tmp_path / "lora")
    plain = harness.submit(range(5, 45), max_new_tokens=80)
    adapted = harness.submit(range(5, 45), max_new_tokens=80, adapter=adapter)
    harness.wait(plain, adapted, tokens=5)
    harness.engine.release_memory().result(10)
    held_at = (plain.produced, adapted.produced)
    assert harness.engine.stats().result(10).running == 0
    assert (plain.produced, adapted.produced) == held_at
    harness.engine.restore_memory().result(10)
    harness.wait(plain, adapted)
    assert gap(model, plain) < 1e-4 and gap(merged, adapted) < 1e-3


def test_weights_are_not_loaded_into_released_memory(tmp_path: Path, start: Start) -> None:
    model = make_model(tmp_path)
    harness = start(tmp_path)
    harness.engine.release_memory().result(10)
    with pytest.raises(Conflict, match="released"):
        harness.engine.load_weights(tmp_path, 2)
    harness.engine.restore_memory().result(10)
    harness.engine.load_weights(tmp_path, 2)
    (sequence,) = harness.run([5, 6], max_new_tokens=4)
    assert gap(model, sequence) < 1e-4 and sequence.versions == [2] * 4


def _full() -> Any:
    return Path("/dev/full").open("wb")


def test_release_without_room_changes_nothing(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path)
    harness = start(tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: _full())
    with pytest.raises(ArealError, match="No space left"):
        harness.engine.release_memory().result(10)
    (sequence,) = harness.run([5, 6], max_new_tokens=4)
    assert sequence.produced == 4 and not harness.engine.memory_released


def test_fallback_releases_and_restores_too(tmp_path: Path) -> None:
    make_model(tmp_path, "Qwen3", tie_word_embeddings=True)
    runner = TransformersRunner(tmp_path, torch.float32, CPU)
    harness = Harness(runner, SchedulerLimits(**{**vars(LIMITS), "shortest_share": 2**62}))
    engine: Engine = harness.engine
    try:
        (before,) = harness.run([5, 6, 7], max_new_tokens=6, seed=1)
        engine.release_memory().result(10)
        assert all(not each.numel() for each in _parameters(runner))
        engine.restore_memory().result(10)
        (after,) = harness.run([5, 6, 7], max_new_tokens=6, seed=1)
        assert after.logprobs == before.logprobs
    finally:
        harness.close()


def _parameters(runner: TransformersRunner) -> Any:
    return runner.model.parameters()
