"""The model routes of a data proxy for an external API.

Calls are relayed with the data proxy's request ids, errors and deadline, and translated if the API lacks the dialect.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from areal.dataclasses import dataclass
from areal.http import headers as names
from areal.http.events import EventReader, ServerEvent
from areal.services.dialects import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning, Reply, ResponseSummary
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse, decode_object
from areal.services.http.service import Handler, json_response
from areal.services.inference.data_proxy import anthropic, responses
from areal.services.inference.data_proxy.anthropic import AnthropicWriter
from areal.services.inference.data_proxy.external_recording import (
    CHAT_PATH,
    NotACompletion,
    ResponseRecorder,
    chat_recorder,
    chunks_of,
    decoded_answer,
    field_of,
    items_of,
    message_of,
    messages_recorder,
)
from areal.services.inference.data_proxy.fields import Fields, dialect_field_names
from areal.services.inference.data_proxy.generation import progress_timeout_s
from areal.services.inference.data_proxy.serializers import ChatTranslation, DialectWriter, TemplateUses
from areal.services.inference.data_proxy.sessions import CallRecorder, CallRecorders
from areal.services.inference.engines.base import Dialect, EngineFailed
from areal.services.inference.engines.external import ExternalApi, Redirected, connection_error
from areal.services.inference.recorder.records import RecordedTurn, TextTurn
from areal.wire.processes import DataProxyConfig

_OWN_FIELDS = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs", "metadata")


def chat_body(chat: Mapping[str, Any]) -> dict[str, object]:
    """Return the body for the API: only OpenAI's own fields that the client set, since providers differ in all others.
    Raises 400 for a last message that is to be continued, which external models do not support."""
    if chat.get("continue_final_message"):
        raise bad_request("the last message must be the user's: an external model begins its own", param="messages")
    body = {name: value for name, value in chat.items() if name not in _OWN_FIELDS and not _is_unset(value)}
    if "max_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_tokens")
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if chat.get("parallel_tool_calls") is False:
        body["parallel_tool_calls"] = False
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    body["messages"] = [{name: item for name, item in each.items() if name != "is_error"} for each in chat["messages"]]
    return body


def _is_unset(value: Any) -> bool:
    """Return whether a field is unset. A temperature of 0 is set, though 0 equals False."""
    return value is None or value is False or value == []


async def answer_in_dialect(
    writer: DialectWriter,
    upstream: aiohttp.ClientResponse,
    request: Request,
    headers: dict[str, str],
    response_recorder: ResponseRecorder,
    *,
    stream: bool,
) -> AnyResponse:
    """Send ``upstream``'s response in the writer's dialect. Raises ApiError, EngineFailed, NotACompletion."""
    if upstream.status != 200:
        raise _refused(upstream.status, await upstream.read(), upstream.headers.get("Retry-After"))
    if stream:
        _check_streams(upstream)
    else:
        data = decoded_answer(await upstream.read())
        answer = json_response(_whole_answer(writer, data), more_headers=headers)
        response_recorder.data(data, whole=True)
        await response_recorder.end()
        return answer
    out = StreamingResponse(headers={**names.EVENT_STREAM, **headers})
    with contextlib.suppress(ConnectionResetError):  # the client disconnected
        async with contextlib.aclosing(_dialect_parts(writer, upstream, response_recorder)) as parts:
            async for part in parts:
                if not out.prepared:
                    out.begin(request)
                await out.write(part)
    return out


def _check_streams(upstream: aiohttp.ClientResponse) -> None:
    """Raise EngineFailed for an answer that is not a stream of events."""
    if upstream.content_type != "text/event-stream":
        given = upstream.headers.get("Content-Type", "no content type")
        raise EngineFailed(f"the request was for a stream, but the answer is {given}: send the request without stream")


async def _events(upstream: aiohttp.ClientResponse) -> AsyncGenerator[ServerEvent, None]:
    """Yield the events of a stream. Raises EngineFailed for one that is too long. A last event without its blank line
    is passed on if it is whole: half of one would hide the error that follows it from clients."""
    reader = EventReader()
    async for part in upstream.content.iter_any():
        try:
            events = reader.feed(part)
        except ValueError as error:
            raise EngineFailed(str(error)) from error
        for event in events:
            yield event
    if (last := reader.end()) is not None and last.data:
        with contextlib.suppress(NotACompletion):
            if last.data.strip() != b"[DONE]":
                decoded_answer(last.data)
            yield last


async def _chunks(
    upstream: aiohttp.ClientResponse, response_recorder: ResponseRecorder
) -> AsyncGenerator[Mapping[str, object], None]:
    """Yield the chunks of a stream until ``[DONE]``. Raises EngineFailed for an error event; NotACompletion."""
    async with contextlib.aclosing(_events(upstream)) as events:
        async for event in events:
            if not event.data:
                continue
            if event.data.strip() == b"[DONE]":
                response_recorder.done()
                return
            data = decoded_answer(event.data)
            if data.get("error") is not None:
                raise EngineFailed(f"the engine failed: {data['error']}")
            yield data


async def _dialect_parts(
    writer: DialectWriter, upstream: aiohttp.ClientResponse, response_recorder: ResponseRecorder
) -> AsyncGenerator[bytes, None]:
    chunks = ChatDeltaReader()
    opening = writer.opening(0)  # the length of the prompt is known only at the end
    async with contextlib.aclosing(_chunks(upstream, response_recorder)) as received:
        async for chunk in received:
            chunks.note(chunk)
            response_recorder.data(chunk, whole=False)
            for choice in items_of(chunk, "choices")[:1]:
                written = opening + writer.pieces(chunks.pieces(field_of(choice, "delta", dict, {})))
                opening = b""
                if written:
                    yield written
    if opening:
        raise EngineFailed("the stream was empty")
    if not response_recorder.is_whole:
        raise EngineFailed("the stream was cut")
    await response_recorder.end()
    yield writer.closing(chunks.summary())


def _read_completion(completion: Mapping[str, object]) -> tuple[list[Piece], ResponseSummary]:
    chunks = ChatDeltaReader()
    chunks.note(completion)
    return chunks.pieces(message_of(completion)), chunks.summary()


def _whole_answer(writer: DialectWriter, completion: Mapping[str, object]) -> dict[str, object]:
    pieces, summary = _read_completion(completion)
    reply = Reply()
    reply.add(pieces)
    return writer.whole(reply, summary)


async def _replay(
    request: Request, turns: Sequence[RecordedTurn], writer: DialectWriter | None, *, stream: bool
) -> AnyResponse:
    """Send the recorded completion: as it is, or in the writer's dialect."""
    first = turns[0]
    assert isinstance(first, TextTurn)
    completion = first.extra["completion"]
    if not stream:
        return json_response(completion if writer is None else _whole_answer(writer, completion))
    if writer is None:
        events = b"".join(chunks_of(completion))
    else:
        pieces, summary = _read_completion(completion)
        events = writer.opening(0) + writer.pieces(pieces) + writer.closing(summary)
    out = StreamingResponse(headers={**names.EVENT_STREAM})
    out.begin(request)
    await out.write(events)
    return out


