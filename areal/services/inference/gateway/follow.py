"""Follows the router's /watch for as long as the relay lives. While the router is gone the last table stands, and one
that comes back knowing nothing is told it: nobody else is there to do so until the next reconcile."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

import orjson

from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.router.table import EMPTY, Changes, Snapshot
from areal.services.web.client import CallFailed, HttpClient, Lost
from areal.services.web.ndjson import split_lines
from areal.services.web.watchdog import Watchdog

_log = logging.getLogger(__name__)

_SILENCE_S = 10.0  # the router's heartbeat comes every two
_REFRESH_S = 2.0
_RECALL_S = 5.0
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0


class Follower:
    def __init__(self, table: LiveTable, http: HttpClient, router_url: str, headers: Mapping[str, str]) -> None:
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
            except (CallFailed, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                if self.connected or not self._table.received.is_set():
                    _log.warning("lost the router at %s (%r); routing by the last table", self._url, error)
            self.connected = False
            pause = _RETRY_FIRST_S if self._table.snapshot is not before else min(pause * 2, _RETRY_MAX_S)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _follow(self) -> None:
        calling = self._http.call("GET", self._url, "/watch?changes", self._headers)
        async with Watchdog(lambda: _SILENCE_S) as watchdog, calling as answer:
            _check(answer.status)
            told = EMPTY
            async for line in split_lines(answer.parts()):
                watchdog.kick()
                data = orjson.loads(line)
                if data["type"] == "snapshot":
                    told = Snapshot.from_json(data)
                    self._table.apply(told)
                    await self._remind(told)
                elif data["type"] == "changes":
                    told = told.changed(Changes.from_json(data))
                    self._table.apply(told)
                self.connected = True

    async def _remind(self, incoming: Snapshot) -> None:
        """Raises CallFailed, TimeoutError: then the next snapshot is answered so."""
        if (remembered := self._table.remembered(incoming)) is None:
            return
        body = orjson.dumps(remembered.to_json())
        said = await self._http.fetch(
            "POST", self._url, "/recall", headers=self._headers, body=body, timeout_s=_RECALL_S
        )
        _check(said.status)

    async def refresh(self) -> None:
        """Fetch the table now: before a model is called unknown, the router is asked whether it just came.

        Callers at the same time share one fetch. A router that does not answer changes nothing.
        """
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._fetch(), name="table-refresh")
        await asyncio.shield(self._refreshing)

    async def _fetch(self) -> None:
        try:
            said = await self._http.fetch("GET", self._url, "/table", headers=self._headers, timeout_s=_REFRESH_S)
            _check(said.status)
            self._table.apply(Snapshot.from_json(orjson.loads(said.body)))
        except (CallFailed, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("could not refresh the table: %r", error)


def _check(status: int) -> None:
    if status != 200:
        raise Lost(f"the router answered {status}")
