"""One HTTP call to an engine, its failures sorted by who can do what about them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import orjson

from areal.services.inference.engines.base import (
    DeltaSink,
    EngineDelta,
    EngineFailed,
    EngineRefused,
    EngineState,
    EngineUnavailable,
    EngineUnsupported,
    OnFlow,
)
from areal.services.inference.engines.clients.deltas import JsonLines
from areal.services.web.client import CallFailed, Connection, HttpClient, NotConnected, Window

WINDOW_S = 0.02  # 50 events a second are a smooth text
_CONTROL_S = 5.0
_COMMAND_S = 120.0
LOAD_S = 1800.0  # weights of any size, from any disk
_NEVER_BEGAN = frozenset({429, 503})
_NO_SUCH_ROUTE = frozenset({404, 405, 501})
_MOST_ERROR_BYTES = 65536
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class EngineHttp:
    """The engine at ``url``. Generations have no wall-clock limit: their caller watches progress."""

    def __init__(self, http: HttpClient, url: str, headers: Mapping[str, str]) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = {**headers, "Content-Type": "application/json"}
        self._window = Window(WINDOW_S)

    def hand_on(self) -> None:
        """Of all generations, what has come by now: nothing of it waits for what comes next."""
        self._window.end()

    def point_to(self, url: str) -> None:
        self._url = url.rstrip("/")

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Connection]:
        """An answer with status 200, its body still to be read. Leaving early closes the connection."""
        try:
            async with self._http.call("POST", self._url, path, self._headers, orjson.dumps(body)) as answer:
                if answer.status != 200:
                    await _raise_for(answer)
                yield answer
        except NotConnected as error:
            raise EngineUnavailable("the engine does not answer") from error
        except CallFailed as error:
            raise EngineFailed("the connection to the engine broke") from error

    async def deltas(self, path: str, body: Mapping[str, Any], reader: JsonLines) -> AsyncGenerator[EngineDelta, None]:
        """A generation's deltas. Raises EngineError."""
        async with self.post(path, body) as answer:
            while part := await answer.part():
                for delta in reader.feed(part):
                    yield delta
            for delta in reader.end():
                yield delta

    async def pour(
        self,
        path: str,
        body: Mapping[str, Any],
        reader: JsonLines,
        sink: DeltaSink,
        flowing: OnFlow,
    ) -> None:
        """``deltas``, each given to ``sink`` inside a callback of the loop: those of a window in one, but for the
        first and the last."""

        def feed(part: bytes) -> None:
            for delta in reader.feed(part):
                sink(delta)

        async with self.post(path, body) as answer:
            flowing(answer)
            await answer.pour(feed, window=self._window)
            for delta in reader.end():
                sink(delta)

    async def control(self, path: str, body: Mapping[str, Any]) -> None:
        """A short call whose failure is nobody's: abort."""
        with contextlib.suppress(CallFailed, TimeoutError):
            await self._http.fetch(
                "POST", self._url, path, timeout_s=_CONTROL_S, headers=self._headers, body=orjson.dumps(body)
            )

    async def command(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        unless: str,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _COMMAND_S,
    ) -> dict[str, Any]:
        """A control that must work: its answer, or an EngineError. ``unless`` says why the route may be missing."""
        where = f"{path}?{urlencode(params)}" if params else path
        data = orjson.dumps(body or {})
        try:
            answer = await self._http.fetch(
                "POST", self._url, where, timeout_s=timeout_s, headers=self._headers, body=data
            )
        except NotConnected as error:
            raise EngineUnavailable("the engine does not answer") from error
        except (CallFailed, TimeoutError) as error:
            raise EngineFailed(f"the engine did not answer to {path}: {error!r}") from error
        if answer.status in _NO_SUCH_ROUTE:
            raise EngineUnsupported(unless)
        if answer.status != 200:
            raise _failure(answer.status, answer.body)
        return answer.object()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON object (empty when the body is none). Status 0: no answer."""
        try:
            answer = await self._http.fetch("GET", self._url, path, timeout_s=_CONTROL_S, headers=self._headers)
        except (CallFailed, TimeoutError):
            return 0, {}
        return answer.status, answer.object()


async def _raise_for(answer: Connection) -> None:
    said = b""
    while len(said) < _MOST_ERROR_BYTES and (part := await answer.part()):
        said += part
    raise _failure(answer.status, said)


def _failure(status: int, body: bytes) -> EngineFailed | EngineRefused | EngineUnavailable:
    text, code = read_error(body)
    if not text and status in _PHRASES:
        text = _PHRASES[status]
    if status in _NEVER_BEGAN:
        return EngineUnavailable(f"the engine takes no requests now: {text}")
    if 400 <= status < 500 and status not in (401, 403, 404, 405):
        return EngineRefused(text, code)
    return EngineFailed(f"the engine answered {status}: {text}")


def key_refused(engine: str, status: int) -> EngineState | None:
    """The state of an engine of that name that answered so to what needs its key; None where it took it."""
    if status not in (401, 403):
        return None
    what = f"{engine} does not take the key, or wants one: it answered {status}"
    return EngineState(not_ready=what, fault=f"{what}; name the one of its --api-key in engineApiKeyFrom")


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
