"""The plan: what will be done, in which order, and why. A value; nothing here touches the world.

Invariants: an op's ``needs`` name only ops with smaller ids; every op has a cause in words; equal inputs give an
equal plan, so that ``diff`` prints exactly what ``apply`` runs and a saved plan can be checked for staleness by
planning again. Runs that the plan starts are named by a symbol ("+engine/0"); runs that exist by their uid. A GPU that
an op frees is handed to an op that waits for it, so that no order of execution ever holds more GPUs than there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from areal.errors import NoCapacity
from areal.resources.tree import ABSENT, UpdateClass, path_text


@dataclass
class GpuPool:
    """``free`` GPUs can be taken at once; ``_coming`` holds (count, op after which they are free), earliest first."""

    free: int = 0
    _coming: list[tuple[int, int]] = field(default_factory=list)

    @property
    def available(self) -> int:
        return self.free + sum(count for count, _ in self._coming)

    def take(self, count: int, what: str) -> tuple[int, ...]:
        """The ops to wait for before ``count`` more GPUs are there. Raises NoCapacity."""
        if count > self.available:
            raise NoCapacity(
                f"{what} needs {count} GPUs; {self.available} are free",
                hint="areal get processes -o wide shows who holds the GPUs; lower spec.replicas or stop something",
            )
        now = min(count, self.free)
        self.free -= now
        count -= now
        needs = []
        while count:
            coming, op = self._coming.pop(0)
            needs.append(op)
            if coming > count:
                self._coming.insert(0, (coming - count, op))
            count -= min(count, coming)
        return tuple(needs)

    def give(self, count: int, op: int) -> None:
        """``count`` GPUs are free again after ``op``."""
        if count:
            self._coming.append((count, op))

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """An error inside gives back what was taken."""
        free, coming = self.free, list(self._coming)
        try:
            yield
        except NoCapacity:
            self.free, self._coming = free, coming
            raise


PLAN_FORMAT = 1


class Verb(StrEnum):
    RECORD = "record"  # write the object as accepted: ours before it exists
    SPAWN = "spawn"  # start a run
    KICK = "restart-now"  # end a back-off
    AWAIT = "await-ready"  # the run's own child lives, owns its port and answers
    WARM = "warm-up"  # a one-token completion through the data proxy
    ROUTE = "route"  # give the router a model's exact worker set
    CONFIGURE = "configure"  # hot settings of a running service
    SYNC = "synced"  # tell a router that came back that its table is whole
    SETTLE = "visible"  # the gateway lists the model
    SOAK = "soak"  # minReadySeconds without a failure
    DRAIN = "drain"  # no new picks; running requests finish
    UNROUTE = "unroute"  # forget a model at the router
    STOP = "stop"  # end a run and everything in its session
    FORGET = "forget"  # delete the record of an ended run
    ERASE = "erase"  # delete the object


_WORDS = {
    Verb.RECORD: "record",
    Verb.SPAWN: "start",
    Verb.KICK: "restart",
    Verb.AWAIT: "wait until ready:",
    Verb.WARM: "warm up",
    Verb.ROUTE: "send requests to",
    Verb.CONFIGURE: "configure",
    Verb.SYNC: "complete the table of",
    Verb.SETTLE: "wait until the gateway lists",
    Verb.SOAK: "watch",
    Verb.DRAIN: "drain",
    Verb.UNROUTE: "send no more requests to",
    Verb.STOP: "stop",
    Verb.FORGET: "forget an ended run of",
    Verb.ERASE: "delete",
}


@dataclass(frozen=True)
class Op:
    id: int
    verb: Verb
    ref: str
    target: str
    cause: str
    needs: tuple[int, ...] = ()
    run: str = ""
    runs: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        needs = ",".join(str(need) for need in self.needs)
        target = f" {self.target}" if self.target else ""
        return f"[{needs}] -> #{self.id} {self.ref}{target}, {self.verb}, {self.cause}"

    def to_words(self) -> str:
        """For people: "2. start Model/qwen engine/0: no process (after 1)"."""
        after = f" (after {', '.join(str(need) for need in self.needs)})" if self.needs else ""
        target = f" {self.target}" if self.target else ""
        return f"{self.id}. {_WORDS[self.verb]} {self.ref}{target}: {self.cause}{after}"


@dataclass(frozen=True)
class FieldChange:
    path: str  # "spec.engineArgs.maxBatchSize"
    old: Any
    new: Any
    update: UpdateClass

    def to_text(self) -> str:
        return f"{self.path}: {_value(self.old)} -> {_value(self.new)}  ({self.update.name})"


@dataclass(frozen=True)
class Drift:
    """Reality left the record: ``kind`` is a stable name (process-died, route-missing, ...)."""

    ref: str
    kind: str
    target: str
    message: str

    def to_text(self) -> str:
        return f"{self.ref} {self.target}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class Refusal:
    """Why nothing is done about an object while the rest of the plan goes on."""

    reason: Literal["capacity", "unseen", "conflict", "invalid"]
    message: str
    hint: str


@dataclass(frozen=True)
class ObjectPlan:
    """One object's part: ``action`` is create | configure | unchanged | heal | replace | prune | delete |
    blocked.

    ``decided_by`` is the changed leaf with the highest update class, ``cause`` says what that class means here.
    ``blocked`` comes with a ``refusal``.
    """

    ref: str
    action: str
    cause: str = ""
    decided_by: str = ""
    changes: tuple[FieldChange, ...] = ()
    taken: tuple[str, ...] = ()  # leaves taken from other layers by --force-conflicts, in words
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Plan:
    objects: tuple[ObjectPlan, ...] = ()
    ops: tuple[Op, ...] = ()
    drift: tuple[Drift, ...] = ()
    destructive: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # what could not be seen, and so is left alone
    faults: tuple[Mapping[str, Any], ...] = ()  # of the manifests; what has one is not planned
    serial: int = 0
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.ops

    @property
    def changes(self) -> dict[str, tuple[FieldChange, ...]]:
        return {item.ref: item.changes for item in self.objects if item.changes}

    @property
    def summary(self) -> str:
        """ "3 to create, 1 to roll, 2 unchanged": how many objects, by what happens to them."""
        counts = Counter(_outlook(item) for item in self.objects)
        return ", ".join(f"{counts[word]} {word}" for word in _OUTLOOKS if counts[word]) or "no object"

    def ops_of(self, ref: str) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.ref == ref)

    def to_text(self) -> str:
        lines = [line for item in self.objects for line in _object_lines(item)]
        lines += [f"! drift {drift.to_text()}" for drift in self.drift]
        lines += [f"? unknown {reason}" for reason in self.unknown]
        lines += [f"! {sentence}" for sentence in self.destructive]
        if self.ops:
            lines += ["", "plan:", *(f"  {op.to_words()}" for op in self.ops)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": PLAN_FORMAT,
            "serial": self.serial,
            "summary": self.summary,
            "objects": [_object_json(item) for item in self.objects],
            "drift": [vars_of(drift) for drift in self.drift],
            "unknown": list(self.unknown),
            "faults": [dict(fault) for fault in self.faults],
            "destructive": list(self.destructive),
            "ops": [_op_json(op) for op in self.ops],
            "source": dict(self.source),
        }


def vars_of(drift: Drift) -> dict[str, str]:
    return {"ref": drift.ref, "kind": drift.kind, "target": drift.target, "message": drift.message}


_SIGN = {
    "create": "+",
    "configure": "~",
    "heal": "~",
    "prune": "-",
    "delete": "-",
    "unchanged": " ",
    "replace": "-/+",
    "blocked": "?",
}


_OUTLOOKS = (
    *("to create", "to roll", "to recreate", "to change", "to heal", "to replace"),
    *("to delete", "blocked", "unchanged"),
)
_ACTIONS = {"create": "to create", "heal": "to heal", "replace": "to replace", "prune": "to delete"}
_ACTIONS |= {"delete": "to delete", "blocked": "blocked", "unchanged": "unchanged"}


def _outlook(item: ObjectPlan) -> str:
    if item.action != "configure":
        return _ACTIONS[item.action]
    decisive = max((change.update for change in item.changes), default=UpdateClass.META)
    return {UpdateClass.ROLL: "to roll", UpdateClass.RECREATE: "to recreate"}.get(decisive, "to change")


def _object_lines(item: ObjectPlan) -> list[str]:
    cause = f" ({item.cause})" if item.cause else ""
    decided = f", decided by {item.decided_by}" if item.decided_by else ""
    lines = [f"{_SIGN[item.action]} {item.ref} {item.action}{cause}{decided}"]
    lines += [f"    {change.to_text()}" for change in item.changes]
    lines += [f"    took {sentence}" for sentence in item.taken]
    return lines


def _object_json(item: ObjectPlan) -> dict[str, Any]:
    changes = [
        {
            "path": change.path,
            "old": None if change.old is ABSENT else change.old,
            "new": None if change.new is ABSENT else change.new,
            "update": change.update.name,
        }
        for change in item.changes
    ]
    return {
        "ref": item.ref,
        "action": item.action,
        "cause": item.cause,
        "decidedBy": item.decided_by,
        "changes": changes,
        "taken": list(item.taken),
        **({"refusal": asdict(item.refusal)} if item.refusal else {}),
    }


def _op_json(op: Op) -> dict[str, Any]:
    return {
        "id": op.id,
        "verb": op.verb.value,
        "ref": op.ref,
        "target": op.target,
        "cause": op.cause,
        "needs": list(op.needs),
        "run": op.run,
        "runs": list(op.runs),
        "args": dict(op.args),
    }


def _value(value: Any) -> str:
    return "(not set)" if value is ABSENT else repr(value)


def spec_path(path: Sequence[str | int]) -> str:
    return path_text(tuple(path))


class PlanBuilder:
    """Collects ops in order and hands out their ids; the only place where ids are made."""

    def __init__(self) -> None:
        self._ops: list[Op] = []

    def add(
        self,
        verb: Verb,
        ref: str,
        target: str,
        cause: str,
        *,
        needs: Iterable[int] = (),
        run: str = "",
        runs: Iterable[str] = (),
        args: Mapping[str, Any] | None = None,
    ) -> int:
        number = len(self._ops) + 1
        op = Op(number, verb, ref, target, cause, tuple(sorted(set(needs))), run, tuple(runs), dict(args or {}))
        assert all(need < number for need in op.needs), f"op {number} needs a later op: {op.needs}"
        self._ops.append(op)
        return number

    def ops(self) -> tuple[Op, ...]:
        return tuple(self._ops)

    def ops_of(self, ref: str) -> tuple[Op, ...]:
        return tuple(op for op in self._ops if op.ref == ref)

    def ready_ops(self, refs: Container[str]) -> tuple[int, ...]:
        """The ops after which objects serve."""
        awaited = (Verb.ROUTE, Verb.SETTLE, Verb.AWAIT)
        return tuple(op.id for op in self._ops if op.ref in refs and op.verb in awaited)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A plan that turns out not to fit leaves no op behind."""
        mark = len(self._ops)
        try:
            yield
        except NoCapacity:
            del self._ops[mark:]
            raise
