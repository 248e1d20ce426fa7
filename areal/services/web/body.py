"""Request bodies: bounded while they arrive, decoded once, refused by name when they are not a JSON object."""

from __future__ import annotations

from typing import Any

import orjson

from areal.services.web.errors import ApiError
from areal.services.web.server import Request

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes. Raises 413 as soon as that is known to be passed."""
    return await request.read(limit)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises 400; UTF-8 is required, as JSON over HTTP requires it."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return data


async def read_object(request: Request, limit: int = DEFAULT_MAX_BODY_BYTES) -> dict[str, Any]:
    return decode_object(await read_body(request, limit))
