"""Request bodies: bounded while they arrive, decoded once, refused by name when they are not a JSON object."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from areal.services.web.errors import ApiError

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024


async def read_body(request: web.Request, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes. Raises 413 as soon as that is known to be passed."""
    declared = request.content_length
    if declared is not None and declared > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises 400; UTF-8 is required, as JSON over HTTP requires it."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return data


async def read_object(request: web.Request, limit: int = DEFAULT_MAX_BODY_BYTES) -> dict[str, Any]:
    return decode_object(await read_body(request, limit))


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")
