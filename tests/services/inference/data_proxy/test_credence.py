"""Deltas that can be true pass as they are; any other is the engine's failure."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.data_proxy.credence import check_delta
from areal.services.inference.engines.base import EngineDelta, EngineFailed

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e30, 1.0), st.integers(-1, 2**40)), max_size=8)


def delta(tokens: list[Any], index: int = 0) -> EngineDelta:
    ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return EngineDelta(index, ids, logprobs, versions)


@given(TOKENS, st.integers(1, 4))
def test_what_can_be_true_passes(tokens: list[Any], choices: int) -> None:
    for index in range(choices):
        check_delta(delta(tokens, index), choices)


@given(TOKENS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0))
def test_logprob_that_is_no_number_is_the_engines_failure(tokens: list[Any], logprob: float, place: int) -> None:
    tokens.insert(place % (len(tokens) + 1), (1, logprob, 0))
    with pytest.raises(EngineFailed, match="log-probability"):
        check_delta(delta(tokens), 1)


@pytest.mark.parametrize("token", [-1, 2**31, 7.5, "7", None, True])
def test_token_that_is_none_is_the_engines_failure(token: Any) -> None:
    with pytest.raises(EngineFailed, match="token"):
        check_delta(delta([(token, -0.5, 0)]), 1)


@pytest.mark.parametrize("index", [-1, 2])
def test_choice_that_nobody_asked_for_is_the_engines_failure(index: int) -> None:
    with pytest.raises(EngineFailed, match="choice"):
        check_delta(delta([], index), 2)


@pytest.mark.parametrize("short", ["logprobs", "versions"])
def test_lists_out_of_step_are_the_engines_failure(short: str) -> None:
    fields: dict[str, Any] = {"token_ids": (1,), "logprobs": (-0.5,), "versions": (0,), short: ()}
    with pytest.raises(EngineFailed, match="sent 1 tokens"):
        check_delta(EngineDelta(0, **fields), 1)


@pytest.mark.parametrize("logprobs", [("no",), (None,), None])
def test_logprobs_of_another_kind_are_the_engines_failure(logprobs: Any) -> None:
    with pytest.raises(EngineFailed, match="makes no sense"):
        check_delta(EngineDelta(0, (1,), logprobs, (0,)), 1)
