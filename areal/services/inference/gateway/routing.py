"""The relay's view of the router: the routing table, its change event, and the suspect workers.

The router detects a dead worker within seconds. A relay whose connection is refused avoids that worker at once, for a
time that grows until a call succeeds. Suspicion is local and only a preference: if all ready workers are suspect, they
are used nevertheless.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Self

import orjson

from areal.http import headers as names
from areal.http.client import CallFailed, Connection, HttpClient, HttpReply, Lines, NotConnected, ResponseLost
from areal.services.http.errors import ApiError, refusal
from areal.services.http.messages import AnyResponse, Request, decode_object
from areal.services.http.service import Handler, Service, json_response, to_response
from areal.services.http.tasks import Watchdog, happens
from areal.services.journal.keys import damaged_journal
from areal.wire.bodies import is_target, scrape_target
from areal.wire.routing import (
    CORDONED,
    DEAD,
    DRAINING,
    EMPTY,
    NO_REPLICAS,
    READY,
    Changes,
    Followed,
    GatewayLimits,
    ModelEntry,
    Snapshot,
    WorkerEntry,
)

_SUSPECT_FIRST_S = 0.5
_SUSPECT_MAX_S = 2.0


class LiveTable:
    """The routing table of this relay. Changed only by ``apply``; read by every request."""

    def __init__(self, defaults: GatewayLimits) -> None:
        self._defaults = defaults
        self.limits = defaults
        self._followed = Followed()
        self._changed = asyncio.Event()
        self._suspects: dict[str, tuple[float, float]] = {}  # address -> (avoided until, for how long)
        self._trusted: dict[
            str, tuple[float, list[WorkerEntry]]
        ] = {}  # a model's ready workers without suspects, until (loop time)
        self._journals: dict[str, str] = {}  # tag -> model
        self._damaged: dict[str, str] = {}  # tag -> folder
        self._ready: dict[str, list[WorkerEntry]] = {}  # by published model
        self._holders: dict[tuple[str, str], list[WorkerEntry]] = {}  # by published model and journal
        self.received = asyncio.Event()

    @property
    def snapshot(self) -> Snapshot:
        return self._followed.table

    @property
    def timeout_s(self) -> float:
        """The seconds that a call may take without progress or without a worker."""
        return self.limits.request_timeout_seconds

    @property
    def whole(self) -> bool:
        """Whether the table is complete, so that a model missing from it does not exist."""
        return self.received.is_set() and not self.snapshot.learning

    def require_whole(self) -> None:
        """Raise 503 while the table is incomplete."""
        if not self.whole:
            message = "the routing table is not complete yet"
            raise ApiError(503, message, code="no_routing_table", headers={"Retry-After": "1"})

    def require_replicas(self, name: str) -> None:
        """Raise 503 if the model is declared with no replicas."""
        model = self.resolve(name)
        if model is not None and model.idle:
            message = f"the model {model.name!r} has no replicas: it is scaled to 0 or suspended"
            raise ApiError(503, message, code=NO_REPLICAS, headers={"Retry-After": "5"})

    def apply(self, incoming: Snapshot) -> None:
        before = _ready_addrs(self.snapshot)
        self._followed = self._followed.follow(incoming)
        self.limits = self._defaults.updated(self.snapshot.limits)
        self._journals = _journals(self.snapshot)
        self._damaged = {tag: name for each in self.snapshot.models.values() for tag, name in each.damaged.items()}
        published = [model for model in self.snapshot.models.values() if model.published]
        self._ready = {model.name: [each for each in model.workers if each.state == READY] for model in published}
        self._holders = _holders(published)
        # A worker is no longer suspect once the router reports it ready again, or it is gone.
        still_ready = before & _ready_addrs(self.snapshot)
        self._suspects = {addr: since for addr, since in self._suspects.items() if addr in still_ready}
        self._trusted.clear()
        self.received.set()
        self._changed.set()
        self._changed = asyncio.Event()

    def summary(self) -> dict[str, object]:
        """Return the table's state, for /health."""
        table = self.snapshot
        about = {"epoch": table.epoch, "serial": table.serial, "synced": table.synced, "strategy": table.strategy}
        return {**about, "limits": asdict(self.limits)}

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next change of the table, at most ``timeout_s``."""
        await happens(self._changed, timeout_s)

    def published(self) -> list[ModelEntry]:
        return [model for model in self.snapshot.models.values() if model.published]

    def resolve(self, name: str | None) -> ModelEntry | None:
        """Return the model with this name, or with this adapter (``adapter``, ``model:adapter``); None if it is
        unknown. Without a name, return the only model, and raise 400 if there are several."""
        models = self.snapshot.models
        if name is not None:
            return models.get(name) or self._with_adapter(name)
        if len(models) > 1:
            message = f"model is required: this service has {', '.join(sorted(models))}"
            raise ApiError(400, message, param="model", code="missing_field")
        return next(iter(models.values()), None)

    def _with_adapter(self, name: str) -> ModelEntry | None:
        """Return the model of ``model:adapter``, or of ``adapter`` if exactly one model has it."""
        base, colon, adapter = name.partition(":")
        if colon and base in self.snapshot.models:
            model = self.snapshot.models[base]
            return model if adapter in model.adapters or model.idle else None
        having = [model for model in self.snapshot.models.values() if name in model.adapters]
        return having[0] if len(having) == 1 else None

    def model_of_journal(self, tag: str) -> str | None:
        """Return the model whose folder has this journal, even if no data proxy serves it. Raises 503 for a damaged
        one."""
        if (damaged := self._damaged.get(tag)) is not None:
            raise damaged_journal(damaged)
        return self._journals.get(tag)

    def require_readable(self) -> None:
        """Raise 503 while any journal is damaged: it may contain the session that no data proxy has."""
        for name in self._damaged.values():
            raise damaged_journal(name, "may have been")

    @property
    def records(self) -> bool:
        """Whether any model records sessions."""
        return bool(self._journals)

    @property
    def all_heard(self) -> bool:
        """Whether every worker has reported its journals, so that an unreported journal does not exist. Always
        False while the router still learns its workers, and without workers until the table is synced."""
        workers = [worker for model in self.snapshot.models.values() for worker in model.workers]
        known = not self.snapshot.learning and (bool(workers) or self.snapshot.synced)
        return known and all(worker.heard for worker in workers)

    def routable(self, name: str, *, even_suspects: bool, tag: str | None = None) -> list[WorkerEntry]:
        """Return the workers that may get a new call: ready workers of a published model that are not suspect. With
        ``even_suspects``, return the suspects if there are no others. With ``tag``, only workers with that journal. The
        cost does not grow with the table, except for the first call after a suspicion began or ended."""
        ready = self._ready.get(name, []) if tag is None else self._holders.get((name, tag), [])
        if not self._suspects:
            return ready
        now = asyncio.get_running_loop().time()
        until, trusted = self._trusted.get(name, (0.0, [])) if tag is None else (0.0, [])
        if until <= now:
            avoided = {addr: end for addr, (end, _) in self._suspects.items() if end > now}
            trusted = [worker for worker in ready if worker.addr not in avoided] if avoided else ready
            if tag is None:
                self._trusted[name] = min(avoided.values(), default=math.inf), trusted
        return trusted or (ready if even_suspects else [])

    def moving(self, name: str, tag: str) -> bool | None:
        """Return whether a journal's sessions can move from the draining worker that holds them to another worker; None
        if no draining worker holds them."""
        model = self.snapshot.models.get(name)
        workers = model.workers if model is not None else ()
        if not any(each.turns_away and each.state == DRAINING and tag in each.journals for each in workers):
            return None
        return any(each.state in (READY, CORDONED) and each.journals for each in workers)

    def fault(self, name: str) -> str:
        """Return the model's fault if all its workers report that waiting will not make them ready, otherwise ""."""
        model = self.snapshot.models.get(name)
        workers = model.workers if model is not None else ()
        hopeless = workers and all(worker.state == DEAD and worker.fault for worker in workers)
        return workers[0].fault if hopeless else ""

    def suspicion_left_s(self, name: str) -> float:
        """Return the seconds until a suspect worker of this model may be tried again; infinity without suspects."""
        model = self.snapshot.models.get(name)
        ends = [self._suspects[w.addr][0] for w in model.workers if w.addr in self._suspects] if model else []
        return max(0.01, min(ends) - asyncio.get_running_loop().time()) if ends else math.inf

    def is_serving(self, name: str, addr: str) -> bool:
        """Return whether the router considers the worker alive, so that a silent call is only slow."""
        model = self.snapshot.models.get(name)
        return model is not None and any(w.addr == addr and w.state != DEAD for w in model.workers)

    def suspect(self, addr: str) -> None:
        now = asyncio.get_running_loop().time()
        until, span = self._suspects.get(addr, (0.0, 0.0))
        if until <= now:  # calls that fail together count once
            span = min(max(span * 2, _SUSPECT_FIRST_S), _SUSPECT_MAX_S)
            self._trusted.clear()
        self._suspects[addr] = (now + span, span)

    def trust(self, addr: str) -> None:
        if self._suspects and self._suspects.pop(addr, None) is not None:
            self._trusted.clear()


