"""Which distribution the log-probabilities of an engine are of is found by asking it, whatever its flags are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.http.client import HttpClient
from areal.services.inference.engines.base import LogprobsMode
from areal.wire.sampling import SamplingParams
from tests.services.inference.engines.conformance.engines import start
from tests.services.inference.engines.conformance.models import Models

RAW = LogprobsMode(tempered=False, before_grammars=False)
PROCESSED = LogprobsMode(before_filters=False, before_penalties=False, before_grammars=False)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        ("vllm-standin", ["--logprobs-mode", "raw_logprobs"], RAW),
        pytest.param("vllm-standin", ["--logprobs-mode", "processed_logprobs"], PROCESSED, marks=pytest.mark.slow),
        pytest.param(
            "sglang-standin",
            [],
            LogprobsMode(before_penalties=False, before_grammars=False),
            marks=pytest.mark.slow,
        ),
        # In the stand-in also before penalties, which SGLANG_RETURN_ORIGINAL_LOGPROB is not.
        ("sglang-standin", ["--logprobs-mode", "raw_logprobs"], RAW),
    ],
    ids=["vllm-raw", "vllm-processed", "sglang", "sglang-original"],
)
async def test_mode_is_read_once_engine_is_ready(
    kind: str, flags: list[str], expected: LogprobsMode, models: Callable[[bool], Models], log: Path, http: HttpClient
) -> None:
    process = start(kind, models(False).folders[0], log, None, *flags)
    try:
        await process.wait_ready(http)
        client = process.open(http)
        assert (await client.state()).not_ready is None
        assert client.capabilities.logprobs == expected
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("mode", "sampling", "grammar", "conflict"),
    [
        (LogprobsMode(), SamplingParams(temperature=0.3, top_p=0.5, repetition_penalty=2.0), True, None),
        (RAW, SamplingParams(temperature=0.6), False, "temperature"),
        (RAW, SamplingParams(top_p=0.6, presence_penalty=1.0), False, None),
        (RAW, SamplingParams(temperature=0.0), False, None),
        (RAW, SamplingParams(), True, "response_format"),
        (PROCESSED, SamplingParams(temperature=0.6), False, None),
        (PROCESSED, SamplingParams(top_p=0.9), False, "top_p"),
        (PROCESSED, SamplingParams(temperature=0.0, top_p=0.9), False, None),  # greedy: nothing is filtered
        (PROCESSED, SamplingParams(temperature=0.0, logit_bias={1: 1.0}), False, "logit_bias"),
        (PROCESSED, SamplingParams(min_new_tokens=1), False, "min_new_tokens"),
    ],
)
def test_conflict_names_settings_shaping_logprobs(
    mode: LogprobsMode, sampling: SamplingParams, grammar: bool, conflict: str | None
) -> None:
    assert mode.conflict(sampling, grammar=grammar) == conflict


@given(st.floats(0.01, 2.0), st.floats(0.01, 1.0), st.integers(0, 50), st.floats(0.0, 1.0), st.booleans())
def test_conforming_engine_has_no_conflicts(
    temperature: float, top_p: float, top_k: int, min_p: float, grammar: bool
) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert LogprobsMode().conflict(sampling, grammar=grammar) is None
