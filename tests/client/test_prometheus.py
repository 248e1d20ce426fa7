"""Pages of metrics, and what two of them tell together."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from areal.client.prometheus import Page, buckets, increase, parse, quantile, sum_buckets

BOUNDS = (0.1, 0.5, 1.0, 5.0, math.inf)


def test_prometheus_client_page_is_parsed() -> None:
    registry = CollectorRegistry()
    calls = Counter("calls_total", 'How many "calls"\nthere were.', ("route", "text"), registry=registry)
    Gauge("load", "Now.", registry=registry).set(-2.5)
    calls.labels("/a", 'x"\\y\n,{}=').inc(3)
    calls.labels("/b", "").inc()
    Histogram("took", "Time.", buckets=(1, 2), registry=registry).observe(1.5)
    page = parse(generate_latest(registry).decode())
    assert page.total("calls_total") == 4
    assert page.total("calls_total", lambda labels: labels["text"] == 'x"\\y\n,{}=') == 3
    assert page.total("load") == -2.5
    assert page.total("nothing") is None


@given(st.text())
def test_parse_accepts_any_text(text: str) -> None:
    parse(text)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_counter_increase_spans_restarts(parts: list[float]) -> None:
    """Each part is counted by a process of its own that began at 0, and seen at its end."""
    grown, before = 0.0, Page(samples={"n": {}})
    for part in parts:
        after = Page(samples={"n": {(): part}})
        grown += increase(before, after, "n")
        before = after
    restarted = [part for place, part in enumerate(parts) if place == 0 or part < parts[place - 1]]
    climbed = [part - parts[place] for place, part in enumerate(parts[1:]) if part >= parts[place]]
    assert grown == pytest.approx(math.fsum([*restarted, *climbed]))


def test_increase_sums_matching_series() -> None:
    before = parse('n{s="200"} 5\nn{s="500"} 7\n')
    after = parse('n{s="200"} 8\nn{s="500"} 2\nn{s="404"} 1\n')
    assert increase(before, after, "n") == 3 + 2 + 1
    assert increase(before, after, "n", lambda labels: labels["s"] == "200") == 3


def histogram(values: list[float]) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in values)) for bound in BOUNDS}


@given(st.lists(st.floats(0.001, 20), min_size=1), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantile_lies_in_its_bucket(values: list[float], share: float) -> None:
    found = quantile(histogram(values), share)
    assert found is not None
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    place = bisect_left(BOUNDS, exact)
    assert (BOUNDS[place - 1] if place else 0.0) <= found <= BOUNDS[min(place, len(BOUNDS) - 2)]


@given(st.lists(st.floats(0.001, 20), min_size=1))
def test_quantiles_increase_with_share(values: list[float]) -> None:
    found = [quantile(histogram(values), share / 20) or 0.0 for share in range(21)]
    assert found == sorted(found)


def test_quantile_without_values_is_none() -> None:
    assert quantile({}, 0.5) is None
    assert quantile(histogram([]), 0.5) is None


def test_buckets_between_looks_contain_only_new_values() -> None:
    before = parse('t_bucket{r="a",le="1.0"} 2\nt_bucket{r="a",le="+Inf"} 3\n')
    after = parse(
        't_bucket{r="a",le="1.0"} 2\nt_bucket{r="a",le="+Inf"} 7\n'
        't_bucket{r="b",le="1.0"} 1\nt_bucket{r="b",le="+Inf"} 1\n'
    )
    assert buckets(before, after, "t") == {1.0: 1.0, math.inf: 5.0}
    assert buckets(before, after, "t", lambda labels: labels["r"] == "a") == {1.0: 0.0, math.inf: 4.0}
    assert sum_buckets([{1.0: 1.0}, {1.0: 2.0, math.inf: 3.0}]) == {1.0: 3.0, math.inf: 3.0}
