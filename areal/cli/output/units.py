"""Numbers as people read them. Only tables use these: JSON keeps the numbers."""

from __future__ import annotations


def age(seconds: float | None) -> str:
    """``45s``, ``3m20s``, ``5h12m``, ``3d4h``: two units at most."""
    if seconds is None:
        return "-"
    left = max(0, int(seconds))
    if left < 120:
        return f"{left}s"
    for big, small, size, part in (("m", "s", 60, 1), ("h", "m", 3600, 60), ("d", "h", 86400, 3600)):
        if left < {"m": 3600, "h": 86400}.get(big, float("inf")):
            rest = left % size // part
            return f"{left // size}{big}{rest}{small}" if rest and left // size < 10 else f"{left // size}{big}"
    raise AssertionError("unreachable")


def size(count: float | None) -> str:
    """Bytes: ``512B``, ``1.5KiB``, ``12GiB``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.3g}{unit}"
        value /= 1024
    raise AssertionError("unreachable")


def clock(at: float | None) -> str:
    """Local time, with the date when it is not today's."""
    if at is None:
        return "-"
    import time

    moment = time.localtime(at)
    same_day = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", moment)


def iso(at: float | None) -> str | None:
    """UTC, RFC 3339, for JSON and manifests."""
    if at is None:
        return None
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
