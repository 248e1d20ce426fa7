"""From messages to tokens, for training and for serving: what a model learns is what it is served.

``normalise`` reads messages, ``Template`` renders them, ``Chat`` makes tokens of them: prompts, the ends of turns,
continuations of recorded responses. Pure: no I/O, and any tokenizer fits that encodes and decodes.
"""

from areal.conversation.chat import Branch, Chat
from areal.conversation.messages import Conversation, ConversationError, decoded_arguments, normalise
from areal.conversation.template import RESERVED, Template

__all__ = [
    "RESERVED",
    "Branch",
    "Chat",
    "Conversation",
    "ConversationError",
    "Template",
    "decoded_arguments",
    "normalise",
]