def _journals(table: Snapshot) -> dict[str, str]:
    """Return the model of each journal. A data proxy's own model takes precedence over the external models it also
    serves."""
    models = sorted(table.models.items(), key=lambda item: not item[1].external)
    found = {tag: name for name, model in models for tag in model.orphans}
    for name, model in models:
        found |= {tag: name for worker in model.workers for tag in worker.journals}
    return found


def _ready_addrs(table: Snapshot) -> set[str]:
    serving = (READY, CORDONED)
    return {worker.addr for model in table.models.values() for worker in model.workers if worker.state in serving}


def _holders(published: list[ModelEntry]) -> dict[tuple[str, str], list[WorkerEntry]]:
    found: dict[tuple[str, str], list[WorkerEntry]] = {}
    for model in published:
        for worker in model.workers:
            for tag in worker.journals if worker.state in (READY, CORDONED) else ():
                found.setdefault((model.name, tag), []).append(worker)
    return found


class AnswerLines:
    """Iterates over the complete, non-empty lines of an answer, without newlines. Raises ResponseLost. Not a generator,
    because closing an unfinished async generator takes a task of its own."""

    def __init__(self, answer: Connection) -> None:
        self._answer = answer
        self._cut = Lines()
        self._lines = deque[bytes]()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._lines:
            if not (part := await self._answer.part()):
                raise StopAsyncIteration
            self._lines.extend(self._cut.feed(part))
        return self._lines.popleft()


