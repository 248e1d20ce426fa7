"""The one way services call other services: a pooled aiohttp session, no proxies, no cookies, deadlines set.

The pool's idle time is shorter than any server's keep-alive here, so that a pooled connection is not one that the
other side is about to close.
"""

from __future__ import annotations

import aiohttp

CONNECT_TIMEOUT_S = 5.0
POOL_IDLE_S = 30.0


def open_session(*, total_s: float | None = None, read_s: float | None = None) -> aiohttp.ClientSession:
    """A session whose calls end after ``total_s``, or after ``read_s`` without a byte. Give each call one of the two,
    here or at the call."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept-Encoding": "identity"},
    )
