"""A small JSON client for the admin routes of routers, gateways and data proxies.

``http.client`` and nothing else: no proxy variables, no redirects, one connection a call, one deadline a call.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

from areal.client.connection import open_connection


@dataclass
class AdminClient:
    """``timeout_s`` bounds each call. Raises OSError (ConnectionRefusedError, TimeoutError, ...) without an answer."""

    base_url: str
    admin_key: str | None = field(default=None, repr=False)
    timeout_s: float = 5.0

    def get(self, path: str) -> tuple[int, Any]:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.call("POST", path, {} if body is None else body)

    def delete(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.call("DELETE", path, body)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, decoded JSON, or the text where the answer is not JSON)."""
        connection, prefix = open_connection(self.base_url, self.timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, prefix + path, data, self._headers(data))
            answer = connection.getresponse()
            raw = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        return answer.status, _decoded(raw)

    def _headers(self, data: bytes | None) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self.admin_key:
            headers["Authorization"] = f"Bearer {self.admin_key}"
        return headers


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")
