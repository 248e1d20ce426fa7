"""Whether an engine computes with the weights that it was given: by what it samples from, never by a status code.

Engines have answered 200 to an update and gone on with a stale copy of a tied head. So whoever has the weights makes a
plain forward pass over a few tokens, and the engine must give the next token the same log-probabilities.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from areal.services.inference.engines.base import EngineCall, EngineFailed, Sampling, TokenEngine, WeightsDiffer

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


def largest_gap(probe: WeightProbe, told: Mapping[int, float]) -> float:
    """In nats, over the tokens that both sides name; infinite when they name none in common."""
    common = probe.expected.keys() & told.keys()
    return max((abs(probe.expected[token] - told[token]) for token in common), default=float("inf"))


async def check_weights(engine: TokenEngine, probe: WeightProbe, *, adapter: str | None = None) -> float:
    """The largest gap in nats. Raises WeightsDiffer when it exceeds the tolerance; the engine must not be paused."""
    wanted = min(len(probe.expected), engine.capabilities.max_top_logprobs)
    sampling = Sampling(max_new_tokens=1, temperature=0.0, top_logprobs=wanted, ignore_eos=True)
    call = EngineCall(f"probe-{secrets.token_hex(8)}", (probe.input_ids,), sampling, adapter=adapter)
    told: dict[int, float] = {}
    async with contextlib.aclosing(engine.generate(call)) as deltas:
        async for delta in deltas:
            told |= dict(zip(delta.token_ids, delta.logprobs, strict=True))
            for entry in delta.top_logprobs or ():
                told |= dict(entry)
    if not told:
        raise EngineFailed("the engine gave no token to compare its weights by")
    gap = largest_gap(probe, told)
    if not gap <= probe.tolerance:  # NaN differs
        raise WeightsDiffer(
            f"the engine does not compute with the weights it was given: its log-probabilities are {gap:.3g} nats off "
            f"those of a plain forward pass (tolerance {probe.tolerance:g}); load the weights again, or restart it"
        )
    return gap
