"""What one caller may take of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Seconds and bytes that one connection may take.

    A body may take ``body_grace_s``, and longer as long as it has come at ``body_bytes_per_s``. ``buffered_bytes`` are
    taken of a body that nobody reads yet.
    """

    keep_alive_s: float = 120.0  # longer than POOL_IDLE_S of our clients
    header_s: float = 15.0
    header_bytes: int = 64 * 1024
    header_count: int = 128
    body_grace_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    buffered_bytes: int = 256 * 1024
    pipelined: int = 64
    linger_s: float = 10.0  # for a caller to stop sending what is refused, and to take its last answer
    stalled_s: float = 900.0  # for a caller to take anything at all of an answer that waits
    sweep_s: float = 2.0
