"""The router's routes, which need the admin key, and its process.

A registration waits for the first probe of the new workers, so that its answer and the routing table already contain
their state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import orjson

from areal.dataclasses import dataclass, field
from areal.files import lacks_room, parse_json, replace_file, stamp
from areal.http.client import HttpClient
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.lease import RENEWAL_TIMEOUT_S
from areal.services.http.messages import (
    AnyResponse,
    Request,
    Response,
    StreamingResponse,
    body_as,
    read_body,
    read_object,
)
from areal.services.http.process import ServeOptions
from areal.services.http.service import Lifetime, Service, json_response, to_response
from areal.services.http.tasks import IDLE_S, background, happens, until_beat
from areal.services.inference.router.picking import CallKey, Picker
from areal.services.inference.router.prober import Prober, expire_leases, read_report, read_result
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry
from areal.services.inference.router.sessions import SessionPlacing
from areal.wire.bodies import (
    ConfigureRouter,
    NameWorker,
    RegisterModel,
    RegisterTarget,
    RegisterWorker,
    RemoveModel,
    RenewLease,
    RouteCall,
    scrape_target,
)
from areal.wire.processes import RouterConfig
from areal.wire.routing import CORDONED, DEAD, DECLARED, DRAINING, READY, Readiness, WorkerEntry, worker_base_url

# GET /watch: first the whole table, then after each change the whole table again, or with ``?changes`` only the
# changes. One JSON object a line, with heartbeats in between. A follower gets all changes since its last line at once,
# and the whole table if it has fallen far behind. Rapid changes are sent together, to bound the time spent on sending.

HEARTBEAT_S = 2 * IDLE_S  # an idle gateway wakes for each
_COSTLY_S = 0.002  # if encoding a line took longer, the next line waits
_REST = 5.0  # the wait, as a multiple of the time that encoding the last line took
_LONGEST_REST_S = 0.5


class Watch:
    """The followers of a registry's table: the handler of GET /watch."""

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
        """Return the line with the changes since serial ``sent``, encoded once for all followers."""
        place = sent, self._registry.serial
        if (line := self._lines.get(place)) is None:
            began = time.perf_counter()
            changes = self._registry.changes_since(sent) if sent is not None else None
            kind, table = ("changes", changes) if changes is not None else ("snapshot", self._registry.snapshot())
            line = orjson.dumps({"type": kind, **table.to_json()}) + b"\n"
            self._lines = {span: text for span, text in self._lines.items() if span[1] == place[1]}
            self._lines[place] = line
            self._cost_s = time.perf_counter() - began
        return line

    async def handle(self, request: Request) -> AnyResponse:
        response = StreamingResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        response.begin(request)
        waker = asyncio.Event()
        self._wakers.add(waker)
        leaving = asyncio.create_task(self._lifetime.wait_draining(), name="watch-until-draining")
        leaving.add_done_callback(lambda _: waker.set())
        try:
            await self._send_lines(response, waker, whole="changes" not in request.query_string)
        finally:
            leaving.cancel()
            self._wakers.discard(waker)
        return response

    async def _send_lines(self, response: StreamingResponse, waker: asyncio.Event, *, whole: bool) -> None:
        sent: int | None = None
        while not self._lifetime.draining:
            waker.clear()
            if sent != self._registry.serial:
                line, sent = self._line_after(None if whole else sent), self._registry.serial
                await response.write(line)
                await asyncio.sleep(min(self._cost_s * _REST, _LONGEST_REST_S) if self._cost_s > _COSTLY_S else 0)
            else:
                beat = {"type": "heartbeat", "epoch": self._registry.epoch, "serial": sent}
                await response.write(orjson.dumps(beat) + b"\n")
            await happens(waker, until_beat(HEARTBEAT_S))


# Targets for Prometheus' HTTP service discovery: a list of ``{"targets", "labels"}``. The router always knows the data
# proxies and their engines, even after a rolling update changed their ports. Trainers register themselves for a limited
# time and renew the registration. The label ``job`` names the component.

_MOST = 1000

Target = dict[str, Any]


def targets_of(workers: Iterable[WorkerRecord]) -> list[Target]:
    """Return one target for each data proxy, engine and agent's worker, even if it serves several models."""
    found: dict[str, Target] = {}
    for worker in workers:
        about = {"model": worker.model, "worker_id": worker.id}
        found.setdefault(worker.addr, scrape_target(worker.addr, "data-proxy", **about))
        for url, job in ((worker.report.engine_url, "engine"), (worker.report.agent_url, "agent-worker")):
            if url is not None:
                found.setdefault(url, scrape_target(url, job, **about))
    return list(found.values())


