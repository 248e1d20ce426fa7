"""Which tokens end a text, by what the model folder says: config.json, generation_config.json and the tokenizer.

All that are named count: instruction models often name the end of a turn in one file and the end of text in another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def end_tokens(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids of the end tokens. A file that is absent adds none."""
    found = _ids(config.get("eos_token_id")) | _ids(_read(folder / "generation_config.json").get("eos_token_id"))
    text = _read(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(text, dict):  # an AddedToken, written out
        text = text.get("content")
    for token in _read(folder / "tokenizer.json").get("added_tokens") or []:
        if text is not None and token.get("content") == text:
            found |= _ids(token.get("id"))
    return frozenset(found)


def _ids(value: Any) -> set[int]:
    if isinstance(value, int):
        return {value}
    return {each for each in value if isinstance(each, int)} if isinstance(value, list) else set()


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
