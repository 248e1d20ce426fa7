"""Connections to an external API: to the addresses that its name has now, and that it may have.

A name is resolved for each new connection, every address that comes back is judged, and the connection goes to one of
those very addresses: between the judging and the connecting nothing asks again. No proxies, no cookies, no redirects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from areal.resources.external_url import ExternalUrl

_CONNECT_S = 10.0
_IDLE_S = 30.0


class CheckedResolver(AbstractResolver):
    """Knows one host: that of ``url``."""

    def __init__(self, url: ExternalUrl, *, allow_private: bool) -> None:
        self._url = url
        self._allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError saying why, when the name leads anywhere that it may not."""
        if host != self._url.host:
            raise OSError(None, f"{host} is not the host of {self._url.text}")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results = []
        for kind, _, protocol, _, where in found:
            address = ipaddress.ip_address(where[0])
            if (why := self._url.refusal(address, allow_private=self._allow_private)) is not None:
                raise OSError(None, f"{host} {why}")
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        return None


def open_outside(url: ExternalUrl, *, allow_private: bool) -> aiohttp.ClientSession:
    resolver = CheckedResolver(url, allow_private=allow_private)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=0, keepalive_timeout=_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept-Encoding": "identity"},
    )
