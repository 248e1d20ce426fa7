"""The command line's fixture, for conversions of files."""

from __future__ import annotations

from tests.cli.conftest import areal

__all__ = ["areal"]
