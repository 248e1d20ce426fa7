"""AReaL's import path of the tokenizer loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.dataset.tokenizers import load_hf_processor_and_tokenizer, load_hf_tokenizer, templated

__all__ = ["apply_chat_template", "load_hf_processor_and_tokenizer", "load_hf_tokenizer"]


def apply_chat_template(
    tokenizer: Any, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **how: Any
) -> list[int] | str:
    """The conversation's token ids as a plain list, or its text, in every release of transformers: some releases of
    ``tokenizer.apply_chat_template`` wrap the ids. Raises UsageFault if the tokenizer has no template."""
    for name in ("return_dict", "return_tensors"):  # ignored: the result is always a plain list
        how.pop(name, None)
    if tokenize:
        return templated(tokenizer, conversation, **how)
    return tokenizer.apply_chat_template(list(conversation), tokenize=False, **how)
