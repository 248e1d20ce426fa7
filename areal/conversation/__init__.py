"""Conversion of messages to tokens. Training and serving use the same code: a model is trained on what it is served.

``normalise`` reads messages, ``Template`` renders them as text, ``Chat`` encodes the text: prompts, ends of turns,
continuations of recorded responses. ``learning.trained_tokens`` selects the tokens of a row that are trained. The
package does no I/O, and works with any tokenizer that can encode and decode.
"""

from areal.conversation.chat import Branch, Chat, in_common
from areal.conversation.messages import (
    Conversation,
    ConversationError,
    decoded_arguments,
    field_as_given,
    normalise,
    read_tools,
)
from areal.conversation.template import RESERVED, Template

__all__ = [
    "RESERVED",
    "Branch",
    "Chat",
    "Conversation",
    "ConversationError",
    "Template",
    "decoded_arguments",
    "field_as_given",
    "in_common",
    "normalise",
    "read_tools",
]
