"""Streamed chat completions and turns of agents, for commands. A stream is a context manager: leaving it closes the
connection, which ends the generation. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from areal.client.gateway import NoResponse, ServiceClient
from areal.dataclasses import dataclass
from areal.errors import ArealError, NotFound, TimedOut, UsageFault
from areal.files import parse_json
from areal.http.events import EventReader

T = TypeVar("T")
Message = Mapping[str, object]


@dataclass(frozen=True)
class TokenLogprob:
    token: str
    logprob: float


@dataclass(frozen=True)
class ChatDelta:
    """One chunk of a chat completion. The last one has a ``finish_reason``; ``usage`` is set only on request, and
    ``versions``, those of the weights that sampled its tokens, with ``return_token_ids``. ``id``: of the answer."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, int] | None = None
    versions: tuple[int, ...] = ()
    id: str = ""


@dataclass(frozen=True)
class _StreamClient(ServiceClient):
    """``url``: of a gateway, without ``/v1``."""

    timeout_s: float = 600.0
    _what: ClassVar[str] = "the gateway "
    _namespace: ClassVar[str]  # of the commands that hints name: ``areal NAMESPACE``

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """Yield a response with status 200. Raises ArealError for every failure of the call or of its reading."""
        try:
            with self.open(method, path, body) as response:
                if response.status != 200:
                    raise _refusal(response, self.url, self._namespace)
                yield response
        except NoResponse as error:
            if error.is_late:
                raise TimedOut(f"{self.url} was silent for {self.timeout_s:g} s") from error
            raise

    def _deltas(self, response: http.client.HTTPResponse, read: Callable[[Mapping[str, object]], T]) -> Iterator[T]:
        events = _events(response)
        while True:
            with self._checked():
                if (event := next(events, None)) is None:
                    return
                delta = read(event)
            yield delta

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise ArealError if the response that is read in the block does not have the form of the API."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"{self.url} answered 200, and the body has another form than a gateway's"
            raise ArealError(message, hint="is it the address of a gateway?") from error


class ChatClient(_StreamClient):
    """Client of a gateway of an inference service."""

    _namespace = "inf"
    _hint = "areal inf status"

    def models(self) -> list[str]:
        """Return the names of the models that the gateway serves."""
        with self._request("GET", "/v1/models", None) as response, self._checked():
            return [entry["id"] for entry in json.loads(response.read())["data"]]

    @contextlib.contextmanager
    def stream(
        self, messages: Sequence[Message], *, model: str | None = None, **fields: Any
    ) -> Iterator[Iterator[ChatDelta]]:
        """Stream a completion, chunk by chunk. ``fields`` are those of the API: temperature, max_tokens, ...

        Raises NotFound (unknown model), TimedOut (no data for ``timeout_s``), and ArealError for every other failure,
        including an error event in the stream.
        """
        body = _body(messages, model, {**fields, "stream": True})
        with self._request("POST", "/v1/chat/completions", body) as response:
            yield self._deltas(response, _delta)

    def complete(self, messages: Sequence[Message], *, model: str | None = None, **fields: Any) -> ChatDelta:
        """Return the whole completion. Raises as ``stream`` does."""
        with self._request("POST", "/v1/chat/completions", _body(messages, model, fields)) as response:
            raw = response.read()
        with self._checked():
            data = json.loads(raw)
            choice = data["choices"][0]
            text = choice["message"].get("content") or ""
            return ChatDelta(text, _logprobs(choice), choice.get("finish_reason"), data.get("usage"))


def _body(messages: Sequence[Message], model: str | None, fields: Mapping[str, object]) -> dict[str, object]:
    given = {name: value for name, value in fields.items() if value is not None}
    return {"messages": list(messages), **({"model": model} if model else {}), **given}


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, object]]:
    """Yield server-sent events until ``[DONE]`` or ``response.completed``. Raises ArealError if the stream ends before,
    ValueError if it is not a stream of events."""
    reader, has_begun = EventReader(), "text/event-stream" in response.getheader("Content-Type", "")
    while part := response.read1():
        for event in reader.feed(part):
            if event.data == b"[DONE]":
                return
            if event.data:
                data, has_begun = json.loads(event.data), True
                yield data
                if data.get("type") == "response.completed":
                    return
    if not has_begun:
        raise ValueError("not a stream of events")
    raise ArealError("the answer was cut short: the connection ended in the middle", hint="areal logs")


def _delta(data: Mapping[str, Any]) -> ChatDelta:
    if "error" in data:
        raise _error(data["error"], 0)
    choices = data.get("choices") or ()
    if not choices:
        return ChatDelta(usage=data.get("usage"))
    choice = choices[0]
    return ChatDelta(
        choice["delta"].get("content") or "",
        _logprobs(choice),
        choice.get("finish_reason"),
        data.get("usage"),
        tuple(choice.get("versions") or ()),
        str(data.get("id") or ""),
    )


def _logprobs(choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    content = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(TokenLogprob(entry["token"], entry["logprob"]) for entry in content)


def _refusal(response: http.client.HTTPResponse, base_url: str, namespace: str) -> ArealError:
    raw = response.read()
    try:
        error = parse_json(raw)["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if not isinstance(error, Mapping):
        is_page = response.headers.get_content_type() == "text/html"
        text = response.reason if is_page else raw.decode("utf-8", "replace")[:200]
        return ArealError(f"{base_url} answered {response.status}: {text}", hint="is it the address of a gateway?")
    hint = {"inf": "areal inf models", "agent": "areal agent sessions list"}[namespace]
    return _error(error, response.status, hint)


def _error(error: Mapping[str, object], status: int, hint: str | None = None) -> ArealError:
    message, detail = str(error.get("message")), f"request {error.get('request_id')}"
    if status in (404, 410):
        return NotFound(message, hint=hint, detail=detail)
    if status in (401, 403):
        return ArealError(message, hint="pass the service's key with --api-key-file", detail=detail)
    if status in (400, 422):
        return UsageFault(message, hint=hint if error.get("param") == "model" else None, detail=detail)
    return ArealError(message, detail=detail)


@dataclass(frozen=True)
class TurnDelta:
    """One event of a turn: text, a tool call (``name``, ``arguments``), or a tool's ``result``."""

    text: str = ""
    name: str | None = None
    arguments: str = ""
    result: str | None = None


class TurnClient(_StreamClient):
    """Client of an agent gateway."""

    _namespace = "agent"
    _hint = "areal agent status"

    @contextlib.contextmanager
    def stream(self, message: str, session: str) -> Iterator[Iterator[TurnDelta]]:
        """Stream a turn's events. Leaving the context cancels the turn. Raises TimedOut, else ArealError."""
        body = {"input": message, "user": session, "stream": True}
        with self._request("POST", "/v1/responses", body) as response:
            yield (delta for delta in self._deltas(response, _turn_delta) if delta is not None)


def _turn_delta(data: Mapping[str, Any]) -> TurnDelta | None:
    match data.get("type"):
        case "response.output_text.delta":
            return TurnDelta(data["delta"])
        case "response.mcp_call_arguments.done":
            return TurnDelta(name=data["name"], arguments=data["arguments"])
        case "response.output_item.done" if data["item"]["type"] == "mcp_call":
            return TurnDelta(result=data["item"]["output"])
        case "response.failed":
            raise _error(data["response"].get("error") or {}, 0)
        case "error":
            raise _error(data.get("error") or data, 0)
        case None if "error" in data:
            raise _error(data["error"], 0)
    return None
