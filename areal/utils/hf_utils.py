"""AReaL's import path of the tokenizer loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.conversation import normalise
from areal.dataset.tokenizers import chat_of, load_hf_processor_and_tokenizer, load_hf_tokenizer

__all__ = ["apply_chat_template", "load_hf_processor_and_tokenizer", "load_hf_tokenizer"]


def apply_chat_template(
    tokenizer: Any, conversation: Sequence[Mapping[str, object]], *, tokenize: bool = True, **how: Any
) -> list[int] | str:
    """Return the conversation's token ids as a plain list, or its text, in every release of transformers: some releases
    of ``tokenizer.apply_chat_template`` wrap the ids. Raises UsageFault if the tokenizer has no template, and
    ConversationError."""
    for name in ("return_dict", "return_tensors"):  # ignored: the result is always a plain list
        how.pop(name, None)
    given = normalise(conversation, how.pop("tools", None))
    chat = chat_of(tokenizer, bool(given.tools))
    text = chat.template.render(given, how.pop("add_generation_prompt", False), **how)
    return list(chat.encode(text)) if tokenize else text
