"""Ask a component over HTTP, with one deadline for the whole exchange and never through a proxy."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_MAX_BODY = 1 << 20
_BLOCK = 1 << 16


class Unreachable(Exception):
    """No complete answer: refused, cut off, not HTTP, or too late."""


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes  # at most 1 MiB of it


def http_get(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> Response:
    """GET ``url``. A peer that sends a byte now and then cannot hold us: the deadline is for all of it."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise Unreachable(f"{url}: not an http:// URL")
    deadline = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", path, headers={"Connection": "close", **(headers or {})})
        sock = connection.sock
        response = connection.getresponse()
        body = b""
        while len(body) < _MAX_BODY:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if response.isclosed():
                break
            sock.settimeout(remaining)
            block = response.read1(_BLOCK)
            if not block:
                break
            body += block
        if response.length and len(body) < _MAX_BODY:
            raise Unreachable(f"{url}: the answer was cut off")
    except TimeoutError:
        raise Unreachable(f"{url}: no answer within {timeout_s:g} s")
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}")
    finally:
        connection.close()
    return Response(response.status, body)


def http_json_pid(response: Response) -> int | None:
    """The ``pid`` that areal's components name in their answers; None from anything else."""
    import json

    try:
        record = json.loads(response.body)
    except ValueError:
        return None
    pid = record.get("pid") if isinstance(record, dict) else None
    return pid if isinstance(pid, int) else None
