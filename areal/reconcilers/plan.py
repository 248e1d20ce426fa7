"""The plan: operations, their order and their causes. A value, without I/O.

Invariants: an op's ``needs`` name only ops with smaller ids; every op has a cause as text; equal inputs give an equal
plan, so that ``diff`` prints exactly what ``apply`` runs, and planning again shows whether a saved plan is stale. Runs
that the plan starts are named by a symbol ("+engine/0"), existing runs by their uid. An op that waits for GPUs needs
the ops that free them, so that no order of execution ever holds more GPUs than there are.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

from areal.dataclasses import asdict, dataclass, field
from areal.errors import ArealError, Conflict, FieldName, InvalidManifest, NoCapacity, TimedOut, Wording
from areal.resources.tree import ABSENT, UpdateClass
from areal.wire.fields import write_fields

if TYPE_CHECKING:
    from areal.resources.nodes import Diagnostic
    from areal.wire.routing import Readiness


class DoesNotFit(NoCapacity):
    """There is not enough room for the object ``ref`` of a plan."""

    def __init__(self, ref: str, error: NoCapacity) -> None:
        super().__init__(error.message, hint=error.hint, detail=error.detail)
        self.ref = ref


FEWER_REPLICAS = Wording(
    "areal get processes -o wide shows who holds the GPUs; lower ",
    FieldName("spec.replicas"),
    " or stop something; resources: {gpus: 0} computes on the CPU",
)


@dataclass
class GpuPool:
    """The GPUs of a plan. ``free`` can be taken at once; ``_coming`` has pairs of a count and the op that frees that
    many, earliest first."""

    free: int = 0
    _coming: deque[tuple[int, int]] = field(default_factory=deque)
    _due: int = 0  # the sum of the counts in ``_coming``

    @property
    def available(self) -> int:
        return self.free + self._due

    def take(self, count: int, what: str) -> tuple[int, ...]:
        """Take ``count`` GPUs. Return the ops that free them. Raises NoCapacity."""
        if count > self.available:
            raise NoCapacity(f"{what} needs {count} GPUs; {self.available} are free", hint=FEWER_REPLICAS)
        now = min(count, self.free)
        self.free -= now
        count -= now
        needs = []
        self._due -= count
        while count:
            coming, op = self._coming.popleft()
            needs.append(op)
            if coming > count:
                self._coming.appendleft((coming - count, op))
            count -= min(count, coming)
        return tuple(needs)

    def give(self, count: int, op: int) -> None:
        """Add ``count`` GPUs that ``op`` frees."""
        if count:
            self._coming.append((count, op))
            self._due += count

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo every ``take`` in the block if one raises NoCapacity."""
        free, coming, due = self.free, self._coming.copy(), self._due
        try:
            yield
        except NoCapacity:
            self.free, self._coming, self._due = free, coming, due
            raise


PLAN_FORMAT = 1
_RESTARTED = "restartedAt"  # in a process's inputs: when its restart was requested


class Verb(StrEnum):
    RECORD = "record"  # write the accepted object, before its processes start
    SPAWN = "spawn"  # start a run
    KICK = "restart-now"  # end a back-off
    REPAIR = "repair-record"  # rewrite the damaged record of a live run
    AWAIT = "await-ready"  # the run's process is alive, owns its port and answers
    WARM = "warm-up"  # a one-token completion through the data proxy
    ROUTE = "route"  # give the router a model's exact worker set
    CONFIGURE = "configure"  # hot settings of a running service
    SYNC = "synced"  # mark the table of a restarted router as complete
    SETTLE = "visible"  # the gateway lists the model
    SOAK = "soak"  # minReadySeconds without a failure
    DRAIN = "drain"  # no new requests; running ones finish
    UNROUTE = "unroute"  # remove a model from the router
    STOP = "stop"  # end a run and everything in its session
    FORGET = "forget"  # delete the record of an ended run
    ERASE = "erase"  # delete the object
    BARRIER = "barrier"  # no action: replaces many ops in the needs of others


_WORDS = {
    Verb.RECORD: "record",
    Verb.SPAWN: "start",
    Verb.KICK: "restart",
    Verb.REPAIR: "write again the record of",
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
    Verb.BARRIER: "go on with",
}


@dataclass(frozen=True)
class OpArgs:
    """The arguments of a verb. ``JSON``: names in a saved plan that differ from the attributes."""

    JSON: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True)
