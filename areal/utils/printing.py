"""AReaL's import path of ``tabulate_stats``."""

from __future__ import annotations

from collections.abc import Mapping


def tabulate_stats(data: Mapping[str, float], *_: object, floatfmt: str = ".4e", **__: object) -> str:
    """Return a table with one aligned line per metric."""
    names, values = list(data), [format(float(value), floatfmt) for value in data.values()]
    left, right = max(map(len, names), default=0), max(map(len, values), default=0)
    return "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in zip(names, values, strict=True))


__all__ = ["tabulate_stats"]
