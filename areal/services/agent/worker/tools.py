"""Tools of MCP servers, through the ``mcp`` package. Each server is connected before the agent is constructed, and
again whenever its connection ends; calls wait for the connection. A call that a server does not answer fails and is
not retried, because the server may have executed it. One over HTTP is called at the very addresses that were checked:
a name may lead elsewhere the next time."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
import httpx2
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from areal.api.agent import Tool, ToolError
from areal.dataclasses import dataclass
from areal.errors import ArealError, UsageFault
from areal.http import tracing
from areal.resources.addresses import refusal
from areal.services.http.tasks import background
from areal.wire.stage import report_stage

_MOST_PAGES = 1000  # of one server's list of tools
_AGAIN_S = 1.0
_REQUEST_S = 30.0  # to connect and to send
_SILENCE_S = 300.0
_CLOSED = -32000  # JSON-RPC's code of a connection that was closed
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class McpTool:
    """A tool of an MCP server, as ``areal.api.agent.Tool``."""

    server: McpConnection
    name: str
    description: str
    input_schema: Mapping[str, object]

    async def call(self, arguments: Mapping[str, object]) -> str:
        about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": self.name}
        with tracing.span(f"execute_tool {self.name}", about, "client"):
            return await self.server.call(self.name, arguments)


class McpConnection:
    """The connection to one MCP server, in the one task that anyio wants. ``tools``: as it listed them at first."""

    def __init__(self, command: Sequence[str], url: str | None, timeout_s: float) -> None:
        self.name = url or " ".join(command)
        self._timeout_s = timeout_s
        self._doing = "answer"
        self.tools: list[McpTool] = []
        self._command, self._url = command, url
        self._lost = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        while True:
            try:
                await self._connection()
                _log.warning("the MCP server %s has ended its connection", self.name)
            except Exception as error:  # noqa: BLE001 - the boundary to the server and its client
                _log.warning("the MCP server %s: %s", self.name, _shown(error))
                if self._doing and not self._client.done():  # the attempt to connect failed
                    self._client.set_exception(ToolError(f"the MCP server {self.name} is away: {_shown(error)}"))
                    self._client.exception()  # marks it as retrieved: there may be no waiting call
            self._drop_connection()
            await asyncio.sleep(_AGAIN_S)

    async def _connection(self) -> None:
        self._lost.clear()
        self._doing = "answer"
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                async with Client(_watched(self._transport(), self._drop_connection)) as client:
                    if not self.tools:
                        self._doing = "end the list of its tools"
                        self.tools = [tool async for tool in self._listed(client)]
                    limit.reschedule(None)
                    self._client.set_result(client)
                    self._doing = ""
                    await self._lost.wait()
        except TimeoutError as error:
            raise ToolError(f"it did not {self._doing} within {self._timeout_s:g} s") from error

    def _drop_connection(self) -> None:
        """Drop the connection. Later calls wait for the next one."""
        if self._client.done():
            self._client = asyncio.get_running_loop().create_future()
        self._lost.set()

    async def connected(self) -> Client:
        """Return the connected client. Raises ToolError if the current attempt to connect fails."""
        return await asyncio.shield(self._client)

    def _transport(self) -> AbstractAsyncContextManager[Any]:
        if self._url is not None:
            return _over_http(self._url)
        program, *arguments = self._command
        # With `strict`, a byte that is not UTF-8 would end the package's reader, and calls would wait without end.
        parameters = StdioServerParameters(
            command=program, args=arguments, env=dict(os.environ), encoding_error_handler="replace"
        )
        return stdio_client(parameters)

    async def _listed(self, client: Client) -> AsyncIterator[McpTool]:
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                yield McpTool(self, tool.name, tool.description or "", tool.input_schema)
            if (cursor := page.next_cursor) is None:
                return
        raise ToolError(f"its list of tools has more than {_MOST_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        try:  # the package would end the connection, which others use, and would send NaN as null
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the arguments of {name} cannot be written as JSON: {error}") from error
        connection = self._client
        client = await self.connected()
        try:
            result = await client.call_tool(name, dict(arguments))
        except Exception as error:
            if getattr(error, "code", None) == _CLOSED and self._client is connection:
                self._drop_connection()
            raise ToolError(f"the MCP server {self.name} did not answer {name}: {error}") from error
        parts = [
            part.text if part.type == "text" else part.model_dump_json(by_alias=True, exclude_none=True)
            for part in result.content
        ]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        if result.is_error:
            raise ToolError("\n".join(parts))
        return "\n".join(parts)


async def checked_addresses(url: httpx2.URL) -> list[str]:
    """Return the addresses of the host. Raises ToolError if one of them is one that no request may be sent to."""
    found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(each[0]) for *_, each in found))
    for address in addresses:
        if (why := refusal(ipaddress.ip_address(address.partition("%")[0]), allow_private=True)) is not None:
            raise ToolError(f"{url.host} {why}")
    return addresses


class PinnedTransport(httpx2.AsyncBaseTransport):
    """Sends each request to a checked address of its host; the server sees, and TLS checks, the host's name."""

    def __init__(self) -> None:
        self._inner = httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        *others, last = await checked_addresses(request.url)
        for address in others:
            try:
                return await self._inner.handle_async_request(_pinned(request, address))
            except httpx2.ConnectError:
                continue  # nothing was sent
        return await self._inner.handle_async_request(_pinned(request, last))

    async def aclose(self) -> None:
        await self._inner.aclose()


