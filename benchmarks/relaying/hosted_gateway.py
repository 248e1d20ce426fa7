"""The gateway under another HTTP server: what its hop would cost there.

    python benchmarks/relaying/hosted_gateway.py uvicorn|granian FLAGS_OF_THE_GATEWAY

areal's services write from callbacks, and end a call when its caller leaves. So a send to uvicorn is stepped where it
stands, as far as it goes without waiting, and each call has a task that waits for the caller to leave. Backpressure,
pipelining and the deadlines of slow callers are left out, in favour of the other servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from areal.http.headers import Headers
from areal.services.http.messages import (
    BodyBudget,
    FlowControl,
    Request,
    Response,
    ServerLimits,
    StreamingResponse,
    Upgraded,
    has_body,
)
from areal.services.http.process import bind, collect_rarely, read_config, serve_options
from areal.services.http.serve import run_loop
from areal.services.http.service import Service
from areal.services.inference.gateway.app import gateway
from areal.wire.processes import GatewayConfig


class HostedConnection:
    """One call's end of a connection, as the services write to it."""

    writable = True
    last_part = b""
    budget = BodyBudget(ServerLimits().bodies_bytes)

    def want_body(self, request: Request) -> None:
        """All of it is read before the handler begins."""

    def write_chunk(self, chunk: bytes) -> None:
        raise AssertionError("the server frames chunks itself")

    async def wait_writable(self) -> None: ...

    def set_source(self, source: FlowControl | None) -> None: ...

    def upgrade(self, request: Request, head: bytes, reader: Upgraded) -> None:
        raise NotImplementedError("the gateway of models speaks HTTP only")

    def write_raw(self, data: bytes) -> None: ...

    def hold_input(self, hold: bool) -> None: ...

    def has_left(self, *, aborted: bool = False) -> bool:
        return False

    def abort(self) -> None: ...


def _fields(request: Request, response: Response | StreamingResponse) -> list[tuple[str, str]]:
    ids = [(name, request.id) for name in request.id_headers if name not in response.headers]
    return [*((name.lower(), value) for name, value in response.headers.items()), *ids]


class AsgiConnection(HostedConnection):
    def __init__(self, send: Callable[[dict[str, Any]], Any]) -> None:
        self._send = send

    def _step(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(StopIteration):
            self._send(message).send(None)

    def _start(self, request: Request, response: Response | StreamingResponse, *more: tuple[bytes, bytes]) -> None:
        headers = [(name.encode(), value.encode()) for name, value in _fields(request, response)]
        self._step({"type": "http.response.start", "status": response.status, "headers": [*headers, *more]})

    def send(self, request: Request, response: Response) -> None:
        request.answered = True
        self._start(request, response, (b"content-length", str(len(response.body)).encode()))
        body = response.body if has_body(request.method, response.status) else b""
        self._step({"type": "http.response.body", "body": body, "more_body": False})

    def begin_stream(self, request: Request, response: StreamingResponse, first: bytes = b"") -> None:
        request.stream = response
        self._start(request, response)
        if first:
            self.write_part(request, first)

    def write_part(self, request: Request, data: bytes) -> None:
        self.last_part = data
        self._step({"type": "http.response.body", "body": data, "more_body": True})


class RsgiConnection(HostedConnection):
    """granian sends what is awaited, so a stream has a task that waits for its parts and sends them."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._parts: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._ended = False
        self.sending: asyncio.Task[None] | None = None

    def send(self, request: Request, response: Response) -> None:
        request.answered = True
        self._protocol.response_bytes(response.status, _fields(request, response), response.body)

    def begin_stream(self, request: Request, response: StreamingResponse, first: bytes = b"") -> None:
        request.stream = response
        transport = self._protocol.response_stream(response.status, _fields(request, response))
        self.sending = asyncio.create_task(self._send_parts(transport), name="parts")
        if first:
            self.write_part(request, first)

    def write_part(self, request: Request, data: bytes) -> None:
        self.last_part = data
        self._parts.append(data)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def _send_parts(self, transport: Any) -> None:
        while self._parts or not self._ended:
            await self._news.wait()
            self._news.clear()
            while self._parts:
                await transport.send_bytes(self._parts.popleft())


async def _cancel_after(gone: Awaitable[Any], handler: asyncio.Task[Any] | None) -> None:
    await gone
    assert handler is not None
    handler.cancel()


async def _answer(service: Service, request: Request, gone: Awaitable[Any]) -> bool:
    """Whether the answer is a stream, whose end is the caller's business."""
    request.completed()
    watch = asyncio.create_task(_cancel_after(gone, asyncio.current_task()), name="caller")
    try:
        answer = await service.answer(request)
        if isinstance(answer, Response) and not request.answered:
            request.connection.send(request, answer)
        return isinstance(answer, StreamingResponse)
    finally:
        watch.cancel()
        request.release()


async def serve_uvicorn(service: Service, host: str) -> None:
    import uvicorn

    async def disconnected(receive: Callable[[], Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    async def call(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[dict[str, Any]], Any]) -> None:
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        connection = AsgiConnection(send)
        request = Request(connection, scope["method"], target.decode(), Headers(dict(scope["headers"])))
        more = True
        while more:
            message = await receive()
            request.received(message.get("body", b""))
            more = message.get("more_body", False)
        if await _answer(service, request, disconnected(receive)):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    sock = bind(host, 0, reuse_port=False)
    sock.listen(4096)
    print(f"listens on {host} port {sock.getsockname()[1]}", flush=True)
    settings = uvicorn.Config(call, http="httptools", ws="none", lifespan="off", access_log=False, log_level="warning")
    await uvicorn.Server(settings).serve(sockets=[sock])


async def serve_granian(service: Service, host: str) -> None:
    from granian.constants import HTTPModes, Interfaces
    from granian.log import LogLevels
    from granian.server.embed import Server

    async def call(scope: Any, protocol: Any) -> None:
        query = scope.query_string
        target = f"{scope.path}?{query}" if query else scope.path
        headers = Headers({name.encode(): value.encode() for name, value in scope.headers.items()})
        connection = RsgiConnection(protocol)
        request = Request(connection, scope.method, target, headers)
        request.received(await protocol())
        if await _answer(service, request, protocol.client_disconnect()) and connection.sending is not None:
            connection.end()
            await connection.sending

    with bind(host, 0, reuse_port=False) as sock:
        port = sock.getsockname()[1]
    print(f"listens on {host} port {port}", flush=True)
    server = Server(
        call,
        address=host,
        port=port,
        interface=Interfaces.RSGI,
        http=HTTPModes.http1,
        websockets=False,
        backlog=4096,
        log_level=LogLevels.warning,
    )
    await server.serve()


async def main() -> None:
    config = read_config(GatewayConfig, "hosted-gateway", sys.argv[2:])
    options = serve_options(config)
    async with gateway(config, options) as service, service.lifespan():
        collect_rarely()
        await {"uvicorn": serve_uvicorn, "granian": serve_granian}[sys.argv[1]](service, options.host)


if __name__ == "__main__":
    run_loop(main, "warning")
