"""AReaL's import path of imports by name."""

from __future__ import annotations

from typing import Any

from areal.loading import load_attr


def import_from_string(path: str) -> Any:
    """Import ``package.module.name`` or ``package.module:name``. Raises UsageFault."""
    return load_attr(path)


__all__ = ["import_from_string"]