@dataclass
class RegisteredTargets:
    """Scrape targets that registered themselves. Times are monotonic seconds."""

    _until: dict[str, tuple[Mapping[str, str], float]] = field(default_factory=dict)

    def register(self, target: RegisterTarget, now: float) -> None:
        """Register a target, or remove it if its time is 0. Raises ValueError if there are too many."""
        self._until = {each: entry for each, entry in self._until.items() if entry[1] > now}
        self._until.pop(target.target, None)
        if target.ttl_seconds:
            if len(self._until) >= _MOST:
                raise ValueError(f"{_MOST} targets are registered already")
            self._until[target.target] = dict(target.labels or {}), now + target.ttl_seconds

    def all(self, now: float) -> list[Target]:
        return [
            {"targets": [name], "labels": dict(labels)} for name, (labels, until) in self._until.items() if until > now
        ]


_log = logging.getLogger(__name__)
_PERIOD_S = 1.0
_LEARNING_S = 6.0  # by then every living data proxy has read the new router's address from the file


class DeclaredFile:
    """The file with a router's declarations and address.

    The next router restores its registry from the file, and the service's data proxies read the router's address from
    it. An unreadable file is renamed, not taken for an empty one: the router then learns its workers from their leases.
    With ``path`` None nothing is kept.
    """

    def __init__(self, path: Path | None, registry: WorkerRegistry) -> None:
        self._path = path
        self._registry = registry
        self._written: dict[str, Any] | None = None
        self._serial = -1
        self._url: str | None = None
        self._identity: tuple[int, int, int] | None = None  # of the file as it was written
        self.fault: str | None = None
        """Why the file cannot be written."""

    def read(self) -> None:
        """Restore the registry. A new service has no file; its router is synced at once."""
        if self._path is None:
            return
        try:
            content = parse_json(self._path.read_text())
            self._registry.restore(content[DECLARED], time.monotonic())
        except FileNotFoundError:
            self._registry.mark_synced()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._path.with_name(f"{self._path.name}.damaged-{time.time():.0f}")
            _log.warning("%s cannot be read (%r) and is set aside as %s", self._path, error, aside.name)
            self._path.rename(aside)
            self._registry.learning = True

    def announce(self, url: str | None) -> None:
        """Set the router's address and write the file."""
        self._url = url
        self.write()

    def write(self) -> None:
        """Write the file if something has changed. Raises OSError."""
        if self._path is None or self._url is None or self._serial == self._registry.serial:
            return
        content = {"url": self._url, "epoch": self._registry.epoch, DECLARED: self._registry.declared()}
        if content != self._written:
            replace_file(self._path, orjson.dumps(content), mode=0o600, durable=True)
            self._written, self._identity = content, stamp(self._path)
        self._serial = self._registry.serial

    def keep(self) -> None:
        """Write the file if the registry has changed, or if another program has changed or removed the file."""
        if self._written is not None and self._path is not None and stamp(self._path) != self._identity:
            _log.warning("%s was changed or removed by another program, and is written again", self._path)
            self._written, self._serial = None, -1
        try:
            self.write()
            self.fault = None
        except OSError as error:
            if self.fault is None:
                _log.warning("%s cannot be written: %s", self._path, error)
            self.fault = f"{self._path} cannot be written: {error.strerror}"

    async def run(self) -> None:
        """Write the file periodically, since leases change the registry, and end the learning after ``_LEARNING_S``."""
        learnt_at = time.monotonic() + _LEARNING_S
        while True:
            is_idle = self._serial == self._registry.serial
            self.keep()
            await asyncio.sleep(until_beat(2 * IDLE_S if is_idle else _PERIOD_S))
            if self._registry.learning and time.monotonic() > learnt_at:
                self._registry.mark_synced()


_LEASE_FIELDS = tuple(RenewLease.__dataclass_fields__)


@lru_cache(maxsize=1024)
def _read_lease(own: bytes) -> RenewLease:
    """Parse the lease's fields. Cached, since a data proxy sends the same fields at each renewal. Raises 400."""
    return body_as(RenewLease, orjson.loads(own))


_REMOVED_AGAIN_S = 5.0


