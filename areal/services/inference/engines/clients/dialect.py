"""The APIs that external models have."""

from __future__ import annotations

from enum import StrEnum


class Dialect(StrEnum):
    """What is spoken over there."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
