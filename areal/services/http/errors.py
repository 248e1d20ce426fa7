"""HTTP errors, in the format of the API that was called and always with a request id.

A caller's mistake is 4xx. A fault of the service is 5xx and reveals no internals: the log has the detail under the same
request id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import orjson

from areal.errors import FieldName, Wording
from areal.http.headers import ANTHROPIC_REQUEST_ID, REQUEST_ID

if TYPE_CHECKING:
    from areal.http.client import HttpReply

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_SEQUENCE = re.compile(rb'"sequence_number":\s*(\d{1,18})')  # cannot match the answer's text: its quotes are escaped


class ApiError(Exception):
    """A refused or failed request. ``param`` names the offending field, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self, request_id: str) -> dict[str, object]:
        """Return OpenAI's error object."""
        fields = {"message": self.message, "type": self.type, "code": self.code, "param": self.param}
        return {"error": {**fields, "request_id": request_id}}


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def bad_field(name: str, problem: str, *, code: str = "invalid_value") -> ApiError:
    return bad_request(Wording(FieldName(name), f" {problem}"), param=name, code=code)


def unsupported(name: str, why: str) -> ApiError:
    return bad_field(name, f"is not supported: {why}", code="unsupported_parameter")


def refusal(reply: HttpReply, who: str) -> ApiError:
    """Return the error for our caller after a call to another component, ``who``, was refused; 502 if it gave no
    reason."""
    error = reply.error()
    if not error.get("message"):
        return ApiError(502, f"{who} answered {reply.status}", code="bad_gateway")
    return ApiError(reply.status, str(error["message"]), code=error.get("code"), param=error.get("param"))


class ErrorFormat:
    """OpenAI's error format: the ``body`` of a response, or the last ``event`` of a stream, written after
    ``last_part``."""

    id_headers: tuple[str, ...] = (REQUEST_ID,)

    def body(self, error: ApiError, request_id: str) -> dict[str, object]:
        return error.body(request_id)

    def event(self, error: ApiError, request_id: str, last_part: bytes) -> bytes:
        return b"data: " + orjson.dumps(self.body(error, request_id)) + b"\n\n"


class _ResponsesFormat(ErrorFormat):
    """The Responses API's error event, with the error object, by which clients tell it from unknown events. Its
    sequence number follows that of the last event."""

    def event(self, error: ApiError, request_id: str, last_part: bytes) -> bytes:
        numbers = _SEQUENCE.findall(last_part)
        number = int(numbers[-1]) + 1 if numbers else 0
        fields = {"message": error.message, "code": error.code, "param": error.param}
        event = {"type": "error", "sequence_number": number, **fields, **self.body(error, request_id)}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"


class _AnthropicFormat(ErrorFormat):
    id_headers = (REQUEST_ID, ANTHROPIC_REQUEST_ID)

    def body(self, error: ApiError, request_id: str) -> dict[str, object]:
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}

    def event(self, error: ApiError, request_id: str, last_part: bytes) -> bytes:
        return b"event: error\n" + super().event(error, request_id, last_part)


OPENAI = ErrorFormat()
_FORMATS = {"/messages": _AnthropicFormat(), "/responses": _ResponsesFormat()}
_PREFIXES = tuple(_FORMATS)


def error_format(path: str) -> ErrorFormat:
    """Return the format in which callers of ``path`` expect errors, even if there is no such route."""
    path = path.removeprefix("/v1")
    if not path.startswith(_PREFIXES):
        return OPENAI
    return next((form for prefix, form in _FORMATS.items() if path == prefix or path.startswith(prefix + "/")), OPENAI)