@dataclass(eq=False)
class RouterRoutes:
    _registry: WorkerRegistry
    _prober: Prober
    _watch: Watch
    _placing: SessionPlacing
    _file: DeclaredFile

    def __post_init__(self) -> None:
        self._picker = Picker()
        self._scraped = RegisteredTargets()
        self._listed: dict[str, tuple[Sequence[WorkerRecord], list[WorkerEntry], dict[str, WorkerRecord]]] = {}

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
        body = await read_body(request, RegisterWorker)
        worker = self._registry.register(body.worker_id, body.addr, body.model)
        await self._prober.probe([worker])
        return self._accepted(worker_id=worker.id, state=worker.state)

    async def lease(self, request: Request) -> Response:
        """Register a data proxy or renew its lease.

        The body has the fields of ``RenewLease`` and those of the data proxy's /ready. The data proxy must renew after
        ``renew_seconds``; its lease ends after ``lease_seconds``, which is absent while its health is in doubt.
        ``registered`` is false for a removed worker.
        """
        data = await read_object(request)
        own = orjson.dumps({name: data[name] for name in _LEASE_FIELDS if name in data})
        lease, now = _read_lease(own), time.monotonic()
        worker = self._registry.renew(lease, read_result(data), read_report(data, now - RENEWAL_TIMEOUT_S), now)
        if worker is None:
            return json_response({"status": "ok", "registered": False, "renew_seconds": _REMOVED_AGAIN_S})
        body = {"status": "ok", "registered": True, "renew_seconds": self._registry.renew_s(worker)}
        if not worker.health.in_doubt:
            body["lease_seconds"] = worker.granted_s
        return json_response(body)

    async def unregister(self, request: Request) -> Response:
        worker = self._worker(await read_body(request, NameWorker))
        self._registry.unregister(worker)
        return self._accepted(worker_id=worker.id)

    async def register_model(self, request: Request) -> Response:
        body = await read_body(request, RegisterModel)
        self._registry.register_model(
            body.model,
            [(worker.worker_id, worker.addr) for worker in body.workers],
            expected=body.expected,
            external=body.external,
            readiness=body.readiness,
            cordoned=[worker.worker_id for worker in body.workers if worker.cordoned],
        )
        workers = self._registry.workers(body.model)
        await self._prober.probe(worker for worker in workers if not worker.health.seen)
        return self._accepted(model=body.model, workers=[worker.to_json() for worker in workers])

    async def remove_model(self, request: Request) -> Response:
        body = await read_body(request, RemoveModel)
        name = _required_model(body.model or body.name)
        if not self._registry.remove_model(name):
            raise ApiError(404, f"no model {name!r}", code="model_not_found", param="model")
        return self._accepted(model=name)

    async def drain(self, request: Request) -> Response:
        """Stop new calls to one worker or to ``all``; their sessions move to the model's other workers.

        With ``stopping`` the worker is about to exit, and calls of its sessions wait for its successor. Otherwise calls
        of sessions that cannot move are refused.
        """
        return await self._set_drained(await read_body(request, NameWorker), True)

    async def undrain(self, request: Request) -> Response:
        return await self._set_drained(await read_body(request, NameWorker), False)

    async def configure(self, request: Request) -> Response:
        body = await read_body(request, ConfigureRouter)
        limits = {name: value for name, value in body.limits.items() if value is not None}
        try:
            self._registry.configure(body.strategy, limits)
        except ValueError as error:
            raise bad_request(str(error), param="limits") from error
        return self._accepted()

    async def synced(self, request: Request) -> Response:
        self._registry.mark_synced()
        return self._accepted()

    async def pick(self, request: Request) -> Response:
        """Return the worker for a call: by the session or the session's key, otherwise by the model. Relays ask the
        router only for keys that a caller chose."""
        body = await read_body(request, RouteCall)
        held = await self._placing.holder(body)
        if held is not None:
            return self._location(held.worker, journal=held.tag)
        name = _required_model(body.model)
        if not self._registry.has_model(name):
            raise ApiError(404, f"no model {name!r}", code="model_not_found", param="model")
        entries, ready = self._ready(name)
        if not ready:
            raise ApiError(503, f"no worker of model {name!r} is ready", code="no_worker_available")
        strategy = self._registry.strategy
        chosen = self._picker.pick(strategy, entries, CallKey(), lambda w: ready[w.addr].report.in_flight_tokens, name)
        return self._location(ready[chosen.addr])

    def _ready(self, model: str) -> tuple[list[WorkerEntry], dict[str, WorkerRecord]]:
        """Return a model's ready workers, as entries and by address. Cached until the table changes."""
        members = self._registry.members(model)
        cached = self._listed.get(model)
        if cached is None or cached[0] is not members:
            ready = {worker.addr: worker for worker in members if worker.state == READY}
            cached = self._listed[model] = members, [WorkerEntry(each.id, each.addr) for each in ready.values()], ready
        return cached[1:]

    def _location(self, worker: WorkerRecord, **more: Any) -> Response:
        """Return the answer of /route. ``api_key`` is always None: a provider's key never leaves its data proxy."""
        where = {"worker_id": worker.id, "worker_addr": worker.addr, "url": worker.addr, "api_key": None}
        return json_response({**where, "model": worker.model, **more})

    async def register_session(self, request: Request) -> Response:
        return to_response(await self._placing.start(await read_object(request), request.id))

    async def remove_session(self, request: Request) -> Response:
        """End every session of a group. ``removed`` in the answer is whether the group had any."""
        reply = await self._placing.end(await read_object(request), request.id)
        if reply.status != 200:
            return to_response(reply)
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
        return json_response(self._worker(NameWorker(worker_id=request.match_info["worker_id"])).to_json())

    async def scrape_targets(self, request: Request) -> Response:
        """List the targets for Prometheus' ``http_sd_configs``."""
        own = [scrape_target(self._service.address, "router")] if self._service.address else []
        found = [*own, *targets_of(self._registry.workers()), *self._scraped.all(time.monotonic())]
        return json_response(found)

    async def register_target(self, request: Request) -> Response:
        """Register a scrape target, such as a trainer, for its ``ttl_seconds``."""
        try:
            self._scraped.register(await read_body(request, RegisterTarget), time.monotonic())
        except ValueError as error:
            raise bad_request(str(error)) from error
        return json_response({"status": "ok"})

    async def table(self, request: Request) -> Response:
        return json_response(self._registry.snapshot().to_json())

    def _accepted(self, **more: Any) -> Response:
        """Write the declarations to disk, then return the answer. Raises 507 or 500 if they cannot be written."""
        try:
            self._file.write()
        except OSError as error:
            status, code = (507, "storage_full") if lacks_room(error) else (500, "storage_failed")
            raise ApiError(status, f"the declared models cannot be saved: {error}", code=code) from error
        return json_response({"status": "ok", "epoch": self._registry.epoch, "serial": self._registry.serial, **more})

    async def _set_drained(self, body: NameWorker, drained: bool) -> Response:
        workers = self._registry.workers() if body.worker_id == "all" else [self._worker(body)]
        for worker in workers:
            self._registry.set_drained(worker, drained, stopping=drained and body.stopping)
        await asyncio.gather(*(self._placing.move(worker) for worker in workers))
        return self._accepted(workers=[worker.to_json() for worker in workers])

    def _worker(self, body: NameWorker) -> WorkerRecord:
        if body.worker_id is None and body.worker_addr is None:
            raise bad_field("worker_id", "or worker_addr is required")
        addr = worker_base_url(body.worker_addr) if body.worker_addr is not None and body.worker_id is None else None
        worker = self._registry.find(worker_id=body.worker_id, addr=addr)
        if worker is None:
            raise ApiError(404, f"no worker {body.worker_id or addr}", code="worker_not_found", param="worker_id")
        return worker


