"""A dialect before an external API: the chat body for it, and its answer's pieces.

Only OpenAI's own fields are sent, and only those that the caller gave a value: providers differ in what else they take.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Protocol

import aiohttp
import orjson

from areal.services.inference.data_proxy.dialects.writer import Outcome, Writer
from areal.services.inference.data_proxy.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
)
from areal.services.inference.engines.base import EngineFailed
from areal.services.inference.engines.clients.sse import read_events
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import AnyResponse, Request, StreamResponse
from areal.services.web.service import json_response

_OURS = ("continue_final_message", "add_generation_prompt", "chat_template_kwargs", "metadata")


def chat_body(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Raises 400 for what only a model of ours can do."""
    if chat.get("continue_final_message"):
        raise bad_request("the last message must be the user's: an external model begins its own", param="messages")
    body = {name: value for name, value in chat.items() if name not in _OURS and value not in (None, [], False)}
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


class Hears(Protocol):
    """Whoever keeps what was answered. What ``end`` raises fails the call, before its last event."""

    def data(self, data: Mapping[str, Any], *, whole: bool) -> None: ...

    async def end(self) -> None: ...


async def answer_with(
    writer: Writer,
    upstream: aiohttp.ClientResponse,
    request: Request,
    headers: dict[str, str],
    heard: Hears,
    *,
    stream: bool,
) -> AnyResponse:
    """Say ``upstream``'s answer in the writer's way. Raises ApiError for one that is none."""
    if upstream.status != 200:
        raise _refused(upstream.status, await upstream.read(), upstream.headers.get("Retry-After"))
    if stream:
        return await _streamed(writer, upstream, request, headers, heard)
    with _as_a_chat_answer():
        data = orjson.loads(await upstream.read())
        answer = json_response(_whole(writer, data), more_headers=headers)
        heard.data(data, whole=True)
    await heard.end()
    return answer


async def answer_again(writer: Writer, completion: Mapping[str, Any], request: Request, *, stream: bool) -> AnyResponse:
    """Say a recorded answer in the writer's way."""
    if not stream:
        return json_response(_whole(writer, completion))
    chunks = Chunks()
    pieces = chunks.pieces(completion["choices"][0]["message"])
    chunks.note(completion)
    out = StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await out.prepare(request)
    await out.write(writer.opening(0) + writer.pieces(pieces) + writer.closing(chunks.outcome()))
    return out


def _whole(writer: Writer, completion: Mapping[str, Any]) -> dict[str, Any]:
    chunks, reply = Chunks(), Reply()
    reply.add(chunks.pieces(completion["choices"][0]["message"]))
    chunks.note(completion)
    return writer.whole(reply, chunks.outcome())


async def _streamed(
    writer: Writer,
    upstream: aiohttp.ClientResponse,
    request: Request,
    headers: dict[str, str],
    heard: Hears,
) -> AnyResponse:
    out = StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    try:
        async with contextlib.aclosing(_said(writer, upstream, heard)) as parts:
            async for part in parts:
                if not out.prepared:
                    await out.prepare(request)
                await out.write(part)
    except ConnectionResetError:  # ours, not the API's: the caller is gone
        return out
    return out


async def _said(writer: Writer, upstream: aiohttp.ClientResponse, heard: Hears) -> AsyncGenerator[bytes, None]:
    chunks = Chunks()
    opening = writer.opening(0)  # how long their prompt was is known at the end
    with _as_a_chat_answer():
        async with contextlib.aclosing(read_events(upstream.content.iter_any())) as events:
            async for event in events:
                chunks.note(event)
                heard.data(event, whole=False)
                for choice in event.get("choices", ())[:1]:
                    said = opening + writer.pieces(chunks.pieces(choice.get("delta") or {}))
                    opening = b""
                    if said:
                        yield said
        if opening:
            raise EngineFailed("the stream was empty")
        await heard.end()
        yield writer.closing(chunks.outcome())


class Chunks:
    """Pieces from the messages or deltas of one answer, and how it ended."""

    def __init__(self) -> None:
        self._call = -1  # the last call that began
        self._finish = "stop"
        self._stop: str | None = None
        self._usage: Mapping[str, Any] = {}

    def note(self, data: Mapping[str, Any]) -> None:
        """What a chunk, or a whole answer, says about its end."""
        self._usage = data.get("usage") or self._usage
        for choice in data.get("choices", ())[:1]:
            self._finish = choice.get("finish_reason") or self._finish
            stop = choice.get("stop_reason")  # vLLM's and SGLang's
            self._stop = stop if isinstance(stop, str) else self._stop

    def pieces(self, delta: Mapping[str, Any]) -> list[Piece]:
        """Raises ValueError for calls that are not one after the other."""
        pieces: list[Piece] = []
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            pieces.append(Reasoning(reasoning))
        if content := delta.get("content") or delta.get("refusal"):
            pieces.append(Content(content))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            pieces.extend(self._call_pieces(call, call.get("index", position)))
        return pieces

    def _call_pieces(self, call: Mapping[str, Any], index: int) -> Iterator[Piece]:
        function = call.get("function") or {}
        if index == self._call + 1:
            if self._call >= 0:
                yield CallEnd(self._call)
            self._call = index
            yield CallStart(index, call["id"], function["name"])
        elif index != self._call:
            raise ValueError(f"call {index} goes on after call {self._call}")
        if arguments := function.get("arguments"):
            yield CallArguments(index, arguments)

    def outcome(self) -> Outcome:
        details = self._usage.get("completion_tokens_details") or {}
        return Outcome(
            finish=self._finish,
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            output_tokens=self._usage.get("completion_tokens") or 0,
            reasoning_tokens=details.get("reasoning_tokens") or 0,
            stop=self._stop,
        )


@contextlib.contextmanager
def _as_a_chat_answer() -> Iterator[None]:
    """What is no chat completion is the external API's failure."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ApiError(502, "the external API's answer is no chat completion", code="engine_failed") from error
    except EngineFailed as error:
        raise ApiError(502, f"the external API failed: {error}", code="engine_failed") from error


def _refused(status: int, body: bytes, retry_after: str | None) -> ApiError:
    """Their refusal as ours: OpenAI's error object is what compatible APIs answer with."""
    try:
        error = orjson.loads(body).get("error")
    except (ValueError, AttributeError):
        error = None
    said = error if isinstance(error, Mapping) else {"message": error} if isinstance(error, str) else {}
    code, param = said.get("code"), said.get("param")
    return ApiError(
        status if status >= 400 else 502,
        str(said.get("message") or f"the external API answered {status}"),
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        headers={"Retry-After": retry_after} if retry_after else {},
    )
