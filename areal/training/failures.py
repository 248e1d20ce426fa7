"""What training raises, by who is to blame."""

from __future__ import annotations

from areal.errors import ArealError


class NonFinite(ArealError):
    """A loss or a gradient that is no number. Raised before the optimizer's step: weights and moments are intact."""