class ChatDeltaReader:
    """Reads the message or deltas of one response into pieces and a summary. Raises NotACompletion."""

    def __init__(self) -> None:
        self._call = -1  # index of the last call that began
        self._finish = "stop"
        self._stop: str | None = None
        self._usage: dict[str, object] = {}

    def note(self, data: Mapping[str, object]) -> None:
        """Note the finish reason and usage of a chunk or a whole response."""
        self._usage = field_of(data, "usage", dict, self._usage)
        for choice in items_of(data, "choices")[:1]:
            self._finish = field_of(choice, "finish_reason", str, self._finish)
            stop = choice.get("stop_reason")  # vLLM's and SGLang's
            self._stop = stop if isinstance(stop, str) else self._stop

    def pieces(self, delta: Mapping[str, object]) -> list[Piece]:
        pieces: list[Piece] = []
        if reasoning := field_of(delta, "reasoning_content", str, "") or field_of(delta, "reasoning", str, ""):
            pieces.append(Reasoning(reasoning))
        if content := field_of(delta, "content", str, "") or field_of(delta, "refusal", str, ""):
            pieces.append(Content(content))
        for position, call in enumerate(items_of(delta, "tool_calls")):
            pieces.extend(self._call_pieces(call, field_of(call, "index", int, position)))
        return pieces

    def _call_pieces(self, call: Mapping[str, object], index: int) -> Iterator[Piece]:
        function: Mapping[str, object] = field_of(call, "function", dict, {})
        if index == self._call + 1:
            if self._call >= 0:
                yield CallEnd(self._call)
            self._call = index
            call_id, name = field_of(call, "id", str, ""), field_of(function, "name", str, "")
            if not call_id or not name:
                raise NotACompletion(f"call {index} has no id or no name")
            yield CallStart(index, call_id, name)
        elif index != self._call:
            raise NotACompletion(f"call {index} goes on after call {self._call}")
        if arguments := field_of(function, "arguments", str, ""):
            yield CallArguments(index, arguments)

    def summary(self) -> ResponseSummary:
        details: Mapping[str, object] = field_of(self._usage, "completion_tokens_details", dict, {})
        return ResponseSummary(
            finish=self._finish,
            prompt_tokens=field_of(self._usage, "prompt_tokens", int, 0),
            output_tokens=field_of(self._usage, "completion_tokens", int, 0),
            reasoning_tokens=field_of(details, "reasoning_tokens", int, 0),
            stop=self._stop,
        )


