"""Ids that are unique, not secret: a generator seeded once costs a hundredth of a system call an id."""

from __future__ import annotations

import random
import secrets

_numbers = random.Random(secrets.randbits(128))


def unique_id(prefix: str) -> str:
    """``prefix`` and 96 random bits. Never a capability: those come from ``secrets``."""
    return f"{prefix}{_numbers.getrandbits(96):024x}"
