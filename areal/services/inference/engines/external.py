"""An external HTTP API, OpenAI-compatible or Anthropic's, as an engine. Bodies are relayed and nothing is tokenized.

The request gets the provider's model name; the bytes of the answer are not changed. The provider's key is sent only to
the configured origin, and callers' keys are never sent. A redirect is an error, because its target, which is not
configured, would get the body and the key.

The API's host is resolved for each new connection. Every returned address is checked, and the connection goes to one of
them without another resolution. There are no proxies and no cookies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver, ResolveResult

from areal.http import tracing
from areal.resources.addresses import ExternalUrl
from areal.services.inference.engines.base import Dialect, EngineState

_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_CONNECT_S = 10.0
_REFUSALS = 3  # one may be of its own content
_REFUSAL_S = 600.0
ANTHROPIC_VERSION = "2023-06-01"


class Redirected(aiohttp.ClientError):
    """The API answered with a redirect."""


def connection_error(error: Exception) -> str:
    """Return the reason why there is no connection, as the operating system describes it."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionError) and cause.errno is not None:
        return os.strerror(cause.errno)
    return getattr(cause, "strerror", None) or str(cause) or type(error).__name__


class ExternalApi:
    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: ExternalUrl,
        model: str,
        key: str | None,
        dialect: Dialect = Dialect.OPENAI,
    ) -> None:
        self._http = http
        self._base_url = url.text
        self._model = model
        if dialect is Dialect.OPENAI:
            self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        else:
            self._headers = {"anthropic-version": ANTHROPIC_VERSION} | ({"x-api-key": key} if key else {})
        self._has_key = key is not None
        self._refused: list[float] = []  # when calls were, since the last that was not

    @property
    def refusal(self) -> str | None:
        """Return why callers are refused although the API answers its probe, which may need no key, or None."""
        if len(self._refused) < _REFUSALS or time.monotonic() - self._refused[-1] > _REFUSAL_S:
            return None
        return f"{self._base_url} refused the key or the account of the last {len(self._refused)} calls"

    @contextlib.asynccontextmanager
    async def post(
        self,
        path: str,
        data: Mapping[str, object],
        request_id: str,
        idle_s: float,
        more_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the API's response to ``data`` for the provider's model. Times out after ``idle_s`` without a byte."""
        headers = {**self._headers, **(more_headers or {}), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=idle_s)
        about = {"gen_ai.request.model": self._model, "server.address": self._base_url, "url.path": path}
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(tracing.span(f"call {self._model}", about, "client"))
            response = await stack.enter_async_context(
                self._http.post(
                    self._base_url + path,
                    data=orjson.dumps({**data, "model": self._model}),
                    headers={**headers, "x-request-id": request_id, **tracing.headers()},
                    timeout=timeout,
                    allow_redirects=False,
                )
            )
            if 300 <= response.status < 400:
                target = response.headers.get("Location", "").partition("?")[0][:200]  # a query may hold a secret
                raise Redirected(f"it redirects to {target or 'nowhere'}; name that URL itself")
            refused = response.status in (401, 402, 403)
            self._refused = [*self._refused[-99:], time.monotonic()] if refused else []
            yield response

    async def state(self) -> EngineState:
        """Return the state: ready if the API answers and accepts the key."""
        try:
            async with self._http.get(
                f"{self._base_url}/models", headers=self._headers, timeout=_PROBE_TIMEOUT, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = (
                f"nothing came for {_PROBE_TIMEOUT.total:g} s"
                if isinstance(error, TimeoutError)
                else connection_error(error)
            )
            return self._fault(f"does not answer: {why}", "check external.url, and that its server runs")
        if status in (401, 403) and not self._has_key:
            return self._fault(
                f"wants a key, and none is given: it answered {status}", "name it in external.apiKeyFrom"
            )
        if status in (401, 403):
            return self._fault(
                f"does not take the key: it answered {status}", "give the right one and restart the model"
            )
        if 300 <= status < 400:
            return self._fault(f"redirects (it answered {status})", "name the URL that it redirects to in external.url")
        if status >= 500:
            return self._fault(f"answered {status}", "see to that server")
        return EngineState(not_ready=None)

    def _fault(self, what: str, advice: str) -> EngineState:
        return EngineState(not_ready=f"{self._base_url} {what}", advice=advice)


_IDLE_S = 30.0


class CheckedResolver(AbstractResolver):
    """Resolves the host of ``url`` only, to checked addresses."""

    def __init__(self, url: ExternalUrl, *, allow_private: bool) -> None:
        self._url = url
        self._allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raise OSError with the reason where an address is not allowed."""
        if host != self._url.host:
            raise OSError(None, f"{host} is not the host of {self._url.text}")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results = []
        for kind, _, protocol, _, where in found:
            address = ipaddress.ip_address(where[0])
            if (why := self._url.refusal(address, allow_private=self._allow_private)) is not None:
                raise OSError(None, f"{host} {why}")
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        return None


def open_checked_session(url: ExternalUrl, *, allow_private: bool) -> aiohttp.ClientSession:
    resolver = CheckedResolver(url, allow_private=allow_private)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=0, keepalive_timeout=_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept-Encoding": "identity"},
    )
