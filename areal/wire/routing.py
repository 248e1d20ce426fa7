"""The routing table as the relays see it: a value, and the rule by which a new snapshot replaces an old one.

A snapshot carries the router's ``epoch`` (random at each start), a ``serial`` that grows with each change, and
``synced``: whether the reconciler has sent this router its complete table. The rule (``follow``): a router that
restarted and is not yet synced never removes anything from a relay's table, because it may not have received those
entries yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from areal.dataclasses import asdict, dataclass, field, replace
from areal.wire.fields import NonNegativeFloat, NonNegativeInt, Range, read_fields

READY = "ready"
CORDONED = "cordoned"  # nothing new, but the calls of the sessions that it has
DRAINING = "draining"
DEAD = "dead"
NO_REPLICAS = "model_has_no_replicas"  # the code of an error

Strategy = Literal["auto", "round_robin", "least_loaded", "prefix"]


def worker_base_url(text: str) -> str:
    """Return ``host:port`` or ``http://host:port`` as a base URL without a trailing slash. Raises ValueError."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port is None:
        raise ValueError(f"worker address {text!r} must be host:port or http://host:port")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"worker address {text!r} must be a host and a port, nothing else")
    return f"{parts.scheme}://{parts.netloc}"


@dataclass(frozen=True)
class GatewayLimits:
    """Bounds on model calls; all of them change while running."""

    max_body_bytes: NonNegativeInt = 32 * 1024 * 1024
    request_timeout_seconds: NonNegativeFloat = 600.0  # without progress, not in all
    max_queued_requests: NonNegativeInt = 10_000  # calls that wait for a worker, in one relay process

    def updated(self, given: Mapping[str, float]) -> GatewayLimits:
        """Return these limits with ``given`` on top. Raises FieldError."""
        return read_fields(GatewayLimits, {**vars(self), **given}, "limits")


_MODERATE = Range(above=0, most=1e9)


@dataclass(frozen=True)
class Readiness:
    """Probe settings of a model's workers: the period, the time for an answer, how many failures in a row are a death
    and how many answers in a row a recovery."""

    period_seconds: Annotated[float, _MODERATE] = 1.0
    timeout_seconds: Annotated[float, _MODERATE] = 2.0
    failure_threshold: Annotated[int, _MODERATE] = 3
    success_threshold: Annotated[int, _MODERATE] = 2


DEFAULT_READINESS = Readiness()


@dataclass(frozen=True)
class WorkerEntry:
    """One data proxy: ``addr`` is its base URL. ``journals``: tags of those that it serves, its own first; none where
    it records nothing, or was not ``heard`` from yet. ``turns_away``: it drains without an end in sight, so that calls
    of sessions that cannot move are refused at once. ``fault``: why a dead one will not be ready by itself."""

    id: str
    addr: str
    state: str = READY
    journals: tuple[str, ...] = ()
    heard: bool = True
    turns_away: bool = False
    fault: str = ""


@dataclass(frozen=True)
class ModelEntry:
    """A model and its workers. It is published once ``expected`` of them are known; before, calls wait.

    ``max_model_len`` (the least of its workers') and ``root`` (where they have it from) are None until they tell.
    ``adapters``: LoRA adapters that all of its ready workers serve.
    ``orphans``: journals that none of its workers serves just now; some worker will.
    ``damaged``: the folders' names of journals that no worker can open, by tag.
    ``withheld``: not declared yet, and fewer than ``expected`` of its workers were ready.
    """

    name: str
    workers: tuple[WorkerEntry, ...] = ()
    expected: int = 1
    external: bool = False
    created: int = 0  # seconds since the epoch
    max_model_len: int | None = None
    root: str | None = None
    adapters: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    readiness: Readiness = DEFAULT_READINESS
    withheld: bool = False

    @property
    def idle(self) -> bool:
        """Whether it is declared to have no replica."""
        return not self.workers and self.expected == 0

    @property
    def published(self) -> bool:
        return bool(self.workers) and len(self.workers) >= self.expected and not self.withheld


