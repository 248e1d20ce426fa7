"""Sampling parameters over the wire."""

from __future__ import annotations

from typing import Any

import pytest

from areal.errors import FieldError
from areal.wire.sampling import SamplingParams, derived_seed, parse_sampling


def test_parse_of_empty_object_gives_defaults() -> None:
    assert parse_sampling({}, 100) == SamplingParams()
    assert parse_sampling({"temperature": None, "seed": None, "logit_bias": None}, 100) == SamplingParams()


def test_parse_of_every_field_keeps_it() -> None:
    raw = {
        "max_new_tokens": 5, "min_new_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1,
        "seed": 2**63 - 1, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5,
        "logit_bias": {"7": -100},
        "stop_token_ids": [1, 2], "ignore_eos": True, "n": 3, "top_logprobs": 4,
    }  # fmt: skip
    parsed = parse_sampling(raw, 100)
    assert parsed.greedy
    assert not SamplingParams(top_k=-1).filters
    assert (parsed.seed, parsed.logit_bias, parsed.stop_token_ids) == (2**63 - 1, {7: -100.0}, (1, 2))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1}, "temperature must be from 0 to 2, not -1"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_p": True}, "top_p must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"stop_token_ids": [100]}, "stop_token_ids must have token ids below 100, not 100"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids must have token ids below 100, not -1"),
        ({"logit_bias": [1]}, "logit_bias must be an object"),
        ({"logit_bias": {"7": True}}, "logit_bias.7 must be a number"),
        ({"logit_bias": {"7": 101, "8": 0}}, "logit_bias must have numbers from -100 to 100"),
        ({"logit_bias": {"7": 0, "8": -101}}, "logit_bias must have numbers from -100 to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias must have token ids"),
        ({"logit_bias": {"100": 1}}, "logit_bias must have token ids below 100"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"beams": 4}, "beams is not a known field"),
    ],
)
def test_parse_of_wrong_value_names_the_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        parse_sampling(raw, 100)


def test_parse_of_zero_top_p_is_greedy() -> None:
    parsed = parse_sampling({"top_p": 0}, 100)
    assert (parsed.top_k, parsed.top_p) == (1, 1.0)


def test_parse_accepts_every_token_of_the_vocabulary() -> None:
    parsed = parse_sampling({"stop_token_ids": [0, 99], "logit_bias": {"0": 100, "99": -100}}, 100)
    assert (parsed.stop_token_ids, parsed.logit_bias) == ((0, 99), {0: 100.0, 99: -100.0})


def test_defaults_sample_one_choice_without_filters_or_limits() -> None:
    """As OpenAI's and vLLM's."""
    unsaid = SamplingParams()
    assert (unsaid.max_new_tokens, unsaid.min_new_tokens, unsaid.seed, unsaid.stop_token_ids) == (None, 0, None, ())
    assert (unsaid.temperature, unsaid.top_p, unsaid.top_k, unsaid.min_p) == (1.0, 1.0, 0, 0.0)
    assert (unsaid.n, unsaid.top_logprobs, unsaid.ignore_eos, unsaid.logit_bias) == (1, 0, False, {})
    assert (unsaid.filters, unsaid.penalizes, unsaid.changed()) == (False, False, {})


def test_only_changed_fields_are_sent() -> None:
    assert SamplingParams(top_k=5, temperature=1.0, n=2).changed() == {"top_k": 5, "n": 2}


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_only_temperatures_near_zero_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_derived_seeds_are_the_same_in_every_release() -> None:
    """A run that resumes under a newer release samples what it would have sampled."""
    assert [derived_seed("task", 0), derived_seed("task", 1), derived_seed(7)] == [106677472, 317172591, 2030201243]


BOUNDS: dict[str, tuple[float, float]] = {  # the lowest and the highest
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "max_new_tokens": (1, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 128),
    "top_logprobs": (0, 100),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_parse_accepts_exactly_the_bounds(name: str) -> None:
    low, high = BOUNDS[name]
    beyond = 1 if isinstance(low, int) else 1e-6
    for value in (low, high):
        parse_sampling({name: value}, 100)
    for value in (low - beyond, high + beyond):
        with pytest.raises(FieldError, match=f"{name} must be from"):
            parse_sampling({name: value}, 100)


@pytest.mark.parametrize(
    ("raw", "filters", "penalizes"),
    [
        ({}, False, False),
        ({"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, False, False),
        ({"top_k": 1}, True, False),
        ({"top_p": 0.9}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"presence_penalty": 0.1}, False, True),
        ({"frequency_penalty": -0.1}, False, True),
        ({"repetition_penalty": 0.9}, False, True),
    ],
)
def test_any_single_filter_or_penalty_is_detected(raw: dict[str, float], filters: bool, penalizes: bool) -> None:
    params = parse_sampling(raw, 100)
    assert (params.filters, params.penalizes) == (filters, penalizes)
