"""What an engine says is training data: what cannot be true ends its call, and nothing of it is recorded.

An engine that drops a log-probability, counts choices that nobody asked for or says NaN is broken, or something between
it and us is. Answering with its text, and recording what is left, would poison a trainer in silence.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from areal.services.inference.engines.base import EngineDelta, EngineFailed

_BEYOND = 2**31  # token ids are recorded as 32 bits
_MISREAD = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


async def next_delta(deltas: AsyncIterator[EngineDelta], choices: int) -> EngineDelta | None:
    """The next delta of a call with so many choices; None at the end. Raises EngineFailed for what makes no sense."""
    try:
        delta = await anext(deltas)
        check_delta(delta, choices)
    except StopAsyncIteration:
        return None
    except _MISREAD as error:  # a field that is missing, or is of another kind
        raise EngineFailed(f"the engine's answer makes no sense: {type(error).__name__}: {str(error)[:200]}") from error
    return delta


def check_delta(delta: EngineDelta, choices: int) -> None:
    """Raises EngineFailed for what no engine can have sampled."""
    tokens = delta.token_ids
    if not len(tokens) == len(delta.logprobs) == len(delta.versions):
        counts = f"{len(delta.logprobs)} log-probabilities and {len(delta.versions)} versions"
        raise EngineFailed(f"the engine sent {len(tokens)} tokens with {counts}")
    if not 0 <= delta.index < choices:
        raise EngineFailed(f"the engine answered choice {delta.index} of {choices}")
    if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < _BEYOND):
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token < _BEYOND)
        raise EngineFailed(f"the engine sent the token {wrong!r}")
    if not all(map(math.isfinite, delta.logprobs)):
        bad = next(logprob for logprob in delta.logprobs if not math.isfinite(logprob))
        raise EngineFailed(f"the engine sent the log-probability {bad}")