@dataclass(frozen=True)
class Snapshot:
    epoch: str
    serial: int
    synced: bool = False
    strategy: str = "auto"
    limits: Mapping[str, float] = field(default_factory=dict)  # those configured; the relay has defaults for the rest
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    learning: bool = False  # the router lost its table, and learns it from the workers

    def to_json(self) -> dict[str, Any]:
        models = {name: _model_to_json(model) for name, model in self.models.items()}
        return {**vars(self), "limits": dict(self.limits), "models": models}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        models = {name: _model_from_json(name, model) for name, model in data["models"].items()}
        return cls(**{**_known(Snapshot, data), "models": models})

    def changed(self, changes: Changes) -> Snapshot:
        """Return the table after ``changes``. Raises ValueError where they belong to another one."""
        if (self.epoch, self.serial) != (changes.epoch, changes.base):
            raise ValueError(f"changes of table {changes.epoch} {changes.base}, not of {self.epoch} {self.serial}")
        models = dict(self.models)
        for name, entry in changes.models.items():
            before = models.get(name)
            workers = {worker.id: worker for worker in before.workers} if before is not None else {}
            workers |= {worker.id: worker for worker in entry.workers}
            for worker_id in changes.gone[name]:
                workers.pop(worker_id, None)
            models[name] = replace(entry, workers=tuple(workers.values()))
        return replace(self, serial=changes.serial, models=models)


@dataclass(frozen=True)
class Changes:
    """Changes from the table of serial ``base`` to that of ``serial``: models with changed workers, with these workers
    only, and ids of workers that are ``gone``."""

    epoch: str
    base: int
    serial: int
    models: Mapping[str, ModelEntry]
    gone: Mapping[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        models = {name: {**_model_to_json(entry), "gone": list(self.gone[name])} for name, entry in self.models.items()}
        return {"epoch": self.epoch, "base": self.base, "serial": self.serial, "models": models}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Changes:
        models = {name: _model_from_json(name, entry) for name, entry in data["models"].items()}
        gone = {name: tuple(entry["gone"]) for name, entry in data["models"].items()}
        return cls(data["epoch"], data["base"], data["serial"], models, gone)


EMPTY = Snapshot(epoch="", serial=-1)
DECLARED = "declared"  # in the router's file, behind what it announces of itself


@dataclass(frozen=True)
class Followed:
    """The table that a relay routes by (``table``), and that of a previous router (``inherited``), which also counts
    until the present router is synced: without a state file it knows no workers at first."""

    table: Snapshot = EMPTY
    inherited: Snapshot = EMPTY

    def follow(self, incoming: Snapshot) -> Followed:
        """Return the table after ``incoming``. Within one epoch an older serial changes nothing."""
        if incoming.epoch == self.table.epoch and incoming.serial < self.table.serial:
            return self
        if incoming.synced:
            return Followed(table=incoming)
        inherited = self.inherited if incoming.epoch == self.table.epoch else self.table
        return Followed(table=_overlay(inherited, incoming), inherited=inherited)


def _overlay(kept: Snapshot, incoming: Snapshot) -> Snapshot:
    if kept is EMPTY:
        return incoming
    models = dict(kept.models)
    for name, model in incoming.models.items():
        models[name] = _overlay_model(kept.models.get(name), model)
    return replace(incoming, strategy=kept.strategy, limits=kept.limits, models=models, learning=False)


def _overlay_model(kept: ModelEntry | None, incoming: ModelEntry) -> ModelEntry:
    """Return a worker that this router has not heard from yet keeps the journals that the last one knew of."""
    if kept is None:
        return incoming
    workers = {worker.addr: worker for worker in kept.workers}
    for worker in incoming.workers:
        before = workers.get(worker.addr)
        if before is not None and not worker.heard:
            worker = replace(worker, journals=before.journals, heard=before.heard)
        workers[worker.addr] = worker
    orphans = tuple(dict.fromkeys((*kept.orphans, *incoming.orphans)))
    damaged = {**kept.damaged, **incoming.damaged}
    return replace(incoming, workers=tuple(workers.values()), created=kept.created, orphans=orphans, damaged=damaged)


def _model_to_json(model: ModelEntry) -> dict[str, object]:
    about = {name: value for name, value in vars(model).items() if name != "name"}
    workers = [dict(vars(worker)) for worker in model.workers]
    return {**about, "workers": workers, "published": model.published, "readiness": asdict(model.readiness)}


def _model_from_json(name: str, data: Mapping[str, Any]) -> ModelEntry:
    workers = tuple(WorkerEntry(**_known(WorkerEntry, worker)) for worker in data["workers"])
    readiness = read_fields(Readiness, data.get("readiness", {}))
    return ModelEntry(**{**_known(ModelEntry, data), "name": name, "workers": workers, "readiness": readiness})


def _known(cls: type, data: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields that this version knows. Not ``read_fields``: a relay reads thousands of workers at each
    change."""
    known = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: tuple(each) if type(each) is list else each for name, each in data.items() if name in known}
