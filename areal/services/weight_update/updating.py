"""Connecting a pair, updating it, taking it apart: each whole, or undone.

An update, in order: check the version; have the training side publish; pause every inference worker; have each take
what was published; let generation go on. Whatever fails, generation goes on and the caller hears why. Where only some
workers took the new weights, the others are named: their version tells them apart, and the next update reaches all.

Publishing a folder comes before the pause: workers stand still only while they read it. Once generation goes on, each
worker is compared with what the training side computes over a few tokens: an engine's word is no proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from areal.services.web.errors import ApiError
from areal.services.weight_update.pairs import Mode, Pair, PairState
from areal.services.weight_update.peers import TRANSFER_S, PeerFailed, Peers

_log = logging.getLogger(__name__)


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
    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    # -- connecting

    async def connect(self, pair: Pair) -> None:
        """Contact every worker of both sides. Raises ApiError 502; then no worker knows of the pair any more."""
        try:
            async with _named("connect"):
                workers = await self._inference_workers(pair)
                offers = await self._peers.post_all(pair.train, "/weights/connect", self._hello(pair, workers))
                offer = offers[pair.train[0]]
                pair.settings["offer"] = offer
                await self._introduce(pair, workers)
        except BaseException:
            await self.disconnect(pair)
            raise

    async def _introduce(self, pair: Pair, workers: Sequence[str]) -> None:
        """Tell inference workers of the pair; each proves that it reaches what the training side offered."""
        offer = pair.settings["offer"]
        hellos = [
            self._peers.post(url, "/weights/connect", {**self._hello(pair, workers), "offer": offer, "rank": rank})
            for rank, url in enumerate(workers, start=1)
        ]
        pair.connected |= set(workers)
        if pair.mode is Mode.XCCL:  # a process group forms when all of its members come
            hellos.append(self._peers.post(pair.train[0], "/weights/join", {"pair_name": pair.name}))
        _raise_failures(await asyncio.gather(*hellos, return_exceptions=True))

    def _hello(self, pair: Pair, workers: Sequence[str]) -> dict[str, Any]:
        return {"pair_name": pair.name, "mode": pair.mode.value, "world_size": len(workers) + 1, **pair.settings}

    async def disconnect(self, pair: Pair) -> list[str]:
        """Tell every worker. What did not answer is returned, and forgotten all the same."""
        body = {"pair_name": pair.name}
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
        workers = await self._inference_workers(pair)
        await self._meet_newcomers(pair, workers)
        order = {"pair_name": pair.name, "version": version}
        if pair.mode is Mode.XCCL:
            async with self._paused(workers) as pause:
                size = await self._broadcast(pair, workers, order)
        else:
            published = await self._peers.post(pair.train[0], "/weights/publish", order, TRANSFER_S)
            async with self._paused(workers) as pause:
                taken = {**order, "source": published["source"]}
                await self._peers.post_all(workers, "/weights/update", taken, TRANSFER_S)
            size = int(published["bytes"])
            if (probe := published.get("probe")) is not None:
                await self._peers.post_all(workers, "/weights/check", {"probe": probe})
        return Done(version, (time.monotonic() - began) * 1e3, pause.lasted_ms, size)

    async def _broadcast(self, pair: Pair, workers: Sequence[str], order: dict[str, Any]) -> int:
        """Both sides at once: one sends while the others receive. When one fails the pair is taken apart, or the others
        would wait for it; the next update builds the process group anew."""
        manifest = await self._peers.post(pair.train[0], "/weights/manifest", order, TRANSFER_S)
        taken = {**order, "source": manifest["source"]}
        calls = [self._peers.post(pair.train[0], "/weights/publish", order, TRANSFER_S)]
        calls += [self._peers.post(url, "/weights/update", taken, TRANSFER_S) for url in workers]
        tasks = {asyncio.create_task(call, name="broadcast") for call in calls}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except BaseException:
            for task in tasks:
                task.cancel()
            await self.disconnect(pair)
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return int(manifest["bytes"])

    async def _meet_newcomers(self, pair: Pair, workers: Sequence[str]) -> None:
        """A worker that joined since; one that left is no longer spoken to. A process group is built anew."""
        newcomers = [url for url in workers if url not in pair.connected]
        if pair.mode is Mode.XCCL and (newcomers or set(workers) != pair.connected):
            await self.disconnect(pair)
            await self.connect(pair)
            return
        pair.connected &= set(workers)
        if newcomers:
            await self._introduce(pair, newcomers)

    async def _inference_workers(self, pair: Pair) -> list[str]:
        if pair.inference_gateway is None:
            return list(pair.inference)
        known = (await self._peers.get(pair.inference_gateway, "/workers"))["workers"]
        alive = [
            worker["worker_addr"]
            for worker in known
            if worker["model"] == pair.model and worker["state"] in ("ready", "draining")
        ]
        if not alive:
            raise PeerFailed(f"model {pair.model!r} at {pair.inference_gateway} has no worker that is ready")
        return list(dict.fromkeys(alive))

    @contextlib.asynccontextmanager
    async def _paused(self, workers: Sequence[str]) -> AsyncIterator[_Pause]:
        """Nothing is generated inside. Generation goes on afterwards, on every worker that answers, also where the
        pause itself failed on some."""
        pause = _Pause()
        try:
            await self._peers.post_all(workers, "/pause_generation", {})
            pause.began = time.monotonic()
            yield pause
        finally:
            failed = await asyncio.shield(asyncio.create_task(self._go_on(workers), name="continue-generation"))
            pause.lasted_ms = (time.monotonic() - pause.began) * 1e3 if pause.began else 0.0
        if failed:
            raise PeerFailed("generation did not go on: " + "; ".join(failed))

    async def _go_on(self, workers: Sequence[str]) -> list[str]:
        results = await asyncio.gather(
            *(self._peers.post(url, "/continue_generation") for url in workers), return_exceptions=True
        )
        failed = [str(result) for result in results if isinstance(result, BaseException)]
        for failure in failed:
            _log.error("generation did not go on: %s", failure)
        return failed


@dataclass
class _Pause:
    began: float = 0.0
    lasted_ms: float = 0.0


def _raise_failures(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PeerFailed):
            raise result
    failures = [str(result) for result in results if isinstance(result, PeerFailed)]
    if failures:
        raise PeerFailed("; ".join(failures))


@contextlib.asynccontextmanager
async def _named(what: str) -> AsyncIterator[None]:
    """A worker's failure as the caller of the gateway meets it."""
    try:
        yield
    except PeerFailed as error:
        raise ApiError(502, f"{what} failed: {error}", code=f"{what}_failed") from error