_log = logging.getLogger(__name__)

_SILENCE_S = 10.0  # the router's heartbeat comes every four
_GRACE_S = 1.0  # the data proxy's own progress deadline expires first
_REFRESH_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 1.0


class Follower:
    """Follows the router's /watch. Without the router the last table stays in use; see ``Followed`` for how long it
    does after the router has restarted without a state file."""

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
            snapshot = EMPTY
            async for line in AnswerLines(answer):
                watchdog.kick()
                data = orjson.loads(line)
                if data["type"] == "snapshot":
                    snapshot = Snapshot.from_json(data)
                    self._table.apply(snapshot)
                elif data["type"] == "changes":
                    snapshot = snapshot.changed(Changes.from_json(data))
                    self._table.apply(snapshot)
                self.connected = True

    def watchdog(self, model: str, addr: str, busy: Callable[[], bool] = lambda: False) -> Watchdog:
        """Return the progress deadline of a call to the worker at ``addr``. It is suspended while ``busy``, and while
        the router sees the worker alive: the worker's data proxy then enforces the deadline."""
        return Watchdog(
            lambda: self._table.timeout_s + _GRACE_S,
            suspended=lambda: busy() or (self.connected and self._table.is_serving(model, addr)),
        )

    async def refresh(self) -> None:
        """Fetch the table now, before a model is reported unknown. Concurrent callers share one request. If the router
        does not answer, the table stays as it is."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._fetch(), name="table-refresh")
        await asyncio.shield(self._refreshing)

    async def _fetch(self) -> None:
        try:
            reply = await self._http.fetch("GET", self._url, "/table", headers=self._headers, timeout_s=_REFRESH_S)
            _check(reply.status)
            self._table.apply(Snapshot.from_json(orjson.loads(reply.body)))
        except (CallFailed, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("could not refresh the table: %r", error)


def _check(status: int) -> None:
    if status != 200:
        raise ResponseLost(f"the router answered {status}")


ROUTER_AWAY = "router_away"  # the call did not reach the router
_ADMIN_BODY_BYTES = 1024 * 1024
_TIMEOUT_S = 35.0  # the router itself asks workers within 30


class RouterClient:
    """Sends requests to the router, and makes handlers for the admin routes that the router answers."""

    def __init__(self, http: HttpClient, router_url: str, headers: Mapping[str, str]) -> None:
        self._http = http
        self._url = router_url.rstrip("/")
        self._headers = headers

    def forwards(self, method: str, path: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            return to_response(await self.send(method, path, await request.read(_ADMIN_BODY_BYTES), request.id))

        return handle

    def forwards_worker(self, path: str) -> Handler:
        """Return a handler that POSTs ``path`` for the worker in the request's path, or for ``all``."""

        async def handle(request: Request) -> AnyResponse:
            if body := await request.read(_ADMIN_BODY_BYTES):
                decode_object(body)  # refuse a malformed body rather than ignore it
            named = orjson.dumps({"worker_id": request.match_info["worker_id"]})
            return to_response(await self.send("POST", path, named, request.id))

        return handle

    def lists_targets(self, service: Service, job: str) -> Handler:
        """Return a handler for the router's Prometheus targets and ``service`` itself, at the request's address."""

        async def handle(request: Request) -> AnyResponse:
            reply = await self.send("GET", "/http_sd", b"", request.id)
            if reply.status != 200:
                return to_response(reply)
            asked = request.headers.get("Host", "")
            url = f"//{asked}" if is_target(asked) else service.address
            return json_response([*([scrape_target(url, job)] if url else []), *orjson.loads(reply.body)])

        return handle

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON answer. Raises ApiError: the router's error, or 502 or 503 if it does not answer."""
        return _accepted(await self.send("GET", path))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _accepted(await self.send("POST", path, orjson.dumps(body)))

    async def send(self, method: str, path: str, body: bytes = b"", request_id: str | None = None) -> HttpReply:
        """Return the router's answer. Raises ApiError if there is none: 503 if the router was not reached, 502 if it
        may have acted."""
        named = {names.REQUEST_ID: request_id} if request_id is not None else {}
        headers = {**self._headers, **named}
        try:
            return await self._http.fetch(method, self._url, path, headers=headers, body=body, timeout_s=_TIMEOUT_S)
        except NotConnected as error:
            again = {"Retry-After": "1"}
            raise ApiError(503, f"the router is not available: {error!r}", code=ROUTER_AWAY, headers=again) from error
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"the router does not answer: {error!r}", code="router_unavailable") from error


def _accepted(reply: HttpReply) -> dict[str, object]:
    if reply.status != 200:
        raise refusal(reply, "the router")
    return reply.object()
