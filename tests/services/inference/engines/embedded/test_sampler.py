"""What is drawn: the right distribution, filters and penalties as their formulas say, a seed's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from areal.services.inference.engines.embedded.sampler import (
    Penalties,
    SamplerBatch,
    invert,
    keep_only,
    mix,
    stream_key,
)
from areal.services.inference.engines.embedded.scheduler import TokenSequence
from areal.wire.sampling import SamplingParams

from .support import STEADY, make_sequence

CPU = torch.device("cpu")
NO_IDS: Any = None  # what a filter of transformers does not look at
VOCAB = 12


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(logits: torch.Tensor, count: int, **sampling: Any) -> torch.Tensor:
    """``count`` tokens drawn from the one row ``logits`` by sequences of different seeds; their shares [vocab]."""
    sequences = [make_sequence([1], seed=seed, **sampling) for seed in range(count)]
    tokens = SamplerBatch(sequences, VOCAB, CPU).sample(logits.expand(count, -1)).tokens
    return torch.bincount(tokens, minlength=VOCAB) / count


@pytest.mark.extended
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.8},
    ],
    ids=str,
)
def test_sample_frequencies_follow_distribution(sampling: dict[str, Any]) -> None:
    logits, count = logits_of(3), 40_000
    params = SamplingParams(**sampling)
    expected = keep_only(logits / params.temperature, [params]).softmax(-1)[0]
    shares = draws(logits, count, **sampling)
    # Five standard deviations: a fair sampler fails once in a million runs, and the seeds are fixed.
    assert torch.all((shares - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9)
    assert torch.all(shares[expected == 0] == 0)


def test_random_numbers_of_positions_are_independent() -> None:
    logits = torch.zeros(1, VOCAB)
    sequence = make_sequence([1], seed=5)
    batch = SamplerBatch([sequence], VOCAB, CPU)
    tokens = torch.cat([batch.sample(logits).tokens for _ in range(20_000)])
    pairs = torch.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB**2) / (len(tokens) - 1)
    assert torch.all((pairs - VOCAB**-2).abs() < 5 * (VOCAB**-2 / len(tokens)) ** 0.5)


@given(st.integers(0, 10**6), st.integers(1, VOCAB), st.floats(0.05, 1.0), st.floats(0.0, 0.9), st.floats(0.2, 3.0))
@settings(STEADY, max_examples=150)
def test_filters_match_transformers(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    logits = logits_of(seed)
    expected = TemperatureLogitsWarper(temperature)(NO_IDS, logits)
    expected = TopKLogitsWarper(top_k)(NO_IDS, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(NO_IDS, expected)
    if min_p > 0.0:
        expected = MinPLogitsWarper(min_p)(NO_IDS, expected)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = keep_only(logits / temperature, [params])
    assert torch.equal(kept.isfinite(), expected.isfinite())
    assert torch.allclose(kept[kept.isfinite()], expected[kept.isfinite()])


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [1, 100, 128, 129, 1500, 3000, 0])
def test_filters_match_transformers_for_large_vocabulary(top_k: int, top_p: float, spread: float) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(top_k)) * spread
    expected = TopKLogitsWarper(top_k)(NO_IDS, logits) if top_k else logits
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(NO_IDS, expected)
    kept = keep_only(logits, [SamplingParams(top_k=top_k, top_p=top_p)] * 3)
    different = (kept.isfinite() != expected.isfinite()).sum(dim=-1)
    assert different.max() <= 1  # a sum of thousands may round to either side of the nucleus


def test_filters_apply_per_row_in_mixed_batch() -> None:
    logits = logits_of(1, rows=4)
    params = [SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(min_p=0.3)]
    together = keep_only(logits, params)
    assert torch.equal(together, torch.cat([keep_only(logits[i : i + 1], params[i : i + 1]) for i in range(4)]))
    assert torch.equal(together[0], logits[0])


def sequence_of(prompt: list[int], output: list[int], **sampling: Any) -> TokenSequence:
    sequence = make_sequence(prompt, **sampling)
    sequence.output = output
    sequence.produced = len(output)
    return sequence


def test_presence_and_frequency_penalties_follow_formula() -> None:
    logits = logits_of(2)
    sequence = sequence_of([7, 7], [3, 3, 5], presence_penalty=0.5, frequency_penalty=0.25)
    penalties = Penalties.of([sequence], VOCAB, CPU)
    assert penalties is not None
    expected = logits.clone()
    expected[0, 3] -= 0.5 + 2 * 0.25  # the prompt's 7 is not counted
    expected[0, 5] -= 0.5 + 0.25
    assert torch.allclose(penalties.apply(logits), expected)


def test_repetition_penalty_matches_transformers() -> None:
    logits = logits_of(2)
    penalties = Penalties.of([sequence_of([7, 7], [3, 5], repetition_penalty=1.7)], VOCAB, CPU)
    assert penalties is not None
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[7, 7, 3, 5]]), logits.clone())
    assert torch.allclose(penalties.apply(logits), expected)


def test_penalties_persist_across_batch_changes() -> None:
    first = sequence_of([7], [3], frequency_penalty=0.5)
    other = sequence_of([7], [4], presence_penalty=1.0)
    logits = logits_of(2, rows=2)
    together = Penalties.of([other, first], VOCAB, CPU)
    assert together is not None
    together.observe(torch.tensor([6, 3]))
    alone = Penalties.of([first], VOCAB, CPU)
    assert alone is not None
    expected = logits[:1].clone()
    expected[0, 3] -= 2 * 0.5
    assert torch.allclose(alone.apply(logits[:1]), expected)


_STOPS = st.sets(st.integers(0, VOCAB - 1), max_size=3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), _STOPS), min_size=1, max_size=6))
@settings(STEADY)
def test_stop_tokens_are_masked_until_min_new_tokens(rows: list[tuple[int, int, set[int]]]) -> None:
    sequences = [sequence_of([7], [3] * produced, min_new_tokens=least) for least, produced, _ in rows]
    for sequence, (_, _, stops) in zip(sequences, rows, strict=True):
        sequence.stop_ids = frozenset(stops)
    penalties = Penalties.of(sequences, VOCAB, CPU)
    for step in range(7):
        logits = logits_of(step, rows=len(rows))
        expected = logits.clone()
        for row, (least, produced, stops) in enumerate(rows):
            if produced + step < least:
                expected[row, sorted(stops)] = float("-inf")
        assert torch.equal(logits if penalties is None else penalties.apply(logits), expected)


def test_logit_bias_applies_to_its_row_only() -> None:
    logits = logits_of(4, rows=2)
    sequences = [
        make_sequence([1], temperature=0.0),
        make_sequence([1], temperature=0.0, logit_bias={9: 100.0, 2: -100.0}),
    ]
    sampled = SamplerBatch(sequences, VOCAB, CPU).sample(logits)
    assert sampled.tokens.tolist() == [int(logits[0].argmax()), 9]
    assert torch.allclose(sampled.logprobs, logits.log_softmax(-1)[[0, 1], sampled.tokens])


def test_batch_mixes_greedy_and_sampled_rows() -> None:
    logits = logits_of(4)
    sequences = [make_sequence([1], seed=seed, temperature=0.0 if seed % 2 else 1.0) for seed in range(200)]
    tokens = SamplerBatch(sequences, VOCAB, CPU).sample(logits.expand(200, -1)).tokens
    assert set(tokens[1::2].tolist()) == {int(logits.argmax())}
    assert len(set(tokens[0::2].tolist())) > 1


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True, width=32))
@settings(STEADY, max_examples=200)
def test_invert_never_draws_zero_probability_tokens(weights: list[float], uniform: float) -> None:
    probabilities = torch.tensor([weights])
    if float(probabilities.sum()) < 1e-30:
        probabilities[0, 0] = 1.0
    token = int(invert(probabilities, torch.tensor([[uniform]])))
    assert probabilities[0, token] > 0


KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_logprobs": 2}]


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    st.integers(0, 3),
    st.data(),
)
def test_shrunk_batch_matches_new_batch(kinds: list[dict[str, Any]], steps: int, data: st.DataObject) -> None:
    sequences = [make_sequence([1], seed=seed, **kind) for seed, kind in enumerate(kinds)]
    batch = SamplerBatch(sequences, VOCAB, CPU)
    for step in range(steps):
        for sequence, token in zip(sequences, batch.sample(logits_of(step, len(kinds))).tokens.tolist(), strict=True):
            sequence.output.append(token)
    rows = data.draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, unique=True))
    kept, recreate = batch.of_rows(rows), SamplerBatch([sequences[row] for row in rows], VOCAB, CPU)
    logits = logits_of(9, len(kinds))[rows]
    assert kept is not None and kept.sequences == recreate.sequences
    for _ in range(2):
        found, wanted = kept.sample(logits), recreate.sample(logits)
        assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.logprobs, wanted.logprobs)
        assert found.top == wanted.top


@pytest.mark.parametrize("sampling", [{"presence_penalty": 1.0}, {"top_k": 3}, {"logit_bias": {1: 2.0}}], ids=str)
def test_batch_is_rebuilt_for_rows_with_more_needs(sampling: dict[str, Any]) -> None:
    assert SamplerBatch([make_sequence([1], **sampling), make_sequence([1])], VOCAB, CPU).of_rows([1]) is None


@given(
    st.integers(0, 10**6),
    st.lists(
        st.fixed_dictionaries(
            {"temperature": st.just(0.0) | st.floats(0.02, 3.0)},
            optional={
                "top_k": st.integers(1, VOCAB),
                "top_p": st.floats(0.05, 1.0),
                "min_p": st.floats(0.0, 0.9),
                "repetition_penalty": st.floats(0.5, 2.0),
                "presence_penalty": st.floats(-2.0, 2.0),
                "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5.0, 5.0), max_size=3),
                "top_logprobs": st.integers(0, 3),
            },
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(STEADY, max_examples=150)
def test_logprobs_depend_only_on_row_temperature(seed: int, each: list[dict[str, Any]]) -> None:
    logits = logits_of(seed, len(each))
    sampled = SamplerBatch([make_sequence([1], seed=seed, **how) for how in each], VOCAB, CPU).sample(logits)
    for row, how in enumerate(each):
        expected = (logits[row].double() / (how["temperature"] or 1.0)).log_softmax(-1)
        assert sampled.logprobs[row].item() == pytest.approx(expected[sampled.tokens[row]].item(), abs=1e-4)
        for token, value in sampled.top[row] if sampled.top else []:
            assert value == pytest.approx(expected[token].item(), abs=1e-4)


def test_stream_keys_differ_for_adjacent_seeds_and_choices() -> None:
    keys = {stream_key(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(keys) == 5000
    assert all(0 <= key < 2**64 for key in keys)


def test_mix_equals_splitmix64_reference() -> None:
    # The first outputs of SplitMix64 from state 0, as published with the reference implementation.
    gamma = 0x9E3779B97F4A7C15
    assert [mix(gamma * step) for step in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
