"""The limits of one connection, and of the request bodies that a process holds for all connections."""

from __future__ import annotations

from areal.dataclasses import dataclass
from areal.services.http.errors import ApiError

_SMALL = 1024 * 1024


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one connection in seconds and bytes; ``bodies_bytes`` is the limit of all connections together.

    A body may take ``body_grace_s``, and longer while its average rate is at least ``body_bytes_per_s``. Up to
    ``buffered_bytes`` are buffered of a body that no handler reads yet.
    """

    keep_alive_s: float = 120.0  # longer than POOL_IDLE_S of our clients
    header_s: float = 15.0
    header_bytes: int = 64 * 1024
    header_count: int = 128
    body_grace_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    buffered_bytes: int = 256 * 1024
    bodies_bytes: int = 512 * 1024 * 1024
    pipelined: int = 64
    linger_s: float = 10.0  # for a caller to stop sending and to read its last answer
    linger_bytes: int = 64 * 1024 * 1024  # the most that the caller may still send
    stalled_s: float = 900.0  # for a caller to read any byte of the answer
    sweep_s: float = 2.0  # between checks of these limits; until then a disconnected caller keeps its buffers


class BodyBudget:
    """The bytes of bodies and messages that a process holds for all callers, from their arrival to the end of their
    request.

    A body of up to 1 MiB may use twice the limit, so that large bodies do not block usual ones. A body is always
    accepted if there is no other.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    def take(self, count: int, size: int) -> None:
        """Count ``count`` more bytes of a body that has ``size`` bytes so far. Raises 503 beyond the limit."""
        of_others = self.held + count - size
        if of_others > 0 and self.held + count > (self._most if size > _SMALL else 2 * self._most):
            message = f"the request bodies of all callers have {self._most} bytes, which is the limit"
            raise ApiError(503, message, code="too_many_bytes", headers={"Retry-After": "1"})
        self.held += count

    def give(self, count: int) -> None:
        self.held -= count
