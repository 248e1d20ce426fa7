"""Data sets by configuration: local files, GSM8K, or anything that ``datasets`` can load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.lazy import lazy

if TYPE_CHECKING:
    from areal.dataset.files import Rows
    from areal.dataset.loading import get_custom_dataset

__all__ = ["Rows", "get_custom_dataset"]
__getattr__ = lazy(__name__, {"Rows": "areal.dataset.files", "get_custom_dataset": "areal.dataset.loading"})
