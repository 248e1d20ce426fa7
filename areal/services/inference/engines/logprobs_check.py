"""Which distribution an engine's log-probabilities are of, found by what it answers: flags and environment variables of
engines change it (vLLM's ``--logprobs-mode``, SGLang's ``SGLANG_RETURN_ORIGINAL_LOGPROB``), and no route tells.

One token each after a short prompt. Between two tokens, softmax(logits / T) has log-probabilities 1 / T times as far
apart as softmax(logits). Under top-k 1, or a bias that leaves one token only, a log-probability of what is left is 0.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping

from areal.services.inference.engines.base import EngineCall, EngineFailed, LogprobsMode, Sampling, TokenEngine

_ALTERNATIVES = 5
_LEAST = 0.1  # nats: a gap or a log-probability below it decides nothing, in bfloat16 at least
_PROMPTS = tuple((first, first + 1, 1) for first in range(1, 9))
_T = 0.5
_BIAS = 100.0


async def find_logprobs_mode(engine: TokenEngine, expected: LogprobsMode) -> LogprobsMode:
    """``expected`` in what cannot be found so: what a grammar does, and all of a model without a preference. Raises
    EngineError. The engine must not be paused."""
    for prompt in _PROMPTS:
        plain = await _next(engine, prompt, Sampling(temperature=1.0))
        ranked = sorted(plain, key=plain.__getitem__, reverse=True)
        first, last = ranked[0], ranked[-1]
        gap = plain[first] - plain[last]
        if gap < _LEAST or plain[first] > -_LEAST:
            continue
        tempered = await _next(engine, prompt, Sampling(temperature=_T))
        filtered = await _next(engine, prompt, Sampling(top_k=1))
        biased = await _next(engine, prompt, Sampling(logit_bias={first: _BIAS}))
        if not {first, last} <= tempered.keys() or first not in filtered or first not in biased:
            raise EngineFailed("the engine's log-probabilities of one prompt do not fit together")
        return LogprobsMode(
            tempered=tempered[first] - tempered[last] > gap * (1 + 1 / _T) / 2,
            before_filters=filtered[first] < plain[first] / 2,
            before_penalties=biased[first] < plain[first] / 2,
            before_grammars=expected.before_grammars,
        )
    return expected


async def _next(engine: TokenEngine, prompt: tuple[int, ...], sampling: Sampling) -> Mapping[int, float]:
    """Log-probabilities of the likeliest next tokens: not of the sampled one, which may be none of them."""
    options = sampling.changed() | {"max_new_tokens": 1, "ignore_eos": True, "top_logprobs": _ALTERNATIVES}
    call = EngineCall(f"logprobs-{secrets.token_hex(8)}", (prompt,), Sampling(**options))
    told: dict[int, float] = {}
    async with contextlib.aclosing(engine.generate(call)) as deltas:
        async for delta in deltas:
            for entry in delta.top_logprobs or ():
                told |= dict(entry)
    if len(told) < 2:
        raise EngineFailed("the engine gives no log-probabilities of alternatives")
    return told