class StartRun(OpArgs):
    """Arguments of SPAWN. ``router`` and ``engine``: the runs whose addresses the new run needs. ``inputs`` are
    recorded with the run. A ``successor`` starts beside its predecessor. ``gpus``: on each node."""

    router: str = ""
    engine: str = ""
    successor: bool = False
    gpus: int | None = None
    nodes: int = 1
    inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AwaitReady(OpArgs):
    """Arguments of AWAIT. An ``engine`` that fails ends the wait. ``trainer``: the job that publishes the weights, for
    which the op does not wait."""

    engine: str = ""
    trainer: str = ""


@dataclass(frozen=True)
class AtRouter(OpArgs):
    """Arguments of an op that calls a service's router."""

    service: str
    router: str


@dataclass(frozen=True)
class SetRoutes(AtRouter):
    """Arguments of ROUTE. ``cordoned``: those of the op's runs that get no new sessions."""

    expected: int
    readiness: Readiness
    cordoned: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemoveRoutes(AtRouter):
    """Arguments of UNROUTE. ``model``: the name at the router, if it is not the object's. ``declared``: the model stays
    declared without replicas, so that its callers try again."""

    model: str = ""
    declared: bool = False


@dataclass(frozen=True)
class DrainWorker(AtRouter):
    seconds: float


@dataclass(frozen=True)
class SettleRoutes(OpArgs):
    service: str
    trainer: str = ""


@dataclass(frozen=True)
class SoakRuns(OpArgs):
    seconds: float


@dataclass(frozen=True)
class StopRun(OpArgs):
    """Arguments of STOP. ``grace_seconds``: between SIGTERM and SIGKILL; None: the run's own."""

    JSON = {"grace_seconds": "graceSeconds"}
    grace_seconds: float | None = None


NO_ARGS, PLAIN_START, OWN_GRACE = OpArgs(), StartRun(), StopRun()
NO_PROCESS = "no process"  # the cause of a first start
A = TypeVar("A")  # OpArgs, or the body of POST /configure


@dataclass(frozen=True)
class Op(Generic[A]):
    """One operation. ``after``: ops that must have ended, successfully or not."""

    id: int
    verb: Verb
    ref: str
    target: str
    cause: str
    needs: tuple[int, ...] = ()
    run: str = ""
    runs: tuple[str, ...] = ()
    args: A = cast(Any, NO_ARGS)
    after: tuple[int, ...] = ()

    def to_text(self) -> str:
        needs = ",".join(str(need) for need in self.needs)
        target = f" {self.target}" if self.target else ""
        return f"[{needs}] -> #{self.id} {self.ref}{target}, {self.verb}, {self.cause}"

    def to_json(self) -> dict[str, object]:
        names = self.args.JSON if isinstance(self.args, OpArgs) else {}
        args: dict[str, Any] = {names.get(name, name): value for name, value in write_fields(self.args).items()}
        return {
            "id": self.id,
            "verb": self.verb.value,
            "ref": self.ref,
            "target": self.target,
            "cause": self.cause,
            "needs": list(self.needs),
            "run": self.run,
            "runs": list(self.runs),
            "args": args | ({"after": list(self.after)} if self.after else {}),
        }

    def to_words(self) -> str:
        """Return the op in words: "2. start Model/qwen engine/0: no process (after 1)"."""
        after = f" (after {', '.join(str(need) for need in self.needs)})" if self.needs else ""
        target = f" {self.target}" if self.target else ""
        return f"{self.id}. {_WORDS[self.verb]} {self.ref}{target}: {self.cause}{after}"


@dataclass(frozen=True)
class FieldChange:
    path: str  # "spec.engineArgs.maxBatchSize"
    old: Any
    new: Any
    update: UpdateClass

    def to_text(self) -> Wording:
        old, new = ("(not set)" if value is ABSENT else repr(value) for value in (self.old, self.new))
        return Wording(FieldName(self.path), f": {old} -> {new}  ({self.update.name})")

    def to_json(self) -> dict[str, object]:
        old, new = (None if value is ABSENT else value for value in (self.old, self.new))
        return {"path": self.path, "old": old, "new": new, "update": self.update.name}


