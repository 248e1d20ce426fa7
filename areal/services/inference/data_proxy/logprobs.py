"""Log-probabilities in the shapes of the two APIs.

Every sampled token has its entry, the one that ended the answer and those that spell a stop string too: the entries
stay in step with ``completion_tokens``. JSON has no minus infinity; the API writes -9999.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from areal.services.inference.data_proxy.choice import Choice
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import PromptLogprobs

_LEAST = -9999.0


def _entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": codec.token_text(token_id),
        "logprob": max(logprob, _LEAST),
        "bytes": list(codec.bytes_of(token_id)),
    }


def chat_logprobs(codec: TextCodec, choice: Choice, start: int, end: int) -> dict[str, Any]:
    content = []
    for position in range(start, end):
        top = choice.top_logprobs[position] if choice.top_logprobs else ()
        entry = _entry(codec, choice.token_ids[position], choice.logprobs[position])
        content.append({**entry, "top_logprobs": [_entry(codec, token_id, value) for token_id, value in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(codec: TextCodec, choice: Choice, start: int, end: int, offset: int) -> dict[str, Any]:
    """``offset`` is where the first token's text begins in the choice's text."""
    tokens = [codec.token_text(token_id) for token_id in choice.token_ids[start:end]]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {codec.token_text(token_id): max(value, _LEAST) for token_id, value in top}
        for top in choice.top_logprobs[start:end]
    ]
    return {
        "tokens": tokens,
        "token_logprobs": plain_logprobs(choice, start, end),
        "top_logprobs": tops or None,
        "text_offset": offsets,
    }


def prompt_logprobs(codec: TextCodec, prompt: Sequence[int], scores: PromptLogprobs, top: int) -> dict[str, Any]:
    """As ``completion_logprobs``, of an echoed prompt: nothing comes before its first token, which has null."""
    tokens = [codec.token_text(token_id) for token_id in prompt]
    offsets = [0, *accumulate(map(len, tokens[:-1]))]
    tops: list[dict[str, float] | None] = [
        {
            **{codec.token_text(token_id): max(value, _LEAST) for token_id, value in reversed(entry[:top])},
            token: max(value, _LEAST),
        }
        for token, value, entry in zip(tokens[1:], scores.logprobs, scores.top_logprobs, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None, *(max(value, _LEAST) for value in scores.logprobs)],
        "top_logprobs": [None, *tops] if top else [],
        "text_offset": offsets,
    }


def by_token(codec: TextCodec, prompt: Sequence[int], scores: PromptLogprobs) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of a prompt, its own and the likeliest, by token id."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, value, entry in zip(prompt[1:], scores.logprobs, scores.top_logprobs, strict=True):
        every = {token_id: value, **dict(entry)}
        told.append(
            {
                str(each): {"logprob": max(logprob, _LEAST), "decoded_token": codec.token_text(each)}
                for each, logprob in every.items()
            }
        )
    return told


def plain_logprobs(choice: Choice, start: int, end: int) -> list[float]:
    """Of the tokens alone."""
    values = choice.logprobs[start:end]
    return values if not values or min(values) >= _LEAST else [max(value, _LEAST) for value in values]
