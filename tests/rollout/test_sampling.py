"""From generation parameters to the fields of a call: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import GenerationHyperparameters
from areal.client.errors import CallerError
from areal.rollout.engine import answer_budget, derived_seed, sampling_fields


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100), st.none() | st.integers(1, 100))
def test_budget_keeps_prompt_and_answer_within_every_limit(new: int, total: int, prompt: int, room: int | None) -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=new, max_tokens=total)
    try:
        budget = answer_budget(gconfig, prompt, room)
    except CallerError as error:
        assert error.code == "context_length_exceeded"
        assert prompt >= min(total, room or total)
        return
    assert 1 <= budget <= new
    assert prompt + budget <= min(total, room or total)


def test_defaults_send_nothing_but_the_temperature() -> None:
    assert sampling_fields(GenerationHyperparameters(), None) == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("given_", "sent"),
    [
        ({"greedy": True, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_k": 5, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}),
        ({"stop": ["x"], "stop_token_ids": [3]}, {"temperature": 1.0, "stop": ["x"], "stop_token_ids": [3]}),
        ({"ignore_eos": True, "min_new_tokens": 2}, {"temperature": 1.0, "ignore_eos": True, "min_tokens": 2}),
    ],
)
def test_what_differs_is_sent_under_the_apis_name(given_: dict[str, object], sent: dict[str, object]) -> None:
    assert sampling_fields(GenerationHyperparameters(**given_), None) == sent  # type: ignore[arg-type]


def test_every_sample_has_a_seed_of_its_own_and_every_run_the_same() -> None:
    seeds = {derived_seed("task", member, call) for member in range(20) for call in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed("task", 1, 2) == derived_seed("task", 1, 2)
