"""Placing sessions on replicas, and locating them.

A new group of sessions goes to the replica with the fewest sessions; in a large pool, to the lightest of a sample. A
session's name contains the tag of its journal and replicas report the journals they serve, which locates an existing
session. Replicas are asked only for keys that a caller chose. A session with such a key starts where the key's last
session is, otherwise where a hash of the key points, so that two sessions cannot have the same key at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import orjson

from areal.dataclasses import dataclass
from areal.http import headers as names
from areal.http.client import CallFailed, HttpClient, HttpReply, NotConnected
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.inference.recorder.session import GroupName, SessionName
from areal.services.inference.router.picking import rendezvous
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.services.journal.keys import damaged_journal, key_digest, tag_of_key
from areal.wire.bodies import RouteCall
from areal.wire.routing import CORDONED, DEAD, NO_REPLICAS, READY, WorkerEntry

_LARGE_POOL = 32
_CANDIDATES = 4
_SURELY_REPORTED_S = 60.0
_MOST_PLACED = 4096  # addresses with unreported sessions; beyond this, addresses of gone replicas are dropped
_KEPT_S = 600.0  # longer than the time between two reports


@dataclass
class SessionPlacement:
    """Sessions being started on a replica, or started at ``done_at`` (monotonic). ``started``: the replica's count of
    started sessions after these."""

    size: int
    done_at: float | None = None
    started: int | None = None

    def is_in(self, report: WorkerReport) -> bool:
        """Return whether the replica's report counts these sessions. Without counts this is decided by time alone:
        sessions started just before the report may then count twice or not at all."""
        if self.done_at is None:
            return False
        if self.started is None or report.started is None or self.done_at < report.asked_at - _SURELY_REPORTED_S:
            return self.done_at < report.asked_at
        return self.started <= report.started


class Placements:
    """Sessions placed since each replica's last report. They are added to the reported number, so that a burst of
    starts spreads over the replicas."""

    def __init__(self) -> None:
        self._placed: dict[str, list[SessionPlacement]] = {}

    def sessions(self, worker: WorkerRecord) -> int:
        return worker.report.sessions + sum(each.size for each in self._unreported(worker))

    def _unreported(self, worker: WorkerRecord) -> list[SessionPlacement]:
        """Return the placements that the replica's report does not count, and forget the others."""
        recent = [each for each in self._placed.pop(worker.addr, ()) if not each.is_in(worker.report)]
        if recent:
            self._placed[worker.addr] = recent
        return recent

    def lightest_first(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Return the ready workers that record, least loaded first. A large pool is sampled, so that the cost of a
        start does not grow with the pool."""
        if len(workers) > _LARGE_POOL:
            workers = [workers[place] for place in random.sample(range(len(workers)), _CANDIDATES)]
        recorders = [worker for worker in workers if worker.state == READY and worker.report.journals]
        return sorted(recorders, key=lambda worker: (self.sessions(worker), worker.id))

    @contextmanager
    def placing(self, worker: WorkerRecord, size: int) -> Iterator[SessionPlacement]:
        """Count ``size`` sessions on a worker from now on. The block sets the placement's ``size`` to 0 if they did not
        start."""
        placed = SessionPlacement(size)
        if len(self._placed) > _MOST_PLACED:  # forget old ones at addresses without reports: their replica is gone
            latest = time.monotonic() - _KEPT_S
            self._placed = {
                addr: placed
                for addr, placed in self._placed.items()
                if any(each.done_at is None or each.done_at > latest for each in placed)
            }
        self._placed[worker.addr] = [*self._unreported(worker), placed]
        try:
            yield placed
        except BaseException:
            placed.size = 0
            raise
        finally:
            placed.done_at = time.monotonic()


_START_TIMEOUT_S = 30.0
_FIND_TIMEOUT_S = 2.0
_MOVE_TIMEOUT_S = 5.0
_LARGEST_GROUP = 1024


@dataclass(frozen=True)
class SessionLocation:
    """A session's worker and the tag of its journal. ``tag`` None: a new session starts in the worker's own journal."""

    worker: WorkerRecord
    tag: str | None = None


class SessionPlacing:
    def __init__(self, registry: WorkerRegistry, http: HttpClient, headers: Mapping[str, str]) -> None:
        self._registry = registry
        self._http = http
        self._headers = headers
        self._placements = Placements()
        self._starting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self, data: Mapping[str, object], request_id: str) -> HttpReply:
        """Start a group of sessions. Starts with the same key run one after the other, so that each finds the previous
        session. Raises 400, 404, 502, 503."""
        key = data.get("api_key")
        async with self._starting.setdefault(key, asyncio.Lock()) if isinstance(key, str) else asyncio.Lock():
            return await self._start_first(data, request_id)

    async def _start_first(self, data: Mapping[str, object], request_id: str) -> HttpReply:
        for location in await self._preferred(data.get("api_key"), self._model(data.get("model"))):
            try:
                return await self._start(location, data, request_id)
            except NotConnected:
                continue  # nothing was started
            except (CallFailed, TimeoutError) as error:
                raise ApiError(502, f"the data proxy was lost: {error!r}", code="worker_lost") from error
        raise ApiError(503, "no data proxy took the sessions", code="no_worker_available", headers={"Retry-After": "1"})

    async def _start(self, location: SessionLocation, data: Mapping[str, object], request_id: str) -> HttpReply:
        size = data.get("group_size", 1)
        size = size if isinstance(size, int) and 1 <= size <= _LARGEST_GROUP else 1
        with self._placements.placing(location.worker, size) as placed:
            reply = await self._post(location.worker, "/rl/start_session", data, request_id, tag=location.tag)
            placed.size = size if reply.status == 201 else 0
            count = reply.headers.get(names.STARTED, "")
            placed.started = int(count) if count.isdecimal() else None
            return reply

    def _model(self, name: object) -> str:
        """Return the requested model, or the only one. Raises 400, 404."""
        if name is None:
            names = sorted(self._registry.names)
            if len(names) == 1:
                return names[0]
            message = f"model is required: this service has {', '.join(names) or 'none yet'}"
            raise bad_request(message, param="model", code="missing_field")
        if not isinstance(name, str) or not self._registry.has_model(name):
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        return name

    def _recorders(self, model: str) -> list[WorkerRecord]:
        """Return the model's ready replicas that record. Raises 503 if no replica is ready, 400 if none records."""
        ready = [worker for worker in self._registry.members(model) if worker.state == READY]
        if not ready:
            message = f"no worker of model {model!r} is ready"
            raise ApiError(503, message, code="no_worker_available", headers={"Retry-After": "1"})
        recorders = [worker for worker in ready if worker.report.journals]
        if not recorders:
            message = f"the data proxies of model {model!r} keep no sessions: they run without --state-dir"
            raise bad_request(message, param="model", code="sessions_not_kept")
        return recorders

    async def _preferred(self, key: object, model: str) -> list[SessionLocation]:
        """Return the locations to try, in order."""
        if not isinstance(key, str):  # the data proxy refuses a malformed one
            lightest = self._placements.lightest_first
            workers = lightest(self._registry.members(model)) or lightest(self._recorders(model))
            return [SessionLocation(worker) for worker in workers]
        recorders = self._recorders(model)
        tag = tag_of_key(key)
        if tag is not None:
            return [self._with_journal(tag)]
        digest = key_digest(key.encode("utf-8", "surrogatepass"))
        held = await self._find(digest, model)
        if held is not None:
            return [held]
        by_addr = {worker.addr: worker for worker in recorders}
        order = rendezvous(digest, [worker.entry for worker in recorders])
        return [SessionLocation(by_addr[entry.addr]) for entry in order]

    async def holder(self, body: RouteCall) -> SessionLocation | None:
        """Return the location of the session named by id, key or the key's digest, or None if none is named. Raises
        404, 503."""
        digest = body.api_key_digest
        if body.session_id is not None:
            return self._with_journal(SessionName.require(body.session_id).tag)
        if body.api_key is not None:
            tag = tag_of_key(body.api_key)
            if tag is not None:
                return self._with_journal(tag)
            digest = key_digest(body.api_key.encode("utf-8", "surrogatepass")).hex()
        if digest is None:
            return None
        try:
            held = await self._find(bytes.fromhex(digest))
        except ValueError as error:
            raise bad_field("api_key_digest", "must be hexadecimal") from error
        if held is None:
            raise ApiError(404, "no session has this key", code="session_not_found", param="api_key")
        return held

    def _with_journal(self, tag: str) -> SessionLocation:
        holders = self._registry.holders(tag)
        for worker in holders:
            if worker.state != DEAD:
                return SessionLocation(worker, tag)
        if (damaged := self._registry.damaged().get(tag)) is not None:
            raise damaged_journal(damaged)
        if holders or self._registry.is_orphan(tag) or not self._registry.all_heard:
            raise _session_away("the session's data proxy is away; it, or another one, will serve it again")
        raise ApiError(404, "no data proxy has this session", code="session_not_found")

    async def _find(self, digest: bytes, model: str | None = None) -> SessionLocation | None:
        """Return the location of the session with this key, by asking the replicas; None if it does not exist.

        Replicas where the session would have been started are asked first. Raises 503 if no replica has the session but
        the search was incomplete: a replica did not answer or has not reported yet, or a journal was not searched
        because no replica serves it or it is moving. A start in ``model`` does not wait for the journals of other
        models without replicas, which may be gone for good.
        """
        damaged = self._registry.damaged()  # no process can search those
        recorders = [
            each for each in self._registry.workers() if any(tag not in damaged for tag in each.report.journals)
        ]
        workers = {worker.addr: worker for worker in recorders}
        # The workers where each model starts sessions with this key while all its replicas are available.
        models: dict[str | None, list[WorkerEntry]] = {}
        for worker in recorders:
            models.setdefault(worker.model, []).append(worker.entry)
        homes = {rendezvous(digest, entries)[0].addr for entries in models.values()}
        unanswered = not self._registry.all_heard  # a replica that reports only later is not asked below
        searched: set[str] = set()
        away = [name for name in self._registry.names if name not in models and model in (None, name)]
        known = {tag for name in away for tag in self._registry.journals(name)}
        for group in (homes, workers.keys() - homes):
            asked = [workers[addr] for addr in group]
            answers = await asyncio.gather(*(self._journal_of_key(worker, digest) for worker in asked))
            for worker, answer in zip(asked, answers, strict=True):
                if answer is None:
                    unanswered = True
                elif answer["journal"]:
                    return SessionLocation(worker, answer["journal"])
                else:
                    searched.update(answer["journals"])
                    known.update(answer["elsewhere"])
        idle = [name for name in away if self._registry.is_idle(name)]
        elsewhere = known.difference(searched, *map(self._registry.journals, idle))
        if unanswered or not self._registry.all_heard or elsewhere:
            raise _session_away("no data proxy has a session with this key, but one of them is away")
        if not searched.issuperset(known):  # the caller does not wait: nothing brings a replica
            message = f"no data proxy has a session with this key, and the model {idle[0]!r} has no replica to search"
            raise ApiError(503, message, code=NO_REPLICAS, headers={"Retry-After": "5"})
        return None

    async def _journal_of_key(self, worker: WorkerRecord, digest: bytes) -> dict[str, Any] | None:
        """Ask a worker for the session with this key. Return None if the worker does not answer, otherwise
        ``journal``: the tag of the session's journal or None, ``journals``: the tags it searched, ``elsewhere``:
        other tags it sees."""
        with contextlib.suppress(CallFailed, TimeoutError):
            reply = await self._post(worker, "/rl/find_key", {"digest": digest.hex()}, timeout_s=_FIND_TIMEOUT_S)
            if "journal" in (found := reply.object()):  # a data proxy of an earlier version names no others
                elsewhere = self._registry.journals(worker.model)
                return {"journals": worker.report.journals, "elsewhere": elsewhere, **found}
        return None

    async def move(self, worker: WorkerRecord) -> None:
        """Tell a drained worker to move its sessions to the model's other workers, if there are any, and any other
        worker to keep its sessions. A worker that does not answer is treated as dead: others adopt its journals."""
        if not worker.report.journals:
            return
        others = [
            each
            for each in self._registry.workers(worker.model)
            if each is not worker and each.state in (READY, CORDONED) and each.report.journals
        ]
        if worker.drained and not others:
            return
        with contextlib.suppress(CallFailed, TimeoutError):
            await self._post(worker, "/drain" if worker.drained else "/undrain", {}, timeout_s=_MOVE_TIMEOUT_S)

    async def end(self, data: Mapping[str, object], request_id: str) -> HttpReply:
        """End every session of a group. Raises 404, 502, 503."""
        group_id = data.get("group_id")
        worker = self._with_journal(GroupName.require(group_id).tag).worker
        try:
            return await self._post(worker, "/rl/end_session", {"group_id": group_id}, request_id)
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"the data proxy does not answer: {error!r}", code="worker_lost") from error

    async def _post(
        self,
        worker: WorkerRecord,
        path: str,
        body: Mapping[str, object],
        request_id: str | None = None,
        timeout_s: float = _START_TIMEOUT_S,
        tag: str | None = None,
    ) -> HttpReply:
        headers = dict(self._headers)
        if request_id is not None:
            headers[names.REQUEST_ID] = request_id
        if tag is not None:  # lets the worker refuse the call if the journal has moved
            headers[names.JOURNAL] = tag
        data = orjson.dumps(body)
        return await self._http.fetch("POST", worker.addr, path, headers=headers, body=data, timeout_s=timeout_s)


def _session_away(message: str) -> ApiError:
    return ApiError(503, message, code="session_away", headers={"Retry-After": "1"})
