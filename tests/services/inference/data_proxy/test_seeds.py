"""A session's seed gives each of its calls one, whatever the order in which they arrive."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.sessions import SessionSeeds
from areal.services.inference.engines.base import SAMPLING_FIELDS, Capabilities
from areal.services.inference.recorder.session import SessionName
from tests.services.inference.data_proxy.control.embedded_service import (
    COMPLETIONS,
    MODEL,
    EmbeddedService,
    build_embedded_service,
)
from tests.services.processes import Processes

EMBEDDED = Capabilities(free_seeds=True)
SLOW = Capabilities()
WITHOUT = Capabilities(sampling_fields=SAMPLING_FIELDS - {"seed"})
TAG = "abcdefgh"
PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=8)


def started(seed: int, members: int = 1) -> SessionSeeds:
    seeds = SessionSeeds(EMBEDDED)
    seeds.start(seed, [str(SessionName("task", TAG, number)) for number in range(1, members + 1)])
    return seeds


def one(seeds: SessionSeeds, session: int, prompt: list[int]) -> int:
    found = seeds.of_call(TAG, session, [prompt])
    assert found is not None
    return found[0]


@given(prompts=PROMPTS, order=st.randoms(use_true_random=False))
def test_session_seeds_are_independent_of_call_order(prompts: list[list[int]], order: random.Random) -> None:
    straight, mixed = started(7), started(7)
    shuffled = list(prompts)
    order.shuffle(shuffled)
    first = sorted((prompt, one(straight, 1, prompt)) for prompt in prompts)
    assert sorted((prompt, one(mixed, 1, prompt)) for prompt in shuffled) == first
    assert len({seed for _, seed in first}) == len(prompts)  # also of one prompt that is sampled again


def test_members_of_a_group_and_other_seeds_sample_differently() -> None:
    group, other = started(7, members=64), started(8)
    assert len({one(group, number, [1, 2]) for number in range(1, 65)} | {one(other, 1, [1, 2])}) == 65
    group.end(TAG, 1)
    assert group.of_call(TAG, 1, [[1, 2]]) is None


@pytest.mark.parametrize(("engine", "default"), [(EMBEDDED, 5), (SLOW, None), (WITHOUT, None), (None, None)])
def test_default_seed_is_used_where_engine_supports_it(engine: Capabilities | None, default: int | None) -> None:
    assert SessionSeeds(engine).chosen(None, 5) == default


@pytest.mark.parametrize("engine", [WITHOUT, None])
def test_seed_of_an_engine_without_seeds_is_refused(engine: Capabilities | None) -> None:
    with pytest.raises(ApiError, match="seed"):
        SessionSeeds(engine).chosen(3, None)
    assert SessionSeeds(SLOW).chosen(3, None) == 3


@pytest.fixture(scope="module")
def service(module_processes: Processes) -> EmbeddedService:
    return build_embedded_service(module_processes)


def ask(service: EmbeddedService, **body: Any) -> Any:
    body = {"model": MODEL, "temperature": 1.5, "max_tokens": 8, "return_token_ids": True, **body}
    return service.ask("POST", COMPLETIONS, body)


def test_batched_prompts_sample_like_single_ones_by_seed(service: EmbeddedService) -> None:
    prompts, seeds = [[1, 5, 6, 7], [1, 9, 8], [1, 5, 6, 7]], [3, 4, 5]
    choices = ask(service, prompt=prompts, default_seed=seeds, n=2).json()["choices"]
    together = [choice["token_ids"] for choice in choices]
    alone = [
        choice["token_ids"]
        for prompt, seed in zip(prompts, seeds, strict=True)
        for choice in ask(service, prompt=prompt, seed=seed, n=2).json()["choices"]
    ]
    assert together == alone and len(set(map(str, together))) == 6


@pytest.mark.parametrize("wrong", [[1], [1, "2"], "3", 1.5, [True, False], [1, 2**63]])
def test_rejects_default_seeds_not_matching_prompts(service: EmbeddedService, wrong: Any) -> None:
    answer = ask(service, prompt=[[1, 5], [1, 6]], default_seed=wrong)
    assert answer.status == 400 and answer.json()["error"]["param"] == "default_seed"
