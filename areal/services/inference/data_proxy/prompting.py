"""From a request to the tokens of its prompts.

A turn that goes on from a recorded one keeps that turn's tokens exactly and encodes only what follows. So what a
model sampled is what it sees again, and a conversation is one row of training data: encoding an answer's text anew
may cut it otherwise than the model did. Where the new text does not begin with the old one (a template that drops
earlier reasoning) the prompt is encoded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.services.inference.data_proxy.asks import Ask
from areal.services.inference.data_proxy.tokenizer import ENCODE_US, RENDER_US, CodecPool, TextCodec
from areal.services.inference.recording.conversation import begins_with
from areal.services.inference.recording.recent import Known


@dataclass(frozen=True)
class Prompts:
    """``text`` is that of a chat's one prompt."""

    ids: Sequence[list[int]]
    text: str | None = None

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


async def make_prompts(ask: Ask, codec: TextCodec, pool: CodecPool, known: Known | None, size: int) -> Prompts:
    """``size``: bytes of the request. Raises ApiError 400 when the template refuses the chat."""
    if ask.text is None:
        return Prompts(await pool.run(lambda: [prompt() for prompt in ask.prompts], size * ENCODE_US))
    text = await pool.run(ask.text, size * RENDER_US)
    if known is None or not begins_with(text, known.text):
        return Prompts([await _encode(text, codec, pool)], text)
    prompt = known.tokens.tolist()
    prompt += await _encode(text[known.text[0] :], codec, pool)
    return Prompts([prompt], text)


async def _encode(text: str, codec: TextCodec, pool: CodecPool) -> list[int]:
    return await pool.run(lambda: codec.encode(text, add_special_tokens=False), len(text) * ENCODE_US)
