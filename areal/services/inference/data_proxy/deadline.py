"""The deadline on progress of one request."""

from __future__ import annotations

from areal.services.web import headers as names
from areal.services.web.server import Request

_LONGEST_S = 1e7


def idle_s(request: Request, default: float) -> float:
    """Seconds without progress that are too many: what the relay says, which follows the hot limits, else ours."""
    try:
        given = float(request.headers.get(names.PROGRESS_TIMEOUT, ""))
    except ValueError:
        return default
    return given if 0 < given < _LONGEST_S else default