@dataclass(frozen=True)
class Drift:
    """A difference between recorded and observed state. ``kind``: a stable name (process-died, route-missing, ...)."""

    ref: str
    kind: str
    target: str
    message: str

    def to_text(self) -> str:
        return f"{self.ref} {self.target}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class Refusal:
    """Why nothing is done about an object while the rest of the plan proceeds. ``has_faults``: the plan's faults
    already state the reason, each with its position."""

    reason: Literal["capacity", "unseen", "conflict", "invalid"]
    message: str
    hint: str
    has_faults: bool = False

    def to_json(self) -> dict[str, str]:
        return {"reason": self.reason, "message": self.message, "hint": self.hint}


_ACTIONS = {  # the sign in front of the object, the summary's words
    "create": ("+", "to create"),
    "configure": ("~", "to change"),
    "heal": ("~", "to heal"),
    "replace": ("-/+", "to replace"),
    "prune": ("-", "to delete"),
    "delete": ("-", "to delete"),
    "blocked": ("?", "blocked"),
    "unchanged": (" ", "unchanged"),
}
_ROLLOUTS = {UpdateClass.ROLL: "to roll", UpdateClass.RECREATE: "to recreate"}
_SUMMARY = tuple(dict.fromkeys(["to create", *_ROLLOUTS.values(), *(words for _, words in _ACTIONS.values())]))


_REFUSED: Mapping[str, type[ArealError]] = {"capacity": NoCapacity, "invalid": InvalidManifest}


def refused_error(refusal: Refusal) -> ArealError:
    """Return the refusal as an error with its exit code."""
    return _REFUSED.get(refusal.reason, Conflict)(refusal.message, hint=refusal.hint)


def refusal_of(error: ArealError) -> Refusal:
    """Return an object's error as a refusal, by exit code: NoCapacity (10), Conflict (5), all others invalid (3)."""
    reason: Literal["capacity", "conflict", "invalid"] = "invalid"
    if isinstance(error, NoCapacity | Conflict):
        reason = "capacity" if isinstance(error, NoCapacity) else "conflict"
    return Refusal(reason, error.message, error.hint or "", bool(getattr(error, "diagnostics", ())))


@dataclass(frozen=True)
class ObjectPlan:
    """One object's part. ``action``: create | configure | unchanged | heal | replace | prune | delete | blocked.

    A ``blocked`` object has a ``refusal``. ``decided_by``: the changed leaf with the highest update class; ``cause``:
    what that class means here. ``unseen``: a process that cannot be observed, and why; the plan does not change it.
    """

    ref: str
    action: str
    cause: str = ""
    decided_by: str = ""
    changes: tuple[FieldChange, ...] = ()
    taken: tuple[str, ...] = ()  # leaves taken from other layers by --force-conflicts, as text
    refusal: Refusal | None = None
    unseen: str = ""

    @property
    def outlook(self) -> str:
        """The action, in the words of the summary."""
        decisive = max((change.update for change in self.changes), default=UpdateClass.META)
        rollout = _ROLLOUTS.get(decisive) if self.action == "configure" else None
        return rollout or _ACTIONS[self.action][1]

    def to_lines(self) -> list[str]:
        cause = f" ({self.cause})" if self.cause else ""
        decided = f", decided by {self.decided_by}" if self.decided_by else ""
        lines = [f"{_ACTIONS[self.action][0]} {self.ref} {self.action}{cause}{decided}"]
        lines += [f"    {change.to_text()}" for change in self.changes]
        return lines + [f"    took {sentence}" for sentence in self.taken]

    def to_json(self) -> dict[str, object]:
        return {
            "ref": self.ref,
            "action": self.action,
            "cause": self.cause,
            "decidedBy": self.decided_by,
            "changes": [change.to_json() for change in self.changes],
            "taken": list(self.taken),
            **({"refusal": self.refusal.to_json()} if self.refusal else {}),
        }


