"""What the router knows: models, their workers, drains and health. No I/O; every change makes a new snapshot.

A worker belongs to one model (or to none yet). ``register_model`` is declarative: it replaces a model's workers;
a worker that stays keeps its health and its drain.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from areal.services.inference.router.health import DEFAULT, Answer, Health, Readiness
from areal.services.inference.router.table import (
    CORDONED,
    DEAD,
    DRAINING,
    READY,
    Limits,
    ModelEntry,
    Snapshot,
    WorkerEntry,
)


@dataclass(frozen=True)
class Report:
    """What a worker said of itself at the last probe, which was sent at ``asked_at`` (monotonic).

    ``journals`` and ``elsewhere``: tags of the journals that it serves, and of the others in its model's folder.
    ``sessions``: those that are active.
    """

    in_flight: int = 0
    in_flight_tokens: int = 0
    version: int | None = None
    paused: bool = False
    max_model_len: int | None = None
    root: str | None = None
    adapters: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    sessions: int = 0
    asked_at: float = 0.0


@dataclass
class Worker:
    id: str
    addr: str
    model: str | None = None
    drained: bool = False
    stopping: bool = False  # drained because it is about to be stopped: its sessions wait for its successor
    cordoned: bool = False
    health: Health = field(default_factory=Health)
    report: Report = field(default_factory=Report)
    probed_at: float = -1e9  # monotonic: when it was last asked

    @property
    def state(self) -> str:
        if not self.health.healthy:
            return DEAD
        if self.drained or self.health.leaving:
            return DRAINING
        return CORDONED if self.cordoned else READY

    @property
    def public(self) -> tuple[object, ...]:
        """What the table says of it, or takes from it."""
        told = self.report
        about = told.max_model_len, told.root, told.adapters
        return self.state, self.health.seen, about, told.journals, told.elsewhere

    @property
    def entry(self) -> WorkerEntry:
        turns_away = self.drained and not self.stopping
        return WorkerEntry(self.id, self.addr, self.state, self.report.journals, self.health.seen, turns_away)

    def to_json(self) -> dict[str, Any]:
        return {
            "worker_id": self.id,
            "worker_addr": self.addr,
            "model": self.model,
            "state": self.state,
            "healthy": self.health.healthy,
            "in_flight": self.report.in_flight,
            "in_flight_tokens": self.report.in_flight_tokens,
            "version": self.report.version,
            "paused": self.report.paused,
            "sessions": self.report.sessions,
        }


@dataclass
class _Model:
    expected: int
    external: bool
    created: int
    readiness: Readiness
    journals: frozenset[str] = frozenset()  # all of which its workers told, when last some did


class Registry:
    """Mutable, and only changed from the event loop. ``on_change`` is called after every change."""

    def __init__(self, *, strategy: str = "auto", readiness: Readiness = DEFAULT) -> None:
        self.epoch = secrets.token_hex(8)
        self.serial = 0
        self.synced = False
        self.strategy = strategy
        self.limits: dict[str, float] = {}
        self._readiness = readiness  # of models that do not say
        self.on_change: Callable[[], None] = lambda: None
        self._models: dict[str, _Model] = {}
        self._workers: dict[str, Worker] = {}

    def workers(self, model: str | None = None) -> list[Worker]:
        return [worker for worker in self._workers.values() if model is None or worker.model == model]

    def readiness(self, worker: Worker) -> Readiness:
        """How this worker is probed."""
        model = self._models.get(worker.model) if worker.model is not None else None
        return model.readiness if model is not None else self._readiness

    def has_model(self, name: str) -> bool:
        return name in self._models

    def find(self, *, worker_id: str | None = None, addr: str | None = None) -> Worker | None:
        if worker_id is not None:
            return self._workers.get(worker_id)
        return next((worker for worker in self._workers.values() if worker.addr == addr), None)

    def register(self, worker_id: str | None, addr: str, model: str | None) -> Worker:
        """Add one worker, or move it. The same id with another address is the replica's successor."""
        known = self.find(worker_id=worker_id) if worker_id else self.find(addr=addr)
        worker = self._place(known.id if known else worker_id or f"worker-{secrets.token_hex(4)}", addr, model)
        if model is not None and model not in self._models:
            self._models[model] = _Model(1, False, int(time.time()), self._readiness)
        self._changed()
        return worker

    def unregister(self, worker: Worker) -> None:
        del self._workers[worker.id]
        self._changed()

    def register_model(
        self,
        name: str,
        workers: Iterable[tuple[str, str]],
        *,
        expected: int | None,
        external: bool,
        readiness: Readiness | None = None,
        cordoned: Collection[str] = (),
    ) -> None:
        """``workers`` are (id, address) pairs, the whole set; ``cordoned`` those ids that get nothing new. Saying the
        same again changes nothing."""
        before = self._content()
        wanted = dict(workers)
        for worker in self.workers(name):
            if worker.id not in wanted:
                del self._workers[worker.id]
        for worker_id, addr in wanted.items():
            self._place(worker_id, addr, name).cordoned = worker_id in cordoned
        known = self._models.get(name) or _Model(1, external, int(time.time()), self._readiness)
        count = expected if expected is not None else max(1, len(wanted))
        self._models[name] = replace(known, expected=count, external=external, readiness=readiness or self._readiness)
        if self._content() != before:
            self._changed()

    def remove_model(self, name: str) -> bool:
        if self._models.pop(name, None) is None:
            return False
        for worker in self.workers(name):
            del self._workers[worker.id]
        self._changed()
        return True

    def set_drained(self, worker: Worker, drained: bool, *, stopping: bool = False) -> None:
        if (worker.drained, worker.stopping) != (drained, stopping):
            worker.drained, worker.stopping = drained, stopping
            self._changed()

    def observe(self, worker: Worker, answer: Answer, report: Report | None) -> None:
        """One probe's finding. Load alone is no change of the table: relays count their own."""
        before = worker.public
        worker.health = worker.health.after(answer, self.readiness(worker))
        worker.report = report or worker.report
        self._note_journals(worker.model)
        if worker.public != before and self._workers.get(worker.id) is worker:
            self._changed()

    def _note_journals(self, name: str | None) -> None:
        """While a model has no worker that told anything, its journals are those of before: a successor will come."""
        model = self._models.get(name) if name is not None else None
        heard = [worker.report for worker in self.workers(name) if worker.health.seen] if model else []
        if model is not None and heard:
            model.journals = frozenset().union(*(report.journals + report.elsewhere for report in heard))

    @property
    def all_heard(self) -> bool:
        """Whether every worker has told its journals: then one that none named is nobody's. A router without workers
        can say so only when it was told that there are none."""
        workers = self.workers()
        return all(worker.health.seen for worker in workers) and (bool(workers) or self.synced)

    def orphans(self) -> frozenset[str]:
        """Journals that no worker serves just now."""
        held = {tag for worker in self.workers() for tag in worker.report.journals}
        return frozenset().union(*(model.journals for model in self._models.values())) - held

    def configure(self, strategy: str | None, limits: Mapping[str, Any]) -> None:
        """Raises ValueError for a limit that is none."""
        Limits().updated(limits)
        updated = {**self.limits, **limits}
        if (strategy or self.strategy, updated) != (self.strategy, self.limits):
            self.strategy, self.limits = strategy or self.strategy, updated
            self._changed()

    def recall(self, kept: Snapshot) -> bool:
        """Go on from the table of the router before us, where nobody has told us anything. Whether it was taken.
        Who was draining gets nothing new here: whoever had it drained says how it goes on. Raises ValueError."""
        if self.synced or self._models or self._workers:
            return False
        self.configure(kept.strategy, kept.limits)
        for model in kept.models.values():
            self.register_model(
                model.name,
                [(worker.id, worker.addr) for worker in model.workers],
                expected=model.expected,
                external=model.external,
                readiness=model.readiness,
                cordoned=[worker.id for worker in model.workers if worker.state in (CORDONED, DRAINING)],
            )
            journals = frozenset(model.orphans).union(*(worker.journals for worker in model.workers))
            self._models[model.name] = replace(self._models[model.name], journals=journals)
        return True

    def mark_synced(self) -> None:
        if not self.synced:
            self.synced = True
            self._changed()

    def snapshot(self) -> Snapshot:
        return Snapshot(self.epoch, self.serial, self.synced, self.strategy, self.limits, self._content())

    def _content(self) -> dict[str, ModelEntry]:
        return {name: self._entry(name, model) for name, model in self._models.items()}

    def _entry(self, name: str, model: _Model) -> ModelEntry:
        workers = self.workers(name)
        held = {tag for worker in workers for tag in worker.report.journals}
        return ModelEntry(
            name=name,
            workers=tuple(worker.entry for worker in workers),
            expected=model.expected,
            external=model.external,
            created=model.created,
            max_model_len=min(filter(None, (worker.report.max_model_len for worker in workers)), default=None),
            root=next(filter(None, (worker.report.root for worker in workers)), None),
            adapters=_adapters([worker for worker in workers if worker.state == READY]),
            orphans=tuple(sorted(model.journals - held)),
            readiness=model.readiness,
        )

    def _place(self, worker_id: str, addr: str, model: str | None) -> Worker:
        worker = self._workers.get(worker_id)
        if worker is None or worker.addr != addr:
            worker = self._workers[worker_id] = Worker(worker_id, addr)
        worker.model = model
        return worker

    def _changed(self) -> None:
        self.serial += 1
        self.on_change()


def worker_base_url(text: str) -> str:
    """``host:port`` or ``http://host:port`` as a base URL without a trailing slash. Raises ValueError."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port is None:
        raise ValueError(f"worker address {text!r} must be host:port or http://host:port")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"worker address {text!r} must be a host and a port, nothing else")
    return f"{parts.scheme}://{parts.netloc}"


def _adapters(ready: Sequence[Worker]) -> tuple[str, ...]:
    """Those that every ready worker serves: a call that names one may go to any of them."""
    shared = set(ready[0].report.adapters).intersection(*(worker.report.adapters for worker in ready)) if ready else ()
    return tuple(sorted(shared))
