"""The router's state: models, their workers, and each worker's drain and health. No I/O.

A worker belongs to one model or to none. ``register_model`` is declarative: it replaces all workers of a model. A
worker that stays keeps its health and its drain; a removed worker cannot rejoin by renewing its lease. A data proxy
registers itself with a lease (``renew``), which adds it to its model, and is dead once the lease expires. ``declared``
and ``restore`` carry models and workers over to the next router.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from areal.dataclasses import asdict, dataclass, field, replace
from areal.services.inference.router.health import ProbeResult, WorkerHealth
from areal.wire.bodies import RenewLease
from areal.wire.fields import read_fields
from areal.wire.routing import (
    CORDONED,
    DEAD,
    DEFAULT_READINESS,
    DRAINING,
    READY,
    Changes,
    GatewayLimits,
    ModelEntry,
    Readiness,
    Snapshot,
    WorkerEntry,
    worker_base_url,
)

_REMOVED_KEPT = 1000
_CHANGES_KEPT = 50_000
_RENEWALS_PER_S = 500.0  # at most, of all workers together


@dataclass(frozen=True)
class WorkerReport:
    """A worker's report at its last probe, which was sent at ``asked_at`` (monotonic).

    ``journals`` and ``elsewhere``: tags of the journals that it serves, and of the others in its model's folder.
    ``damaged``: the folders' names of those that cannot be opened, by tag.
    ``sessions``: the number of active ones; ``started``: the count of those ever started, None from an earlier version.
    ``fault``: why it is not ready, where waiting alone does not help.
    ``engine_url``, ``agent_url``: the engine, or the agent's worker, that serves /metrics.
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
    damaged: Mapping[str, str] = field(default_factory=dict)
    sessions: int = 0
    started: int | None = None
    asked_at: float = 0.0
    fault: str = ""
    engine_url: str | None = None
    agent_url: str | None = None


@dataclass
class WorkerRecord:
    id: str
    addr: str
    model: str | None = None
    drained: bool = False
    stopping: bool = False  # drained to be stopped: its sessions wait for its successor
    cordoned: bool = False
    health: WorkerHealth = field(default_factory=WorkerHealth)
    report: WorkerReport = field(default_factory=WorkerReport)
    probed_at: float = -1e9  # monotonic
    expires_at: float | None = None  # monotonic: the lease's end; None: without a lease, it is probed
    granted_s: float = math.inf  # the lease's length
    was_ready: bool = False

    @property
    def state(self) -> str:
        if not self.health.healthy:
            return DEAD
        if self.drained or self.health.leaving:
            return DRAINING
        return CORDONED if self.cordoned else READY

    @property
    def public(self) -> tuple[object, ...]:
        """The fields on which the routing table depends."""
        report = self.report
        about = report.max_model_len, report.root, report.adapters, report.fault
        return self.state, self.health.seen, about, report.journals, report.elsewhere, report.damaged

    @property
    def entry(self) -> WorkerEntry:
        turns_away = self.drained and not self.stopping
        report = self.report
        return WorkerEntry(self.id, self.addr, self.state, report.journals, self.health.seen, turns_away, report.fault)

    def to_json(self) -> dict[str, object]:
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
            "fault": self.report.fault,
        }


@dataclass
class _Model:
    """A model. ``withheld``: it joined by leases and is not published until all of its replicas have been ready."""

    expected: int
    external: bool
    created: int
    readiness: Readiness
    journals: frozenset[str] = frozenset()  # all that its workers reported last
    withheld: bool = False
    were_ready: int = 0  # workers that were ready while it is withheld
    journals_due: bool = False  # some worker reported others than before
    departed: frozenset[str] = frozenset()  # all when a worker was removed, until all others have reported since
    departed_at: float = 0.0  # monotonic
    awaited: set[str] | None = None  # ids of workers that have not reported since; None: not computed yet


