"""A world that a plan's ops can be done to, without a process: what each op needs to be true, and what it changes.

Every op checks its own preconditions and raises ``Violation``: a plan that starts more than the GPUs hold, routes what
does not answer, stops what still gets requests, or touches what cannot be seen, fails here and not on a machine.

Relays are modelled as the real ones work: they go by the router's table, and, until it says that it is whole, by what
they had before as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal.errors import TargetFailed
from areal.reconcilers.converge import abandoned
from areal.reconcilers.desired import Target
from areal.reconcilers.execute import claim_slots
from areal.reconcilers.kinds import host_of
from areal.reconcilers.kinds.agent_plan import session_settings
from areal.reconcilers.kinds.service_plan import inference_inputs
from areal.reconcilers.launch import Slot
from areal.reconcilers.observe import Observed, ObservedRun, Seen
from areal.reconcilers.plan import AtRouter, Op, Plan, Report, StartRun, Verb
from areal.resources.validation import effective
from areal.runtime.backends.base import Capacity, LastExit, Phase, RunSpec, RunState
from areal.state.records import StoredObject
from areal.wire.fields import write_fields
from areal.wire.routing import ModelEntry, Snapshot, WorkerEntry
from tests.reconcilers.worlds import gpus_of

Pick = Callable[[Sequence[Op[Any]]], Op[Any]]
View = dict[str, dict[str, str]]  # model -> data proxy -> state


class Violation(AssertionError):
    """A plan would do what must never be done."""


@dataclass
class Relay:
    """One gateway's idea of the table."""

    view: View = field(default_factory=dict)
    inherited: View = field(default_factory=dict)

    def router_gone(self) -> None:
        self.inherited = self.view

    def follow(self, table: Snapshot) -> None:
        incoming = {model: {each.id: each.state for each in entry.workers} for model, entry in table.models.items()}
        if table.synced:
            self.view, self.inherited = incoming, {}
            return
        merged = {model: dict(workers) for model, workers in self.inherited.items()}
        for model, workers in incoming.items():
            merged[model] = {**merged.get(model, {}), **workers}
        self.view = merged


class Ports:
    """The only part of a backend that claiming slots needs."""

    host = "127.0.0.1"

    def __init__(self, taken: set[int]) -> None:
        self._taken = taken

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        port = next(port for port in (*prefer, *range(23000, 29999)) if port not in self._taken)
        self._taken.add(port)
        return (port,)


