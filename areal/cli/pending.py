"""Verbs whose floor is not built yet: their flags are final, their body is one line on stderr and exit status 1."""

from __future__ import annotations

import click

from areal.errors import ArealError


def not_implemented() -> int:
    """Raised, not printed: a script must not take it for success."""
    raise ArealError(f"`{click.get_current_context().command_path}` is not implemented yet")
