"""Weights swapped under load on a real engine: each token has the version of the weights that sampled it.

AREAL_VLLM_PYTHON=/path/to/python pytest -m vllm tests/engines/test_swaps.py --timeout=1500
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from areal.http.client import HttpClient
from areal.services.inference.engines.base import EngineCall, EngineDelta, TokenEngine
from areal.wire.sampling import SamplingParams
from tests.services.inference.engines.conformance.engines import REAL, start
from tests.services.inference.engines.conformance.models import TOLERANCE, Models, logprobs, make_models

SWAPS, CALLERS, TOKENS = 30, 8, 200
ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in REAL]


def wrong_tokens(models: Models, prompt: list[int], deltas: list[EngineDelta]) -> tuple[int, int]:
    """How many tokens do not have the log-probability that the weights of their version give, and how many versions."""
    tokens = [token for delta in deltas for token in delta.token_ids]
    reported = torch.tensor([value for delta in deltas for value in delta.logprobs])
    versions = deltas[-1].all_versions or tuple(version for delta in deltas for version in delta.versions)
    assert len(tokens) == len(versions) == TOKENS
    wrong = 0
    for number, model in enumerate(models.versions):
        plain = logprobs(model, prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        ours = torch.tensor([version % 2 == number for version in versions])
        wrong += int(((plain - reported).abs() > TOLERANCE)[ours].sum())
    return wrong, len(set(versions))


async def call_until(
    client: TokenEngine, done: asyncio.Event, number: int, ids: Iterator[int]
) -> list[tuple[list[int], list[EngineDelta]]]:
    answers = []
    while not done.is_set():
        prompt, deltas = [5 + number, 6, next(ids) % 200 + 5], list[EngineDelta]()
        sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
        call = EngineCall(f"swap-{next(ids)}", (tuple(prompt),), sampling, stream=number % 2 == 0)
        await client.stream_to(call, deltas.append, lambda flow: None)
        answers.append((prompt, deltas))
    return answers


@pytest.mark.parametrize("name", ENGINES)
async def test_thirty_swaps_under_load_give_no_wrong_version(name: str, tmp_path: Path) -> None:
    if REAL[name] not in os.environ:
        pytest.skip(f"{REAL[name]} names no Python that has {name}")
    models = make_models(tmp_path, tied=True)
    process = start(name, models.folders[0], tmp_path / "log")
    done, ids = asyncio.Event(), itertools.count()
    try:
        with closing(HttpClient()) as http:
            await process.wait_ready(http)
            client = process.open(http)
            await client.state()
            await client.set_version(0)
            assert client.capabilities.whole_answers
            async with asyncio.TaskGroup() as group:
                callers = [
                    group.create_task(call_until(client, done, number, ids), name=f"caller-{number}")
                    for number in range(CALLERS)
                ]
                took = []
                for version in range(1, SWAPS + 1):
                    await asyncio.sleep(0.3)  # so that calls have tokens of several versions, and not of all
                    began = asyncio.get_running_loop().time()
                    await client.pause()
                    await client.load_weights(str(models.folders[version % 2]), version)
                    await client.resume()
                    took.append(asyncio.get_running_loop().time() - began)
                done.set()
    finally:
        process.stop()
    counts = [wrong_tokens(models, *answer) for caller in callers for answer in caller.result()]
    several = sum(versions > 1 for _, versions in counts)
    print(f"{len(counts)} answers, {len(counts) * TOKENS} tokens, {several} of several versions", end=" ")
    print(f"swaps: median {sorted(took)[SWAPS // 2] * 1e3:.0f} ms, most {max(took) * 1e3:.0f} ms")
    assert sum(wrong for wrong, _ in counts) == 0
    assert several >= CALLERS