def _pinned(request: httpx2.Request, address: str) -> httpx2.Request:
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )


async def _check(request: httpx2.Request) -> None:
    await checked_addresses(request.url)


def open_client(url: str, timeout: httpx2.Timeout) -> httpx2.AsyncClient:
    """Return a client for one server. Behind a proxy, which resolves the name itself, the name is checked here too."""
    parts = httpx2.URL(url)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.host):
        return httpx2.AsyncClient(timeout=timeout, event_hooks={"request": [_check]})
    return httpx2.AsyncClient(timeout=timeout, transport=PinnedTransport())


@contextlib.asynccontextmanager
async def _over_http(url: str) -> AsyncIterator[Any]:
    """Yield the streams of a server over HTTP, no request of which goes to an address of credentials. The package
    follows redirects within the server's origin alone."""
    async with open_client(url, httpx2.Timeout(_REQUEST_S, read=_SILENCE_S)) as http:
        async with streamable_http_client(url, http_client=http) as streams:
            yield streams


@contextlib.asynccontextmanager
async def _watched(
    transport: AbstractAsyncContextManager[Any], lost: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of ``transport``. ``lost`` is called when the server closes it, before pending calls fail."""
    async with transport as (read, write), anyio.create_task_group() as group:
        send, receive = anyio.create_memory_object_stream[Any](0)

        async def pass_on() -> None:
            async with send:
                async for message in read:
                    await send.send(message)
                lost()

        group.start_soon(pass_on)
        try:
            yield receive, write
        finally:
            group.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def mcp_tools(configured: Sequence[Mapping[str, Any]], timeout_s: float) -> AsyncIterator[list[Tool]]:
    """Connect all servers for the body, each within ``timeout_s``, and yield their tools. Raises ArealError."""
    async with AsyncExitStack() as stack:
        tools: dict[str, Tool] = {}
        for each in configured:
            about = each["mcp"]
            server = McpConnection(about.get("command") or (), about.get("url"), timeout_s)
            report_stage(f"connecting to the MCP server {server.name}")
            await stack.enter_async_context(background(f"mcp {server.name}", server.serve))
            try:
                await server.connected()
            except ToolError as error:
                raise ArealError(str(error)) from error
            for tool in server.tools:
                if tool.name in tools:
                    raise UsageFault(f"tools: two tools are named {tool.name!r}; the second is of {server.name}")
                tools[tool.name] = tool
        yield list(tools.values())


def _shown(error: BaseException) -> str:
    """Return the message of an error; of an exception group, of the first error in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}".removesuffix(": ")
