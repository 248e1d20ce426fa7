"""The model routes of a data proxy before an external API: relayed, with our request ids, errors and deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from areal.services.inference.data_proxy.deadline import idle_s
from areal.services.inference.data_proxy.dialects.anthropic_writer import AnthropicWriter
from areal.services.inference.data_proxy.dialects.external import answer_again, answer_with, chat_body
from areal.services.inference.data_proxy.dialects.writer import Translated, Uses, Writer, named
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.hearing import CHAT_PATH, Heard, NotHeard, hearing, say_again
from areal.services.inference.data_proxy.hearing_messages import hearing_messages
from areal.services.inference.data_proxy.transcript import recorded_completion
from areal.services.inference.data_proxy.visits import Visits
from areal.services.inference.engines.clients.external import ExternalApi, Redirected
from areal.services.web import headers as names
from areal.services.web.body import decode_object, read_body
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import AnyResponse, Request, Response, StreamResponse
from areal.services.web.service import Handler
from areal.services.web.streaming import EventCutter

_FINAL = {names.FINAL: "1"}
_PASSED_HEADERS = ("Content-Type", "Retry-After")


@dataclass
class _Call:
    request: Request
    started: float
    waited: float = 0.0

    def overhead(self) -> str:
        return str(int((time.perf_counter() - self.started - self.waited) * 1e6))


class ExternalCalls:
    """``idle_s``: seconds without a byte that are too many, where the relay does not say."""

    def __init__(self, model: str, api: ExternalApi, visits: Visits, *, max_body_bytes: int, idle_s: float) -> None:
        self._model = model
        self._api = api
        self._visits = visits
        self._max_body_bytes = max_body_bytes
        self._idle_s = idle_s

    def relay_to(self, path: str, *, keeps: bool = True) -> Handler:
        """The handler that relays to ``path`` under the API's base URL. ``keeps``: a session's call is recorded."""

        async def handle(request: Request) -> AnyResponse:
            return await (self._relay(request, path) if keeps else self._relay_unheard(request, path))

        return handle

    async def _relay(self, request: Request, path: str) -> AnyResponse:
        caller = self._visits.caller(request.headers)
        body = await read_body(request, self._max_body_bytes)
        call = _Call(request, time.perf_counter())
        data = decode_object(body)
        self._check_model(data.get("model"))
        timeout = idle_s(request, self._idle_s)
        async with self._visits.enter(caller, request.headers, body) as visit:
            if visit.replayed is not None:
                return await say_again(request, visit.replayed, stream=data.get("stream") is True)
            heard = hearing(visit, self._model, path, data)
            with api_failures():
                async with self._api.post(path, data, request.id, timeout) as upstream:
                    return await _pass_on(call, upstream, heard)

    async def _relay_unheard(self, request: Request, path: str) -> AnyResponse:
        self._visits.caller(request.headers)
        body = await read_body(request, self._max_body_bytes)
        call, data = _Call(request, time.perf_counter()), decode_object(body)
        self._check_model(data.get("model"))
        timeout, theirs = idle_s(request, self._idle_s), _anthropics_own(request)
        with api_failures():
            async with self._api.post(path, data, request.id, timeout, theirs) as upstream:
                return await _pass_on(call, upstream, NotHeard())

    async def relay_messages(self, request: Request) -> AnyResponse:
        """Anthropic's API, asked as it is."""
        caller = self._visits.caller(request.headers)
        body = await read_body(request, self._max_body_bytes)
        call, data = _Call(request, time.perf_counter()), decode_object(body)
        self._check_model(data.get("model"))
        timeout, theirs = idle_s(request, self._idle_s), _anthropics_own(request)
        async with self._visits.enter(caller, request.headers, body) as visit:
            if visit.replayed is not None:
                writer = AnthropicWriter(visit.replayed[0].answer_id, self._model)
                completion = recorded_completion(visit.replayed)
                return await answer_again(writer, completion, request, stream=data.get("stream") is True)
            heard = hearing_messages(visit, self._model, data)
            with api_failures():
                async with self._api.post("/messages", data, request.id, timeout, theirs) as upstream:
                    return await _pass_on(call, upstream, heard)

    def refuse(self, why: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            raise bad_request(why, code="unsupported_path")

        return handle

    def _check_model(self, name: object) -> None:
        if name not in (None, self._model):
            message = f"the model {name!r} does not exist; here is {self._model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def translated_by(self, translate: Callable[[Fields, Uses], Translated], id_prefix: str) -> Handler:
        """The handler of an API that theirs is not: asked as a chat, answered in that API's way."""

        async def handle(request: Request) -> AnyResponse:
            caller = self._visits.caller(request.headers)
            given = await read_body(request, self._max_body_bytes)
            call, fields = _Call(request, time.perf_counter()), Fields(decode_object(given))
            self._check_model(fields.take("model"))
            said = translate(fields, lambda variable: False)
            body = chat_body(said.chat)
            async with self._visits.enter(caller, request.headers, given) as visit:
                if visit.replayed is not None:
                    writer = said.writer(visit.replayed[0].answer_id, self._model, visit.replayed[0].created)
                    return await answer_again(
                        writer, recorded_completion(visit.replayed), request, stream="stream" in body
                    )
                writer = said.writer(answer_id := visit.answer_id(id_prefix), self._model, int(time.time()))
                heard = hearing(visit, self._model, CHAT_PATH, body, answer_id)
                return await self._translated(call, said, body, writer, heard)

        return handle

    async def _translated(
        self, call: _Call, said: Translated, body: dict[str, Any], writer: Writer, heard: Heard
    ) -> AnyResponse:
        request, timeout = call.request, idle_s(call.request, self._idle_s)
        with api_failures(), named(said.names):
            async with self._api.post(CHAT_PATH, body, request.id, timeout) as upstream:
                call.waited = time.perf_counter() - call.started
                headers = {names.OVERHEAD: call.overhead()}
                if said.ignored:
                    headers[names.IGNORED] = ", ".join(said.ignored)
                return await answer_with(writer, upstream, request, headers, heard, stream="stream" in body)


async def _pass_on(call: _Call, upstream: aiohttp.ClientResponse, heard: Heard) -> AnyResponse:
    headers = {name: value for name in _PASSED_HEADERS if (value := upstream.headers.get(name)) is not None}
    call.waited = time.perf_counter() - call.started
    if upstream.status != 200 or upstream.content_type != "text/event-stream":
        body = await upstream.read()
        call.waited = time.perf_counter() - call.started
        await heard.answer(upstream.status, body)
        return Response(upstream.status, body, headers={**headers, **_FINAL, names.OVERHEAD: call.overhead()})
    out = StreamResponse(headers={**headers, "Cache-Control": "no-cache", names.OVERHEAD: call.overhead()})
    cutter = EventCutter()
    try:
        async for part in upstream.content.iter_any():
            if events := heard.events(cutter.push(part)):
                if not out.prepared:
                    await out.prepare(call.request)
                await out.write(events)
        await heard.end()
        if out.prepared:
            await out.write(heard.held + cutter.rest())
    except ConnectionResetError:  # ours, not the API's: the caller is gone
        return out
    return out


def _anthropics_own(request: Request) -> dict[str, str]:
    """What a caller may say of the version that it speaks."""
    found = {name: request.headers.get(name) for name in ("anthropic-version", "anthropic-beta")}
    return {name: value for name, value in found.items() if value}


@contextlib.contextmanager
def api_failures() -> Iterator[None]:
    """What went wrong at the API's end, as our caller is told it, at once: no other worker would fare better."""
    try:
        yield
    except ApiError as error:
        error.headers |= _FINAL
        raise
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        message = f"the external API does not answer: {error}"
        raise ApiError(503, message, code="engine_unavailable", headers=_FINAL) from error
    except Redirected as error:
        raise ApiError(502, f"the external API's URL is not right: {error}", code="engine_failed") from error
    except TimeoutError as error:
        raise ApiError(504, "the external API made no progress", code="progress_timeout") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(502, "the connection to the external API broke", code="engine_failed") from error
