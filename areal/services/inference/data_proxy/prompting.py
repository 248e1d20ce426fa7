"""From a request to the tokens of its prompts.

A turn that goes on from a recorded one keeps that turn's tokens exactly and encodes only what follows. So what a
model sampled is what it sees again, and a conversation is one row of training data: encoding an answer's text anew
may cut it otherwise than the model did. Where the new text does not begin with the old one (a template that drops
earlier reasoning) the prompt is encoded as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.services.inference.data_proxy.asks import Ask
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.recording.conversation import begins_with
from areal.services.inference.recording.recent import Known


@dataclass(frozen=True)
class Prompts:
    """``text`` is that of a chat's one prompt."""

    ids: list[list[int]]
    text: str | None = None

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


def make_prompts(ask: Ask, codec: TextCodec, known: Known | None) -> Prompts:
    """To be run off the event loop. Raises ApiError 400 when the template refuses the chat."""
    if ask.text is None:
        return Prompts([prompt() for prompt in ask.prompts])
    text = ask.text()
    if known is not None and begins_with(text, known.text):
        more = codec.encode(text[known.text[0] :], add_special_tokens=False)
        return Prompts([[*known.tokens, *more]], text)
    return Prompts([codec.encode(text, add_special_tokens=False)], text)
