"""From a request to the tokens of its prompts.

A turn that goes on from a recorded one keeps that turn's tokens exactly and encodes only what follows. So what a
model sampled is what it sees again, and a conversation is one row of training data: encoding an answer's text anew
may cut it otherwise than the model did.

Where the new text begins with the old one, what follows is the rest of it. Where it does not (the client was not told,
or does not send back, the reasoning; the template writes a call otherwise than the model did), what follows is what
the template adds after the recorded answer. Only where the template itself rewrites what came before, as some drop the
reasoning of earlier turns, is the prompt encoded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.services.inference.data_proxy.asks import Ask
from areal.services.inference.data_proxy.tokenizer import (
    DECODE_US,
    ENCODE_US,
    RENDER_US,
    CodecPool,
    TextCodec,
    TooLong,
)
from areal.services.inference.data_proxy.visits import Visit
from areal.services.inference.recording.conversation import begins_with
from areal.services.inference.recording.recent import Known
from areal.services.web.errors import bad_request


@dataclass(frozen=True)
class Prompts:
    """``text`` is that of a chat's one prompt."""

    ids: Sequence[list[int]]
    text: str | None = None

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


async def make_prompts(
    ask: Ask, codec: TextCodec, pool: CodecPool, visit: Visit | None, size: int, most: int | None
) -> Prompts:
    """``size``: bytes of the request. ``visit`` None: nothing recorded is gone on from. ``most``: tokens that there is
    room for. Raises ApiError 400 when the template refuses the chat, or there are more."""
    try:
        return await _prompts(ask, codec, pool, visit, size, most)
    except TooLong:
        message = f"this model's context is {most} tokens; you asked for more in the prompt"
        raise bad_request(message, param="messages", code="context_length_exceeded") from None


async def count_tokens(ask: Ask, codec: TextCodec, pool: CodecPool, size: int) -> int:
    """Of a chat, however long it is; of a long one a few more than it has, for it is counted in pieces."""
    assert ask.text is not None
    text = await pool.run(ask.text, size * RENDER_US)
    return await pool.run(lambda: codec.count(text), len(text) * ENCODE_US)


async def _prompts(
    ask: Ask, codec: TextCodec, pool: CodecPool, visit: Visit | None, size: int, most: int | None
) -> Prompts:
    if ask.text is None:
        return Prompts(await pool.run(lambda: [prompt(most) for prompt in ask.prompts], size * ENCODE_US))
    text = await pool.run(ask.text, size * RENDER_US)
    known = await visit.known(ask.messages) if visit is not None else None
    if visit is not None and known is not None:
        if begins_with(text, known.text):
            return await _joined(known, text[known.text[0] :], text, codec, pool, most)
        answered = await visit.answered()
        rest = await _after_answer(ask, answered, codec, pool, size) if answered is not None else None
        if answered is not None and rest is not None:
            return await _joined(answered, rest, text, codec, pool, most)
    return Prompts([await _encode(text, codec, pool, most)], text)


async def _joined(known: Known, rest: str, text: str, codec: TextCodec, pool: CodecPool, most: int | None) -> Prompts:
    prompt = known.tokens.tolist()
    prompt += await _encode(rest, codec, pool, most)
    return Prompts([prompt], text)


async def _after_answer(ask: Ask, answered: Known, codec: TextCodec, pool: CodecPool, size: int) -> str | None:
    """What comes after a recorded answer that its end token ended."""
    last = answered.tokens[-1]
    follow = ask.after_answer
    if follow is None or last not in codec.end_ids:
        return None
    end, cost_us = codec.token_text(last), 3 * size * RENDER_US + len(answered.tokens) * DECODE_US
    return await pool.run(lambda: follow(codec.decode(answered.tokens, skip_special=False), end), cost_us)


async def _encode(text: str, codec: TextCodec, pool: CodecPool, most: int | None) -> list[int]:
    return await pool.run(lambda: codec.encode(text, add_special_tokens=False, most=most), len(text) * ENCODE_US)
