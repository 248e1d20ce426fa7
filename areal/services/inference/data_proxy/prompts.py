"""The prompt of a chat: the rendered chat template, or a recorded turn's tokens plus what the template adds to them.

A turn that continues a recorded turn keeps that turn's tokens unchanged, so that the model sees the tokens it sampled
and a conversation becomes one row of training data. If the template renders the conversation differently, it is a new
prompt (``areal.conversation``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

from areal.conversation import Branch, Chat, Conversation, ConversationError, normalise
from areal.conversation.template import PROBE
from areal.dataclasses import dataclass
from areal.services.http.errors import bad_field, bad_request
from areal.services.inference.data_proxy.tokenizer import TextCodec, TooLong
from areal.services.inference.recorder.records import PrefixMatch, token_array

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class TemplateRefusals:
    """Converts errors about a conversation or of a chat template to the client's error, 400 naming the field."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConversationError):
            raise bad_field(error.field, error.problem) from error


def read_conversation(messages: object) -> Conversation:
    """Read a request's messages. An answer of reasoning alone has null content: sent back without its reasoning, or
    without its nulls, it is an empty text. Raises 400 naming the message and the part."""
    if isinstance(messages, list):
        messages = [{**each, "content": ""} if _is_empty_answer(each) else each for each in messages]
    with TemplateRefusals():
        conversation = normalise(messages)
    for index, message in enumerate(conversation.messages):
        if message["role"] not in _ROLES:
            where = f"messages[{index}].role"
            raise bad_field(where, f"must be one of {', '.join(_ROLES)}")
    return conversation


def _is_empty_answer(message: object) -> bool:
    if not isinstance(message, dict) or message.get("content") is not None or message.get("role") != "assistant":
        return False
    return not any(value for name, value in message.items() if name not in ("role", "content", "name"))


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of one chat. ``end``: what the service adds to a prompt, given its end. ``is_open``: the response
    continues the last message. ``has_reasoning``: reasoning is separated from the content, so that a client may not
    send it back."""

    codec: TextCodec
    chat: Chat
    conversation: Conversation
    variables: Mapping[str, Any]
    end: Callable[[str], str] | None = None
    add_generation_prompt: bool = True
    is_open: bool = False
    has_reasoning: bool = False

    def text(self) -> str:
        """Render the prompt. Raises ApiError 400 when the template refuses the conversation."""
        with TemplateRefusals():
            begins = self.add_generation_prompt and not self.is_open
            text = self.chat.template.render(self.conversation, begins, **self.variables)
            if self.is_open:
                return self._opened(text)
        return text + self.end(text) if self.end is not None else text

    def _opened(self, prompt: str) -> str:
        """Return the prompt up to the end of the last message's text, which a mark after it shows: the text alone may
        also be in what the template writes after it."""
        *before, last = self.conversation.messages
        content: Any = last["content"]
        if isinstance(content, str):
            content += PROBE
        else:
            content = [*content[:-1], {"type": "text", "text": content[-1]["text"] + PROBE}]
        longer = Conversation((*before, {**last, "content": content}), self.conversation.tools)
        text, mark, _ = self.chat.template.plain(longer, **self.variables).rpartition(PROBE)
        if not prompt.startswith(text):
            text = text.rstrip()  # of a template that drops white space at the end of a text
        if not mark or not prompt.startswith(text):
            raise bad_request("the chat template does not let the last message be continued", param="messages")
        return text

    def token_ids(self, most: int | None) -> array[int]:
        """Return a new prompt's tokens. Raises ApiError 400, and TooLong if there are surely more than ``most``."""
        return token_array(self.codec.encode(self.text(), add_special_tokens=False, most=most))

    def continued(self, recorded: PrefixMatch, most: int | None) -> array[int] | None:
        """Return the tokens of a recorded turn and those to add; None if the template does not continue it. Raises as
        ``token_ids``."""
        if self.is_open or not self.add_generation_prompt or recorded.place >= len(self.conversation.messages):
            return None
        tokens, (count, text) = recorded.tokens, recorded.decoded
        if count < len(tokens):
            text = self.chat.more_text(text, tokens[:count], tokens[count:])
            recorded.decoded = len(tokens), text
        before = self.conversation.head(recorded.place)
        with TemplateRefusals():
            added = self.chat.continuation(
                tokens, before, self.conversation, text=text, reasoning=self.has_reasoning, **self.variables
            )
        if isinstance(added, Branch):
            return None
        if self.end is not None:
            text = self.chat.decode(added)
            if end := self.end(text):
                added = self.chat.encode_after(text + end)
        if most is not None and len(tokens) + len(added) > most:
            raise TooLong
        return tokens + token_array(added)
