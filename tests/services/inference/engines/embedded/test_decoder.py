"""The cache grows within its bound and keeps what it holds; a batch's rows are cut into the spans that cost least."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.engines.embedded.decoder import KVCache, RowSpan, cheapest_spans

from .support import STEADY

LIMIT = 1000


def make_cache() -> KVCache:
    return KVCache(2, 1, 2, LIMIT, torch.float32, torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, LIMIT)), min_size=1, max_size=12))
@settings(STEADY, max_examples=150)
def test_cache_keeps_content_across_any_reserves(asked: list[tuple[int, int]]) -> None:
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


# -- spans

CALL = 100


def every_cut(lengths: list[int]) -> list[list[RowSpan]]:
    rows = len(lengths)
    cuts = []
    for count in range(rows):
        for inner in combinations(range(1, rows), count):
            bounds = [0, *inner, rows]
            parts = [lengths[start:stop] for start, stop in pairwise(bounds)]
            cuts.append(
                [
                    RowSpan(start, start + len(part), max(part), min(part) == max(part))
                    for start, part in zip(bounds, parts, strict=False)
                ]
            )
    return cuts


def cost(spans: list[RowSpan] | tuple[RowSpan, ...]) -> int:
    return sum(span.cost(CALL) for span in spans)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [(0, 1, 5, True)]),
        ([9] * 8, [(0, 8, 9, True)]),
        ([300] * 6 + [10] * 6, [(0, 6, 300, True), (6, 12, 10, True)]),
        ([12, 11, 12], [(0, 3, 12, False)]),
        ([400, 390, 20, 25], [(0, 2, 400, False), (2, 4, 25, False)]),
    ],
)
def test_rows_are_split_when_cheaper(lengths: list[int], expected: list[tuple[int, int, int, bool]]) -> None:
    assert cheapest_spans(lengths, CALL) == tuple(RowSpan(*each) for each in expected)


@given(st.lists(st.sampled_from([1, 2, 3, 30, 60, 90, 300, 310]), min_size=1, max_size=9))
@STEADY
def test_split_has_minimum_cost(lengths: list[int]) -> None:
    assert cost(cheapest_spans(lengths, CALL)) == min(map(cost, every_cut(lengths)))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=128), st.sampled_from([0, 1, 512, 2**40]))
@STEADY
def test_every_row_is_in_one_covering_span(lengths: list[int], call: int) -> None:
    spans = cheapest_spans(lengths, call)
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(len(lengths)))
    for span in spans:
        own = lengths[span.start : span.stop]
        assert span.width == max(own)
        assert span.even == (min(own) == max(own))
    if call == 2**40:
        assert len(spans) == 1
