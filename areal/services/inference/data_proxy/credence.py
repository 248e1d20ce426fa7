"""What an engine says is training data: what cannot be true ends its call, and nothing of it is recorded.

An engine that drops a log-probability, counts choices that nobody asked for or says NaN is broken, or something between
it and us is. Answering with its text, and recording what is left, would poison a trainer in silence.
"""

from __future__ import annotations

import math

from areal.services.inference.engines.base import EngineDelta, EngineFailed
from areal.services.inference.engines.clients.deltas import MISREAD, makes_no_sense

_BEYOND = 2**31  # token ids are recorded as 32 bits


def check_delta(delta: EngineDelta, choices: int) -> None:
    """Raises EngineFailed for what no engine can have sampled in a call with so many choices."""
    try:
        if not (len(delta.token_ids) == 1 and _is_sound_step(delta, choices)):
            _check(delta, choices)
    except MISREAD as error:
        raise makes_no_sense(error) from error


def _is_sound_step(delta: EngineDelta, choices: int) -> bool:
    """``_check`` for the one token of most deltas; it says what is wrong with any other."""
    token, logprobs = delta.token_ids[0], delta.logprobs
    return (
        len(logprobs) == 1 == len(delta.versions)
        and 0 <= delta.index < choices
        and type(token) is int
        and 0 <= token < _BEYOND
        and math.isfinite(logprobs[0])
    )


def _check(delta: EngineDelta, choices: int) -> None:
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