@dataclass(frozen=True)
class Plan:
    objects: tuple[ObjectPlan, ...] = ()
    ops: tuple[Op[Any], ...] = ()
    drift: tuple[Drift, ...] = ()
    destructive: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # parts that could not be observed; the plan does not change them
    faults: tuple[Diagnostic, ...] = ()  # in the manifests; objects with faults are not planned
    serial: int = 0
    source: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.ops

    @property
    def summary(self) -> str:
        """The number of objects by what happens to them: "3 to create, 1 to roll, 2 unchanged"."""
        counts = Counter(item.outlook for item in self.objects)
        return ", ".join(f"{counts[words]} {words}" for words in _SUMMARY if counts[words]) or "no object"

    @property
    def digest(self) -> str:
        """A hash of what is done to which object and why. It does not change with the serial, which other
        objects change, or with the time at which a restart is requested."""
        document = self.to_json()
        for op in document["ops"]:
            op["args"] = {**op["args"], "inputs": {**op["args"].get("inputs", {}), _RESTARTED: None}}
        parts = [document[name] for name in ("objects", "ops", "destructive")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    @property
    def first_ops(self) -> dict[str, str]:
        """The first operation of each object, in words: what is left to do."""
        return {op.ref: f"{op.target}: {op.cause}" for op in reversed(self.ops)}

    def ops_of(self, ref: str) -> tuple[Op[Any], ...]:
        return tuple(self._by_ref.get(ref, ()))

    @cached_property
    def _by_ref(self) -> dict[str, list[Op[Any]]]:
        found: dict[str, list[Op[Any]]] = {}
        for op in self.ops:
            found.setdefault(op.ref, []).append(op)
        return found

    def to_text(self) -> str:
        lines = [line for item in self.objects for line in item.to_lines()]
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
            "objects": [item.to_json() for item in self.objects],
            "drift": [asdict(drift) for drift in self.drift],
            "unknown": list(self.unknown),
            "faults": [fault.to_json() for fault in self.faults],
            "destructive": list(self.destructive),
            "ops": [op.to_json() for op in self.ops],
            "source": dict(self.source),
        }


_MANY = 16  # ops; fewer need no barrier


@dataclass
class Report:
    """The results of the ops of ``plan``. ``skipped`` ops did not start, or ended at an interrupt."""

    plan: Plan = field(default_factory=Plan)
    done: set[int] = field(default_factory=set)
    failed: dict[int, ArealError] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def errors_of(self, ref: str) -> list[ArealError]:
        return [self.failed[op.id] for op in self.plan.ops_of(ref) if op.id in self.failed]

    def faults_of(self, ref: str) -> list[ArealError]:
        """Return the object's errors, except timeouts of the command itself: the processes that it started continue
        without it."""
        failed = [op for op in self.plan.ops_of(ref) if op.id in self.failed]
        return [
            self.failed[op.id] for op in failed if op.verb is Verb.STOP or not isinstance(self.failed[op.id], TimedOut)
        ]

    def is_unfinished(self, ref: str) -> bool:
        return any(op.id in self.skipped for op in self.plan.ops_of(ref))


class PlanBuilder:
    """Collects ops in order. Only this class assigns ids."""

    def __init__(self) -> None:
        self._ops: list[Op[Any]] = []
        self._spawns: dict[str, int] = {}
        self._by_ref: dict[str, list[Op[Any]]] = {}

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
        args: Any = NO_ARGS,
        after: Iterable[int] = (),
    ) -> int:
        number = len(self._ops) + 1
        op: Op[Any] = Op(
            number, verb, ref, target, cause, tuple(sorted(set(needs))), run, tuple(runs), args, tuple(after)
        )
        assert all(need < number for need in op.needs), f"op {number} needs a later op: {op.needs}"
        self._ops.append(op)
        if verb is Verb.SPAWN:
            self._spawns[run] = number
        self._by_ref.setdefault(ref, []).append(op)
        return number

    def barrier(self, ref: str, cause: str, needs: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``needs``, or, if they are many, one op that needs all of them: otherwise n ops that need n others
        each would give the plan n^2 needs."""
        return needs if len(needs) <= _MANY else (self.add(Verb.BARRIER, ref, "", cause, needs=needs),)

    def ops(self) -> tuple[Op[Any], ...]:
        return tuple(self._ops)

    def ops_of(self, ref: str) -> tuple[Op[Any], ...]:
        return tuple(self._by_ref.get(ref, ()))

    def spawn_ops(self, runs: Iterable[str]) -> tuple[int, ...]:
        """Return the ops that start these runs."""
        return tuple(self._spawns[run] for run in runs if run in self._spawns)

    def ready_ops(self, refs: Collection[str]) -> tuple[int, ...]:
        """Return the ops after which these objects serve."""
        awaited = (Verb.ROUTE, Verb.SETTLE, Verb.AWAIT)
        return tuple(sorted(op.id for ref in refs for op in self.ops_of(ref) if op.verb in awaited))

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Remove the ops added in the block if it raises NoCapacity."""
        mark = len(self._ops)
        try:
            yield
        except NoCapacity:
            while len(self._ops) > mark:
                op = self._ops.pop()
                self._by_ref[op.ref].pop()
                if op.verb is Verb.SPAWN:
                    del self._spawns[op.run]
            raise
