"""Tokenizers of model folders, by ``transformers``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from areal.errors import NotFound


@lru_cache(maxsize=8)
def load_hf_tokenizer(model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None) -> Any:
    """With a padding token: its end token, where it has none of its own. Raises NotFound."""
    from transformers import AutoTokenizer

    _check(model_name_or_path)
    more = {"padding_side": padding_side} if padding_side is not None else {}
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, use_fast=fast_tokenizer, **more)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def load_hf_processor_and_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> tuple[Any | None, Any]:
    """The processor is None for a model of text only."""
    from transformers import AutoProcessor

    tokenizer = load_hf_tokenizer(model_name_or_path, fast_tokenizer, padding_side)
    try:
        processor = AutoProcessor.from_pretrained(model_name_or_path)  # type: ignore[no-untyped-call]
    except (ValueError, OSError):  # transformers says so where there is none
        return None, tokenizer
    return (processor if hasattr(processor, "image_processor") else None), tokenizer


def _check(path: str) -> None:
    """A folder that is not there must not be taken for a name on the hub."""
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        raise NotFound(f"there is no model folder {path}")
