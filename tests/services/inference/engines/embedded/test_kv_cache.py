"""The cache grows within its bound and keeps what it holds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.engines.embedded.decoder import KVCache

from .support import STEADY

LIMIT = 1000


def make_cache() -> KVCache:
    return KVCache(2, 1, 2, LIMIT, torch.float32, torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, LIMIT)), min_size=1, max_size=12))
@settings(STEADY, max_examples=150)
def test_reserve_of_any_history_holds_the_rectangle_and_its_content(asked: list[tuple[int, int]]) -> None:
    cache = make_cache()
    held: dict[tuple[int, int], float] = {}
    for number, (rows, width) in enumerate((rows, width) for rows, width in asked if rows * width <= LIMIT):
        held = {at: value for at, value in held.items() if at[0] < rows and at[1] < width}
        cache.reserve(rows, width)
        assert cache.rows >= rows
        assert cache.width >= width
        assert cache.rows * cache.width <= LIMIT
        for layer in cache.layers:
            assert layer.shape == (cache.rows, 2, cache.width, 2)
            assert all(float(layer[row, 1, position, 1]) == value for (row, position), value in held.items())
            layer[rows - 1, :, width - 1] = float(number + 1)
        held[rows - 1, width - 1] = float(number + 1)


def test_spread_copies_only_the_length() -> None:
    cache = make_cache()
    cache.reserve(2, 64)
    for layer in cache.layers:
        layer[1] = 1.0
    cache.spread((1,), (0,), 10)
    assert all(float(layer[0, :, :10].min()) == 1.0 for layer in cache.layers)
    assert all(float(layer[0, :, 10:].max()) == 0.0 for layer in cache.layers)
