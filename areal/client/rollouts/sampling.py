"""From generation parameters to the fields of a completion call. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from areal.api.config.generation import NO_TOP_K
from areal.client.errors import CallerError

if TYPE_CHECKING:
    from areal.api.config.generation import GenerationHyperparameters

_SEED_BITS = 0x7FFFFFFF


def answer_budget(gconfig: GenerationHyperparameters, prompt_len: int, context: int | None = None) -> int:
    """How many tokens the answer may have; ``context``: how many the model has room for, where that is known. Raises
    CallerError where the prompt leaves no room."""
    longest = min(gconfig.max_tokens, context or gconfig.max_tokens)
    budget = min(gconfig.max_new_tokens, longest - prompt_len)
    if budget < 1:
        message = f"a prompt of {prompt_len} tokens leaves no room for an answer in {longest}"
        raise CallerError(message, code="context_length_exceeded", param="max_tokens")
    return budget


def sampling_fields(gconfig: GenerationHyperparameters, seed: int | None) -> dict[str, Any]:
    """Only what differs from the service's own defaults; the budget apart."""
    fields: dict[str, Any] = {"temperature": 0.0 if gconfig.greedy else gconfig.temperature}
    optional = {
        "top_p": (gconfig.top_p, 1.0),
        "min_p": (gconfig.min_p, 0.0),
        "top_k": (gconfig.top_k if 0 < gconfig.top_k < NO_TOP_K else 0, 0),
        "min_tokens": (gconfig.min_new_tokens, 0),
        "frequency_penalty": (gconfig.frequency_penalty, 0.0),
        "presence_penalty": (gconfig.presence_penalty, 0.0),
        "repetition_penalty": (gconfig.repetition_penalty, 1.0),
        "ignore_eos": (gconfig.ignore_eos, False),
        "skip_special_tokens": (gconfig.skip_special_tokens, True),
        "stop": (gconfig.stop or None, None),
        "stop_token_ids": (gconfig.stop_token_ids or None, None),
        "seed": (seed, None),
    }
    return fields | {name: value for name, (value, default) in optional.items() if value != default}


def derived_seed(*parts: object) -> int:
    """A seed of 31 bits from what names a sample, so that each has its own and all runs have the same."""
    return int.from_bytes(sha256(":".join(map(str, parts)).encode()).digest()[:4], "big") & _SEED_BITS
