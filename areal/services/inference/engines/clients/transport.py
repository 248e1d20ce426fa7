"""One HTTP call to an engine, its failures sorted by who can do what about them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

from areal.services.inference.engines.base import EngineFailed, EngineRefused, EngineUnavailable, EngineUnsupported

_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_COMMAND_TIMEOUT = aiohttp.ClientTimeout(total=120.0)
LOAD_TIMEOUT = aiohttp.ClientTimeout(total=1800.0)  # weights of any size, from any disk
_NEVER_BEGAN = frozenset({429, 503})
_NO_SUCH_ROUTE = frozenset({404, 405, 501})


class EngineHttp:
    """The engine at ``url``. Generations have no wall-clock limit: their caller watches progress."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = dict(headers)

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200, its body still to be read. Leaving early closes the connection."""
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._http.post(self._url + path, data=orjson.dumps(body), headers=headers) as response:
                if response.status != 200:
                    await _raise_for(response)
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnavailable("the engine does not answer") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed("the connection to the engine broke") from error

    async def control(self, path: str, body: Mapping[str, Any]) -> None:
        """A short call whose failure is nobody's: abort."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._http.post(
                self._url + path, json=body, headers=self._headers, timeout=_CONTROL_TIMEOUT
            ) as response:
                await response.read()

    async def command(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        unless: str,
        params: Mapping[str, str] | None = None,
        timeout: aiohttp.ClientTimeout = _COMMAND_TIMEOUT,
    ) -> dict[str, Any]:
        """A control that must work: its answer, or an EngineError. ``unless`` says why the route may be missing."""
        try:
            async with self._http.post(
                self._url + path, json=body or {}, params=params, headers=self._headers, timeout=timeout
            ) as response:
                if response.status in _NO_SUCH_ROUTE:
                    raise EngineUnsupported(unless)
                if response.status != 200:
                    await _raise_for(response)
                data = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineUnavailable("the engine does not answer") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"the engine did not answer to {path}: {error!r}") from error
        return _object(data)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON object (empty when the body is none). Status 0: no answer."""
        try:
            async with self._http.get(self._url + path, headers=self._headers, timeout=_CONTROL_TIMEOUT) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0, {}
        return status, _object(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    text, code = read_error(await response.content.read(65536))
    text = text or response.reason or ""
    if response.status in _NEVER_BEGAN:
        raise EngineUnavailable(f"the engine takes no requests now: {text}")
    if 400 <= response.status < 500 and response.status not in (401, 403, 404, 405):
        raise EngineRefused(text, code)
    raise EngineFailed(f"the engine answered {response.status}: {text}")


def read_error(body: bytes) -> tuple[str, str | None]:
    """Message and code of an error body, whichever of the usual shapes it has."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")[:500], None
    inner = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(inner, dict):
        return str(inner)[:500], None
    code = inner.get("code")
    return str(inner.get("message", inner.get("detail", "")))[:500], code if isinstance(code, str) else None
