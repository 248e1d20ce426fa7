"""Connecting a pair, updating it, taking it apart: each whole, or undone.

An update, in order: check the version; have the training side publish; have every inference worker make what was
published ready, while it generates; have each swap it in, for which it stands still; compare each with what the
training side computes over a few tokens (an engine's word is no proof); have each keep in mind that this is what the
model serves. What a worker refuses it refuses before any has swapped. Whatever fails, generation goes on and the caller
hears why; no worker waits for a word of ours to go on. Where only some workers took the new weights, those go back to
the old ones and serve nothing until they have them: no two versions are served. A worker that is lost meanwhile
fails nothing: when it comes back it is behind, asks to join, and is brought to what the others have before it serves.
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
from areal.services.weight_update.crew import PAIRS_NOW, Crew
from areal.services.weight_update.pairs import Mode, Pair, PairState
from areal.services.weight_update.peers import TRANSFER_S, PeerFailed, Peers

_log = logging.getLogger(__name__)
_SERVING = ("ready", "draining")
_WORKERS_S = 180.0  # an engine that is started again may have a large model to read
_LOOK_AGAIN_S = 0.2
_LOOK_S = 5.0
_AWAY = (None, 502, 503)  # no answer; the gateway has none of its router's


@dataclass(frozen=True)
class Done:
    """``paused_ms`` is how long generation stood still; ``bytes`` is what each worker took."""

    version: int
    duration_ms: float
    paused_ms: float
    bytes: int

    @classmethod
    def of(cls, pair: Pair) -> Done:
        """Its last update."""
        return cls(pair.version, pair.duration_ms or 0.0, pair.paused_ms or 0.0, pair.bytes or 0)

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
        if pair.mode is Mode.XCCL:
            pair.settings["group_form"] = await self._group_form(crew)
        offers = await self._peers.post_all(pair.train, "/weights/connect", self._hello(pair, crew.workers))
        pair.settings["offer"] = offers[pair.train[0]]
        await self._introduce(pair, crew)

    async def _group_form(self, crew: Crew) -> str:
        """Engines of one process group make it in one way."""
        said = await crew.each(lambda url: self._peers.get(url, "/weights/pairs"))
        forms = {url: answer.get("group_form") for url, answer in said.items()}
        if unable := [url for url, form in forms.items() if not isinstance(form, str)]:
            raise PeerFailed(f"the engine behind {unable[0]} takes no weights by xccl", 400)
        if len(set(forms.values())) > 1:
            raise PeerFailed(f"engines of several kinds do not join one process group: {forms}", 400)
        return str(next(iter(forms.values())))

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
        about = {"pair_name": pair.name, "mode": pair.mode.value, "world_size": len(workers) + 1, **pair.settings}
        return {**about, "gateway": self._address()}

    async def disconnect(self, pair: Pair, **more: Any) -> list[str]:
        """Tell every worker. What did not answer is returned, and forgotten all the same. ``left``: see the workers'
        ``/weights/disconnect``."""
        body = {"pair_name": pair.name, "gateway": self._address(), **more}
        tasks = [
            self._peers.post(url, "/weights/disconnect", body, self._peers.parting_s)
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
        carry = self._broadcast if pair.mode is Mode.XCCL else self._hand_out
        while True:
            crew = await self._crew(pair)
            workers = tuple(crew.workers)
            try:
                taken = await carry(pair, crew, order)
                break
            except PeerFailed as error:
                error = await self._take_back(pair, workers, order, error)
                if crew.workers or time.monotonic() - began > _WORKERS_S:
                    raise error from None
                _log.warning("no worker of %s is left, one is waited for: %s", pair.name, error)
                await asyncio.sleep(_LOOK_AGAIN_S)
        pair.joiners -= set(crew.workers)
        return Done(version, (time.monotonic() - began) * 1e3, taken.paused_ms, taken.bytes)

    async def _take_back(
        self, pair: Pair, workers: Sequence[str], order: dict[str, Any], error: PeerFailed
    ) -> PeerFailed:
        """Have the workers that took this version go back: the error, with their names."""
        tell = (self._peers.post(url, "/weights/revert", order, self._peers.parting_s) for url in workers)
        answers = await asyncio.gather(*tell, return_exceptions=True)
        back = [
            url for url, said in zip(workers, answers, strict=True) if isinstance(said, dict) and said.get("reverted")
        ]
        if not back:
            return error
        old = f"version {pair.version}" if pair.version >= 0 else "the weights of their start"
        return PeerFailed(f"{error}; go back to {old}, and serve nothing until they have it: {', '.join(back)}")

    async def _hand_out(self, pair: Pair, crew: Crew, order: dict[str, Any]) -> _Taken:
        """Publish a folder, and have each worker of the crew take it."""
        await self._meet(pair, crew)
        published = await self._peers.post(pair.train[0], "/weights/publish", order, TRANSFER_S)
        taken = {**order, "source": published["source"]}
        await crew.all("/weights/prepare", taken, TRANSFER_S)
        return await self._swap(crew, taken, published)

    async def _broadcast(self, pair: Pair, crew: Crew, order: dict[str, Any]) -> _Taken:
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

    async def _broadcast_once(self, pair: Pair, crew: Crew, order: dict[str, Any]) -> _Taken:
        """Both sides at once: one sends while the others receive. When one fails the pair is taken apart, or the others
        would wait for it; then the next one builds the process group anew."""
        await self._meet(pair, crew)
        manifest = await self._peers.post(pair.train[0], "/weights/manifest", order, TRANSFER_S)
        taken = {**order, "source": manifest["source"]}
        await crew.all("/weights/prepare", {**taken, "verify": True})
        calls = [self._peers.post(pair.train[0], "/weights/publish", order, TRANSFER_S)]
        calls += [self._peers.post(url, "/weights/prepare", taken, TRANSFER_S) for url in crew.workers]
        try:
            await _all_or_none(calls, "broadcast")
        except BaseException:
            await self.disconnect(pair)
            raise
        return await self._swap(crew, taken, manifest)

    async def _swap(self, crew: Crew, taken: dict[str, Any], published: dict[str, Any]) -> _Taken:
        """All have it ready: each stands still for as long as its swap takes."""
        said = await crew.each(lambda url: self._peers.post(url, "/weights/update", taken, TRANSFER_S))
        if (probe := published.get("probe")) is not None:
            await crew.all("/weights/check", {"probe": probe})
        await crew.all("/weights/commit", {**taken, "gateway": self._address()})
        pauses = [float(answer["paused_ms"]) for answer in said.values()]
        return _Taken(int(published["bytes"]), max(pauses, default=0.0))

    async def sync(self, pair: Pair) -> Done:
        """Carry over what the training side has staged, which may be newer than what it has asked us to: then its
        update, which waits for the lock, is done too. The caller holds the lock. Raises ApiError 502, 409 where nothing
        was staged yet."""
        served = pair.version
        async with _named("sync"):
            version = await self._staged(pair)
        while True:
            try:
                done = await self.update(pair, version)
                pair.ahead = version if version > served else None
                return done
            except ApiError:
                async with _named("sync"):
                    newer = await self._staged(pair)
                if newer == version:
                    raise
                version = newer  # staged meanwhile; there is no next one before this one was carried over

    async def _staged(self, pair: Pair) -> int:
        said = (await self._peers.post(pair.train[0], "/weights/staged", {"pair_name": pair.name}))["version"]
        version = max(pair.version, said if isinstance(said, int) else -1)
        if version < 0:
            raise ApiError(409, f"pair {pair.name!r} has published nothing yet", code="nothing_published")
        return version

    # -- joining

    async def join(self, pair: Pair, worker: str) -> None:
        """Bring a worker that has started to the version that the others serve. The caller holds the lock. Raises
        ApiError 502, 409 where nothing is published yet."""
        if worker not in pair.joiners:
            return  # an update took it along
        if pair.version < 0:
            raise ApiError(409, f"pair {pair.name!r} has published nothing yet", code="nothing_published")
        if pair.mode is Mode.XCCL:  # a process group is of all
            await self.sync(pair)
            return
        async with _named("join"):
            order = {"pair_name": pair.name, "version": pair.version}
            try:
                await self._hand_out(pair, Crew(self._peers, [worker], may_lose=False), order)
            except PeerFailed as error:
                raise await self._take_back(pair, [worker], order, error) from None

    # -- who takes part

    async def present(self, pair: Pair) -> list[dict[str, Any]] | None:
        """Who serves the model now, and which version; None where that is not known: a gateway that does not answer."""
        if pair.inference_gateway is None:
            return list(await asyncio.gather(*map(self._seen, pair.inference)))
        try:
            known = (await self._peers.get(pair.inference_gateway, "/workers", _LOOK_S))["workers"]
        except PeerFailed:
            return None
        return [
            {"url": worker["worker_addr"], "state": worker["state"], "version": worker.get("version")}
            for worker in known
            if worker["model"] == pair.model
        ]

    async def _seen(self, url: str) -> dict[str, Any]:
        """A fixed worker, as it says itself."""
        try:
            status, about = await self._peers.probe(url)
        except PeerFailed:
            return {"url": url, "state": None, "version": None}
        return {"url": url, "state": "ready" if status == 200 else "not ready", "version": about.get("version")}

    async def _meet(self, pair: Pair, crew: Crew) -> None:
        """Introduce those that do not know of the pair: they joined, or were started again. One that left is no longer
        spoken to. A process group is built anew."""
        path = PAIRS_NOW if pair.mode is Mode.XCCL else "/weights/pairs"  # a dead member would be missed when they send
        said = await crew.each(lambda url: self._peers.get(url, path))
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
        while not (found := await self._found(pair, pair.inference_gateway, deadline)):
            if time.monotonic() > deadline:
                raise PeerFailed(f"model {pair.model!r} at {pair.inference_gateway} has no worker that is ready")
            await asyncio.sleep(_LOOK_AGAIN_S)
        if pair.mode is not Mode.XCCL:  # who left a process group is in it until it is formed anew
            pair.connected &= set(found)
        return Crew(self._peers, found, may_lose=True)

    async def _found(self, pair: Pair, gateway: str, deadline: float) -> list[str]:
        """Nobody yet where the gateway, or the router behind it, is being started again. Raises PeerFailed for a
        gateway that refuses us, and after the ``deadline``."""
        try:
            return await self._known(pair, gateway)
        except PeerFailed as error:
            if error.status not in _AWAY or time.monotonic() > deadline:
                raise
            return []

    async def _known(self, pair: Pair, gateway: str) -> list[str]:
        """Who serves the model, and who would if it had the weights."""
        known = (await self._peers.get(gateway, "/workers"))["workers"]
        ours = {worker["worker_addr"]: worker["state"] for worker in known if worker["model"] == pair.model}
        away = [url for url, state in ours.items() if state not in _SERVING and url not in pair.joiners]
        behind = await asyncio.gather(*map(self._peers.is_behind, away))
        late = [url for url, is_behind in zip(away, behind, strict=True) if is_behind]
        return list(dict.fromkeys([*(url for url in ours if ours[url] in _SERVING), *late, *sorted(pair.joiners)]))


@dataclass(frozen=True)
class _Taken:
    """``paused_ms`` is of the worker that stood still longest."""

    bytes: int
    paused_ms: float


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
