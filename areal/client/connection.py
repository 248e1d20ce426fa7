"""One ``http.client`` connection to a base URL: http or https, no proxy variables. Standard library only."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit


def open_connection(base_url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """An unopened connection, and what comes before every path. ``timeout_s`` bounds the connect and each read."""
    parts = urlsplit(base_url)
    host, prefix = parts.hostname or "127.0.0.1", parts.path.rstrip("/")
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s), prefix
    return http.client.HTTPConnection(host, parts.port, timeout=timeout_s), prefix
