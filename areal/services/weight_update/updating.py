"""Connects, updates and disconnects a pair. Each operation completes, or is undone.

An update has these steps: check the version; the training side publishes; every inference worker prepares the published
weights while it generates; each worker pauses and swaps them in; each worker's log-probabilities of a few tokens are
compared with the training side's, because an engine's own report proves nothing; each worker records the version that
the model serves. Workers serve different versions only between the first swap and the last, and each token is recorded
with its own.

A worker can refuse only before any worker has swapped. After a failure workers continue generation without a request
from here, and the caller gets the reason. If only some workers took the new weights, those return to the old ones and
do not serve until they have them. The loss of a worker does not fail an update: when it comes back it is behind,
requests to join, and gets the served version before it serves. If a worker restarted between two steps, and so refuses
the second, the update is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import orjson

from areal.dataclasses import dataclass, field, replace
from areal.http import tracing
from areal.http.client import CallFailed, HttpClient
from areal.services.http.errors import ApiError
from areal.services.weight_update.pairs import Mode, Pair, PairState, UpdateHistory
from areal.wire.bodies import CheckWeights, ConnectPair, PublishedVersion, UpdateResult, WeightOrder
from areal.wire.routing import CORDONED, DRAINING, READY

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CONTROL_S = 180.0  # a pause waits for a step of the engine, a prepared folder for its disk
_TRANSFER_S = 1800.0
_PARTING_S = 30.0
_PROBE_S = 5.0
_WORKERS_S = 180.0  # a restarting engine may have to read a large model
_DEATH_S = 3.0  # an engine that still answers this long after a failed call is alive
_POLL_S = 0.1
_UNAVAILABLE = (None, 502, 503)  # no response; a component behind the worker failed, or is unavailable
_PAIRS_NOW = "/weights/pairs?look"  # a data proxy first probes its engine
_SERVING = (READY, CORDONED, DRAINING)


class WorkerFailed(Exception):
    """A worker refused, failed, or did not respond (``status`` is None); the message names the worker."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WorkerClient:
    """HTTP client for workers. ``control_s``: the default timeout of a call, in seconds."""

    def __init__(self, http: HttpClient, headers: Mapping[str, str], control_s: float = _CONTROL_S) -> None:
        self._http = http
        self._control_s = control_s
        self.parting_s = min(control_s, _PARTING_S)
        self._headers = headers

    async def post(self, url: str, path: str, body: object = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the worker's response. ``body``: JSON, or a dataclass of ``wire.bodies``. Raises WorkerFailed."""
        return await self._request("POST", url, path, orjson.dumps(body or {}), timeout_s)

    async def get(self, url: str, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._request("GET", url, path, b"", timeout_s)

    async def probe(self, url: str) -> tuple[int, dict[str, Any]]:
        """Return the status and body of /ready. Raises WorkerFailed if the worker does not respond."""
        try:
            reply = await self._http.fetch("GET", url, "/ready", headers=self._headers, timeout_s=_PROBE_S)
        except (CallFailed, TimeoutError) as error:
            raise WorkerFailed(f"{url} does not answer: {str(error) or type(error).__name__}") from error
        return reply.status, reply.object()

    async def is_ready(self, url: str) -> bool:
        with suppress(WorkerFailed):
            return (await self.probe(url))[0] == 200
        return False

    async def is_behind(self, url: str) -> bool:
        """Return whether the worker would serve if it had the published version."""
        with suppress(WorkerFailed):
            return (await self.probe(url))[1].get("awaits_version") is not None
        return False

    async def _request(self, method: str, url: str, path: str, body: bytes, timeout_s: float | None) -> dict[str, Any]:
        timeout_s = self._control_s if timeout_s is None else timeout_s
        try:
            reply = await self._http.fetch(method, url, path, headers=self._headers, body=body, timeout_s=timeout_s)
        except (CallFailed, TimeoutError) as error:
            raise WorkerFailed(f"{url}{path} does not answer: {str(error) or type(error).__name__}") from error
        if reply.status // 100 != 2:
            reason = reply.error().get("message", "no reason given")
            raise WorkerFailed(f"{url}{path} answered {reply.status}: {reason}", reply.status)
        return reply.object()


class WorkerSet:
    """The workers of one operation. ``urls``: those that still take part. ``lost``: those that failed during it.
    ``incarnations``: those of the workers when the operation began, which change with a restart.

    ``may_lose``: a router manages the workers. Then the loss of one does not fail the operation: the router sends it no
    requests, and when it comes back it loads the published weights before it serves. A live worker that refuses fails
    the operation. So does the loss of a fixed worker, because nothing would restart it.
    """

    def __init__(self, client: WorkerClient, urls: Iterable[str], *, may_lose: bool) -> None:
        self._client = client
        self.may_lose = may_lose
        self.urls = list(urls)
        self.lost: set[str] = set()
        self.incarnations: dict[str, object] = {}
        self.pauses: dict[str, float | None] = {}  # ms, by worker that has swapped

    async def all(self, path: str, body: object, timeout_s: float | None = None) -> None:
        """Post to every worker. Raises WorkerFailed with every live worker that failed, or if all are lost."""
        await self.each(lambda url: self._client.post(url, path, body, timeout_s))

    async def each(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """Return the result of ``ask`` for each worker, once all have finished. Drops lost workers. Raises WorkerFailed
        as ``all`` does."""
        answers = await asyncio.gather(*map(ask, self.urls), return_exceptions=True)
        reply, failed = dict[str, T](), dict[str, WorkerFailed]()
        for url, answer in zip(self.urls, answers, strict=True):
            if isinstance(answer, WorkerFailed):
                failed[url] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                reply[url] = answer
        if failed:
            # Lost workers are dropped; a failed worker that is alive refuses.
            lost = await self._find_lost(failed)
            if refusals := [str(failure) for url, failure in failed.items() if url not in lost]:
                raise WorkerFailed("; ".join(refusals))
            self.drop(failed)
            if not self.urls:
                raise WorkerFailed("; ".join(map(str, failed.values())))
        return reply

    async def drop_lost(self, patience_s: float = _DEATH_S) -> None:
        """Probe every worker and drop the lost ones."""
        self.drop(await self._find_lost({url: WorkerFailed(f"{url} is gone") for url in self.urls}, patience_s))

    async def restarted(self) -> list[str]:
        """Return the workers that have restarted since the operation began, so that they lost what they had prepared,
        and that can take part again."""
        known = {url: self.incarnations[url] for url in self.urls if self.incarnations.get(url) is not None}
        timeout_s = min(self._client.parting_s, _PROBE_S)
        calls = (self._client.get(url, _PAIRS_NOW, timeout_s) for url in known)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        now = {url: reply for url, reply in zip(known, answers, strict=True) if isinstance(reply, dict)}
        changed = [url for url, reply in now.items() if reply.get("incarnation") != known[url]]
        return [url for url in changed if await self._client.is_ready(url) or await self._client.is_behind(url)]

    def drop(self, urls: Iterable[str]) -> None:
        lost = set(urls)
        for url in sorted(lost):
            _log.warning("the worker %s is gone: it will catch up when it comes back", url)
        self.lost |= lost
        self.urls = [url for url in self.urls if url not in lost]

    async def _find_lost(self, failed: Mapping[str, WorkerFailed], patience_s: float = _DEATH_S) -> set[str]:
        """Return the failed workers that no longer serve."""
        checks = [self._is_lost(url, error, patience_s) for url, error in failed.items()]
        return {url for url, lost in zip(failed, await asyncio.gather(*checks), strict=True) if lost}

    async def _is_lost(self, url: str, error: WorkerFailed, patience_s: float) -> bool:
        """Make the worker's data proxy probe the engine, and give a dying engine ``patience_s`` seconds to exit."""
        if not self.may_lose or error.status not in _UNAVAILABLE:
            return False
        with suppress(WorkerFailed):
            await self._client.get(url, _PAIRS_NOW)
        deadline = time.monotonic() + patience_s
        while await self._client.is_ready(url) or await self._client.is_behind(url):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True


@dataclass(eq=False)
class Updater:
    """The operations on pairs. ``address`` returns this gateway's own address, to which workers send join requests.
    ``writer``: who trains the weights. ``history``: where each update is recorded."""

    _client: WorkerClient
    _address: Callable[[], str | None] = lambda: None
    _writer: str | None = None
    _history: UpdateHistory = field(default_factory=UpdateHistory)

    async def connect(self, pair: Pair) -> None:
        """Connect every worker of both sides. On failure, disconnect all of them and raise ApiError 502."""
        try:
            async with _as_api_error("connect"):
                await self._connect(pair, await self._participants(pair))
        except BaseException:
            await self.disconnect(pair)
            raise

    async def _connect(self, pair: Pair, workers: WorkerSet) -> None:
        if pair.mode is Mode.XCCL:
            # All engines of a process group must form it in the same way.
            reply = await workers.each(lambda url: self._client.get(url, "/weights/pairs"))
            forms = {url: answer.get("group_form") for url, answer in reply.items()}
            if unable := [url for url, form in forms.items() if not isinstance(form, str)]:
                raise WorkerFailed(f"the engine behind {unable[0]} does not support weights by xccl", 400)
            if len(set(forms.values())) > 1:
                raise WorkerFailed(f"engines of several kinds cannot join the same process group: {forms}", 400)
            pair.settings["group_form"] = str(next(iter(forms.values())))
        about = {"pair_name": pair.name, "mode": pair.mode.value, "world_size": len(workers.urls) + 1, **pair.settings}
        body = {**about, "gateway": self._address()}
        trainers = WorkerSet(self._client, pair.train, may_lose=False)
        offers = await trainers.each(lambda url: self._client.post(url, "/weights/connect", body))
        pair.settings["offer"] = offers[pair.train[0]]
        await self._connect_workers(pair, workers)

    async def _connect_workers(self, pair: Pair, workers: WorkerSet) -> None:
        """Connect inference workers to the pair. Each worker verifies that it reaches what the training side offers."""
        about = ConnectPair(
            pair_name=pair.name, mode=pair.mode.value, offer=pair.settings["offer"], gateway=self._address()
        )
        ranks = {url: rank for rank, url in enumerate(workers.urls, start=1)}
        pair.connected |= set(workers.urls)

        async def hello(url: str) -> None:
            await self._client.post(url, "/weights/connect", replace(about, rank=ranks[url]))

        if pair.mode is not Mode.XCCL:
            await workers.each(hello)
            return
        # A process group forms when all its members join.
        join = self._client.post(pair.train[0], "/weights/join", {"pair_name": pair.name})
        await _all_or_none([join, *map(hello, workers.urls)], "join")

    async def disconnect(self, pair: Pair, **more: Any) -> list[str]:
        """Disconnect every worker. Returns the failures of those that do not respond. ``more``: further fields of the
        workers' ``/weights/disconnect``, such as ``left``."""
        body = {"pair_name": pair.name, "gateway": self._address(), **more}
        tasks = [
            self._client.post(url, "/weights/disconnect", body, self._client.parting_s)
            for url in (*pair.train, *sorted(pair.connected))
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        pair.connected.clear()
        return [str(result) for result in results if isinstance(result, BaseException)]

    async def update(self, pair: Pair, version: int, published: PublishedVersion | None = None) -> UpdateResult:
        """Update the pair to ``version``. ``published``: what the trainer has staged, if it reported it. Raises
        ApiError 502 if a step failed; generation continues in every case. The caller holds the lock."""
        began, at = time.monotonic(), time.time()
        pair.state = PairState.UPDATING
        replicas: dict[str, float | None] = {}
        about = {"areal.pair": pair.name, "areal.weight_version": version, "areal.transport": pair.mode.value}
        try:
            with tracing.span("weight_update", about) as span:
                async with _as_api_error("update"):
                    done = await self._update(pair, version, published, began, replicas)
                span.set({"areal.bytes": done.bytes, "areal.pause_ms": done.paused_ms, "areal.replicas": len(replicas)})
        except BaseException as error:
            reason = error.message if isinstance(error, ApiError) else f"interrupted: {type(error).__name__}"
            pair.failed(reason)
            self._history.note(pair, version, at, replicas=dict.fromkeys(replicas), error=reason)
            raise
        pair.succeeded(done)
        self._history.note(pair, version, at, replicas=replicas, size=done.bytes)
        return done

    async def _update(
        self,
        pair: Pair,
        version: int,
        published: PublishedVersion | None,
        began: float,
        replicas: dict[str, float | None],
    ) -> UpdateResult:
        """Update the pair. ``replicas`` is filled with the workers that took part and their pauses."""
        order = WeightOrder(pair_name=pair.name, version=version)
        carry = self._broadcast if pair.mode is Mode.XCCL else self._publish
        while True:
            workers = await self._participants(pair)
            urls = tuple(workers.urls)
            replicas.clear()
            replicas.update(dict.fromkeys(urls))
            try:
                size, paused_ms = await carry(pair, workers, order, published)
                break
            except WorkerFailed as error:
                restarted = await workers.restarted()
                error = await self._revert(pair, urls, order, error)
                if (workers.urls and not restarted) or time.monotonic() - began > _WORKERS_S:
                    raise error from None
                why = f"{', '.join(restarted)} restarted" if restarted else "no worker is left, one is waited for"
                _log.warning("the update of %s is repeated: %s: %s", pair.name, why, error)
                await asyncio.sleep(_POLL_S)
        pair.joining_workers -= set(workers.urls)
        pair.incarnations = workers.incarnations
        replicas.update(workers.pauses)
        return UpdateResult(version, round((time.monotonic() - began) * 1e3, 3), round(paused_ms, 3), size)

    async def _revert(
        self, pair: Pair, workers: Sequence[str], order: WeightOrder, error: WorkerFailed
    ) -> WorkerFailed:
        """Make the workers that took this version return to the old one. Return the error with their names added."""
        reverts = (self._client.post(url, "/weights/revert", order, self._client.parting_s) for url in workers)
        answers = await asyncio.gather(*reverts, return_exceptions=True)
        back = [
            url
            for url, reply in zip(workers, answers, strict=True)
            if isinstance(reply, dict) and reply.get("reverted")
        ]
        if not back:
            return error
        await self._until_withdrawn(pair, back, order.version)
        old = f"version {pair.version}" if pair.version >= 0 else "the weights of their start"
        return WorkerFailed(
            f"{error}; these workers return to {old}, and serve nothing until they have it: {', '.join(back)}"
        )

    async def _until_withdrawn(self, pair: Pair, workers: Sequence[str], version: int) -> None:
        """Wait until the router knows that these workers do not serve ``version``, as long as a probe takes."""
        until = time.monotonic() + _DEATH_S
        while pair.inference_gateway is not None and time.monotonic() < until:
            try:
                known = (await self._client.get(pair.inference_gateway, "/workers", _PROBE_S))["workers"]
            except WorkerFailed:
                return
            serving = [each for each in known if each["worker_addr"] in workers and each["state"] in _SERVING]
            if all(each.get("version") != version for each in serving):
                return
            await asyncio.sleep(_POLL_S)

    async def _publish(
        self, pair: Pair, workers: WorkerSet, order: WeightOrder, published: PublishedVersion | None = None
    ) -> tuple[int, float]:
        """Publish a folder, and make each worker prepare it and swap it in. Returns as ``_swap`` does."""
        paused_ms = None if published is None else await self._replace_at_once(pair, workers, order, published)
        if published is not None and paused_ms is not None:
            return int(published["bytes"]), paused_ms
        await self._connect_newcomers(pair, workers)
        staged: Any = published or await self._client.post(pair.train[0], "/weights/publish", order, _TRANSFER_S)
        taken = replace(order, source=staged["source"])
        await workers.all("/weights/prepare", taken, _TRANSFER_S)
        return await self._swap(workers, taken, staged)

    async def _replace_at_once(
        self, pair: Pair, workers: WorkerSet, order: WeightOrder, published: PublishedVersion
    ) -> float | None:
        """Make the only worker prepare, swap and commit in one call, and return the pause in ms. None if several calls
        are needed: after a failure, with a probe to check before the commit, or if the worker lacks this pair or this
        call."""
        workers.incarnations, pair.incarnations = pair.incarnations, {}
        if "probe" in published or len(workers.urls) != 1 or workers.urls[0] not in workers.incarnations:
            return None
        order = replace(order, source=published["source"], gateway=self._address(), writer=self._writer)

        async def ask(url: str) -> dict[str, Any]:
            try:
                return await self._client.post(url, "/weights/replace", order, _TRANSFER_S)
            except WorkerFailed as error:
                if error.status == 404:
                    return {}
                raise

        ((url, answer),) = (await workers.each(ask)).items()
        if not answer:
            return None
        workers.incarnations, workers.pauses = {url: answer["incarnation"]}, {url: float(answer["paused_ms"])}
        return workers.pauses[url]

    async def _broadcast(
        self, pair: Pair, workers: WorkerSet, order: WeightOrder, published: PublishedVersion | None = None
    ) -> tuple[int, float]:
        """Broadcast the weights. If a worker is lost, broadcast again in a group of the others."""
        before = len(workers.lost)
        try:
            return await self._broadcast_once(pair, workers, order, published)
        except WorkerFailed as error:
            await workers.drop_lost()
            if len(workers.lost) == before or not workers.urls:
                raise
            _log.warning("the process group of %s is formed again: %s", pair.name, error)
        return await self._broadcast_once(pair, workers, order, published)

    async def _broadcast_once(
        self, pair: Pair, workers: WorkerSet, order: WeightOrder, published: PublishedVersion | None
    ) -> tuple[int, float]:
        """Send and receive at the same time. If a member fails, disconnect the pair, because the others would wait for
        that member; the next broadcast forms a new process group."""
        await self._connect_newcomers(pair, workers)
        manifest: Any = published or await self._client.post(pair.train[0], "/weights/manifest", order, _TRANSFER_S)
        taken = replace(order, source=manifest["source"])
        await workers.all("/weights/prepare", replace(taken, verify=True))
        calls = [self._client.post(pair.train[0], "/weights/publish", order, _TRANSFER_S)]
        calls += [self._client.post(url, "/weights/prepare", taken, _TRANSFER_S) for url in workers.urls]
        try:
            await _all_or_none(calls, "broadcast")
        except BaseException:
            await self.disconnect(pair)
            raise
        return await self._swap(workers, taken, manifest)

    async def _swap(self, workers: WorkerSet, taken: WeightOrder, published: PublishedVersion) -> tuple[int, float]:
        """Make each worker pause and swap in its prepared weights. Return the bytes, and the longest pause in ms."""
        reply = await workers.each(lambda url: self._client.post(url, "/weights/update", taken, _TRANSFER_S))
        if (probe := published.get("probe")) is not None:
            await workers.all("/weights/check", CheckWeights(probe=probe))
        await workers.all("/weights/commit", replace(taken, gateway=self._address(), writer=self._writer))
        pauses = {url: float(answer["paused_ms"]) for url, answer in reply.items()}
        workers.pauses = {url: pauses[url] for url in workers.urls}
        return int(published["bytes"]), max(pauses.values(), default=0.0)

    async def sync(self, pair: Pair) -> UpdateResult:
        """Transfer the version that the training side has staged. If it is newer than the last requested update, the
        update that waits for the lock has nothing left to do. The caller holds the lock. Raises ApiError 502, and 409
        if nothing is staged yet."""
        served, synced_version = pair.version, pair.synced_version
        async with _as_api_error("sync"):
            version = await self._staged(pair)
        while True:
            try:
                if version > served:
                    pair.synced_version = version
                return await self.update(pair, version)
            except ApiError:
                pair.synced_version = synced_version
                async with _as_api_error("sync"):
                    newer = await self._staged(pair)
                if newer == version:
                    raise
                version = newer  # staged meanwhile; the trainer stages no other before this one is transferred

    async def _staged(self, pair: Pair) -> int:
        reply = (await self._client.post(pair.train[0], "/weights/staged", {"pair_name": pair.name}))["version"]
        version = max(pair.version, reply if isinstance(reply, int) else -1)
        if version < 0:
            raise ApiError(409, f"pair {pair.name!r} has published nothing yet", code="nothing_published")
        return version

    async def join(self, pair: Pair, worker: str) -> None:
        """Give a newly started worker the version that the others serve. The caller holds the lock. Raises ApiError
        502, and 409 if nothing is published yet."""
        if worker not in pair.joining_workers:
            return  # an update has included it
        if pair.version < 0:
            raise ApiError(409, f"pair {pair.name!r} has published nothing yet", code="nothing_published")
        if pair.mode is Mode.XCCL:  # a process group has all workers
            await self.sync(pair)
            return
        began, joining = time.time(), WorkerSet(self._client, [worker], may_lose=False)
        async with _as_api_error("join"):
            order = WeightOrder(pair_name=pair.name, version=pair.version)
            try:
                await self._publish(pair, joining, order)
            except WorkerFailed as error:
                reverted = await self._revert(pair, [worker], order, error)
                self._history.note(
                    pair, order.version, began, replicas={worker: None}, joined=True, error=str(reverted)
                )
                raise reverted from None
        self._history.note(pair, order.version, began, replicas=joining.pauses, joined=True)

    async def present(self, pair: Pair) -> list[dict[str, object]] | None:
        """Return the workers that serve the model now, with their versions; None if the gateway does not respond."""
        if pair.inference_gateway is None:
            return list(await asyncio.gather(*map(self._describe, pair.inference)))
        try:
            known = (await self._client.get(pair.inference_gateway, "/workers", _PROBE_S))["workers"]
        except WorkerFailed:
            return None
        return [
            {"url": worker["worker_addr"], "state": worker["state"], "version": worker.get("version")}
            for worker in known
            if worker["model"] == pair.model
        ]

    async def _describe(self, url: str) -> dict[str, object]:
        """Return the state and version of a fixed worker, as the worker reports them."""
        try:
            status, about = await self._client.probe(url)
        except WorkerFailed:
            return {"url": url, "state": None, "version": None}
        return {"url": url, "state": "ready" if status == 200 else "not ready", "version": about.get("version")}

    async def _connect_newcomers(self, pair: Pair, workers: WorkerSet) -> None:
        """Connect the workers that do not know this pair, or know another trainer's pair of the same name: new ones,
        restarted ones, and those that were unavailable when this trainer connected. A process group is formed again if
        its members have changed."""
        # Without a probe, a dead member of a process group would be noticed only during a transfer.
        path = _PAIRS_NOW if pair.mode is Mode.XCCL else "/weights/pairs"
        reply = await workers.each(lambda url: self._client.get(url, path))
        own = self._address()
        workers.incarnations = {url: answer.get("incarnation") for url, answer in reply.items()}
        unconnected = [
            url
            for url in workers.urls
            if pair.name not in reply[url]["pairs"] or reply[url].get("gateways", {}).get(pair.name, own) != own
        ]
        if pair.mode is Mode.XCCL:
            if unconnected or set(workers.urls) != pair.connected:
                await workers.drop_lost(patience_s=0.0)  # a group waits long for a missing member
                await self.disconnect(pair)
                await self._connect(pair, workers)
        elif unconnected:
            newcomers = WorkerSet(self._client, unconnected, may_lose=workers.may_lose)
            await self._connect_workers(pair, newcomers)
            workers.drop(newcomers.lost)

    async def _participants(self, pair: Pair) -> WorkerSet:
        if pair.inference_gateway is None:
            return WorkerSet(self._client, pair.inference, may_lose=False)
        deadline = time.monotonic() + _WORKERS_S
        while True:
            try:
                if found := await self._find_workers(pair, pair.inference_gateway):
                    break
            except WorkerFailed as error:  # the gateway, or the router behind it, may be restarting
                if error.status not in _UNAVAILABLE or time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise WorkerFailed(f"model {pair.model!r} at {pair.inference_gateway} has no worker that is ready")
            await asyncio.sleep(_POLL_S)
        if pair.mode is not Mode.XCCL:  # a process group keeps lost members until it is formed again
            pair.connected &= set(found)
        return WorkerSet(self._client, found, may_lose=True)

    async def _find_workers(self, pair: Pair, gateway: str) -> list[str]:
        """Return the workers that serve the model, and those that would serve it if they had the weights."""
        known = (await self._client.get(gateway, "/workers"))["workers"]
        ours = {worker["worker_addr"]: worker["state"] for worker in known if worker["model"] == pair.model}
        away = [url for url, state in ours.items() if state not in _SERVING and url not in pair.joining_workers]
        behind = await asyncio.gather(*map(self._client.is_behind, away))
        late = [url for url, is_behind in zip(away, behind, strict=True) if is_behind]
        serving = [url for url, state in ours.items() if state in _SERVING]
        return list(dict.fromkeys([*serving, *late, *sorted(pair.joining_workers)]))


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, object]], name: str) -> None:
    """Run the calls together; the first failure cancels the others. Members of a process group wait for each other."""
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
async def _as_api_error(what: str) -> AsyncIterator[None]:
    """Turn a worker's failure into the gateway's error response."""
    try:
        yield
    except WorkerFailed as error:
        raise ApiError(502, f"{what} failed: {error}", code=f"{what}_failed") from error
