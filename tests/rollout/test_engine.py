"""Prompts of one moment in one call: each gets its own choices, and neither a refusal nor a leaver costs the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.client import AsyncInferenceClient, CallerError, ServiceError
from areal.rollout.engine import (
    PartialResponse,
    PromptBatcher,
    answer_budget,
    is_short,
    prompts_per_call,
)
from areal.wire.sampling import MAX_CHOICES, derived_seed
from tests.client.conftest import Place
from tests.services.processes import engine_calls, script

OPTIONS: dict[str, Any] = {"max_tokens": 8, "return_token_ids": True, "logprobs": 0, "store": False}


@pytest.fixture
async def batcher(place: Place) -> AsyncIterator[PromptBatcher]:
    async with AsyncInferenceClient(place.proxy.url, place.key, model="tiny", timeout_s=20) as client:
        batcher = PromptBatcher(client, replicas=1)
        yield batcher
        await batcher.close()


def prompts_seen(place: Place) -> list[int]:
    """How many prompts each of the engine's calls had."""
    asked = [call["body"]["input_ids"] for call in engine_calls(place.engine)]
    return [len(ids) if isinstance(ids[0], list) else 1 for ids in asked]


@given(waiting=st.integers(1, 500), choices=st.integers(1, 300), replicas=st.integers(0, 20))
def test_prompts_per_call_is_bounded_and_shared_by_replicas(waiting: int, choices: int, replicas: int) -> None:
    size = prompts_per_call(waiting, choices, replicas)
    assert size == 1 or (size * choices <= MAX_CHOICES and (size - 1) * max(1, replicas) < waiting)


def test_single_replica_gets_all_fitting_prompts() -> None:
    assert (prompts_per_call(16, 8, 1), prompts_per_call(40, 8, 1), prompts_per_call(16, 8, 4)) == (16, 16, 4)


def test_long_answers_and_prompts_are_not_short() -> None:
    assert is_short(8, 8) and not is_short(8, 1024) and not is_short(10_000, 8)


async def test_simultaneous_prompts_share_one_call(place: Place, batcher: PromptBatcher) -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    given = await asyncio.gather(*(batcher.complete(prompt, n=2, **OPTIONS) for prompt in prompts))
    assert prompts_seen(place) == [3]
    for prompt, choices in zip(prompts, given, strict=True):
        assert [choice["index"] for choice in choices] == [0, 1]
        assert [choice["prompt_token_ids"] for choice in choices] == [prompt, prompt]


async def test_prompts_with_other_options_use_another_call(place: Place, batcher: PromptBatcher) -> None:
    ways: list[dict[str, Any]] = [{"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 1.0}, {"max_tokens": 64}]
    await asyncio.gather(*(batcher.complete([5, 6], n=2, **(OPTIONS | way)) for way in ways))
    assert sorted(prompts_seen(place)) == [1, 1, 2]


async def test_complete_without_replicas_sends_single_prompts(place: Place) -> None:
    async with AsyncInferenceClient(place.proxy.url, place.key, model="tiny", timeout_s=20) as client:
        batcher = PromptBatcher(client)
        await asyncio.gather(*(batcher.complete([5, 6], n=2, **OPTIONS) for _ in range(3)))
    assert prompts_seen(place) == [1, 1, 1]


async def test_complete_beside_refused_prompt_succeeds(place: Place, batcher: PromptBatcher) -> None:
    good, bad = await asyncio.gather(
        batcher.complete([5, 6], n=2, **OPTIONS),
        batcher.complete([10**8], n=2, **OPTIONS),  # no such token
        return_exceptions=True,
    )
    assert isinstance(bad, CallerError)
    assert isinstance(good, list) and len(good) == 2


async def test_complete_reports_an_engine_failure_to_all_callers(place: Place, batcher: PromptBatcher) -> None:
    script(place.engine, cut_after=1)
    ends = await asyncio.gather(*(batcher.complete([5, 6], n=2, **OPTIONS) for _ in range(2)), return_exceptions=True)
    assert [type(end) for end in ends] == [ServiceError, ServiceError]


async def test_shared_call_ends_when_all_callers_leave(place: Place, batcher: PromptBatcher) -> None:
    script(place.engine, gate=1)
    waiting = [asyncio.create_task(batcher.complete([5, 6], n=2, **OPTIONS)) for _ in range(2)]
    await asyncio.to_thread(engine_calls, place.engine, "running")
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert engine_calls(place.engine)[0]["ended"] == "running"
    waiting[1].cancel()
    await asyncio.to_thread(engine_calls, place.engine, "cancelled")


# From generation parameters to the fields of a call


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100), st.none() | st.integers(1, 100))
def test_budget_respects_every_limit(new: int, total: int, prompt: int, room: int | None) -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=new, max_tokens=total)
    try:
        budget = answer_budget(gconfig, prompt, room)
    except CallerError as error:
        assert error.code == "context_length_exceeded"
        assert prompt >= min(total, room or total)
        return
    assert 1 <= budget <= new
    assert prompt + budget <= min(total, room or total)


def test_default_fields_contain_only_temperature() -> None:
    assert GenerationHyperparameters().request_fields() == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("given_", "sent"),
    [
        ({"greedy": True, "temperature": 0.7}, {"temperature": 0.0}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"top_k": 5, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}),
        ({"stop": ["x"], "stop_token_ids": [3]}, {"temperature": 1.0, "stop": ["x"], "stop_token_ids": [3]}),
        ({"ignore_eos": True, "min_new_tokens": 2}, {"temperature": 1.0, "ignore_eos": True, "min_tokens": 2}),
    ],
)
def test_changed_fields_are_sent_under_api_names(given_: dict[str, object], sent: dict[str, object]) -> None:
    assert GenerationHyperparameters(**given_).request_fields() == sent  # type: ignore[arg-type]


@pytest.mark.parametrize(("temperature", "recorded"), [(1e-9, 0.0), (0.0, 0.0), (0.6, 0.6)])
def test_response_records_temperature_used_by_service(temperature: float, recorded: float) -> None:
    request = ModelRequest([1], GenerationHyperparameters(temperature=temperature))
    assert PartialResponse().response(request, 0.0).temperature == recorded


def test_sample_seeds_are_distinct_and_repeatable() -> None:
    seeds = {derived_seed("task", member, call) for member in range(20) for call in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed("task", 1, 2) == derived_seed("task", 1, 2)


def test_more_new_tokens_than_context_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for most in (511, 512, 513, 513):
        answer_budget(GenerationHyperparameters(max_new_tokens=most), 4, 512)
    told = [each.getMessage() for each in caplog.records]
    assert told == [
        f"gconfig.max_new_tokens is {most} and the model's context 512 tokens: a prompt and its answer end there"
        for most in (512, 513)
    ]
