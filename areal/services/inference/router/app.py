"""The router's routes, all for the admin key, and its process. A route reads its body, changes the registry, answers.

Registering waits for the first probe of the new workers, so that the answer, and the table behind it, already
tell whether they serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from areal.services.http.auth import Access
from areal.services.http.client import Fetched, HttpClient
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, StreamResponse, read_object
from areal.services.http.process import ServeOptions
from areal.services.http.service import Lifetime, Metrics, Service, json_response
from areal.services.http.tasks import background, until_beat
from areal.services.inference.router.declared_file import DeclaredFile
from areal.services.inference.router.picking import CallKey, Picker
from areal.services.inference.router.prober import Prober, answer_of, expire_leases, report_of
from areal.services.inference.router.registry import WorkerLease, WorkerRecord, WorkerRegistry, worker_base_url
from areal.services.inference.router.sessions import SessionPlacing
from areal.wire.processes import RouterConfig
from areal.wire.routing import (
    CORDONED,
    DEAD,
    DEFAULT_READINESS,
    DRAINING,
    READY,
    STRATEGIES,
    Readiness,
    Snapshot,
    WorkerEntry,
)

# GET /watch: the table now, then after each change the whole table again, or with ``?changes`` only what has changed;
# one JSON object a line, and heartbeats between. A follower gets all changes since its last line at once; one that
# has fallen far behind gets the whole table again. Fast changes are sent together: sending takes a small part of our
# time.

HEARTBEAT_S = 2.0
_DEAR_S = 0.002
_REST = 5.0  # times as long as the last line took
_LONGEST_REST_S = 0.5


class Watch:
    """The followers of one registry."""

    def __init__(self, registry: WorkerRegistry, lifetime: Lifetime) -> None:
        self._registry = registry
        self._lifetime = lifetime
        self._wakers: set[asyncio.Event] = set()
        self._lines: dict[tuple[int | None, int], bytes] = {}  # by the serials from and to
        self._cost_s = 0.0
        registry.on_change = self._wake

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    def _line_after(self, sent: int | None) -> bytes:
        """The changes since the table of serial ``sent``, encoded once for all followers."""
        place = sent, self._registry.serial
        if (line := self._lines.get(place)) is None:
            began = time.perf_counter()
            changes = self._registry.changes_since(sent) if sent is not None else None
            kind, table = ("changes", changes) if changes is not None else ("snapshot", self._registry.snapshot())
            line = orjson.dumps({"type": kind, **table.to_json()}) + b"\n"
            self._lines = {known: kept for known, kept in self._lines.items() if known[1] == place[1]}
            self._lines[place] = line
            self._cost_s = time.perf_counter() - began
        return line

    async def handle(self, request: Request) -> AnyResponse:
        response = StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        waker = asyncio.Event()
        self._wakers.add(waker)
        leaving = asyncio.create_task(self._lifetime.wait_draining(), name="watch-until-draining")
        leaving.add_done_callback(lambda _: waker.set())
        try:
            await self._feed(response, waker, whole="changes" not in request.query_string)
        finally:
            leaving.cancel()
            self._wakers.discard(waker)
        return response

    async def _feed(self, response: StreamResponse, waker: asyncio.Event, *, whole: bool) -> None:
        sent: int | None = None
        while not self._lifetime.draining:
            waker.clear()
            if sent != self._registry.serial:
                line, sent = self._line_after(None if whole else sent), self._registry.serial
                await response.write(line)
                await asyncio.sleep(min(self._cost_s * _REST, _LONGEST_REST_S) if self._cost_s > _DEAR_S else 0)
            else:
                beat = {"type": "heartbeat", "epoch": self._registry.epoch, "serial": sent}
                await response.write(orjson.dumps(beat) + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(HEARTBEAT_S)):
                    await waker.wait()


# What Prometheus is to scrape, as its HTTP service discovery reads it: a list of ``{"targets", "labels"}``. The
# router knows the data proxies and their engines at each moment, also after a rolling update gave them other ports.
# Trainers register themselves, for a time that they renew. The label ``job`` tells the components apart.

LONGEST_TTL_S = 3600.0
_MOST = 1000
TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}")
_LONGEST_VALUE = 200

Target = dict[str, Any]


def target(url: str, job: str, **labels: str | None) -> Target:
    """``url``: of a service that answers /metrics."""
    known = {name: value for name, value in labels.items() if value}
    return {"targets": [urlsplit(url).netloc.rpartition("@")[2]], "labels": {"job": f"areal-{job}", **known}}


def targets_of(workers: Iterable[WorkerRecord]) -> list[Target]:
    """Each data proxy and each engine once, also where they serve several models."""
    found: dict[str, Target] = {}
    for worker in workers:
        about = {"model": worker.model, "worker_id": worker.id}
        found.setdefault(worker.addr, target(worker.addr, "data-proxy", **about))
        if (engine := worker.report.engine_url) is not None:
            found.setdefault(engine, target(engine, "engine", **about))
    return list(found.values())


@dataclass
class RegisteredTargets:
    """Those that registered themselves. Times are monotonic seconds."""

    _until: dict[str, tuple[Mapping[str, str], float]] = field(default_factory=dict)

    def register(self, data: Mapping[str, Any], now: float) -> None:
        """``{"target", "labels", "ttl_seconds"}``; 0 seconds remove it. Raises ValueError."""
        name, labels, ttl_s = data.get("target"), data.get("labels") or {}, data.get("ttl_seconds", 60)
        if not isinstance(name, str) or (match := TARGET.fullmatch(name)) is None or int(match[2]) > 65535:
            raise ValueError("target must be host:port")
        if not isinstance(labels, dict) or not all(_is_label(*each) for each in labels.items()):
            raise ValueError("labels must be an object of texts, each named as Prometheus names labels")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 <= ttl_s <= LONGEST_TTL_S:
            raise ValueError(f"ttl_seconds must be between 0 and {LONGEST_TTL_S:g}")
        self._until = {each: kept for each, kept in self._until.items() if kept[1] > now}
        self._until.pop(name, None)
        if ttl_s:
            if len(self._until) >= _MOST:
                raise ValueError(f"{_MOST} targets are registered already")
            self._until[name] = dict(labels), now + ttl_s

    def all(self, now: float) -> list[Target]:
        return [
            {"targets": [name], "labels": dict(labels)} for name, (labels, until) in self._until.items() if until > now
        ]


def _is_label(name: object, value: object) -> bool:
    is_name = isinstance(name, str) and _LABEL.fullmatch(name) is not None
    return is_name and isinstance(value, str) and len(value) <= _LONGEST_VALUE


_MODEL_NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._:/]{0,199}")
_ON_ITS_WAY_S = 0.1  # what a lease says is as old as this at most; sessions that were placed since count on top
_REMOVED_AGAIN_S = 5.0
_TABLE_BYTES = 64 * 1024 * 1024
_WORKER_ID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]{0,127}")


class RouterRoutes:
    def __init__(
        self, registry: WorkerRegistry, prober: Prober, watch: Watch, placing: SessionPlacing, kept: DeclaredFile
    ) -> None:
        self._kept = kept
        self._placing = placing
        self._registry = registry
        self._prober = prober
        self._watch = watch
        self._picker = Picker()
        self._scraped = RegisteredTargets()

    def add_to(self, service: Service) -> None:
        self._service = service
        posts = {
            "/lease": self.lease,
            "/register": self.register,
            "/unregister": self.unregister,
            "/register_model": self.register_model,
            "/remove_model": self.remove_model,
            "/register_session": self.register_session,
            "/remove_session": self.remove_session,
            "/drain": self.drain,
            "/undrain": self.undrain,
            "/route": self.pick,
            "/configure": self.configure,
            "/synced": self.synced,
            "/recall": self.recall,
            "/http_sd": self.register_target,
        }
        gets = {
            "/models": self.models,
            "/workers": self.workers,
            "/table": self.table,
            "/watch": self._watch.handle,
            "/resolve_worker/{worker_id}": self.resolve,
        }
        for path, handler in posts.items():
            service.route("POST", path, handler, Access.ADMIN)
        for path, reader in gets.items():
            service.route("GET", path, reader, Access.ADMIN)
        service.route("GET", "/http_sd", self.scrape_targets, Access.METRICS)

    async def register(self, request: Request) -> Response:
        data = await read_object(request)
        addr = _address(data.get("worker_addr"), "worker_addr")
        worker_id = _optional(data, "worker_id", _WORKER_ID)
        worker = self._registry.register(worker_id, addr, _optional(data, "model", _MODEL_NAME))
        await self._prober.probe([worker])
        return self._accepted(worker_id=worker.id, state=worker.state)

    async def lease(self, request: Request) -> Response:
        """A data proxy registers itself, or renews that: its words of /ready beside what it is. It is to come again
        within ``renew_seconds``. ``registered`` is false for one that was removed."""
        data = await read_object(request)
        lease = _lease(data)
        now = time.monotonic()
        worker = self._registry.renew(lease, answer_of(data), report_of(data, now - _ON_ITS_WAY_S), now)
        again_s = self._registry.renew_s(worker) if worker is not None else _REMOVED_AGAIN_S
        return json_response({"status": "ok", "registered": worker is not None, "renew_seconds": again_s})

    async def unregister(self, request: Request) -> Response:
        worker = self._named(await read_object(request))
        self._registry.unregister(worker)
        return self._accepted(worker_id=worker.id)

    async def register_model(self, request: Request) -> Response:
        data = await read_object(request)
        name = _required(data, "model", _MODEL_NAME)
        expected = data.get("expected")
        if expected is not None and (isinstance(expected, bool) or not isinstance(expected, int) or expected < 0):
            raise bad_request("expected must be a whole number, not below 0", param="expected")
        external = data.get("external", False)
        if not isinstance(external, bool):
            raise bad_request("external must be true or false", param="external")
        readiness, pairs = _readiness(data.get("readiness")), self._pairs(data)
        cordoned = [item["worker_id"] for item in data["workers"] if item.get("cordoned") is True]
        self._registry.register_model(
            name, pairs, expected=expected, external=external, readiness=readiness, cordoned=cordoned
        )
        workers = self._registry.workers(name)
        await self._prober.probe(worker for worker in workers if not worker.health.seen)
        return self._accepted(model=name, workers=[worker.to_json() for worker in workers])

    async def remove_model(self, request: Request) -> Response:
        data = await read_object(request)
        name = _required(data, "model" if "model" in data else "name", _MODEL_NAME)
        if not self._registry.remove_model(name):
            raise ApiError(404, f"no model {name!r}", code="model_not_found", param="model")
        return self._accepted(model=name)

    async def drain(self, request: Request) -> Response:
        """No new calls for one worker, or ``all``; its sessions move to the model's other workers. With ``stopping`` it
        goes away after that, and calls of sessions wait; else those of sessions that cannot move are refused."""
        return await self._set_drained(await read_object(request), True)

    async def undrain(self, request: Request) -> Response:
        return await self._set_drained(await read_object(request), False)

    async def configure(self, request: Request) -> Response:
        data = await read_object(request)
        strategy, limits = data.get("strategy"), data.get("limits") or {}
        if strategy is not None and strategy not in STRATEGIES:
            raise bad_request(f"strategy must be one of {', '.join(STRATEGIES)}", param="strategy")
        if not isinstance(limits, dict):
            raise bad_request("limits must be an object", param="limits")
        try:
            self._registry.configure(strategy, {name: value for name, value in limits.items() if value is not None})
        except ValueError as error:
            raise bad_request(str(error), param="limits") from error
        return self._accepted()

    async def synced(self, request: Request) -> Response:
        self._registry.mark_synced()
        return self._accepted()

    async def recall(self, request: Request) -> Response:
        """A relay's table, to a router that was started again and was told nothing since. Whoever is told something
        already is told the rest by the same: then this changes nothing."""
        data = await read_object(request, _TABLE_BYTES)
        try:
            kept = Snapshot.from_json(data)
            recalled = self._registry.recall(kept)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise bad_request(f"this is no table: {error!r}") from error
        if recalled:
            await self._prober.probe(self._registry.workers())
        if recalled and kept.synced:
            self._registry.mark_synced()
        return self._accepted(recalled=recalled)

    async def pick(self, request: Request) -> Response:
        """Where a call would go, by its session or its session's key, else by its model. Relays decide for themselves,
        but for a key that a caller chose; this is for people and other services."""
        data = await read_object(request)
        held = await self._placing.holder(data)
        if held is not None:
            return self._there(held.worker, journal=held.journal)
        name = _required(data, "model", _MODEL_NAME)
        if not self._registry.has_model(name):
            raise ApiError(404, f"no model {name!r}", code="model_not_found", param="model")
        ready = {w.addr: w for w in self._registry.workers(name) if w.state == READY}
        if not ready:
            raise ApiError(503, f"no worker of model {name!r} is ready", code="no_worker_available")
        entries = [WorkerEntry(worker.id, worker.addr) for worker in ready.values()]
        strategy = self._registry.strategy
        chosen = self._picker.pick(strategy, entries, CallKey(), lambda w: ready[w.addr].report.in_flight_tokens)
        return self._there(ready[chosen.addr])

    def _there(self, worker: WorkerRecord, **more: Any) -> Response:
        """``api_key`` is None: a data proxy takes the caller's own, and a provider's key never leaves it."""
        where = {"worker_id": worker.id, "worker_addr": worker.addr, "url": worker.addr, "api_key": None}
        return json_response({**where, "model": worker.model, **more})

    async def register_session(self, request: Request) -> Response:
        return _to_response(await self._placing.start(await read_object(request), request.id))

    async def remove_session(self, request: Request) -> Response:
        """End every session of a group: ``removed`` says whether there was any."""
        reply = await self._placing.end(await read_object(request), request.id)
        if reply.status != 200:
            return _to_response(reply)
        ended = orjson.loads(reply.body)["ended"]
        return json_response({"status": "ok", "removed": bool(ended), "ended": ended})

    async def models(self, request: Request) -> Response:
        models = self._registry.snapshot().to_json()["models"]
        return json_response({"models": [{"name": name, **model} for name, model in models.items()]})

    async def workers(self, request: Request) -> Response:
        models = self._registry.snapshot().models.values()
        declared = {model.name: {"expected": model.expected, "published": model.published} for model in models}
        return json_response({"workers": [it.to_json() for it in self._registry.workers()], "models": declared})

    async def resolve(self, request: Request) -> Response:
        return json_response(self._named({"worker_id": request.match_info["worker_id"]}).to_json())

    async def scrape_targets(self, request: Request) -> Response:
        """For Prometheus' ``http_sd_configs``."""
        own = [target(self._service.address, "router")] if self._service.address else []
        found = [*own, *targets_of(self._registry.workers()), *self._scraped.all(time.monotonic())]
        return json_response(found)

    async def register_target(self, request: Request) -> Response:
        """Something else to scrape, such as a trainer: until its time to live is over."""
        try:
            self._scraped.register(await read_object(request), time.monotonic())
        except ValueError as error:
            raise bad_request(str(error)) from error
        return json_response({"status": "ok"})

    async def table(self, request: Request) -> Response:
        return json_response(self._registry.snapshot().to_json())

    def _accepted(self, **more: Any) -> Response:
        """Answer once the declaration is on disk."""
        try:
            self._kept.write()
        except OSError as error:
            raise ApiError(507, f"what was declared cannot be kept: {error}", code="storage_full") from error
        return json_response({"status": "ok", "epoch": self._registry.epoch, "serial": self._registry.serial, **more})

    async def _set_drained(self, data: dict[str, Any], drained: bool) -> Response:
        workers = self._registry.workers() if data.get("worker_id") == "all" else [self._named(data)]
        for worker in workers:
            self._registry.set_drained(worker, drained, stopping=drained and data.get("stopping") is True)
        await asyncio.gather(*(self._placing.move(worker) for worker in workers))
        return self._accepted(workers=[worker.to_json() for worker in workers])

    def _named(self, data: dict[str, Any]) -> WorkerRecord:
        worker_id = _optional(data, "worker_id", _WORKER_ID)
        if worker_id is None and "worker_addr" not in data:
            raise bad_request("worker_id or worker_addr is required", param="worker_id")
        addr = None if worker_id else _address(data["worker_addr"], "worker_addr")
        worker = self._registry.find(worker_id=worker_id, addr=addr)
        if worker is None:
            raise ApiError(404, f"no worker {worker_id or addr}", code="worker_not_found", param="worker_id")
        return worker

    def _pairs(self, data: dict[str, Any]) -> list[tuple[str, str]]:
        workers = data.get("workers")
        if not isinstance(workers, list):
            raise bad_request("workers must be a list of {worker_id, worker_addr}", param="workers")
        pairs = []
        for index, item in enumerate(workers):
            if not isinstance(item, dict):
                raise bad_request("a worker must be {worker_id, worker_addr}", param=f"workers[{index}]")
            addr = _address(item.get("worker_addr"), f"workers[{index}].worker_addr")
            pairs.append((_required(item, "worker_id", _WORKER_ID), addr))
        if len(dict(pairs)) != len(pairs):
            raise bad_request("two workers have the same worker_id", param="workers")
        return pairs


