"""From messages to tokens, for training and for serving: what a model learns is what it is served.

``normalise`` reads messages, ``Template`` renders them, ``Chat`` makes tokens of them: prompts, the ends of turns,
continuations of recorded responses. ``trained_tokens`` says which of them are learned. Pure: no I/O, and any tokenizer
fits that encodes and decodes.
"""

from areal.conversation.chat import Branch, Chat, in_common
from areal.conversation.learning import TRAIN_ON, TrainedTokens, TrainOn, trained_tokens
from areal.conversation.messages import Conversation, ConversationError, decoded_arguments, normalise, read_tools
from areal.conversation.template import RESERVED, Template

__all__ = [
    "RESERVED",
    "TRAIN_ON",
    "Branch",
    "Chat",
    "Conversation",
    "ConversationError",
    "Template",
    "TrainOn",
    "TrainedTokens",
    "decoded_arguments",
    "in_common",
    "normalise",
    "read_tools",
    "trained_tokens",
]
