"""One form for each kind of number that people read, in the terminal and on the page (``ui/static/numbers.js``);
the bytes of a quantity in a manifest.

| kind | form |
|---|---|
| rewards, losses, rates, shares | four digits: ``0.5``, ``0.0123``, ``1235``; ``1.23e-5`` below 1e-4 and from 1e6 |
| counts | all digits; the page separates thousands |
| measured times | ``640us``, ``12ms``, ``1.25s``, ``45s``, then as ages |
| ages and times left | whole seconds, two units at most: ``45s``, ``3m20s``, ``5h12m``, ``3d4h`` |
| bytes | three digits: ``512B``, ``1.5KiB``, ``12GiB`` |

JSON has the numbers themselves.
"""

from __future__ import annotations

import math
import re
import time

QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
"""A number of bytes in a manifest, such as ``64Gi``."""
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DIGITS = 4
_WHOLE = 1e15  # integers below it are exact, and have all their digits


def number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    size = abs(value)
    if value == int(value) and size < _WHOLE:
        return str(int(value))
    if size >= 1e6 or size < 1e-4:
        digits, power = rounded(value, 3).split("e")
        return f"{digits}e{int(power):+d}"
    return plain(rounded(value, _DIGITS))


def rounded(value: float, digits: int) -> str:
    """Return ``value`` with so many digits, halves away from zero, as ``1.23e+04``."""
    from decimal import ROUND_HALF_UP, Context, Decimal

    return f"{Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(Decimal(value)):.{digits - 1}e}"


def plain(text: str) -> str:
    """Return the number without an exponent and without trailing zeros."""
    return repr(float(text)).removesuffix(".0")


def duration(value: float | None) -> str:
    """Return a measured time."""
    if value is None:
        return "-"
    if value >= 10:
        return age(value)
    short = float(rounded(value, 3)) if value >= 1e-9 else 0.0
    for least, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if short < least:
            return f"{plain(rounded(short * factor, 3))}{unit}"
    return f"{plain(str(short))}s"


def iso(at: float | None) -> str | None:
    """Return seconds since the epoch as RFC 3339 in UTC; None for None and 0."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) if at else None


def age(value: float | None) -> str:
    """Return whole seconds, or two units at most: ``45s``, ``3m20s``, ``5h12m``, ``3d4h``."""
    if value is None:
        return "-"
    left = max(0, int(value))
    if left < 120:
        return f"{left}s"
    big, small, size_, part = next(
        units for units in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)) if left >= units[2]
    )
    count, rest = left // size_, left % size_ // part
    return f"{count}{big}{rest}{small}" if rest and count < 10 else f"{count}{big}"


def size(count: float | None) -> str:
    """Return a number of bytes."""
    if count is None:
        return "-"
    value, units = float(count), ["TiB", "GiB", "MiB", "KiB", "B"]
    while value >= 1023.5 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{plain(rounded(value, 3)) if value < 100 else math.floor(value + 0.5)}{units[-1]}"


def quantity_bytes(quantity: str) -> float:
    """Return the bytes of a ``QUANTITY``. Raises ValueError for another text."""
    match = QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is not a size")
    return float(match[1]) * _FACTORS.get(match[2], 1)
