"""The replicas behind a router: the decision about each slot, and its ops. Pure.

A replica is a data proxy and the process that it calls: the engine of a Model, or the worker of an AgentService. In
this module and in ``replica_plan`` both are called the engine. A data proxy knows its engine by URL, and a replaced
process keeps its port if possible, so that a restarted engine needs no new data proxy. Routes are one declarative set
per object; the only op that takes a replica out of rotation is DRAIN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from areal.dataclasses import dataclass, field, replace
from areal.errors import NoCapacity
from areal.reconcilers.kinds.service_plan import ServiceView
from areal.reconcilers.observe import ObservedRun, Seen
from areal.reconcilers.plan import DrainWorker, RemoveRoutes, SetRoutes, StartRun, Verb
from areal.reconcilers.planning import Action, Component, Decision, ObjectWork, Started, key_input, unseen
from areal.resources.fields import RolloutStrategy
from areal.wire.routing import ModelEntry, Readiness, Snapshot

PROXY = "data-proxy"


@dataclass(frozen=True)
class Replica:
    """One slot: the decisions about its engine (None: not started by areal) and its data proxy. ``callers``: surplus
    data proxies of an engine that will be replaced; they stop with it."""

    index: int
    engine: Decision | None
    proxy: Decision
    engine_component: Component | None
    proxy_component: Component
    callers: tuple[ObservedRun, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return (self.proxy,) if self.engine is None else (self.engine, self.proxy)

    @property
    def replaced(self) -> bool:
        return any(decision.action is Action.REPLACE for decision in self.decisions)

    @property
    def new_engine(self) -> bool:
        """Whether an engine will be started, and so GPUs are needed."""
        return self.engine is not None and self.engine.action in (Action.SPAWN, Action.REPLACE)

    @property
    def old_proxies(self) -> tuple[ObservedRun, ...]:
        """Data proxies to drain and stop when this slot is replaced."""
        own = (self.proxy.run,) if self.proxy.action is Action.REPLACE and self.proxy.run is not None else ()
        return (*own, *self.callers)

    @property
    def old_engine(self) -> ObservedRun | None:
        replaced = self.engine is not None and self.engine.action is Action.REPLACE
        return self.engine.run if replaced and self.engine is not None else None

    @property
    def live_proxy(self) -> ObservedRun | None:
        return self.proxy.run if self.proxy.run is not None and self.proxy.run.is_live else None

    @property
    def serves(self) -> bool:
        """Whether this slot answers requests now."""
        return self.live_proxy is not None and self.live_proxy.seen is Seen.READY


def _behind(engine: Decision, proxy: Decision) -> Decision:
    """Return the decision about a data proxy, given the decision about its engine."""
    if engine.action is Action.SPAWN and proxy.action in (Action.AWAIT, Action.KICK):
        return Decision(Action.DEFER, "its engine has to start first", proxy.run)
    if engine.action is Action.LEAVE and proxy.action is not Action.KEEP:
        return Decision(Action.DEFER, "its engine cannot be seen", proxy.run)
    if engine.action is Action.REPLACE and proxy.run is not None and proxy.run.is_live:
        return replace(engine, run=proxy.run, drift=None)
    return proxy


def not_replaced(slot: Replica) -> Replica:
    """Return the slot with outdated processes left as they are."""
    engine, proxy = slot.engine, slot.proxy
    if proxy.action is Action.REPLACE:
        proxy = Decision(Action.LEAVE, proxy.cause, proxy.run)
    if engine is not None and engine.action is Action.REPLACE:
        engine = Decision(Action.LEAVE, engine.cause, engine.run)
        proxy = _behind(engine, proxy)
    return replace(slot, engine=engine, proxy=proxy, callers=())


@dataclass(frozen=True)
class Extras:
    """Runs that belong to no slot. ``late``: engines of a data proxy that this plan still has to replace."""

    early: tuple[ObservedRun, ...] = ()
    late: tuple[ObservedRun, ...] = ()


def with_callers(replicas: Sequence[Replica], runs: Sequence[ObservedRun]) -> list[Replica]:
    """Return the slots, each with the surplus data proxies of the engine that it replaces."""
    calling = _callers(run for run in _surplus(runs, replicas) if run.state.spec.component == PROXY)
    return [
        replace(slot, callers=tuple(calling.get(slot.old_engine.url, ()))) if slot.old_engine else slot
        for slot in replicas
    ]


def _callers(proxies: Iterable[ObservedRun]) -> dict[str, list[ObservedRun]]:
    """Return data proxies by the URLs among their inputs, such as that of their engine."""
    found: dict[str, list[ObservedRun]] = {}
    for proxy in proxies:
        for url in {value for value in proxy.state.spec.inputs.values() if isinstance(value, str)}:
            found.setdefault(url, []).append(proxy)
    return found


def extras_of(runs: Sequence[ObservedRun], replicas: Sequence[Replica]) -> Extras:
    """Return runs to stop: scaled down, suspended, or left by an interrupted replacement. While any run cannot be
    observed, return none, since these may be the only ones that serve."""
    if unseen(runs):
        return Extras()
    callers = {run.uid for slot in replicas for run in slot.callers}
    found = [run for run in _surplus(runs, replicas) if run.uid not in callers]
    stopping = {run.uid for run in found}
    proxies = (run for run in runs if run.state.spec.component == PROXY and run.is_live and run.uid not in stopping)
    calling = _callers(proxies)

    def is_late(run: ObservedRun) -> bool:
        return run.state.spec.component != PROXY and run.url in calling

    return Extras(tuple(run for run in found if not is_late(run)), tuple(filter(is_late, found)))


def _surplus(runs: Sequence[ObservedRun], replicas: Iterable[Replica]) -> list[ObservedRun]:
    """Return living runs that no slot has chosen."""
    decisions = [decision for replica in replicas for decision in replica.decisions]
    wanted = {decision.run.uid for decision in decisions if decision.run is not None}
    return [run for run in runs if run.is_live and run.uid not in wanted]


@dataclass
class ReplicaWork(ObjectWork, ABC):
    """The working state of an object with replicas.

    ``name``: the router's name of the object. ``count``: of replicas, 0 while it is suspended; ``need``: GPUs of one.
    ``drain_s``: seconds that running requests get. With ``routes_only`` it is a neighbor, whose processes this plan
    does not change. ``restored``: the op that restores lost routes. ``cordoned``: routed runs that keep their sessions
    and get no new ones.

    The class variables are the name of the engine's component, the data proxy's input with the engine's URL, and the
    spec fields on which each of the two depends.
    """

    engine_name: ClassVar[str]
    engine_input: ClassVar[str]
    engine_fields: ClassVar[tuple[str, ...]]
    proxy_fields: ClassVar[tuple[str, ...]]

    name: str = field(init=False)
    suspended: bool = field(init=False)
    count: int = field(init=False)
    strategy: RolloutStrategy = field(init=False)
    drain_s: float = field(init=False)
    starts_engine: bool = field(init=False, default=True)
    need: int = field(init=False, default=0)
    max_unavailable: int = field(init=False, default=0)
    routes_only: bool = False
    replicas: list[Replica] = field(default_factory=list)
    extras: Extras = field(default_factory=Extras)
    restored: tuple[int, ...] = ()
    routed: list[str] = field(default_factory=list)
    cordoned: list[str] = field(default_factory=list)

    @abstractmethod
    def __post_init__(self) -> None:
        """Set what the spec says: the fields from ``name`` to ``max_unavailable``."""

    @property
    @abstractmethod
    def service(self) -> ServiceView:
        """The planned state of the router and the gateway."""

    @property
    @abstractmethod
    def readiness(self) -> Readiness:
        """The router's settings for probes of the data proxies."""

    @property
    def trainer(self) -> str:
        """The job that publishes the weights for which a data proxy may wait."""
        return ""

    @property
    def proxy_inputs(self) -> Mapping[str, str]:
        """Inputs of a data proxy besides its engine's URL and the key."""
        return {}

    @property
    def before_start(self) -> tuple[int, ...]:
        """The ops after which processes may start."""
        return self.recorded

    def warm(self, replica: Replica, run: str, needs: Sequence[int]) -> tuple[int, ...]:
        """Return the ops after which the data proxy ``run``, ready after ``needs``, may be routed."""
        return tuple(needs)

    @property
    def entry(self) -> ModelEntry | None:
        """The object in the router's table; None if there is no table or the router starts empty."""
        table = self.service.table
        return table.models.get(self.name) if isinstance(table, Snapshot) else None

    @cached_property
    def known(self) -> Mapping[str, str]:
        """The data proxies in the router's table, with their states."""
        return {worker.id: worker.state for worker in self.entry.workers} if self.entry is not None else {}

    @property
    def table_lost(self) -> bool:
        """Whether the router was restarted and does not know the object."""
        table = self.service.table
        if isinstance(table, Snapshot):
            return not table.synced and self.name not in table.models
        return table is None and bool(self.service.router)

    @property
    def table_readable(self) -> bool:
        return not isinstance(self.service.table, str)

    def replica(self, index: int) -> Replica:
        """Decide about one slot, and note its drift."""
        inputs = key_input(self.service.spec)
        engine, engine_component = None, None
        if self.starts_engine:
            engine_component = self.component(self.engine_name, index, self.engine_fields, inputs)
            engine = self.decide(engine_component)
            self.note(engine_component, engine)
            if engine.run is not None and engine.action in (Action.KEEP, Action.AWAIT, Action.KICK):
                inputs = {**inputs, self.engine_input: engine.run.url}
        proxy_component = self.component(PROXY, index, self.proxy_fields, {**inputs, **self.proxy_inputs})
        proxy = self.decide(proxy_component)
        engine_restarts = engine is not None and engine.action in (Action.KICK, Action.SPAWN, Action.AWAIT)
        if not (engine_restarts and proxy.action is Action.AWAIT):
            self.note(proxy_component, proxy)
        if engine is not None:
            proxy = _behind(engine, proxy)
            if proxy.action is Action.LEAVE and engine.action is Action.REPLACE:
                engine = Decision(Action.DEFER, "its data proxy cannot be seen", engine.run)
        return Replica(index, engine, proxy, engine_component, proxy_component)

    def start_replica(
        self, replica: Replica, needs: Sequence[int], *, successor: bool = False
    ) -> tuple[str, tuple[int, ...]]:
        """Start the engine, with its GPUs, and the data proxy, or wait for running ones. Return the data proxy's run,
        and the ops after which both are ready. ``successor``: they start beside those that they replace."""
        engine = Started("")
        if replica.engine is not None and replica.engine_component is not None:
            component, decision = replica.engine_component, replica.engine
            gpus = self.gpus.take(self.need, f"{self.ref} {component.target}") if replica.new_engine else ()
            args = StartRun(successor=successor and decision.action is Action.REPLACE, gpus=self.need or None)
            engine = self.start(component, decision, (*needs, *gpus), args)
        about = StartRun(engine=engine.run, successor=successor)
        proxy = self.start(replica.proxy_component, replica.proxy, needs, about, engine.ready, self.trainer)
        return proxy.run, (*engine.ready, *proxy.ready)

    def stop_all(self, runs: Sequence[ObservedRun], cause: str, needs: Sequence[int]) -> tuple[int, ...]:
        stops = tuple(self.stop(run, cause, needs) for run in runs)
        return self.build.barrier(self.ref, cause, stops) if stops else tuple(needs)

    def route(self, cause: str, needs: Sequence[int]) -> int:
        """Give the router the whole set of workers."""
        service, expected = self.service, min(self.count, len(self.routed))
        args = SetRoutes(service.ref, service.router, expected, self.readiness, tuple(self.cordoned))
        needs = (*needs, *self.service.router_ready)
        return self.build.add(Verb.ROUTE, self.ref, "routes", cause, needs=needs, runs=self.routed, args=args)

    def unroute(self, cause: str, needs: Sequence[int], *, declared: bool = False, after: Sequence[int] = ()) -> int:
        """Remove the object from the router, by its name there: by then the object may be deleted or replaced."""
        model = self.name if self.name != self.target.object.name else ""
        args = RemoveRoutes(self.service.ref, self.service.router, model, declared)
        needs = (*needs, *self.service.router_ready)
        return self.build.add(Verb.UNROUTE, self.ref, "routes", cause, needs=needs, args=args, after=after)

    def drain(
        self, proxies: Sequence[str], needs: Sequence[int], cause: str, *, seconds: float | None = None
    ) -> tuple[int, ...]:
        """Stop new requests and let running ones finish. ``seconds`` None: the spec's drain timeout."""
        seconds = self.drain_s if seconds is None else seconds
        args = DrainWorker(self.service.ref, self.service.router, seconds)
        needs = (*needs, *self.service.router_ready, *self.service.synced)
        add = self.build.add
        drains = tuple(add(Verb.DRAIN, self.ref, PROXY, cause, needs=needs, run=uid, args=args) for uid in proxies)
        return drains or tuple(needs)

    def downtime(self, sentence: str) -> None:
        self.notes.destroy(f"{self.ref}: {sentence}")

    def require_gpus(self, count: int, message: str, hint: str) -> None:
        """Raise NoCapacity, before anything is planned, if fewer than ``count`` GPUs are free."""
        if count > self.gpus.available:
            raise NoCapacity(f"{self.ref}{message}; {self.gpus.available} are free", hint=hint)
