"""The inference workers that take part in one operation, and those that are lost on the way.

A worker that a router knows of may go: it has no calls then, and when it comes back it is behind what was published
and catches up before it serves. So its loss fails nothing. A worker that is there and refuses fails the operation, and
so does a fixed one, which nobody would bring back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from areal.services.weight_update.peers import PeerFailed, Peers

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NOTICED_S = 3.0  # an engine that failed a call has died within this, or lives
_LOOK_S = 0.1
PAIRS_NOW = "/weights/pairs?look"  # a data proxy finds out first whether its engine is there
_MAYBE_LOST = (None, 502, 503)  # no answer; the engine behind it failed, or is away


class Crew:
    """``workers`` are those that are still with us, by address; never none of them."""

    def __init__(self, peers: Peers, workers: Iterable[str], *, may_lose: bool) -> None:
        self._peers = peers
        self.may_lose = may_lose
        self.workers = list(workers)
        self.lost: set[str] = set()

    async def all(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """Post to all. Raises PeerFailed naming each that is there and failed."""
        await self.each(lambda url: self._peers.post(url, path, body, timeout_s))

    async def each(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """What ``ask`` gives for each; all are waited for. Raises as ``all``."""
        answers = await asyncio.gather(*map(ask, self.workers), return_exceptions=True)
        said, failed = dict[str, T](), dict[str, PeerFailed]()
        for url, answer in zip(self.workers, answers, strict=True):
            if isinstance(answer, PeerFailed):
                failed[url] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                said[url] = answer
        if failed:
            await self.part_with(failed)
        return said

    async def drop_lost(self, patience_s: float = _NOTICED_S) -> None:
        """Look whether some are gone."""
        failed = {url: PeerFailed(f"{url} is gone") for url in self.workers}
        gone = await asyncio.gather(*(self._is_lost(each, patience_s) for each in failed.items()))
        self.part(url for url, lost in zip(failed, gone, strict=True) if lost)

    async def part_with(self, failed: Mapping[str, PeerFailed], what: str = "") -> None:
        """Those of ``failed`` that are lost go. Raises PeerFailed, beginning with ``what``, where one is not, or none
        is left."""
        gone = await asyncio.gather(*(self._is_lost(each) for each in failed.items()))
        refusals = [str(failure) for failure, lost in zip(failed.values(), gone, strict=True) if not lost]
        if refusals:
            raise PeerFailed(what + "; ".join(refusals))
        self.part(failed)
        if not self.workers:
            raise PeerFailed(what + "; ".join(map(str, failed.values())))

    def part(self, urls: Iterable[str]) -> None:
        gone = set(urls)
        for url in sorted(gone):
            _log.warning("the worker %s is gone: it will catch up when it comes back", url)
        self.lost |= gone
        self.workers = [url for url in self.workers if url not in gone]

    async def _is_lost(self, failure: tuple[str, PeerFailed], patience_s: float = _NOTICED_S) -> bool:
        """Whether it serves nothing any more. Its data proxy is to look whether its engine is there; an engine that is
        about to die needs a moment more."""
        url, error = failure
        if not self.may_lose or error.status not in _MAYBE_LOST:
            return False
        with suppress(PeerFailed):
            await self._peers.get(url, PAIRS_NOW)
        deadline = time.monotonic() + patience_s
        while await self._peers.is_ready(url) or await self._peers.is_behind(url):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True
