"""Data sets from local files, the Hugging Face hub, or the package ``datasets``, selected by the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.lazy import lazy

if TYPE_CHECKING:
    from areal.dataset.files import Rows
    from areal.dataset.loading import get_custom_dataset

__all__ = ["Rows", "get_custom_dataset"]
__getattr__ = lazy(__name__, {"Rows": "areal.dataset.files", "get_custom_dataset": "areal.dataset.loading"})
