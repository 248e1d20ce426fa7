"""JSON in bytes, by orjson where it is installed: the command line's own installation has only the standard library."""

from __future__ import annotations

try:
    from orjson import dumps, loads
except ImportError:
    import json
    from typing import Any

    from areal.files import parse_json as loads  # type: ignore[assignment]

    def dumps(value: Any, /) -> bytes:  # type: ignore[misc]
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


__all__ = ["dumps", "loads"]
