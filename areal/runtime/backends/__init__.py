"""Where processes live: one contract (``base``), one module a place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from areal.errors import UsageFault
from areal.runtime.backends.base import Backend


def open_backend(
    type: str, home_root: Path, *, lease_dir: Path | None = None, crash: Callable[[str], None] = lambda name: None
) -> Backend:
    """The backend of a ``scheduler.type``; ``crash`` is called at each named point (see ``local``)."""
    if type == "local":
        from areal.runtime.backends.local import LocalBackend

        return LocalBackend(home_root, lease_dir, crash)
    raise UsageFault(f"scheduler type {type!r} is not available in this version; use local")
