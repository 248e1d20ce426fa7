"""Token in, token out: what is sampled, what is reported about it, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import replace

import pytest
import torch
from jsonschema import validate
from tokenizers import Tokenizer

from areal.services.inference.engines import sglang, vllm
from areal.services.inference.engines.base import (
    Capabilities,
    EngineCall,
    EngineDelta,
    EngineFailed,
    EngineRefused,
    FinishReason,
    PromptLogprobs,
    PromptScorer,
    TopLogprobs,
)
from areal.services.inference.engines.transport import Pace
from areal.wire.sampling import SamplingParams
from tests.services.inference.engines.conformance.conftest import Subject
from tests.services.inference.engines.conformance.models import END, MAX_LEN, TOLERANCE, VOCAB, gap, greedy, logprobs
from tests.services.inference.engines.deltas import deltas_of

PROMPT = [5, 6, 7, 8]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
LONG = [3 + number % 300 for number in range(200)]


def tokens(deltas: list[EngineDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def reported(deltas: list[EngineDelta], index: int = 0) -> list[float]:
    return [value for delta in deltas if delta.index == index for value in delta.logprobs]


@pytest.mark.parametrize("prompt", [[9], PROMPT, LONG], ids=["one", "few", "many"])
async def test_logprobs_match_forward_pass(engine: Subject, prompt: list[int]) -> None:
    for temperature in (1.0, 0.5, 1.4, 0.0):
        deltas = await engine.run(prompt, max_new_tokens=24, temperature=temperature, ignore_eos=True)
        output = tokens(deltas)
        assert len(output) == 24 and all(0 <= token < VOCAB for token in output)
        assert gap(engine.models.versions[0], prompt, output, reported(deltas), temperature) < TOLERANCE


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["few", "many"])
async def test_prompt_scores_match_forward_pass(engine: Subject, prompt: list[int]) -> None:
    """By the model itself: a prompt has no temperature."""
    scorer = engine.client
    assert isinstance(scorer, PromptScorer) and scorer.capabilities.prompt_logprobs
    names = () if "adapters" in engine.process.lacks else ("pirate",)
    adapted = {None: engine.models.versions[0]} | {name: engine.models.adapted[name] for name in names}
    for adapter, model in adapted.items():
        scores = await scorer.score(prompt, 3, adapter)
        assert gap(model, prompt[:1], prompt[1:], scores.logprobs) < TOLERANCE
        for row, top in zip(logprobs(model, prompt[:1], prompt[1:]), scores.top_logprobs, strict=True):
            assert [value for _, value in top] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
            assert [float(row[token]) for token, _ in top] == pytest.approx([value for _, value in top], abs=TOLERANCE)
    alone = await scorer.score(prompt, 0)
    assert alone.logprobs == pytest.approx((await scorer.score(prompt, 2)).logprobs)
    assert alone.top_logprobs == ((),) * (len(prompt) - 1)


async def test_prompt_of_one_token_has_no_scores(engine: Subject) -> None:
    assert isinstance(engine.client, PromptScorer)
    assert await engine.client.score([9], 2) == PromptLogprobs((), ())


SCORES = PromptLogprobs((-0.5, -2.0), (((6, -0.5),), ((9, -0.1),)))


def test_vllm_prompt_scores_are_keyed_by_token_id() -> None:
    entries = [
        None,
        {"6": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
        {"7": {"logprob": -2.0, "rank": 3, "decoded_token": "b"}, "9": {"logprob": -0.1, "rank": 1}},
    ]
    assert vllm.read_prompt(entries, [5, 6, 7], 1) == SCORES
    for wrong in (None, entries[:2], [None, entries[2], entries[1]]):
        with pytest.raises(EngineFailed, match="not those of the prompt"):
            vllm.read_prompt(wrong, [5, 6, 7], 1)


@pytest.mark.parametrize("more", [[], [None]], ids=["pairs", "with a text"])
def test_sglang_prompt_scores_are_pairs_with_optional_text(more: list[None]) -> None:
    tokens = [[None, 5, *more], [-0.5, 6, *more], [-2.0, 7, *more]]
    tops = [None, [[-0.5, 6, *more], [-3.0, 8, *more]], [[-0.1, 9, *more]]]
    about = {"input_token_logprobs": tokens, "input_top_logprobs": tops}
    assert sglang.read_prompt(about, [5, 6, 7], 1) == SCORES
    for wrong in ({}, {"input_token_logprobs": tokens[1:]}):
        with pytest.raises(EngineFailed, match="not those of the prompt"):
            sglang.read_prompt(wrong, [5, 6, 7], 1)


SHAPED: list[dict[str, object]] = [
    {"top_p": 0.7},
    {"top_k": 3},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {9: 5.0}},
    {"min_new_tokens": 8},
    {"top_p": 0.5, "temperature": 0.0},
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("shaping", SHAPED, ids=[next(iter(each)) for each in SHAPED])
async def test_logprobs_are_of_temperature_alone_or_reported_as_altered(
    engine: Subject, shaping: dict[str, object], temperature: float
) -> None:
    options: dict[str, object] = {"temperature": temperature, **shaping}
    sampling = SamplingParams(**options)  # type: ignore[arg-type]
    is_reported = engine.client.capabilities.logprobs.conflict(sampling, grammar=False) is not None
    assert not is_reported or engine.kind != "embedded"
    deltas = await engine.run(PROMPT, max_new_tokens=12, stop_token_ids=(END,), **options)
    found = gap(engine.models.versions[0], PROMPT, tokens(deltas), reported(deltas), sampling.temperature)
    assert found < TOLERANCE or is_reported


async def test_min_new_tokens_holds_in_shared_batch(engine: Subject) -> None:
    shaping: dict[str, object] = {"temperature": 1.7, "min_new_tokens": 8, "logit_bias": {END: 5.0}}
    takes_seeds = "seed" in engine.client.capabilities.sampling_fields
    seeds = range(12) if takes_seeds else [None] * 12
    calls = [{**shaping, "seed": seed, "top_logprobs": number % 2 * 4} for number, seed in enumerate(seeds)]
    for deltas in await asyncio.gather(
        *(engine.run(PROMPT, max_new_tokens=12, stop_token_ids=(END,), **call) for call in calls)
    ):
        assert len(tokens(deltas)) >= 8 and END not in tokens(deltas)[:8]
        assert all(math.isfinite(value) for value in reported(deltas))


@pytest.mark.parametrize("about", ["output", "input"])
def test_null_sglang_logprob_fails_but_null_top_is_skipped(about: str) -> None:
    def read(logprob: float | None) -> tuple[TopLogprobs, ...]:
        entries, tops = [[-0.5, 5], [logprob, 6]], [None, [[-0.1, 6], [None, 2]]]
        meta = {"completion_tokens": 2, f"{about}_token_logprobs": entries, f"{about}_top_logprobs": tops}
        if about == "input":
            return sglang.read_prompt(meta, [5, 6], 2).top_logprobs
        call = EngineCall("r", ((5,),), SamplingParams(top_logprobs=2))
        reader = sglang.StreamOffsets(call, Capabilities(), Pace())
        return (reader.deltas({"meta_info": meta})[0].top_logprobs or ())[1:]

    assert read(-0.1) == (((6, -0.1),),)
    with pytest.raises(EngineFailed, match="log-probability of token 6 is not finite"):
        read(None)


async def test_top_logprobs_are_tempered(engine: Subject) -> None:
    deltas = await engine.run(PROMPT, max_new_tokens=6, temperature=0.4, ignore_eos=True, top_logprobs=4)
    plain = logprobs(engine.models.versions[0], PROMPT, tokens(deltas), 0.4)
    for row, entry in zip(plain, [entry for delta in deltas for entry in delta.top_logprobs or ()], strict=True):
        for token, value in entry:
            assert abs(float(row[token]) - value) < TOLERANCE


async def test_concurrent_calls_keep_their_temperatures(engine: Subject) -> None:
    temperatures = (0.0, 0.5, 1.0, 1.5)
    answers = await asyncio.gather(
        *(engine.run(PROMPT, max_new_tokens=20, temperature=each, ignore_eos=True) for each in temperatures)
    )
    for temperature, deltas in zip(temperatures, answers, strict=True):
        assert gap(engine.models.versions[0], PROMPT, tokens(deltas), reported(deltas), temperature) < TOLERANCE


async def test_delta_lists_match_and_each_choice_ends_once(engine: Subject) -> None:
    deltas = await engine.run(PROMPT, max_new_tokens=60, ignore_eos=True, top_logprobs=1)
    for delta in deltas:
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.versions) == len(delta.top_logprobs or ())
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].stop_token_id is None
    assert len(tokens(deltas)) == 60


async def test_greedy_takes_most_likely_token(engine: Subject) -> None:
    deltas = await engine.run(PROMPT, max_new_tokens=12, temperature=0.0, ignore_eos=True)
    assert tokens(deltas) == greedy(engine.models.versions[0], PROMPT, 12)


async def test_stop_token_ends_answer_and_is_included(engine: Subject) -> None:
    expected = greedy(engine.models.versions[0], PROMPT, 12)
    stop = next(token for token in expected[3:] if token not in expected[:3])
    both: dict[str, object] = {"ignore_eos": True, "stop_token_ids": (stop,)}
    if engine.process.client_kind == "sglang":  # which would go on
        with pytest.raises(EngineRefused, match="leave one of them out"):
            await engine.run(PROMPT, max_new_tokens=50, temperature=0.0, **both)
        both.pop("ignore_eos")
    deltas = await engine.run(PROMPT, max_new_tokens=50, temperature=0.0, **both)
    assert tokens(deltas) == expected[: expected.index(stop) + 1]
    assert deltas[-1].finish_reason is FinishReason.STOP and deltas[-1].stop_token_id == stop


async def test_end_token_stops_unless_ignored(engine: Subject) -> None:
    bias = {END: 100.0}
    ended = await engine.run(PROMPT, max_new_tokens=5, temperature=0.0, logit_bias=bias, stop_token_ids=(END,))
    assert tokens(ended) == [END] and ended[-1].finish_reason is FinishReason.STOP
    if engine.client.capabilities.logprobs.before_penalties:
        assert gap(engine.models.versions[0], PROMPT, [END], reported(ended)) < TOLERANCE
    gone_on = await engine.run(PROMPT, max_new_tokens=5, temperature=0.0, logit_bias=bias, ignore_eos=True)
    assert tokens(gone_on) == [END] * 5 and gone_on[-1].finish_reason is FinishReason.LENGTH


async def test_choices_differ_and_each_ends(engine: Subject) -> None:
    deltas = await engine.run(PROMPT, max_new_tokens=20, ignore_eos=True, n=3)
    ends = [delta.index for delta in deltas if delta.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]
    answers = [tokens(deltas, index) for index in range(3)]
    assert all(len(answer) == 20 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 3
    for index, answer in enumerate(answers):
        assert gap(engine.models.versions[0], PROMPT, answer, reported(deltas, index)) < TOLERANCE


async def test_greedy_choices_are_equal(engine: Subject) -> None:
    deltas = await engine.run(PROMPT, max_new_tokens=6, temperature=0.0, ignore_eos=True, n=2)
    assert tokens(deltas, 0) == tokens(deltas, 1) == greedy(engine.models.versions[0], PROMPT, 6)


async def test_same_seed_repeats_answer_and_other_seed_differs(engine: Subject) -> None:
    if "seed" not in engine.client.capabilities.sampling_fields:
        pytest.skip("this engine promises no seed, and its client says so")
    one, again, other = [
        tokens(await engine.run(PROMPT, max_new_tokens=20, ignore_eos=True, seed=seed)) for seed in (7, 7, 8)
    ]
    assert one == again != other


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_top_logprobs_match_forward_pass(engine: Subject, stream: bool) -> None:
    call = replace(engine.call(PROMPT, max_new_tokens=10, ignore_eos=True, top_logprobs=5), stream=stream)
    deltas = [delta async for delta in deltas_of(engine.client, call)]
    plain = logprobs(engine.models.versions[0], PROMPT, tokens(deltas))
    for row, entry in zip(plain, [entry for delta in deltas for entry in delta.top_logprobs or ()], strict=True):
        assert len(entry) == 5
        values = torch.tensor([value for _, value in entry])
        assert torch.allclose(values, row.topk(5).values, atol=TOLERANCE)
        assert torch.allclose(values, row[[token for token, _ in entry]], atol=TOLERANCE)


async def test_raising_sink_aborts_call_in_engine(engine: Subject) -> None:
    def sink(delta: EngineDelta) -> None:
        raise ConnectionResetError("the port is closed")

    with pytest.raises(ConnectionResetError):
        call = engine.call(PROMPT, max_new_tokens=480, ignore_eos=True)
        await engine.client.stream_to(call, sink, lambda flow: None)
    await engine.idle()


async def test_cancelled_call_is_aborted_in_engine(engine: Subject) -> None:
    async with contextlib.aclosing(
        deltas_of(engine.client, engine.call(PROMPT, max_new_tokens=480, ignore_eos=True, n=4))
    ) as deltas:
        assert (await anext(deltas)).token_ids
    await engine.idle()


async def test_concurrent_calls_match_single_calls(engine: Subject) -> None:
    prompts = [[10 + number] * (1 + 3 * number) for number in range(6)]
    answers = await asyncio.gather(
        *(engine.run(prompt, max_new_tokens=16, ignore_eos=True, temperature=0.7) for prompt in prompts)
    )
    for prompt, deltas in zip(prompts, answers, strict=True):
        assert gap(engine.models.versions[0], prompt, tokens(deltas), reported(deltas), 0.7) < TOLERANCE


@pytest.mark.parametrize("prompt", [[5, VOCAB + 1000], [5] * (MAX_LEN + 1)], ids=["no-token", "too-long"])
async def test_invalid_prompt_is_refused_without_side_effects(engine: Subject, prompt: list[int]) -> None:
    with pytest.raises(EngineRefused):
        await engine.run(prompt, max_new_tokens=4)
    assert len(tokens(await engine.run(PROMPT, max_new_tokens=4, ignore_eos=True))) == 4


async def test_answer_follows_json_schema(engine: Subject) -> None:
    answer, _ = await answer_in_schema(engine)
    tokenizer = Tokenizer.from_file(str(engine.models.folders[0] / "tokenizer.json"))
    validate(json.loads(tokenizer.decode(answer[:-1])), SCHEMA)


async def test_schema_logprobs_are_unmasked_or_reported_as_masked(engine: Subject) -> None:
    """vLLM 0.32 and SGLang report the log-probabilities of what the grammar left, so that a token that had to come has
    0. A trainer must not take those for the model's."""
    answer, logprobs = await answer_in_schema(engine)
    is_exact = gap(engine.models.versions[0], PROMPT, answer, logprobs, 0.3) < TOLERANCE
    assert is_exact == engine.client.capabilities.logprobs.before_grammars


async def answer_in_schema(engine: Subject) -> tuple[list[int], list[float]]:
    """The tokens of an answer that ended by itself, and their log-probabilities."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert engine.client.capabilities.response_format
    tokenizer = Tokenizer.from_file(str(engine.models.folders[0] / "tokenizer.json"))
    # JSON may have as much white space as it likes, and a random model likes it as much as anything.
    blank = {token: -100.0 for token in range(3, tokenizer.get_vocab_size()) if not tokenizer.decode([token]).strip()}
    sampling = SamplingParams(max_new_tokens=400, temperature=0.3, logit_bias=blank, stop_token_ids=(END,))
    call = EngineCall(f"schema-{id(engine)}", (PROMPT,), sampling, response_format=wanted)
    deltas = [delta async for delta in deltas_of(engine.client, call)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    return tokens(deltas), reported(deltas)
