"""An OpenAI-compatible API elsewhere, as an engine: bodies are relayed, nothing is tokenised.

Our model's name is replaced by theirs in the request and theirs by nothing in the answer: bytes go through as they
come. Their key is sent to the configured origin only (no redirects), our callers' keys never are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import orjson

from areal.services.inference.engines.base import EngineState

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class ExternalApi:
    def __init__(self, http: aiohttp.ClientSession, base_url: str, model: str, key: str | None) -> None:
        self._http = http
        self._base_url = base_url
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def post(
        self, path: str, data: Mapping[str, Any], request_id: str, idle_s: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The API's answer to ``data`` asked of our model; ``idle_s`` without a byte ends it."""
        headers = {**self._headers, "Content-Type": "application/json", "x-request-id": request_id}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=idle_s)
        body = orjson.dumps({**data, "model": self._model})
        return self._http.post(
            self._base_url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        )

    async def state(self) -> EngineState:
        """Ready when the API answers at all and takes our key."""
        try:
            async with self._http.get(
                f"{self._base_url}/models", headers=self._headers, timeout=_PROBE_TIMEOUT, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return EngineState(not_ready=f"{self._base_url} does not answer: {error!r}")
        if status in (401, 403):
            return EngineState(not_ready=f"{self._base_url} does not take the key: it answered {status}")
        if status >= 500:
            return EngineState(not_ready=f"{self._base_url} answered {status}")
        return EngineState(not_ready=None)
