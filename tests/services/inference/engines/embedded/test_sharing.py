"""Copied positions serve as well as computed ones, and never across a weight swap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal.services.inference.engines.embedded.scheduler import SchedulerLimits

from .support import Harness, gap, make_model

Start = Callable[..., Harness]
LIMITS = SchedulerLimits(
    max_rows=8, max_length=200, kv_tokens=8 * 200, prefill_tokens=64, kept_tokens=400, shortest_share=8
)


def test_group_of_one_prompt_matches_plain_forward(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    harness = start(folder, limits=LIMITS)
    sequences = [harness.submit(range(3, 60), index=index, max_new_tokens=10) for index in range(12)]
    harness.wait(*sequences)
    assert max(gap(model, sequence) for sequence in sequences) < 1e-4
    assert len({tuple(sequence.output) for sequence in sequences}) > 1
    assert harness.engine.stats().result(10).shared_tokens >= 11 * 56


def test_turns_of_conversations_match_plain_forward(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    harness = start(folder, limits=LIMITS)
    histories = [[first, *range(5, 20)] for first in (3, 4)]
    for turn in range(4):
        sequences = [harness.submit(history, max_new_tokens=15, seed=turn) for history in histories]
        harness.wait(*sequences)
        assert max(gap(model, sequence) for sequence in sequences) < 1e-4
        histories = [[*each.prompt, *each.output, 7, 8, 9] for each in sequences]
    stats = harness.engine.stats().result(10)
    assert stats.shared_tokens > stats.counters.prompt_tokens
    assert 0 < stats.kept_tokens <= LIMITS.kept_tokens


def test_weight_swap_drops_cached_prefixes(tmp_path: Path, start: Start) -> None:
    make_model(tmp_path / "old", seed=1)
    new = make_model(tmp_path / "new", seed=2)
    harness = start(tmp_path / "old", limits=LIMITS)
    harness.run(range(3, 60), max_new_tokens=5)
    running = harness.submit(range(3, 60), max_new_tokens=100)
    harness.wait(running, tokens=2)
    harness.engine.pause().result(10)
    harness.engine.load_weights(tmp_path / "new", 1)
    late = [harness.submit(range(3, 60), index=index, max_new_tokens=10) for index in range(3)]
    harness.engine.resume()
    harness.wait(running, *late)
    assert max(gap(new, sequence) for sequence in late) < 1e-4
