"""How each API says that a call went wrong: as a body beside a status, and as the last event of a stream.

OpenAI's object everywhere but under Anthropic's paths; a stream of the Responses API has an event type of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from areal.services.web.errors import ApiError
from areal.services.web.headers import ANTHROPIC_REQUEST_ID, REQUEST_ID
from areal.services.web.server.response import Response

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_SEQUENCE = re.compile(rb'"sequence_number":\s*(\d{1,18})')  # within a text of the answer its quotes are escaped


@dataclass(frozen=True)
class ErrorForm:
    """``event`` is what a stream ends with, after the bytes that were written last."""

    body: Callable[[ApiError, str], dict[str, Any]]
    event: Callable[[ApiError, str, bytes], bytes]
    id_headers: tuple[str, ...] = (REQUEST_ID,)

    def response(self, error: ApiError, request_id: str) -> Response:
        ids = dict.fromkeys(self.id_headers, request_id)
        body = orjson.dumps(self.body(error, request_id))
        headers = {**error.headers, **ids}
        return Response(error.status, body, content_type="application/json", headers=headers)


def _openai_body(error: ApiError, request_id: str) -> dict[str, Any]:
    return error.body(request_id)


def _openai_event(error: ApiError, request_id: str, before: bytes) -> bytes:
    return b"data: " + orjson.dumps(error.body(request_id)) + b"\n\n"


def _responses_event(error: ApiError, request_id: str, before: bytes) -> bytes:
    """The API's own event, and the object by which clients tell an error from an event they do not know. Its number
    follows that of the event before."""
    numbers = _SEQUENCE.findall(before)
    number = int(numbers[-1]) + 1 if numbers else 0
    body = error.body(request_id)
    about = {"message": error.message, "code": error.code, "param": error.param}
    event = {"type": "error", "sequence_number": number, **about}
    return b"event: error\ndata: " + orjson.dumps(event | body) + b"\n\n"


def _anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _anthropic_event(error: ApiError, request_id: str, before: bytes) -> bytes:
    return b"event: error\ndata: " + orjson.dumps(_anthropic_body(error, request_id)) + b"\n\n"


OPENAI = ErrorForm(_openai_body, _openai_event)
RESPONSES = ErrorForm(_openai_body, _responses_event)
ANTHROPIC = ErrorForm(_anthropic_body, _anthropic_event, (REQUEST_ID, ANTHROPIC_REQUEST_ID))

_FORMS = {"/messages": ANTHROPIC, "/responses": RESPONSES}
_OTHERS = tuple(_FORMS)


def error_form(path: str) -> ErrorForm:
    """The form in which callers of ``path`` expect errors, whether it is a path of ours or not."""
    path = path.removeprefix("/v1")
    if not path.startswith(_OTHERS):
        return OPENAI
    return next((form for prefix, form in _FORMS.items() if path == prefix or path.startswith(prefix + "/")), OPENAI)