@dataclass(repr=False)
class Simulation:
    stored: dict[str, StoredObject]
    runs: dict[str, ObservedRun]
    tables: dict[str, Snapshot]
    relays: dict[str, Relay]
    free_gpus: int
    unreadable: frozenset[str] = frozenset()  # services whose table cannot be read
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    performed: list[Op[Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        """Short enough to read in a failing example."""
        objects = [f"{ref} {item.spec}" for ref, item in self.stored.items()]
        runs = [
            f"{run.uid} {run.state.phase} {run.seen} {run.url} inputs={run.state.spec.inputs} {run.state.spec.spec}"
            for run in self.runs.values()
        ]
        relays = [f"{gate} picks from {relay.view}" for gate, relay in self.relays.items()]
        tables = [f"{ref} {table.models} synced={table.synced}" for ref, table in self.tables.items()]
        return "\n  ".join(["world:", *objects, *runs, *tables, *relays, f"{self.free_gpus} GPUs free"])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    # -- what a planner sees

    def observed(self) -> Observed:
        grouped: dict[str, tuple[ObservedRun, ...]] = {}
        for uid in sorted(self.runs):
            owner = self.runs[uid].state.spec.owner
            grouped[owner] = (*grouped.get(owner, ()), self.runs[uid])
        routes: dict[str, Snapshot | str] = {}
        for service, table in self.tables.items():
            if any(answers(run) for run in self.of(service, "router")):
                routes[service] = "cannot be read" if service in self.unreadable else table
        gpus = tuple(f"GPU-{index}" for index in range(self.free_gpus))
        return Observed(grouped, routes, Capacity(gpus=gpus))

    def of(self, ref: str, component: str) -> list[ObservedRun]:
        return [r for r in self.runs.values() if r.state.spec.owner == ref and r.state.spec.component == component]

    def copy(self) -> Simulation:
        relays = {uid: Relay(dict(relay.view), dict(relay.inherited)) for uid, relay in self.relays.items()}
        return replace(
            self,
            stored=dict(self.stored),
            runs=dict(self.runs),
            tables=dict(self.tables),
            relays=relays,
            performed=[],
        )

    # -- doing a plan

    def run(
        self,
        plan: Plan,
        targets: Mapping[str, Target],
        pick: Pick,
        *,
        stop_after: int | None = None,
        dies: Callable[[Op[Any]], bool] = lambda op: False,
    ) -> Report:
        """Do the plan's ops one by one in an order that its dependencies allow. ``dies``: AWAIT ops whose process ends
        instead of becoming ready; afterwards what was started in vain is stopped, as the real thing does."""
        hands, report = _Hands(self, plan, targets), Report(plan)
        while stop_after is None or len(report.done) < stop_after:
            waiting = _possible(report)
            if not waiting:
                break
            op = pick(waiting)
            if op.verb is Verb.AWAIT and dies(op):
                hands.die(op)
                report.failed[op.id] = TargetFailed("exited 1")
            else:
                hands.perform(op)
                report.done.add(op.id)
            self.performed.append(op)
        spawned = [op.run for op in plan.ops if op.verb is Verb.SPAWN and op.id in report.done]
        for run in abandoned(report, spawned):
            hands.give_up(run)
        return report

    # -- what users see

    def serving(self, ref: str) -> int | None:
        """Replicas that the gateway in the worst position can use; None when no gateway is up."""
        model = ref.partition("/")[2]
        service = "" if ref not in self.stored else host_of(self.stored[ref]) or ref
        counts = [
            sum(1 for uid, state in self.relays[gate.uid].view.get(model, {}).items() if self._serves(uid, state))
            for gate in self.of(service, "gateway")
            if answers(gate)
        ]
        return min(counts, default=None)

    def _serves(self, uid: str, state: str) -> bool:
        run = self.runs.get(uid)
        return state == "ready" and run is not None and answers(run) and self.engine_answers(run)

    def engine_answers(self, proxy: ObservedRun) -> bool:
        url = called_by(proxy)
        return url is None or any(answers(run) and run.url == url for run in self.runs.values())

    def picked(self, uid: str) -> list[str]:
        """Gateways that may still send requests to a data proxy."""
        return [
            gate
            for gate, relay in self.relays.items()
            if gate in self.runs and self.runs[gate].is_live
            for workers in relay.view.values()
            if workers.get(uid) == "ready"
        ]


def _possible(report: Report) -> list[Op[Any]]:
    """Ops that may begin now; those that never can are marked as skipped."""
    for op in report.plan.ops:
        if op.id not in report.done and (report.failed.keys() | report.skipped) & set(op.needs):
            report.skipped.add(op.id)
    ended = report.done | report.failed.keys() | report.skipped
    return [
        op for op in report.plan.ops if op.id not in ended and set(op.needs) <= report.done and set(op.after) <= ended
    ]


def called_by(proxy: ObservedRun) -> str | None:
    """The URL of its engine, or of its worker."""
    inputs = proxy.state.spec.inputs
    return inputs.get("engineUrl") or inputs.get("workerUrl")


def settings_of(item: StoredObject, component: str) -> Mapping[str, Any]:
    if item.kind != "AgentService" or component != "data-proxy":
        return {}
    return session_settings(effective(item.kind, item.spec))


def answers(run: ObservedRun) -> bool:
    return run.state.phase is Phase.RUNNING and run.seen is Seen.READY


def ended(run: ObservedRun) -> ObservedRun:
    last = LastExit(0, None, 9.0, "stopped")
    return ObservedRun(replace(run.state, phase=Phase.EXITED, pid=None, last_exit=last))


class _Hands:
    """Does one plan's ops to a simulation."""

    def __init__(self, world: Simulation, plan: Plan, targets: Mapping[str, Target]) -> None:
        self.world, self.targets = world, targets
        self.picked: set[str] = set()  # may have requests running, unless it was drained since
        self.drained: set[str] = set()
        self.before = world.observed()
        taken = {port for run in world.runs.values() if run.is_live for port in run.state.spec.ports}
        ports = Ports(taken)
        self.slots = claim_slots(
            plan,
            self.before,
            {ref: target.object.spec for ref, target in targets.items()},
            lambda name: ports,
            lambda ref: {"type": "local"},
            owner_of=lambda port: None,
            new_suffix=lambda: f"{next(world.numbers):03}",
        )

    def perform(self, op: Op[Any]) -> None:
        handler = getattr(self, f"do_{op.verb.name.lower()}")
        try:
            self._watch_picks()
            handler(op)
        except Violation as error:
            raise Violation(f"#{op.id} {op.to_text()}: {error}") from None
        self._watch_picks()

    def _watch_picks(self) -> None:
        """A request that is sent after the drain has looked may still be running when the process is stopped."""
        picked = {uid for uid in self.world.runs if self.world.picked(uid)}
        self.picked |= picked
        self.drained -= picked

    def die(self, op: Op[Any]) -> None:
        """The process exits while it starts; its shim gives up."""
        self._end(self.get(op.run), Phase.CRASHLOOP)

    def give_up(self, run: str) -> None:
        found = self.get(run)
        if found.is_live:
            self._require_idle(found, found.state.spec.component)
            self._end(found, Phase.EXITED)

    def _end(self, run: ObservedRun, phase: Phase) -> None:
        self.world.free_gpus += len(run.state.spec.gpus) if run.is_live else 0
        self._put(replace(ended(run), state=replace(ended(run).state, phase=phase)))

    def uid(self, run: str) -> str:
        return self.slots[run].uid if run in self.slots else run

    def get(self, run: str) -> ObservedRun:
        uid = self.uid(run)
        require(uid in self.world.runs, f"{uid} does not exist")
        found = self.world.runs[uid]
        require(found.state.phase is not Phase.UNKNOWN, f"{uid} cannot be seen and must be left alone")
        return found

    def url(self, run: str) -> str:
        if run in self.slots:
            return self.slots[run].url
        require(run in self.world.runs, f"{run} has no address")
        return self.world.runs[run].url

    def object(self, ref: str) -> StoredObject:
        return self.targets[ref].object if ref in self.targets else self.world.stored[ref]

    # -- objects

    def do_record(self, op: Op[Any]) -> None:
        self.world.stored[op.ref] = replace(self.targets[op.ref].object, uid="recorded")

    def do_erase(self, op: Op[Any]) -> None:
        left = [run.uid for run in self.world.runs.values() if run.state.spec.owner == op.ref]
        require(not left, f"runs are left: {left}")
        del self.world.stored[op.ref]

    # -- runs

    def do_spawn(self, op: Op[Any]) -> None:
        slot = self.slots[op.run]
        require(op.ref in self.world.stored, "started before it was recorded")
        item = self.object(op.ref)
        gpus = gpus_of(item) if slot.component == "engine" else 0
        require(gpus <= self.world.free_gpus, f"needs {gpus} GPUs, {self.world.free_gpus} are free")
        self._require_port(slot)
        self.world.free_gpus -= gpus
        spec = RunSpec(
            uid=slot.uid,
            owner=op.ref,
            component=slot.component,
            replica=slot.replica,
            argv=("true",),
            ports=() if slot.shared else (slot.port,),
            gpus=tuple(f"GPU-of-{slot.uid}-{index}" for index in range(gpus)),
            url=slot.url,
            spec=item.spec,
            inputs=self._inputs(op, item, slot),
        )
        state, settings = RunState(spec, Phase.RUNNING, pid=1, shim_pid=1), settings_of(item, slot.component)
        self.world.runs[slot.uid] = ObservedRun(state, Seen.NOT_READY, settings=settings)

    def _require_port(self, slot: Slot) -> None:
        holders = [
            run.uid
            for run in self.world.runs.values()
            if run.is_live and slot.port in run.state.spec.ports and not slot.shared
        ]
        require(not holders, f"port {slot.port} is held by {holders}")

    def _inputs(self, op: Op[StartRun], item: StoredObject, slot: Slot) -> dict[str, Any]:
        inputs = dict(op.args.inputs)
        if op.args.router:
            inputs["routerUrl"] = self.url(op.args.router)
        engine = "workerUrl" if item.kind == "AgentService" else "engineUrl"
        if op.args.engine:
            inputs[engine] = self.url(op.args.engine)
        external = bool(item.spec.get("external"))
        if slot.component == "data-proxy":
            require(external or engine in inputs, "a data proxy must be told its engine")
        if item.kind == "AgentService" and slot.component in ("gateway", "data-proxy") and item.spec.get("inference"):
            home = effective("InferenceService", self.object("InferenceService/default").spec)
            inputs |= inference_inputs(home, f"http://127.0.0.1:{home.gateway.port}")  # as the launch adds it
        if slot.component == "gateway":
            require("routerUrl" in inputs, "a gateway must be told its router")
        return inputs

    def do_kick(self, op: Op[Any]) -> None:
        run = self.get(op.run)
        require(run.state.phase is Phase.BACKOFF, f"{run.uid} is {run.state.phase}, not in back-off")
        self._put(replace(run, state=replace(run.state, phase=Phase.RUNNING, pid=1), seen=Seen.NOT_READY))

    def do_await(self, op: Op[Any]) -> None:
        run = self.get(op.run)
        require(run.is_live and run.state.phase is not Phase.BACKOFF, f"{run.uid} will never be ready")
        component = run.state.spec.component
        if component == "data-proxy":
            require(self.world.engine_answers(run), f"the engine of {run.uid} does not answer")
        service = run.state.spec.owner
        if component == "gateway" and not self.world.relays.get(run.uid):
            routers = [one for one in self.world.of(service, "router") if one.is_live]
            url = run.state.spec.inputs["routerUrl"]
            require(any(one.url == url for one in routers), f"{run.uid} waits for a router at {url}, where none is")
        self._put(replace(run, state=replace(run.state, phase=Phase.RUNNING), seen=Seen.READY))
        if component == "router" and service not in self.world.tables:
            self.world.tables[service] = Snapshot("epoch", 1)
            self._publish(service)
        if component == "gateway":
            relay = self.world.relays.setdefault(run.uid, Relay())
            if service in self.world.tables:
                relay.follow(self.world.tables[service])

    def do_barrier(self, op: Op[Any]) -> None:
        pass

    def do_warm(self, op: Op[Any]) -> None:
        run = self.get(op.run)
        require(answers(run) and self.world.engine_answers(run), f"{run.uid} does not complete")

    def do_stop(self, op: Op[Any]) -> None:
        run = self.get(op.run)
        component, service = run.state.spec.component, run.state.spec.owner
        if run.is_live:
            if not (self.world.unreadable and self.targets[op.ref].is_deleted):  # a deletion does not wait for a router
                self._require_idle(run, component)
            self.world.free_gpus += len(run.state.spec.gpus)
        if (
            component == "router"
            and run.is_live
            and len([r for r in self.world.of(service, "router") if r.is_live]) == 1
        ):
            self.world.tables.pop(service, None)
            for gate in self.world.of(service, "gateway"):
                self.world.relays.setdefault(gate.uid, Relay()).router_gone()
        self._put(ended(run))

    def _require_idle(self, run: ObservedRun, component: str) -> None:
        if component == "data-proxy":
            callers = self.world.picked(run.uid)
            require(not callers, f"{run.uid} is stopped while {callers} send it requests")
            home = host_of(self.object(run.state.spec.owner)) or run.state.spec.owner
            gates = [gate for gate in self.world.of(home, "gateway") if gate.is_live and gate.uid in self.world.relays]
            idle = run.uid in self.drained or run.uid not in self.picked or not answers(run) or not gates
            require(idle, f"{run.uid} is stopped with the requests that it got after it was drained")
        if component in ("engine", "worker"):
            for proxy in self.world.runs.values():
                called = called_by(proxy) == run.url and proxy.is_live
                require(not (called and self.world.picked(proxy.uid)), f"{proxy.uid} is routed and calls {run.uid}")

    def do_forget(self, op: Op[Any]) -> None:
        run = self.get(op.run)
        require(not run.is_live, f"{run.uid} lives")
        require(not run.leaves_session, f"the session of {run.uid} was not swept")
        del self.world.runs[run.uid]

    # -- routes

    def do_route(self, op: Op[Any]) -> None:
        service, table = self._table(op)
        model = op.ref.partition("/")[2]
        known = {each.id: each.state for each in table.models[model].workers} if model in table.models else {}
        workers = []
        for symbol in op.runs:
            uid = self.uid(symbol)
            require(uid in self.world.runs, f"{uid} does not exist")
            run = self.world.runs[uid]
            may_join = uid in known or answers(run)
            require(may_join, f"{uid} is routed before it is ready")
            require(run.may_live, f"{uid} is routed and does not live")
            workers.append(WorkerEntry(uid, run.url, "cordoned" if symbol in op.args.cordoned else "ready"))
        lost = [uid for uid in known if uid not in {each.id for each in workers} and self._is_unknown(uid)]
        require(not lost, f"{lost} cannot be seen and must be left in the table")
        entry = ModelEntry(model, tuple(workers), readiness=op.args.readiness)
        self._set(service, replace(table, models={**table.models, model: entry}))

    def _is_unknown(self, uid: str) -> bool:
        return uid in self.world.runs and self.world.runs[uid].state.phase is Phase.UNKNOWN

    def do_unroute(self, op: Op[Any]) -> None:
        service, table = self._table(op)
        name = op.args.model or op.ref.partition("/")[2]
        workers = table.models[name].workers if name in table.models else ()
        require(not any(self._is_unknown(each.id) for each in workers), "it has workers out of sight")
        kept = {k: v for k, v in table.models.items() if k != name}
        self._set(service, replace(table, models={**kept, **({name: ModelEntry(name)} if op.args.declared else {})}))

    def do_drain(self, op: Op[Any]) -> None:
        service, table = self._table(op)
        run = self.get(op.run)

        def drained(worker: WorkerEntry) -> WorkerEntry:
            return replace(worker, state="draining") if worker.id == run.uid else worker

        models = {
            name: replace(entry, workers=tuple(map(drained, entry.workers))) for name, entry in table.models.items()
        }
        self._set(service, replace(table, models=models))
        self.drained.add(run.uid)

    def do_configure(self, op: Op[Any]) -> None:
        if op.target.startswith("data-proxy"):
            run = self.get(op.run)
            require(answers(run), f"{run.uid} does not answer")
            self._put(replace(run, settings={**run.settings, **write_fields(op.args)}))
            return
        table = self._table(op)[1]
        self._set(op.ref, replace(table, strategy=op.args.strategy, limits=dict(op.args.limits)))

    def do_synced(self, op: Op[Any]) -> None:
        self._set(op.ref, replace(self._table(op)[1], synced=True))

    do_sync = do_synced

    def do_settle(self, op: Op[Any]) -> None:
        gates = [gate for gate in self.world.of(op.args.service, "gateway") if answers(gate)]
        require(bool(gates), "no gateway is up")
        name = op.ref.partition("/")[2]
        require(all(self.world.relays[gate.uid].view.get(name) for gate in gates), "a gateway does not list it")

    def do_soak(self, op: Op[Any]) -> None:
        for symbol in op.runs:
            require(answers(self.get(symbol)), f"{symbol} does not answer")

    def _table(self, op: Op[Any]) -> tuple[str, Snapshot]:
        at = op.args if isinstance(op.args, AtRouter) else AtRouter(op.ref, op.run)
        service, router = at.service, self.get(at.router)
        require(answers(router), f"router {router.uid} does not answer")
        return service, self.world.tables[service]

    def _set(self, service: str, table: Snapshot) -> None:
        self.world.tables[service] = table
        self._publish(service)

    def _publish(self, service: str) -> None:
        for gate in self.world.of(service, "gateway"):
            if gate.is_live:
                self.world.relays.setdefault(gate.uid, Relay()).follow(self.world.tables[service])

    def _put(self, run: ObservedRun) -> None:
        self.world.runs[run.uid] = run


def require(true: bool, otherwise: str) -> None:
    if not true:
        raise Violation(otherwise)