def _refused(status: int, body: bytes, retry_after: str | None) -> ApiError:
    """Convert the API's error response to an ApiError: compatible APIs respond with OpenAI's error object."""
    try:
        error = orjson.loads(body).get("error")
    except (ValueError, AttributeError):
        error = None
    given = error if isinstance(error, Mapping) else {"message": error} if isinstance(error, str) else {}
    code, param = given.get("code"), given.get("param")
    return ApiError(
        status if status >= 400 else 502,
        str(given.get("message") or f"the external API answered {status}"),
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        headers={"Retry-After": retry_after} if retry_after else {},
    )


_FINAL = {names.FINAL: "1"}
_PASSED_HEADERS = ("Content-Type", "Retry-After")


@dataclass
class _RelayedCall:
    request: Request
    started: float
    waited: float = 0.0

    def overhead(self) -> str:
        return str(int((time.perf_counter() - self.started - self.waited) * 1e6))


@dataclass(eq=False)
class ExternalCalls:
    """Makes the handlers of an external model's routes. The configuration has the longest time without a byte from the
    API, unless the relay sets another one."""

    _model: str
    _api: ExternalApi
    _recorders: CallRecorders
    _config: DataProxyConfig

    def relay_to(self, path: str, *, records: bool = True) -> Handler:
        """Return the handler that relays to ``path`` under the API's base URL. ``records``: a session's calls are
        recorded."""
        is_messages = path.startswith("/messages")  # of Anthropic's API

        async def handle(request: Request) -> AnyResponse:
            caller = self._recorders.authenticate(request)
            body = await request.read(self._config.max_body_bytes)
            call, data = _RelayedCall(request, time.perf_counter()), decode_object(body)
            self._check_model(data.get("model"))
            timeout = progress_timeout_s(request, self._config.request_timeout)
            chosen = ("anthropic-version", "anthropic-beta") if is_messages else ()  # the version of the API
            headers = {name: value for name in chosen if (value := request.headers.get(name))}

            async def answer(recorder: CallRecorder) -> AnyResponse:
                if recorder.replayed is not None:
                    turns, stream = recorder.replayed, data.get("stream") is True
                    writer = AnthropicWriter(turns[0].answer_id, self._model) if is_messages else None
                    return await _replay(request, turns, writer, stream=stream)
                if is_messages:
                    response_recorder = messages_recorder(recorder, self._model, data)
                else:
                    response_recorder = chat_recorder(recorder, self._model, path, data)
                with api_failures():
                    async with self._api.post(path, data, request.id, timeout, headers) as upstream:
                        asked = data.get("stream") is True
                        return await _relay_answer(call, upstream, response_recorder, stream=asked)

            return await self._recorders.run(caller if records else None, request.headers, body, answer)

        return handle

    def refuse(self, why: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            raise bad_request(why, code="unsupported_path")

        return handle

    def _check_model(self, name: object) -> None:
        if name not in (None, self._model):
            message = f"the model {name!r} does not exist; here is {self._model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def translated_by(self, translate: Callable[[Fields, TemplateUses], ChatTranslation], id_prefix: str) -> Handler:
        """Return the handler of a dialect that the API lacks: it sends a chat and responds in the dialect."""

        async def handle(request: Request) -> AnyResponse:
            caller = self._recorders.authenticate(request)
            given = await request.read(self._config.max_body_bytes)
            call, fields = _RelayedCall(request, time.perf_counter()), Fields(decode_object(given))
            self._check_model(fields.take("model"))
            translation = translate(fields, lambda variable: False)
            body = chat_body(translation.chat)

            async def answer(recorder: CallRecorder) -> AnyResponse:
                if (turns := recorder.replayed) is not None:
                    writer = translation.writer(turns[0].answer_id, self._model, turns[0].created)
                    return await _replay(request, turns, writer, stream="stream" in body)
                writer = translation.writer(answer_id := recorder.answer_id(id_prefix), self._model, int(time.time()))
                response_recorder = chat_recorder(recorder, self._model, CHAT_PATH, body, answer_id)
                timeout = progress_timeout_s(request, self._config.request_timeout)
                with api_failures(), dialect_field_names(translation.names, foreign=True):
                    async with self._api.post(CHAT_PATH, body, request.id, timeout) as upstream:
                        call.waited = time.perf_counter() - call.started
                        headers = {names.OVERHEAD: call.overhead()}
                        if translation.ignored:
                            headers[names.IGNORED] = ", ".join(translation.ignored)
                        return await answer_in_dialect(
                            writer, upstream, request, headers, response_recorder, stream="stream" in body
                        )

            return await self._recorders.run(caller, request.headers, given, answer)

        return handle


async def _relay_answer(
    call: _RelayedCall, upstream: aiohttp.ClientResponse, response_recorder: ResponseRecorder, *, stream: bool
) -> AnyResponse:
    headers = {name: value for name in _PASSED_HEADERS if (value := upstream.headers.get(name)) is not None}
    call.waited = time.perf_counter() - call.started
    if upstream.status == 200 and stream:
        _check_streams(upstream)
    if upstream.status != 200 or upstream.content_type != "text/event-stream":
        body = await upstream.read()
        call.waited = time.perf_counter() - call.started
        await response_recorder.answer(upstream.status, body)
        if upstream.status >= 400:
            body = _with_request_id(body, call.request.id)
        return Response(upstream.status, body, headers={**headers, **_FINAL, names.OVERHEAD: call.overhead()})
    out = StreamingResponse(headers={**headers, "Cache-Control": "no-cache", names.OVERHEAD: call.overhead()})
    with contextlib.suppress(ConnectionResetError):  # the client disconnected
        async with contextlib.aclosing(_events(upstream)) as events:
            async for event in events:
                if passed := response_recorder.event(event):
                    if not out.prepared:
                        out.begin(call.request)
                    await out.write(passed)
        if not response_recorder.is_whole:
            raise EngineFailed("the stream was cut")
        await response_recorder.end()
        out.end = response_recorder.held
    return out


def _with_request_id(body: bytes, request_id: str) -> bytes:
    """Return the API's error with our request id, which the caller and our logs have."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    match data:
        case {"type": "error", "error": dict()}:  # Anthropic's
            return orjson.dumps({**data, "request_id": request_id})
        case {"error": dict(error)}:
            return orjson.dumps({**data, "error": {**error, "request_id": request_id}})
    return body


@contextlib.contextmanager
def api_failures() -> Iterator[None]:
    """Convert failures of the API to ApiErrors. Errors that every worker would get are marked as final."""
    try:
        yield
    except ApiError as error:
        error.headers |= _FINAL
        raise
    except NotACompletion as error:
        message = f"the external API's answer is not a chat completion: {error}"
        raise ApiError(502, message, code="engine_failed", headers=_FINAL) from error
    except EngineFailed as error:
        raise ApiError(502, f"the external API failed: {error}", code="engine_failed", headers=_FINAL) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        message = f"the external API does not answer: {connection_error(error)}"
        raise ApiError(503, message, code="engine_unavailable", headers=_FINAL) from error
    except Redirected as error:
        message = f"the external API's URL is not valid: {error}"
        raise ApiError(502, message, code="engine_failed", headers=_FINAL) from error
    except TimeoutError as error:
        raise ApiError(504, "the external API made no progress", code="progress_timeout") from error
    except (aiohttp.ClientError, OSError) as error:
        # Final, too: the provider may have done the work, and a retry would be billed again.
        message = "the connection to the external API broke"
        raise ApiError(502, message, code="engine_failed", headers=_FINAL) from error


def external_handlers(calls: ExternalCalls, dialect: Dialect) -> dict[str, Handler]:
    if dialect is Dialect.ANTHROPIC:
        messages_only = calls.refuse("this model is behind Anthropic's API: ask it by /v1/messages")
        return {
            **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses"), messages_only),
            "/v1/messages": calls.relay_to("/messages"),
            "/v1/messages/count_tokens": calls.relay_to("/messages/count_tokens", records=False),
        }
    return {
        "/v1/chat/completions": calls.relay_to("/chat/completions"),
        "/v1/completions": calls.relay_to("/completions"),
        "/v1/responses": calls.translated_by(responses.translate, "resp_"),
        "/v1/messages": calls.translated_by(anthropic.translate, "msg_"),
        "/v1/messages/count_tokens": calls.refuse("an external model's tokens are not ours to count"),
    }