def _required_model(name: str | None) -> str:
    if name is None:
        raise bad_field("model", "is required", code="missing_field")
    return name


@contextlib.asynccontextmanager
async def router(config: RouterConfig, options: ServeOptions) -> AsyncIterator[Service]:
    """Run the router process: build its parts and yield its service."""
    registry = WorkerRegistry(strategy=config.strategy, readiness=Readiness(period_seconds=config.health_period))
    file = DeclaredFile(Path(config.state_file) if config.state_file else None, registry)
    service = Service("router", key=options.key, loopback=options.loopback, not_ready=lambda: file.fault)
    file.read()
    async with HttpClient() as http:
        prober = Prober(registry, http, options.headers)
        placing = SessionPlacing(registry, http, options.headers)
        workers = service.metrics.gauge(
            "areal_router_workers", "Data proxies, by what the router makes of them.", ("state",)
        )
        for state in (READY, CORDONED, DRAINING, DEAD):
            in_state = partial(lambda state: float(sum(each.state == state for each in registry.workers())), state)
            workers.labels(state).set_function(in_state)
        RouterRoutes(registry, prober, Watch(registry, service.lifetime), placing, file).add_to(service)

        @contextlib.asynccontextmanager
        async def probing() -> AsyncIterator[None]:
            file.announce(service.address)
            async with (
                background("worker-probes", prober.run),
                background("leases", lambda: expire_leases(registry)),
                background("declared-file", file.run),
            ):
                yield

        service.add_lifespan(probing)
        yield service
