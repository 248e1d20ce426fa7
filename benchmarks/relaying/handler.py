"""One handler under several HTTP servers: ``POST /request`` answers a small JSON object, ``POST /events`` 64
server-sent events, ``gap_s`` seconds (a field of the request) apart.

    python benchmarks/relaying/handler.py               # areal's server; prints its port
    uvicorn benchmarks.relaying.handler:asgi
    granian --interface rsgi benchmarks.relaying.handler:rsgi
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from typing import Any

import orjson

from benchmarks.relaying.mock import CHUNKS, event

EVENTS = [event("word ", "stop" if number == CHUNKS - 1 else None) for number in range(CHUNKS)]
_JSON, _EVENT_STREAM = "application/json", "text/event-stream"
_MOST_BYTES = 1024 * 1024

gc.set_threshold(50_000, 20, 50)  # as areal's services have it


def _answer(data: dict[str, Any]) -> bytes:
    return orjson.dumps({"object": "list", "model": data["model"], "data": [{"id": data["model"], "created": 1}]})


def _request_id() -> str:
    return f"req_{random.getrandbits(96):024x}"


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    data = orjson.loads(body)
    headers = [(b"x-request-id", _request_id().encode())]
    start = {"type": "http.response.start", "status": 200}
    if scope["path"] == "/events":
        await send({**start, "headers": [(b"content-type", _EVENT_STREAM.encode()), *headers]})
        for each in EVENTS:
            await asyncio.sleep(data["gap_s"])
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    answer = _answer(data)
    length = (b"content-length", str(len(answer)).encode())
    await send({**start, "headers": [(b"content-type", _JSON.encode()), length, *headers]})
    await send({"type": "http.response.body", "body": answer, "more_body": False})


async def rsgi(scope: Any, protocol: Any) -> None:
    """granian's own interface."""
    data = orjson.loads(await protocol())
    headers = [("x-request-id", _request_id())]
    if scope.path == "/events":
        stream = protocol.response_stream(200, [("content-type", _EVENT_STREAM), *headers])
        for each in EVENTS:
            await asyncio.sleep(data["gap_s"])
            await stream.send_bytes(each)
        return
    protocol.response_bytes(200, [("content-type", _JSON), *headers], _answer(data))


async def main() -> None:
    from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse
    from areal.services.http.server import HttpServer

    async def handle(request: Request) -> AnyResponse:
        data = orjson.loads(await request.read(_MOST_BYTES))
        if request.path != "/events":
            return Response(body=_answer(data), content_type=_JSON)
        stream = StreamingResponse(headers={"Content-Type": _EVENT_STREAM})
        stream.begin(request)
        for each in EVENTS:
            await asyncio.sleep(data["gap_s"])
            await stream.write(each)
        return stream

    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    await HttpServer(handle).listen(sock)
    print(sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    from areal.services.http.serve import run_loop

    run_loop(main, "warning")
