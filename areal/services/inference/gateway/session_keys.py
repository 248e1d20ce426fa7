"""Whose key it is that a caller presents: the admin's, or a session's, and then where that session is recorded.

A session's key says so itself, by its journal's tag. A key that a caller chose is asked for at the router, and the
answer is remembered for a while; so is that nobody has it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from areal.services.inference.gateway.follow import Follower
from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.router_client import ROUTER_AWAY, RouterClient
from areal.services.inference.recording.names import key_digest, tag_of_key
from areal.services.web.access import presented_key, unknown_key
from areal.services.web.errors import ApiError
from areal.services.web.keys import AdminKey

_REMEMBERED = 10_000
_FOUND_S = 60.0
_MISSED_S = 0.5
_AWAY = ("session_away", ROUTER_AWAY)
_AWAY_S = 60.0
_ASK_AGAIN_S = 0.5
_ASKS_AT_ONCE = 16
_UNHEARD_S = 10.0
_REFRESH_S = 0.1


class SessionKeys:
    """``key`` None: a service without keys, where whoever presents no session's key is admin."""

    def __init__(self, table: LiveTable, follower: Follower, router: RouterClient, key: AdminKey | None) -> None:
        self._table = table
        self._follower = follower
        self._router = router
        self._key = key
        self._chosen: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()  # digest -> (tag, until)
        self._refreshed_at = -_REFRESH_S
        self._asking = asyncio.Semaphore(_ASKS_AT_ONCE)

    async def journal_of(self, headers: Mapping[str, str]) -> str | None:
        """The tag of the caller's session's journal; None for the admin. Raises 401 for anybody else."""
        try:
            key = presented_key(headers)
        except ApiError:
            if self._key is not None:
                raise
            return None
        if self._key is not None and self._key.matches(key):
            return None
        tag = tag_of_key(key.decode("ascii"))
        if tag is not None and await self.is_known(tag):
            return tag
        chosen = await self._chosen_key(key_digest(key)) if self._table.records else None
        if chosen is None and self._key is not None:
            self._table.require_whole()
            raise unknown_key()
        return chosen

    async def is_known(self, tag: str) -> bool:
        """Whether some data proxy has this journal, or will have it again. Raises 503 where one that might have it was
        not heard from yet."""
        if self._table.model_of_journal(tag) is not None:
            return True
        loop = asyncio.get_running_loop()
        if loop.time() - self._refreshed_at >= _REFRESH_S:  # keys that were made up must not keep the router busy
            await self._follower.refresh()  # it may have been made a moment ago
            self._refreshed_at = loop.time()
        deadline = loop.time() + _UNHEARD_S
        while self._table.model_of_journal(tag) is None:
            if self._table.all_heard:
                return False
            if (left := deadline - loop.time()) <= 0:
                message = "no data proxy has this session, but one of them was not heard from yet"
                raise ApiError(503, message, code="session_away", headers={"Retry-After": "1"})
            await self._table.changed(left)
        return True

    async def _chosen_key(self, digest: bytes) -> str | None:
        loop = asyncio.get_running_loop()
        known = self._chosen.get(digest)
        if known is not None and known[1] > loop.time():
            return known[0]
        try:
            tag = await self._found(digest, loop.time() + (_AWAY_S if known is None else 0.0))
        except ApiError:
            if known is None:
                raise
            tag = known[0]  # while who could tell is away, what was known holds
        self._chosen[digest] = (tag, loop.time() + (_FOUND_S if tag is not None else _MISSED_S))
        self._chosen.move_to_end(digest)
        if len(self._chosen) > _REMEMBERED:
            self._chosen.popitem(last=False)
        return tag

    async def _found(self, digest: bytes, deadline: float) -> str | None:
        """Raises 503 where the router, or a data proxy that may have the session, stays away until ``deadline``."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with self._asking:
                    return await self._ask(digest)
            except ApiError as error:
                if error.code not in _AWAY or loop.time() >= deadline:
                    raise
            await self._table.changed(_ASK_AGAIN_S)

    async def _ask(self, digest: bytes) -> str | None:
        try:
            journal = (await self._router.post("/route", {"api_key_digest": digest.hex()})).get("journal")
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return journal if isinstance(journal, str) else None

    def forget(self, key: bytes) -> None:
        """Another session may have it now."""
        self._chosen.pop(key_digest(key), None)