def _to_response(reply: Fetched) -> Response:
    return Response(reply.status, reply.body, content_type="application/json")


def _lease(data: dict[str, Any]) -> WorkerLease:
    expected = data.get("expected", 1)
    if type(expected) is not int or expected < 1:
        raise bad_request("expected must be a whole number from 1", param="expected")
    return WorkerLease(
        _required(data, "worker_id", _WORKER_ID),
        _address(data.get("worker_addr"), "worker_addr"),
        _required(data, "model", _MODEL_NAME),
        expected,
        data.get("external") is True,
        _readiness(data.get("readiness")) or DEFAULT_READINESS,
        data.get("held") is True,
    )


def _readiness(value: object) -> Readiness | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request("readiness must be an object", param="readiness")
    try:
        return Readiness.of(value)
    except ValueError as error:
        raise bad_request(str(error), param="readiness") from error


def _address(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{param} must be the worker's address, host:port", param=param)
    try:
        return worker_base_url(value)
    except ValueError as error:
        raise bad_request(str(error), param=param) from error


def _required(data: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = _optional(data, name, pattern)
    if value is None:
        raise bad_request(f"{name} is required", param=name, code="missing_field")
    return value


def _optional(data: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str | None:
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise bad_request(f"{name} has characters or a length that is not allowed", param=name)
    return value


def count_workers(metrics: Metrics, registry: WorkerRegistry) -> None:
    workers = metrics.gauge("areal_router_workers", "Data proxies, by what the router makes of them.", ("state",))
    for state in (READY, CORDONED, DRAINING, DEAD):
        workers.labels(state).set_function(partial(_in_state, registry, state))


def _in_state(registry: WorkerRegistry, state: str) -> float:
    return float(sum(worker.state == state for worker in registry.workers()))


@contextlib.asynccontextmanager
async def router(config: RouterConfig, options: ServeOptions) -> AsyncIterator[Service]:
    """The router process, wired together."""
    service = Service("router", key=options.key, loopback=options.loopback)
    registry = WorkerRegistry(strategy=config.strategy, readiness=Readiness(period_seconds=config.health_period))
    kept = DeclaredFile(Path(config.state_file) if config.state_file else None, registry)
    kept.read()
    async with HttpClient() as http:
        prober = Prober(registry, http, options.headers)
        placing = SessionPlacing(registry, http, options.headers)
        count_workers(service.metrics, registry)
        RouterRoutes(registry, prober, Watch(registry, service.lifetime), placing, kept).add_to(service)

        @contextlib.asynccontextmanager
        async def probing() -> AsyncIterator[None]:
            kept.announce(service.address)
            async with (
                background("worker-probes", prober.run),
                background("leases", lambda: expire_leases(registry)),
                background("declared-file", kept.run),
            ):
                yield

        service.add_lifespan(probing)
        yield service
