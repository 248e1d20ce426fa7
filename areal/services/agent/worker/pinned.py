"""An HTTP client that connects to the very addresses that were checked: a name may lead elsewhere the next time."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.request

import httpx2

from areal.api.agent import ToolError
from areal.resources.addresses import refusal


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
