"""Follows the router's /watch for as long as the relay lives. While the router is gone the last table stands."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

import aiohttp
import orjson

from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.router.table import Snapshot
from areal.services.web.ndjson import split_lines

_log = logging.getLogger(__name__)

_SILENCE_S = 10.0  # the router's heartbeat comes every two
_REFRESH_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0


class Follower:
    def __init__(
        self, table: LiveTable, http: aiohttp.ClientSession, router_url: str, headers: Mapping[str, str]
    ) -> None:
        self._table = table
        self._http = http
        self._url = router_url.rstrip("/")
        self._headers = dict(headers)
        self._refreshing: asyncio.Task[None] | None = None
        self.connected = False

    async def run(self) -> None:
        pause = _RETRY_FIRST_S
        while True:
            before = self._table.snapshot
            try:
                await self._follow()
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                if self.connected or not self._table.received.is_set():
                    _log.warning("lost the router at %s (%r); routing by the last table", self._url, error)
            self.connected = False
            pause = _RETRY_FIRST_S if self._table.snapshot is not before else min(pause * 2, _RETRY_MAX_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        timeout = aiohttp.ClientTimeout(sock_connect=2.0, sock_read=_SILENCE_S)
        async with self._http.get(f"{self._url}/watch", headers=self._headers, timeout=timeout) as response:
            response.raise_for_status()
            async for line in split_lines(response.content):
                data = orjson.loads(line)
                if data["type"] == "snapshot":
                    self._table.apply(Snapshot.from_json(data))
                self.connected = True

    async def refresh(self) -> None:
        """Fetch the table now: before a model is called unknown, the router is asked whether it just came.

        Callers at the same time share one fetch. A router that does not answer changes nothing.
        """
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._fetch(), name="table-refresh")
        await asyncio.shield(self._refreshing)

    async def _fetch(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_REFRESH_S)
        try:
            async with self._http.get(f"{self._url}/table", headers=self._headers, timeout=timeout) as response:
                response.raise_for_status()
                self._table.apply(Snapshot.from_json(orjson.loads(await response.read())))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("could not refresh the table: %r", error)
