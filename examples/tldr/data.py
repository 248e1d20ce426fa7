"""The TL;DR data sets of the Hugging Face hub as conversations: a post is a user's message, its summary the answer."""

from __future__ import annotations

from typing import Any

from areal.dataset import Rows, get_custom_dataset
from areal.dataset.loading import formatted


def posts(split: str | None, dataset_config: Any, tokenizer: Any) -> Rows:
    """Posts with a summary (`trl-lib/tldr`): to fine-tune on, and prompts."""
    return _conversations("trl-lib/tldr", ("completion",), split, dataset_config, tokenizer)


def pairs(split: str | None, dataset_config: Any, tokenizer: Any) -> Rows:
    """Posts with two summaries (`trl-lib/tldr-preference`), of which people preferred one."""
    return _conversations("trl-lib/tldr-preference", ("chosen", "rejected"), split, dataset_config, tokenizer)


def _conversations(path: str, columns: tuple[str, ...], split: str | None, about: Any, tokenizer: Any) -> Rows:
    asked = get_custom_dataset(split, path=path, type="rl")  # a text becomes a user's message
    rows = asked.map(lambda row: {"prompt": row["messages"], **{name: row[name] for name in columns}})
    return formatted(rows, about.type, tokenizer, about.max_length)
