"""Connecting a pair, updating it, taking it apart: each whole, or undone.

An update, in order: check the version; have the training side publish; pause every inference worker; have each take
what was published, and then keep in mind that this is what the model serves; let generation go on. Whatever fails,
generation goes on and the caller hears why. Where only some workers took the new weights, the others are named: their
version tells them apart, and the next update reaches all. A worker that is lost meanwhile fails nothing: when it comes
back it is behind, asks to join, and is brought to what the others have before it serves.

Publishing a folder comes before the pause: workers stand still only while they read it. Once generation goes on, each
worker is compared with what the training side computes over a few tokens: an engine's word is no proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from areal.services.web.errors import ApiError
from areal.services.weight_update.crew import Crew
from areal.services.weight_update.pairs import Mode, Pair, PairState
from areal.services.weight_update.peers import TRANSFER_S, PeerFailed, Peers

_log = logging.getLogger(__name__)
_SERVING = ("ready", "draining")
_WORKERS_S = 180.0  # an engine that is started again may have a large model to read
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True)
class Done:
    """``paused_ms`` is how long generation stood still; ``bytes`` is what each worker took."""

    version: int
    duration_ms: float
    paused_ms: float
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "version": self.version,
            "duration_ms": round(self.duration_ms, 3),
            "paused_ms": round(self.paused_ms, 3),
            "bytes": self.bytes,
        }


class Updater:
    """``address`` is this gateway's own: workers that join find it there."""

    def __init__(self, peers: Peers, address: Callable[[], str | None] = lambda: None) -> None:
        self._peers = peers
        self._address = address

    # -- connecting

    async def connect(self, pair: Pair) -> None:
        """Contact every worker of both sides. Raises ApiError 502; then no worker knows of the pair any more."""
        try:
            async with _named("connect"):
                await self._connect(pair, await self._crew(pair))
        except BaseException:
            await self.disconnect(pair)
            raise

    async def _connect(self, pair: Pair, crew: Crew) -> None:
        offers = await self._peers.post_all(pair.train, "/weights/connect", self._hello(pair, crew.workers))
        pair.settings["offer"] = offers[pair.train[0]]
        await self._introduce(pair, crew)

    async def _introduce(self, pair: Pair, crew: Crew) -> None:
        """Tell inference workers of the pair; each proves that it reaches what the training side offered."""
        about = {**self._hello(pair, crew.workers), "offer": pair.settings["offer"]}
        ranks = {url: rank for rank, url in enumerate(crew.workers, start=1)}
        pair.connected |= set(crew.workers)

        async def hello(url: str) -> None:
            await self._peers.post(url, "/weights/connect", {**about, "rank": ranks[url]})

        if pair.mode is not Mode.XCCL:
            await crew.each(hello)
            return
        # a process group forms when all of its members come
        join = self._peers.post(pair.train[0], "/weights/join", {"pair_name": pair.name})
        await _all_or_none([join, *map(hello, crew.workers)], "join")

    def _hello(self, pair: Pair, workers: Sequence[str]) -> dict[str, Any]:
        return {"pair_name": pair.name, "mode": pair.mode.value, "world_size": len(workers) + 1, **pair.settings}

    async def disconnect(self, pair: Pair, **more: Any) -> list[str]:
        """Tell every worker. What did not answer is returned, and forgotten all the same. ``left``: see the workers'
        ``/weights/disconnect``."""
        body = {"pair_name": pair.name, **more}
        tasks = [
            self._peers.post(url, "/weights/disconnect", body, timeout_s=30.0)
            for url in (*pair.train, *sorted(pair.connected))
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        pair.connected.clear()
        return [str(result) for result in results if isinstance(result, BaseException)]

    # -- updating

    async def update(self, pair: Pair, version: int) -> Done:
        """Raises ApiError 502 when any step failed; generation goes on in every case. The caller holds the lock."""
        began = time.monotonic()
        pair.state = PairState.UPDATING
        try:
            async with _named("update"):
                done = await self._update(pair, version, began)
        except ApiError as error:
            pair.failed(error.message)
            raise
        except BaseException as error:
            pair.failed(f"interrupted: {type(error).__name__}")
            raise
        pair.succeeded(version, done.duration_ms, done.paused_ms, done.bytes)
        return done

    async def _update(self, pair: Pair, version: int, began: float) -> Done:
        order = {"pair_name": pair.name, "version": version}
        crew = await self._crew(pair)
        if pair.mode is Mode.XCCL:
            size, pause = await self._broadcast(pair, crew, order)
        else:
            size, pause = await self._hand_out(pair, crew, order)
        pair.joiners -= set(crew.workers)
        return Done(version, (time.monotonic() - began) * 1e3, pause.lasted_ms, size)

    async def _hand_out(self, pair: Pair, crew: Crew, order: dict[str, Any]) -> tuple[int, _Pause]:
        """Publish a folder, and have each worker of the crew read it."""
        await self._meet(pair, crew)
        published = await self._peers.post(pair.train[0], "/weights/publish", order, TRANSFER_S)
        taken = {**order, "source": published["source"]}
        async with self._paused(crew) as pause:
            await crew.all("/weights/update", taken, TRANSFER_S)
            await crew.all("/weights/commit", {**taken, "gateway": self._address()})
        if (probe := published.get("probe")) is not None:
            await crew.all("/weights/check", {"probe": probe})
        return int(published["bytes"]), pause

    async def _broadcast(self, pair: Pair, crew: Crew, order: dict[str, Any]) -> tuple[int, _Pause]:
        """Where a worker is lost in the middle: once more, in a group of those that are left."""
        before = len(crew.lost)
        try:
            return await self._broadcast_once(pair, crew, order)
        except PeerFailed as error:
            await crew.drop_lost()
            if len(crew.lost) == before or not crew.workers:
                raise
            _log.warning("the process group of %s is formed anew: %s", pair.name, error)
        return await self._broadcast_once(pair, crew, order)

    async def _broadcast_once(self, pair: Pair, crew: Crew, order: dict[str, Any]) -> tuple[int, _Pause]:
        """Both sides at once: one sends while the others receive. When one fails the pair is taken apart, or the others
        would wait for it; then the next one builds the process group anew."""
        await self._meet(pair, crew)
        manifest = await self._peers.post(pair.train[0], "/weights/manifest", order, TRANSFER_S)
        taken = {**order, "source": manifest["source"]}
        async with self._paused(crew) as pause:
            if crew.lost.intersection(pair.connected):
                raise PeerFailed("a worker of the process group is gone")
            calls = [self._peers.post(pair.train[0], "/weights/publish", order, TRANSFER_S)]
            calls += [self._peers.post(url, "/weights/update", taken, TRANSFER_S) for url in crew.workers]
            try:
                await _all_or_none(calls, "broadcast")
            except BaseException:
                await self.disconnect(pair)
                raise
            await crew.all("/weights/commit", {**taken, "gateway": self._address()})
        if (probe := manifest.get("probe")) is not None:
            await crew.all("/weights/check", {"probe": probe})
        return int(manifest["bytes"]), pause

    # -- joining

    async def join(self, pair: Pair, worker: str) -> None:
        """Bring a worker that has started to the version that the others serve. The caller holds the lock. Raises
        ApiError 502, 409 where nothing is published yet."""
        if worker not in pair.joiners:
            return  # an update took it along
        if pair.version < 0:
            raise ApiError(409, f"pair {pair.name!r} has published nothing yet", code="nothing_published")
        if pair.mode is Mode.XCCL:  # a process group is of all
            await self.update(pair, pair.version)
            return
        async with _named("join"):
            order = {"pair_name": pair.name, "version": pair.version}
            await self._hand_out(pair, Crew(self._peers, [worker], may_lose=False), order)

    # -- who takes part

    async def _meet(self, pair: Pair, crew: Crew) -> None:
        """Introduce those that do not know of the pair: they joined, or were started again. One that left is no longer
        spoken to. A process group is built anew."""
        said = await crew.each(lambda url: self._peers.get(url, "/weights/pairs"))
        strangers = [url for url in crew.workers if pair.name not in said[url]["pairs"]]
        if pair.mode is Mode.XCCL:
            if strangers or set(crew.workers) != pair.connected:
                await crew.drop_lost(patience_s=0.0)  # a group waits long for a member that does not come
                await self.disconnect(pair)
                await self._connect(pair, crew)
        elif strangers:
            newcomers = Crew(self._peers, strangers, may_lose=crew.may_lose)
            await self._introduce(pair, newcomers)
            crew.part(newcomers.lost)

    async def _crew(self, pair: Pair) -> Crew:
        if pair.inference_gateway is None:
            return Crew(self._peers, pair.inference, may_lose=False)
        deadline = time.monotonic() + _WORKERS_S
        while not (found := await self._known(pair, pair.inference_gateway)):
            if time.monotonic() > deadline:
                raise PeerFailed(f"model {pair.model!r} at {pair.inference_gateway} has no worker that is ready")
            await asyncio.sleep(_LOOK_AGAIN_S)
        pair.connected &= set(found)
        return Crew(self._peers, found, may_lose=True)

    async def _known(self, pair: Pair, gateway: str) -> list[str]:
        """Who serves the model, and who would if it had the weights."""
        known = (await self._peers.get(gateway, "/workers"))["workers"]
        ours = {worker["worker_addr"]: worker["state"] for worker in known if worker["model"] == pair.model}
        away = [url for url, state in ours.items() if state not in _SERVING and url not in pair.joiners]
        behind = await asyncio.gather(*map(self._peers.is_behind, away))
        late = [url for url, is_behind in zip(away, behind, strict=True) if is_behind]
        return list(dict.fromkeys([*(url for url in ours if ours[url] in _SERVING), *late, *sorted(pair.joiners)]))

    @contextlib.asynccontextmanager
    async def _paused(self, crew: Crew) -> AsyncIterator[_Pause]:
        """Nothing is generated inside. Generation goes on afterwards, on every worker that answers, also where the
        pause itself failed on some."""
        pause, workers = _Pause(), tuple(crew.workers)
        try:
            await crew.all("/pause_generation", {})
            pause.began = time.monotonic()
            yield pause
        finally:
            failed = await asyncio.shield(asyncio.create_task(self._go_on(workers), name="continue-generation"))
            pause.lasted_ms = (time.monotonic() - pause.began) * 1e3 if pause.began else 0.0
        if held := {url: failure for url, failure in failed.items() if url not in crew.lost}:
            await crew.part_with(held, "generation did not go on: ")

    async def _go_on(self, workers: Sequence[str]) -> dict[str, PeerFailed]:
        results = await asyncio.gather(
            *(self._peers.post(url, "/continue_generation") for url in workers), return_exceptions=True
        )
        failed = {url: result for url, result in zip(workers, results, strict=True) if isinstance(result, PeerFailed)}
        for failure in failed.values():
            _log.error("generation did not go on: %s", failure)
        return failed


@dataclass
class _Pause:
    began: float = 0.0
    lasted_ms: float = 0.0


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, object]], name: str) -> None:
    """The first failure ends them all: in a process group each waits for the others."""
    tasks = {asyncio.create_task(call, name=name) for call in calls}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _named(what: str) -> AsyncIterator[None]:
    """A worker's failure as the caller of the gateway meets it."""
    try:
        yield
    except PeerFailed as error:
        raise ApiError(502, f"{what} failed: {error}", code=f"{what}_failed") from error