class WorkerRegistry:
    """The models and workers of one router. Not thread-safe; ``on_change`` is called after every change."""

    def __init__(self, *, strategy: str = "auto", readiness: Readiness = DEFAULT_READINESS) -> None:
        self.epoch = secrets.token_hex(8)
        self.serial = 0
        self.synced = False
        self.learning = False  # declarations were lost: an unknown model or worker may exist until all have registered
        self.strategy = strategy
        self.limits: dict[str, float] = {}
        self._readiness = readiness  # the default
        self.on_change: Callable[[], None] = lambda: None
        self._models: dict[str, _Model] = {}
        self._workers: dict[str, WorkerRecord] = {}
        self._members: dict[str | None, dict[str, WorkerRecord]] = {}  # the same, by model
        self._by_addr: dict[str, dict[str, WorkerRecord]] = {}  # the same, by address
        self._by_journal: dict[str, dict[str, WorkerRecord]] = {}  # the same, by served journal
        self._listed: dict[str, tuple[int, list[WorkerRecord]]] = {}  # a model's members at a serial
        self._changes: deque[tuple[int, str | None, str]] = deque(maxlen=_CHANGES_KEPT)  # serial, model, worker
        self._whole_at = 0  # serial of the last change of more than single workers
        self._removed: dict[str, None] = {}  # ids of removed workers, whose leases are refused

    def workers(self, model: str | None = None) -> list[WorkerRecord]:
        return list((self._workers if model is None else self._members.get(model, {})).values())

    def members(self, model: str) -> Sequence[WorkerRecord]:
        """Return ``workers(model)``, cached until the table changes."""
        cached = self._listed.get(model)
        if cached is None or cached[0] != self.serial:
            cached = self._listed[model] = self.serial, self.workers(model)
        return cached[1]

    def holders(self, tag: str) -> list[WorkerRecord]:
        """Return the workers that serve a journal, workers of external models last."""
        return sorted(self._by_journal.get(tag, {}).values(), key=self._is_external)

    def _is_external(self, worker: WorkerRecord) -> bool:
        model = self._models.get(worker.model) if worker.model is not None else None
        return model is not None and model.external

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def readiness(self, worker: WorkerRecord) -> Readiness:
        """Return the probe settings of a worker."""
        model = self._models.get(worker.model) if worker.model is not None else None
        return model.readiness if model is not None else self._readiness

    def has_model(self, name: str) -> bool:
        return name in self._models

    def find(self, *, worker_id: str | None = None, addr: str | None = None) -> WorkerRecord | None:
        if worker_id is not None:
            return self._workers.get(worker_id)
        return next(iter(self._by_addr.get(addr or "", {}).values()), None)

    def register(self, worker_id: str | None, addr: str, model: str | None) -> WorkerRecord:
        """Add a worker, or move it to ``model``. A known id at a new address replaces the worker at the old one."""
        known = self.find(worker_id=worker_id) if worker_id else self.find(addr=addr)
        former = known.model if known is not None else None
        worker = self._place(known.id if known else worker_id or f"worker-{secrets.token_hex(4)}", addr, model)
        self._removed.pop(worker.id, None)
        if model is not None and model not in self._models:
            self._models[model] = _Model(1, False, int(time.time()), self._readiness)
        self._changed(worker if former in (None, model) else None)
        return worker

    def unregister(self, worker: WorkerRecord) -> None:
        self._remove(worker)
        self._changed(worker)

    def _remove(self, worker: WorkerRecord) -> None:
        self._delete(worker)
        if worker.expires_at is not None:
            self._removed[worker.id] = None
            if len(self._removed) > _REMOVED_KEPT:
                del self._removed[next(iter(self._removed))]

    def renew(self, lease: RenewLease, result: ProbeResult, report: WorkerReport, now: float) -> WorkerRecord | None:
        """Register a data proxy or renew its lease, and record its state. Return None if the worker was removed."""
        if lease.worker_id in self._removed:
            return None
        worker = self._workers.get(lease.worker_id)
        if worker is None or worker.addr != lease.addr or worker.model != lease.model:
            worker = self._join(lease, worker)
        self.observe(worker, result, report)
        worker.granted_s = self.lease_s(worker)
        worker.expires_at = now + worker.granted_s
        self._publish(worker)
        return worker

    def _join(self, lease: RenewLease, former: WorkerRecord | None) -> WorkerRecord:
        model = self._models.get(lease.model)
        if model is None or (model.expected == 0 and not self._members.get(lease.model)):  # it had no replica
            created = int(time.time()) if model is None else model.created
            journals = frozenset[str]() if model is None else model.journals
            self._models[lease.model] = _Model(
                lease.expected, lease.external, created, lease.readiness, journals, withheld=True
            )
        elif model.withheld:
            model.expected = max(model.expected, lease.expected)
        for other in list(self._by_addr.get(lease.addr, {}).values()):
            if other.model == lease.model and other.id != lease.worker_id:  # dead, since its port was taken over
                self._delete(other)
                self._changed(other)
        was = former.model if former is not None else None
        worker = self._place(lease.worker_id, lease.addr, lease.model)
        worker.drained = former is not None and former.drained
        worker.stopping = former is not None and former.stopping
        worker.cordoned = former.cordoned if former is not None else lease.held
        self._changed(worker if was in (None, lease.model) else None)
        return worker

    def _publish(self, worker: WorkerRecord) -> None:
        """Publish a withheld model once all the workers that it expects have been ready."""
        name = str(worker.model)
        model = self._models[name]
        if not model.withheld:
            return
        if worker.state == READY and not worker.was_ready:
            worker.was_ready = True
            model.were_ready += 1
        if model.were_ready < model.expected:
            return
        workers = self.workers(name)
        for each in workers:  # a worker that is gone counts again once it is back
            each.was_ready = each.state == READY
        model.were_ready = sum(each.was_ready for each in workers)
        if model.were_ready >= model.expected:
            model.withheld = False
            self._changed()

    def renew_s(self, worker: WorkerRecord) -> float:
        """Return the seconds between renewals of a worker's lease: the model's probe period, or longer in a large pool,
        to bound the router's load, unless the worker's health is in doubt."""
        period_s = self.readiness(worker).period_seconds
        return period_s if worker.health.in_doubt else max(period_s, len(self._workers) / _RENEWALS_PER_S)

    def lease_s(self, worker: WorkerRecord) -> float:
        rules = self.readiness(worker)
        return self.renew_s(worker) * rules.failure_threshold + rules.timeout_seconds

    def expire(self, now: float) -> None:
        """Mark workers with an expired lease dead. A lease granted before the pool grew lasts as long as a new one."""
        for worker in self._workers.values():
            if worker.expires_at is None or worker.expires_at >= now or not worker.health.healthy:
                continue
            if worker.expires_at + max(0.0, self.lease_s(worker) - worker.granted_s) < now:
                worker.health = replace(worker.health, healthy=False, successes=0)
                self._changed(worker)

    def next_expiry(self) -> float:
        """Return the earliest end of a healthy worker's lease, or infinity if there is none."""
        ends = (each.expires_at for each in self._workers.values() if each.expires_at and each.health.healthy)
        return min(ends, default=math.inf)

    def extend(self, seconds: float) -> None:
        """Extend every lease by the time for which the router was suspended."""
        for worker in self._workers.values():
            if worker.expires_at is not None:
                worker.expires_at += seconds

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
        """Replace the model's workers by ``workers``, as (id, address). ``cordoned``: ids that get no new calls.
        Idempotent."""
        wanted, marked = dict(workers), frozenset(cordoned)
        changed, moved = [worker for worker in self.workers(name) if worker.id not in wanted], False
        for worker in changed:
            self._remove(worker)
        for worker_id, addr in wanted.items():
            self._removed.pop(worker_id, None)
            former = self._workers.get(worker_id)
            moved = moved or (former is not None and former.model not in (None, name))
            worker = self._place(worker_id, addr, name)
            if worker is not former or worker.cordoned != (worker_id in marked):
                worker.cordoned = worker_id in marked
                changed.append(worker)
        before = self._models.get(name)
        known = before or _Model(1, external, int(time.time()), self._readiness)
        count = expected if expected is not None else max(1, len(wanted))
        readiness = readiness or self._readiness
        self._models[name] = replace(known, expected=count, external=external, readiness=readiness, withheld=False)
        if before is None or moved:
            self._changed()
        elif changed:  # followers get them as one change, since they read only after this method returns
            for worker in changed:
                self._changed(worker)
        elif replace(self._models[name], journals=before.journals, journals_due=before.journals_due) != before:
            self._changed()

    def remove_model(self, name: str) -> bool:
        if self._models.pop(name, None) is None:
            return False
        for worker in self.workers(name):
            self._remove(worker)
        self._listed.pop(name, None)
        self._changed()
        return True

    def set_drained(self, worker: WorkerRecord, drained: bool, *, stopping: bool = False) -> None:
        if (worker.drained, worker.stopping) != (drained, stopping):
            worker.drained, worker.stopping = drained, stopping
            self._changed(worker)

    def observe(self, worker: WorkerRecord, result: ProbeResult, report: WorkerReport | None) -> None:
        """Apply the result of a probe. A new load alone does not change the table: relays count their own calls."""
        before, journals = worker.public, worker.report.journals
        worker.health = worker.health.after(result, self.readiness(worker))
        worker.report = report or worker.report
        if self._workers.get(worker.id) is worker and (self._ends_departure(worker) or worker.public != before):
            self._index_journals(worker, journals, worker.report.journals)
            self._journals_changed(worker.model)
            self._changed(worker)

    def _ends_departure(self, worker: WorkerRecord) -> bool:
        """Clear ``departed`` if all living workers have reported since the last removal; return whether it did."""
        model = self._models.get(worker.model or "")
        if model is None or not model.departed:
            return False
        if model.awaited is None:
            members = self._members[worker.model].values()
            model.awaited = {each.id for each in members if each.report.asked_at <= model.departed_at}
        elif worker.report.asked_at > model.departed_at:
            model.awaited.discard(worker.id)
        silent_s = worker.report.asked_at - model.departed_at  # after a lease's length, awaited workers are dead
        if model.awaited and silent_s <= self.lease_s(worker):
            return False
        model.departed = frozenset()
        return True

    def _index_journals(self, worker: WorkerRecord, old: Sequence[str], new: Sequence[str]) -> None:
        if old == new:
            return
        for tag in set(old):
            del self._by_journal[tag][worker.id]
            if not self._by_journal[tag]:
                del self._by_journal[tag]
        for tag in new:
            self._by_journal.setdefault(tag, {})[worker.id] = worker

    def _journals_changed(self, name: str | None) -> None:
        if name is not None and (model := self._models.get(name)) is not None:
            model.journals_due = True

    def _update_journals(self, name: str | None) -> None:
        """Update the model's journals from its workers' reports, before they are read or a worker is removed.

        After a removal, the journals known until then stay until every other worker has reported. Without any report
        the previous journals stay.
        """
        model = self._models.get(name) if name is not None else None
        if model is None or not model.journals_due:
            return
        model.journals_due = False
        heard = [worker.report for worker in self.workers(name) if worker.health.seen]
        if heard:
            model.journals = model.departed.union(*(report.journals + report.elsewhere for report in heard))

    @property
    def all_heard(self) -> bool:
        """Whether every worker has reported its journals, so that an unreported journal does not exist. Always
        False before the sync for a router without workers, or with lost declarations."""
        workers = self.workers()
        known = not self.learning and (bool(workers) or self.synced)
        return known and all(worker.health.seen for worker in workers)

    def journals(self, name: str | None) -> frozenset[str]:
        """Return the tags of the model's journals, whether or not a worker serves them now."""
        self._update_journals(name)
        return self._models[name].journals if name in self._models else frozenset()

    def is_idle(self, name: str) -> bool:
        """Return whether a model is declared to have no replica."""
        return self._models[name].expected == 0 and not self._members.get(name)

    def is_orphan(self, tag: str) -> bool:
        """Return whether a journal exists but no worker serves it now."""
        return tag not in self._by_journal and any(tag in self.journals(name) for name in self._models)

    def damaged(self, name: str | None = None) -> dict[str, str]:
        """Return the folders' names of a model's journals, or of all, that no worker can open, by tag. One that has
        died cannot open its own again either."""
        found = [each for worker in self.workers(name) for each in worker.report.damaged.items()]
        return {tag: text for tag, text in found if all(each.state == DEAD for each in self.holders(tag))}

    def configure(self, strategy: str | None, limits: Mapping[str, Any]) -> None:
        """Update the strategy and limits. Raises ValueError for an unknown limit or a wrong value."""
        GatewayLimits().updated(limits)
        updated = {**self.limits, **limits}
        if (strategy or self.strategy, updated) != (self.strategy, self.limits):
            self.strategy, self.limits = strategy or self.strategy, updated
            self._changed()

    def mark_synced(self) -> None:
        if not self.synced or self.learning:
            self.synced, self.learning = True, False
            self._changed()

    def snapshot(self) -> Snapshot:
        content = {name: self._entry(name, model) for name, model in self._models.items()}
        return Snapshot(self.epoch, self.serial, self.synced, self.strategy, self.limits, content, self.learning)

    def changes_since(self, serial: int) -> Changes | None:
        """Return the changes since ``serial``, or None if a follower needs the whole table instead."""
        kept_from = self._changes[0][0] if len(self._changes) == _CHANGES_KEPT else 0
        if serial < self._whole_at or serial < kept_from:
            return None
        touched: dict[str, set[str]] = {}
        for at, model, worker_id in reversed(self._changes):
            if at <= serial:
                break
            if model is not None:
                touched.setdefault(model, set()).add(worker_id)
        models = {name: self._entry(name, self._models[name], some) for name, some in touched.items()}
        removed = {name: tuple(some - self._members.get(name, {}).keys()) for name, some in touched.items()}
        return Changes(self.epoch, serial, self.serial, models, removed)

    def _entry(self, name: str, model: _Model, some: Collection[str] | None = None) -> ModelEntry:
        """Return the model's table entry; with ``some``, only these workers are listed in it."""
        self._update_journals(name)
        workers = self.workers(name)
        held = {tag for worker in workers for tag in worker.report.journals}
        of_engines = () if model.external else workers  # data proxies of an external API report another model's
        adapters = [set(worker.report.adapters) for worker in of_engines if worker.state == READY]
        return ModelEntry(
            name=name,
            workers=tuple(worker.entry for worker in workers if some is None or worker.id in some),
            expected=model.expected,
            external=model.external,
            created=model.created,
            max_model_len=min(filter(None, (worker.report.max_model_len for worker in of_engines)), default=None),
            root=next(filter(None, (worker.report.root for worker in of_engines)), None),
            adapters=tuple(sorted(set.intersection(*adapters))) if adapters else (),  # a call may go to any worker
            orphans=tuple(sorted(model.journals - held)),
            damaged=self.damaged(name),
            readiness=model.readiness,
            withheld=model.withheld,
        )

    def declared(self) -> dict[str, object]:
        """Return models, workers and removed ids as JSON, for ``restore``."""
        for name in self._models:
            self._update_journals(name)
        models = {
            name: {
                **{each: getattr(model, each) for each in ("expected", "external", "created", "withheld")},
                "readiness": asdict(model.readiness),
                "journals": sorted(model.journals),
            }
            for name, model in self._models.items()
        }
        declared = ("id", "addr", "model", "drained", "stopping", "cordoned")
        workers = [
            {**{name: getattr(worker, name) for name in declared}, "leased": worker.expires_at is not None}
            for worker in self._workers.values()
        ]
        settings = {"strategy": self.strategy, "limits": dict(self.limits), "learning": self.learning}
        return {**settings, "models": models, "workers": workers, "removed": list(self._removed)}

    def restore(self, declared: Mapping[str, Any], now: float) -> None:
        """Restore an empty registry from the result of ``declared``. Raises ValueError, KeyError or TypeError, without
        any change."""
        GatewayLimits().updated(declared["limits"])
        models = {
            str(name): _Model(
                int(model["expected"]),
                bool(model["external"]),
                int(model["created"]),
                read_fields(Readiness, model["readiness"]),
                journals=(journals := frozenset(map(str, model["journals"]))),
                withheld=bool(model["withheld"]),
                departed=journals,
                departed_at=now,
            )
            for name, model in declared["models"].items()
        }
        workers = {}
        for entry in declared["workers"]:
            worker = WorkerRecord(str(entry["id"]), worker_base_url(entry["addr"]), entry["model"])
            worker.drained, worker.cordoned = bool(entry["drained"]), bool(entry["cordoned"])
            worker.stopping = bool(entry.get("stopping"))
            worker.expires_at = now if entry["leased"] else None
            workers[worker.id] = worker
        self.strategy, self.limits = str(declared["strategy"]), dict(declared["limits"])
        self._models = models
        for worker in workers.values():
            self._insert(worker)
        self._removed = dict.fromkeys(map(str, declared["removed"]))
        self.learning = bool(declared.get("learning"))
        self.synced = not self.learning
        self._changed()

    def _place(self, worker_id: str, addr: str, model: str | None) -> WorkerRecord:
        worker = self._workers.get(worker_id)
        if worker is not None and (worker.addr, worker.model) == (addr, model):
            return worker
        if worker is not None:
            self._delete(worker)
        if worker is None or worker.addr != addr:
            worker = WorkerRecord(worker_id, addr)
        worker.model = model
        self._insert(worker)
        return worker

    def _insert(self, worker: WorkerRecord) -> None:
        self._workers[worker.id] = worker
        self._members.setdefault(worker.model, {})[worker.id] = worker
        self._by_addr.setdefault(worker.addr, {})[worker.id] = worker
        self._index_journals(worker, (), worker.report.journals)
        self._journals_changed(worker.model)

    def _delete(self, worker: WorkerRecord) -> None:
        self._update_journals(worker.model)
        if (model := self._models.get(worker.model or "")) is not None:
            model.departed, model.departed_at, model.awaited = model.journals, time.monotonic(), None
        del self._workers[worker.id]
        for index, key in ((self._members, worker.model), (self._by_addr, worker.addr)):
            del index[key][worker.id]  # type: ignore[index]
            if not index[key]:  # type: ignore[index]
                del index[key]  # type: ignore[arg-type]
        self._index_journals(worker, worker.report.journals, ())
        self._journals_changed(worker.model)

    def _changed(self, worker: WorkerRecord | None = None) -> None:
        """Count a change and notify the followers. ``worker``: the only one that changed."""
        self.serial += 1
        if worker is None:
            self._whole_at = self.serial
            self._changes.clear()
        else:
            self._changes.append((self.serial, worker.model, worker.id))
        self.on_change()
