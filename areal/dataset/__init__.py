"""Data sets by configuration: local files, GSM8K, or anything that ``datasets`` can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.dataset.files import Rows
    from areal.dataset.loading import get_custom_dataset

__all__ = ["Rows", "get_custom_dataset"]
_HOMES = {"get_custom_dataset": "loading", "Rows": "files"}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
