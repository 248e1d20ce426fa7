"""Checks of an engine by what it answers, never by a status code: its log-probabilities and its weights.

``find_logprobs_mode`` finds which distribution the log-probabilities are of: flags and environment variables of
engines change it (vLLM's ``--logprobs-mode``, SGLang's ``SGLANG_RETURN_ORIGINAL_LOGPROB``), and no route tells. It
samples one token each after a short prompt. Between two tokens, softmax(logits / T) has log-probabilities 1 / T times
as far apart as softmax(logits). Under top-k 1, or a bias that leaves one token only, the log-probability of what is
left is 0.

``check_weights`` finds whether an engine computes with the weights that it was given. Engines have answered 200 to an
update and gone on with a stale copy of a tied head. So the sender of the weights makes a plain forward pass over a few
tokens, and the engine must give the next token the same log-probabilities.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from areal.services.inference.engines.base import (
    EngineCall,
    EngineError,
    EngineFailed,
    LogprobsMode,
    TokenEngine,
    WeightsDiffer,
)
from areal.wire.sampling import SamplingParams

_ALTERNATIVES = 5
_LEAST = 0.1  # nats: a gap or a log-probability below it decides nothing, in bfloat16 at least
_PROMPTS = tuple((first, first + 1, 1) for first in range(1, 9))
_T = 0.5
_BIAS = 100.0
_PROBE_S = 60.0


async def find_logprobs_mode(engine: TokenEngine, expected: LogprobsMode) -> LogprobsMode:
    """``expected`` in what cannot be found so: what a grammar does, and all of a model without a preference. Raises
    EngineError. The engine must not be paused."""
    for prompt in _PROMPTS:
        plain = await _next(engine, prompt, SamplingParams(temperature=1.0))
        ranked = sorted(plain, key=plain.__getitem__, reverse=True)
        first, last = ranked[0], ranked[-1]
        gap = plain[first] - plain[last]
        if gap < _LEAST or plain[first] > -_LEAST:
            continue
        tempered = await _next(engine, prompt, SamplingParams(temperature=_T))
        filtered = await _next(engine, prompt, SamplingParams(top_k=1))
        biased = await _next(engine, prompt, SamplingParams(logit_bias={first: _BIAS}))
        if not {first, last} <= tempered.keys() or first not in filtered or first not in biased:
            raise EngineFailed("the engine's log-probabilities of one prompt do not fit together")
        return LogprobsMode(
            tempered=tempered[first] - tempered[last] > gap * (1 + 1 / _T) / 2,
            before_filters=filtered[first] < plain[first] / 2,
            before_penalties=biased[first] < plain[first] / 2,
            before_grammars=expected.before_grammars,
        )
    return expected


async def logprobs_problem(engine: TokenEngine, expected: LogprobsMode, name: str) -> str | None:
    """Set the engine's ``capabilities.logprobs`` to what ``find_logprobs_mode`` finds. The reason where it fails."""
    try:
        async with asyncio.timeout(_PROBE_S):
            engine.capabilities.logprobs = await find_logprobs_mode(engine, expected)
    except (EngineError, TimeoutError) as error:
        return f"{name}'s log-probabilities could not be checked: {error or 'no answer'}"
    return None


async def _next(engine: TokenEngine, prompt: tuple[int, ...], sampling: SamplingParams) -> Mapping[int, float]:
    """Log-probabilities of the likeliest next tokens: not of the sampled one, which may be none of them."""
    options = sampling.changed() | {"max_new_tokens": 1, "ignore_eos": True, "top_logprobs": _ALTERNATIVES}
    call = EngineCall(f"logprobs-{secrets.token_hex(8)}", (prompt,), SamplingParams(**options))
    reported: dict[int, float] = {}
    async with contextlib.aclosing(engine.generate(call)) as deltas:
        async for delta in deltas:
            for entry in delta.top_logprobs or ():
                reported |= dict(entry)
    if len(reported) < 2:
        raise EngineFailed("the engine gives no log-probabilities of alternatives")
    return reported


FLOAT32_TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 0.15


@dataclass(frozen=True)
class WeightProbe:
    """After ``input_ids``, the next token's log-probabilities by a plain forward pass: ``expected`` by token id, of
    the likeliest ones at least. ``tolerance`` is in nats, for the precision that the engine computes in."""

    input_ids: tuple[int, ...]
    expected: Mapping[int, float]
    tolerance: float = FLOAT32_TOLERANCE

    def __post_init__(self) -> None:
        if not self.input_ids or not self.expected:
            raise ValueError("a probe needs tokens, and log-probabilities to compare with")


def largest_gap(probe: WeightProbe, reported: Mapping[int, float]) -> float:
    """In nats, over the tokens that both sides name; infinite when they name none in common."""
    common = probe.expected.keys() & reported.keys()
    return max((abs(probe.expected[token] - reported[token]) for token in common), default=float("inf"))


async def check_weights(engine: TokenEngine, probe: WeightProbe, *, adapter: str | None = None) -> float:
    """The largest gap in nats. Raises WeightsDiffer when it exceeds the tolerance; the engine must not be paused."""
    wanted = min(len(probe.expected), engine.capabilities.max_top_logprobs)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, top_logprobs=wanted, ignore_eos=True)
    call = EngineCall(f"probe-{secrets.token_hex(8)}", (probe.input_ids,), sampling, adapter=adapter)
    reported: dict[int, float] = {}
    async with contextlib.aclosing(engine.generate(call)) as deltas:
        async for delta in deltas:
            reported |= dict(zip(delta.token_ids, delta.logprobs, strict=True))
            for entry in delta.top_logprobs or ():
                reported |= dict(entry)
    if not reported:
        raise EngineFailed("the engine gave no token to compare its weights by")
    gap = largest_gap(probe, reported)
    if not gap <= probe.tolerance:  # NaN differs
        raise WeightsDiffer(
            f"the engine does not compute with the weights it was given: its log-probabilities are {gap:.3g} nats off "
            f"those of a plain forward pass (tolerance {probe.tolerance:g}); load the weights again, or restart it"
        )
    return gap
