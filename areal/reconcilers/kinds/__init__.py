"""The contract between the reconcilers and a kind, and the controllers of the registered kinds.

A kind is added by its spec (``areal.resources``), a controller, and a line in ``areal.resources.kinds``. Planner,
executor, status and the command line know a kind only through its controller. The defaults of ``KindController`` suit a
kind without processes; ``SimpleController`` runs N processes of one component.

`areal get` calls controllers for health: a controller's module imports nothing heavy, and its methods import planning,
the spec's model and clients only when they are called. ``spec`` is the sparse spec, as it is recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from areal.dataclasses import dataclass
from areal.errors import ArealError, UsageFault
from areal.reconcilers.observe import Health, Observed, ObservedRun, best_run, judge, serves
from areal.resources.kinds import KINDS, Ref, load
from areal.runtime.backends.base import LOOPBACK, RestartPolicy, RunSpec, RunState
from areal.state.home import Home, forget_admin_key

if TYPE_CHECKING:
    from areal.reconcilers.context import Progress
    from areal.reconcilers.desired import Target, Wanted
    from areal.reconcilers.launch import EffectContext, Slot
    from areal.reconcilers.plan import Op, StartRun
    from areal.reconcilers.planning import KindPlan, Planning
    from areal.resources.nodes import Diagnostic
    from areal.resources.resource import Resource
    from areal.state.objects import ObjectStore
    from areal.state.records import StoredObject

StageReporter = Callable[[str, str], None]
"""Called before a slow step, with the object's reference and the step in words."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a component. ``port`` 0: a free one, the same as before where it can be. ``field``: of the spec,
    where a port is declared. ``shared``: with its successor. ``in_place``: it takes the port of the run that it
    replaces. ``caller``: the component, and its input, that has the URL of this one."""

    port: int = 0
    host: str = LOOPBACK
    field: str = ""
    shared: bool = False
    in_place: bool = False
    caller: tuple[str, str] | None = None


@dataclass(frozen=True)
class Completion:
    """How an object has ended. ``ended``: the phase in which it ended for good, at ``ended_at``; "" before.
    ``running``: whether ending it now would lose work."""

    ended: str = ""
    ended_at: float = 0.0
    running: bool = False


def lazy(path: str) -> Any:
    """Return a method that is the function at ``module:name``, imported when it is called; it is not given the
    controller."""
    return lambda controller, *given: load(path)(*given)


class KindController:
    """The methods that the reconcilers call, in the order of an object's life. A kind overrides those that differ."""

    runs_to_completion: ClassVar[bool] = False
    replicas_field: ClassVar[str] = ""
    """The field that `areal scale` sets."""
    kept_status: ClassVar[tuple[str, ...]] = ()
    """Fields of the status that effects write: recording the object keeps them."""
    plan_class: ClassVar[str] = "areal.reconcilers.planning:KindPlan"
    """``module:class`` of the kind's part of a plan."""
    ready_title: ClassVar[str] = "READY"
    """The title of the column of `areal get` that counts what is ready."""
    columns: ClassVar[tuple[tuple[str, tuple[str, ...], bool], ...]] = ()
    """Columns of `areal get`: title, path in the object's document, whether with ``-o wide`` only."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def faults(self, resources: Sequence[Resource], cache: Path, report: StageReporter) -> dict[Ref, list[Diagnostic]]:
        """Return faults of the kind's resources beyond their schema, found without the recorded objects. ``cache``: a
        folder for answers of installed programs."""
        return {}

    def faults_against_state(
        self, resources: Sequence[Resource], stored: Sequence[StoredObject]
    ) -> dict[Ref, list[Diagnostic]]:
        """Return faults of the kind's resources in relation to recorded objects. ``stored`` excludes the declared
        objects."""
        return {}

    def faults_before_start(
        self, items: Sequence[tuple[Wanted, Resource]], report: StageReporter
    ) -> dict[Ref, list[Diagnostic]]:
        """Return faults that would keep new objects of the kind from running."""
        return {}

    def expand(
        self,
        wanted: Sequence[Wanted],
        stored: Sequence[StoredObject],
        recreate: Sequence[str],
        refused: MutableMapping[str, ArealError],
    ) -> list[Wanted]:
        """Return ``wanted``, and the objects that the kind's objects among them bring along. ``recreate``: references
        of objects that are deleted and created again. ``refused`` collects the errors of objects that are left out."""
        return list(wanted)

    def require_runnable(self, home: Home, found: StoredObject) -> None:
        """Raise InvalidManifest, before anything is recorded, for an object whose processes could not run."""

    def host(self, spec: Mapping[str, Any]) -> str | None:
        """Return the object to which this one is attached: it is observed with this one, and deleted after it."""
        return None

    def called(self, spec: Mapping[str, object]) -> str | None:
        """Return the service that the object's processes call. It is observed with the object."""
        return self.host(spec)

    def neighbour_of(self, spec: Mapping[str, object]) -> str | None:
        """Return the object whose plan depends on this one."""
        return self.host(spec)

    def follow(
        self, targets: Sequence[Target], stored: Iterable[StoredObject], states: Iterable[RunState]
    ) -> tuple[Target, ...]:
        """Return ``targets``, and the objects that change with the kind's objects among them."""
        return tuple(targets)

    def health(self, ref: str, spec: Mapping[str, Any], seen: Observed, host: Mapping[str, object] | None) -> Health:
        """Return the object's health. ``host``: the spec of its host, None if that is not recorded."""
        return Health("Suspended" if spec.get("suspend") else "Recorded", 0, 0)

    def details(self, ref: str, seen: Observed) -> dict[str, object]:
        """Return further fields of the status, from what the processes report."""
        return {}

    def slots(self, spec: Mapping[str, object], host: Mapping[str, object] | None) -> Mapping[str, int] | None:
        """Return the number of processes that the object should have, by component. None: ended processes are kept."""
        return None

    def address(self, runs: Iterable[ObservedRun]) -> str:
        """Return the URL at which users reach the object, or ""."""
        return ""

    def completion(self, spec: Mapping[str, object], runs: Sequence[ObservedRun]) -> Completion:
        """Return how an object of a kind that ``runs_to_completion`` has ended, or that it has not."""
        return Completion()

    def progress(self, home: Home, name: str, age_s: float) -> Progress | None:
        """Return the progress of an object that is Running."""
        return None

    def plan(self, planning: Planning) -> KindPlan:
        part: KindPlan = load(self.plan_class)(planning, self.kind)
        return part

    def needed_to_end(self, found: StoredObject, observed: Observed) -> tuple[ObservedRun, ...]:
        """Return the runs that must be observable before the object is deleted."""
        return observed.of(str(found.ref))

    def wants_gpus(self, spec: Mapping[str, object]) -> bool:
        return False

    def endpoint(self, spec: Mapping[str, object], component: str) -> Endpoint | None:
        """Return the component's endpoint, or None if it does not listen."""
        return None

    def packages(self, spec: Mapping[str, object]) -> Mapping[str, str]:
        """Return packages that the object's processes import, each with the extra that installs it."""
        return {}

    def programs(self, spec: Mapping[str, Any]) -> Mapping[str, str]:
        """Return programs that the object's processes run, by the field that names each."""
        return {}

    def check_start(self, starting: Mapping[str, StoredObject], report: StageReporter) -> None:
        """Check the files of objects whose processes a plan starts, before its first effect. Raises ArealError."""

    def launch(self, context: EffectContext, op: Op[StartRun], slot: Slot) -> RunSpec:
        """Return the run of a slot's process. Raises ArealError if anything is missing."""
        raise UsageFault(f"{op.ref}: a {self.kind} has no processes")

    def start_deadline_s(self, context: EffectContext, ref: str) -> float:
        """Return the seconds that a process may take to start, whatever the command's own timeout."""
        return float("inf")

    def keep_output(self, home: Home, ref: Ref, uid: str, logs: Sequence[str]) -> None:
        """Keep the log files of the run ``uid`` of an object that is deleted, oldest first, if they are worth it."""

    def dispose(self, home: Home, ref: Ref) -> str | None:
        """Remove the files that an erased object's processes have left. Return a sentence about kept files, or None."""
        return None

    def scaled(self, store: ObjectStore, ref: Ref, model: str | None) -> Ref:
        """Return the object to which `areal scale REF --model` refers. Raises UsageFault, NotFound."""
        if not self.replicas_field:
            raise UsageFault(f"{ref} has no replicas to scale")
        if model is not None:
            raise UsageFault(f"--model names a model of an InferenceService, and {ref} is none")
        return ref

    def replicas(self, spec: Mapping[str, Any]) -> int:
        return 0 if spec.get("suspend") else int(spec.get(self.replicas_field, 1))

    def adopted(self, store: ObjectStore, ref: Ref, pid: int | None, url: str | None) -> dict[str, object]:
        """Return the manifest of a server that already runs. Raises UsageFault, NotFound, TargetFailed, Conflict."""
        raise UsageFault(f"{ref}: only a model server can be adopted", hint="--as model/NAME")

    def deleted(self, home: Home, ref: Ref) -> None:
        """Clean up after `areal delete` has removed the object."""

    def status_of(self, found: StoredObject, runs: Sequence[RunSpec]) -> dict[str, object]:
        """Return the status fields that can be recovered from the object's processes, oldest first, after its record
        was lost."""
        return {}

    def leftovers(self, home: Home, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield files that outlived their object, as (sentence, hint). ``names``: the recorded objects."""
        return iter(())


def folders_without_object(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the folders of a kind's files, each named after its object, whose object is not among ``names``."""
    found = (path for path in folder.iterdir() if path.is_dir() and path.name not in names) if folder.is_dir() else ()
    return sorted(found)


class ServiceController(KindController):
    """A service behind a gateway that requires the service's own key."""

    require_runnable = lazy("areal.reconcilers.launch:require_usable_key")

    def packages(self, spec: Mapping[str, object]) -> Mapping[str, str]:
        return {"orjson": "serve"}

    def address(self, runs: Iterable[ObservedRun]) -> str:
        return next((run.url for run in runs if run.is_live and run.state.spec.component == "gateway"), "")

    def deleted(self, home: Home, ref: Ref) -> None:
        forget_admin_key(home, ref.name, ref.kind)


class SimpleController(KindController, ABC):
    """N processes of one component, each with its own address. A process answers ``GET /health`` while it lives, and
    ``GET /ready`` with 200 while it serves. A successor is ready before the outdated process is stopped."""

    replicas_field = "replicas"
    component: ClassVar[str] = "server"
    fields: ClassVar[tuple[str, ...]] = ()
    """The fields of the spec that a process depends on: it is replaced when one of them changes."""
    restart: ClassVar[RestartPolicy] = RestartPolicy()
    grace_s: ClassVar[float] = 10.0

    @abstractmethod
    def argv(self, found: StoredObject, slot: Slot) -> list[str]:
        """Return the command line of one process, which listens at ``slot.host`` and ``slot.port``."""

    def env(self, found: StoredObject) -> Mapping[str, str]:
        return {}

    def health(self, ref: str, spec: Mapping[str, object], seen: Observed, host: Mapping[str, object] | None) -> Health:
        count = self.replicas(spec)
        if count == 0:
            return Health("Suspended", 0, 0)
        best = [best_run(seen, ref, self.component, index) for index in range(count)]
        return judge(sum(1 for run in best if serves(run)), count, best)

    def slots(self, spec: Mapping[str, object], host: Mapping[str, object] | None) -> Mapping[str, int]:
        return {self.component: self.replicas(spec)}

    def address(self, runs: Iterable[ObservedRun]) -> str:
        return next((run.url for run in runs if run.is_live and run.replica == 0), "")

    def plan(self, planning: Planning) -> KindPlan:
        from areal.reconcilers.planning import SimplePlan

        return SimplePlan(planning, self.kind, self.component, self.fields, self.replicas)

    def endpoint(self, spec: Mapping[str, object], component: str) -> Endpoint | None:
        return Endpoint()

    def launch(self, context: EffectContext, op: Op[StartRun], slot: Slot) -> RunSpec:
        from areal.reconcilers.launch import run_spec

        found, inputs = context.object(op.ref), dict(op.args.inputs)
        argv = self.argv(found, slot)
        return run_spec(found, slot, argv, self.restart, self.grace_s, inputs=inputs, env=self.env(found))


def controller_of(kind: str) -> KindController:
    return _controller(kind, KINDS[kind].controller)


def controllers(kinds: Collection[str] | None = None) -> list[KindController]:
    """Return the controllers of ``kinds`` (None: all). Kinds to which others refer come first."""
    infos = sorted(KINDS.values(), key=lambda info: info.order)
    return [controller_of(info.kind) for info in infos if kinds is None or info.kind in kinds]


def host_of(item: StoredObject) -> str | None:
    """Return the object to which ``item`` is attached."""
    return controller_of(item.kind).host(item.spec)


def called_by(item: StoredObject) -> str | None:
    """Return the service that the processes of ``item`` call."""
    return controller_of(item.kind).called(item.spec)


def started_again_by(ref: Ref) -> str:
    """Return the command that starts an object again after it has failed for good."""
    return f"areal {'restart' if controller_of(ref.kind).runs_to_completion else 'reconcile'} {ref}"


@cache
def _controller(kind: str, path: str) -> KindController:
    controller: KindController = load(path)(kind)
    return controller
