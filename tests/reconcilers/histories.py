"""Random pasts and futures for planning: what was once wanted, what became of it, and what is wanted now.

A past is made the way real ones are: of processes that were started for some version of a spec, some of which died,
are still starting, are out of sight or belong to a replica that was removed; and of a router that knows some
of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from areal.reconcilers.desired import Target
from areal.reconcilers.kinds.agent_plan import session_settings
from areal.reconcilers.kinds.model_plan import replica_count
from areal.reconcilers.observe import ObservedRun, Seen
from areal.reconcilers.plan import Plan
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.resources.validation import effective
from areal.runtime.backends.base import Phase
from areal.state.records import StoredObject
from areal.wire.routing import DEFAULT_READINESS, Readiness
from tests.reconcilers.simulator import Relay, Simulation, answers
from tests.reconcilers.worlds import SERVICE, changed, created, run, service, snapshot, stored

MODELS = ("alpha", "beta")
AGENTS = "AgentService/tau"
AGENT_PORTS = {"router": 20101, "gateway": 8090}
PLACE = {"inferenceUrl": "http://127.0.0.1:8080", "inferenceKeyFrom": "generated"}
PLACE_BEFORE = {**PLACE, "inferenceUrl": "http://127.0.0.1:8081"}

SERVICE_SPECS: tuple[dict[str, Any], ...] = (
    {},
    {"gateway": {"port": 8081}},
    {"gateway": {"relays": 2}},
    {"logLevel": "debug"},
    {"router": {"strategy": "round_robin"}},
    {"suspend": True},
    {"strategy": {"type": "Recreate"}},
    {"strategy": {"type": "BlueGreen", "keepOldSeconds": 5}},
    {"strategy": {"maxSurge": 2, "minReadySeconds": 3}},
    {"auth": {"adminKeyFrom": {"file": "/k"}}},
)
CPU: dict[str, Any] = {"backend": "embedded:d1", "path": "a"}
GPU: dict[str, Any] = {"backend": "sglang:t1", "path": "a"}
MODEL_SPECS: tuple[dict[str, Any], ...] = (
    CPU,
    {**CPU, "path": "b"},
    {**CPU, "chatTemplate": "t.jinja"},
    {**CPU, "replicas": 2},
    {**CPU, "replicas": 3, "path": "b"},
    {**CPU, "replicas": 0},
    {**CPU, "suspend": True},
    {**CPU, "replicas": 2, "path": "b", "strategy": {"type": "Recreate"}},
    {**CPU, "replicas": 2, "path": "b", "strategy": {"type": "BlueGreen"}},
    {"external": {"url": "http://127.0.0.1:1/v1"}},
    GPU,
    {**GPU, "path": "b"},
    {**GPU, "replicas": 2},
    {**GPU, "replicas": 2, "path": "b"},
    {**GPU, "replicas": 3, "engineArgs": {"x": 1}},
    {**GPU, "backend": "sglang:t2"},
    {**GPU, "replicas": 2, "path": "b", "strategy": {"maxUnavailable": 1}},
)


AGENT: dict[str, Any] = {"agent": "a:A"}
AGENT_SPECS: tuple[dict[str, Any], ...] = (
    AGENT,
    {**AGENT, "agent": "a:B"},
    {**AGENT, "pairs": 2},
    {**AGENT, "pairs": 3, "env": {"X": "1"}},
    {**AGENT, "pairs": 0},
    {**AGENT, "suspend": True},
    {**AGENT, "gateway": {"port": 8091}},
    {**AGENT, "logLevel": "debug"},
    {**AGENT, "session": {"idleTimeoutSeconds": 5}, "healthPollSeconds": 1},
    {**AGENT, "inference": {"service": "default"}},
    {**AGENT, "inference": {"service": "default", "model": "alpha"}, "pairs": 2},
    {**AGENT, "pairs": 2, "agent": "a:B", "strategy": {"type": "Recreate"}},
    {**AGENT, "pairs": 2, "agent": "a:B", "strategy": {"type": "BlueGreen"}},
    {**AGENT, "pairs": 2, "strategy": {"maxSurge": 2, "minReadySeconds": 3}},
    {**AGENT, "auth": {"adminKeyFrom": {"file": "/k"}}},
)


SERVING_AGENTS = tuple(
    spec
    for spec in AGENT_SPECS
    if not spec.get("suspend") and spec.get("pairs") != 0 and "Recreate" not in str(spec) and "auth" not in spec
)
SERVING_SERVICES = tuple(spec for spec in SERVICE_SPECS if "suspend" not in spec and "auth" not in spec)
SERVING_MODELS = tuple(
    spec
    for spec in MODEL_SPECS
    if not spec.get("suspend") and spec.get("replicas") != 0 and "Recreate" not in str(spec)
)


@dataclass(frozen=True)
class Wish:
    """What one command asks for: a spec for each object that it names, None to delete it."""

    specs: Mapping[str, Mapping[str, Any] | None]
    policy: Policy = field(default_factory=Policy)

    def scope(self, world: Simulation) -> PlanScope:
        """The targets of asking this of ``world``, and their neighbours."""
        targets = [self._target(world, ref, spec) for ref, spec in self.specs.items()]
        asked = tuple(target for target in targets if target is not None)
        context = tuple(Target(item, "unchanged") for ref, item in world.stored.items() if ref not in self.specs)
        return PlanScope(asked, context)

    def _target(self, world: Simulation, ref: str, spec: Mapping[str, Any] | None) -> Target | None:
        kind, _, name = ref.partition("/")
        item = world.stored.get(ref)
        if spec is None:
            return None if item is None else Target(item, "delete")
        return created(kind, name, spec) if item is None else changed(item, spec)

    def plan(self, world: Simulation) -> tuple[Plan, dict[str, Target]]:
        scope = self.scope(world)
        policy = replace(self.policy, free_gpus=world.free_gpus)
        return make_plan(scope, world.observed(), policy), {target.ref: target for target in scope.all}


@dataclass(frozen=True)
class Chances:
    """What may have happened to a process since it was started. ``serving``: mostly nothing, and the gateway works."""

    unknown: bool = False
    serving: bool = False

    def fates(self, component: str) -> st.SearchStrategy[tuple[Phase, Seen]]:
        well = (Phase.RUNNING, Seen.READY)
        if self.serving and component == "gateway":
            return st.just(well)
        usual = [
            *([well] * (25 if self.serving else 2)),
            (Phase.RUNNING, Seen.NOT_READY),
            (Phase.STARTING, Seen.UNSEEN),
            (Phase.BACKOFF, Seen.UNSEEN),
            (Phase.EXITED, Seen.UNSEEN),
            (Phase.DEAD, Seen.UNSEEN),
            (Phase.CRASHLOOP, Seen.UNSEEN),
            (Phase.INTENDED, Seen.UNSEEN),
        ]
        return st.sampled_from([*usual, (Phase.UNKNOWN, Seen.UNSEEN)] if self.unknown else usual)


@st.composite
def worlds(draw: st.DrawFn, chances: Chances | None = None) -> Simulation:
    """Any past of one service with up to two models, and of an agent service; every process as healthy as ``chances``
    allow."""
    chances = chances or Chances()
    numbers = itertools.count(1)
    home = service(draw(st.sampled_from(SERVING_SERVICES if chances.serving else SERVICE_SPECS)))
    objects: dict[str, StoredObject] = {SERVICE: home}
    runs: list[ObservedRun] = []
    if chances.serving or draw(st.integers(0, 9)):
        runs += draw(_front(home, chances, numbers))
    for name in MODELS:
        if chances.serving or draw(st.booleans()):
            spec = draw(st.sampled_from(SERVING_MODELS if chances.serving else MODEL_SPECS))
            objects[f"Model/{name}"] = item = stored("Model", name, {"service": "default", **spec})
            runs += draw(_replicas(item, chances, numbers))
    if chances.serving or draw(st.booleans()):
        specs = SERVING_AGENTS if chances.serving else AGENT_SPECS
        objects[AGENTS] = agents = stored("AgentService", "tau", draw(st.sampled_from(specs)))
        if chances.serving or draw(st.integers(0, 9)):
            runs += draw(_front(agents, chances, numbers))
        runs += draw(_pairs(agents, chances, numbers))
    world = Simulation(objects, {one.uid: one for one in runs}, {}, {}, draw(st.integers(0, 4)), numbers=numbers)
    draw(_routed(world))
    return world


@st.composite
def _front(draw: st.DrawFn, home: StoredObject, chances: Chances, numbers: Any) -> list[ObservedRun]:
    made: list[ObservedRun] = []
    for component in ("router", "gateway"):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2]) if component == "gateway" else st.just(1))):
            specs = SERVICE_SPECS if home.kind == "InferenceService" else AGENT_SPECS
            other = stored(home.kind, home.name, draw(st.sampled_from(specs)))
            version = draw(st.sampled_from([home, home, other]))
            phase, seen = draw(chances.fates(component))
            uid = f"{home.name}-{component}-0-{next(numbers):03}"
            inputs = {"routerUrl": made[0].url if draw(st.integers(0, 7)) else "http://elsewhere"} if made else {}
            one = _started(version, component, 0, phase, seen, uid, **inputs)
            made.append(_at_port(one, AGENT_PORTS[component]) if home.kind == "AgentService" else one)
    return made


def _started(
    item: StoredObject, component: str, index: int, phase: Phase, seen: Seen, uid: str, **inputs: Any
) -> ObservedRun:
    made = run(item, component, index, phase, seen, uid, **inputs)
    return replace(made, age_s=5.0)


@st.composite
def _replicas(draw: st.DrawFn, item: StoredObject, chances: Chances, numbers: Any) -> list[ObservedRun]:
    """Replicas of the recorded version, or of another one, some of them surplus, some half there."""
    made: list[ObservedRun] = []
    count = replica_count(effective("Model", item.spec))
    for index in range(max(1, count + draw(st.sampled_from([0, 0, 1, -1])))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
            other = stored("Model", item.name, {"service": "default", **draw(st.sampled_from(MODEL_SPECS))})
            made += draw(_replica(draw(st.sampled_from([item, item, other])), index, chances, numbers))
    return made


@st.composite
def _replica(draw: st.DrawFn, item: StoredObject, index: int, chances: Chances, numbers: Any) -> list[ObservedRun]:
    made = []
    number = next(numbers)
    inputs: dict[str, Any] = {}
    if not item.spec.get("external"):
        phase, seen = draw(chances.fates("engine"))
        engine = _started(item, "engine", index, phase, seen, f"{item.name}-engine-{index}-{number:03}")
        engine = _at_port(engine, 24000 + number)
        inputs["engineUrl"] = engine.url
        made.append(engine)
    if draw(st.integers(0, 4)):
        phase, seen = draw(chances.fates("data-proxy"))
        if seen is Seen.READY and made and not answers(made[0]):
            seen = Seen.NOT_READY
        uid = f"{item.name}-data-proxy-{index}-{number:03}"
        made.append(_at_port(_started(item, "data-proxy", index, phase, seen, uid, **inputs), 26000 + number))
    return made


@st.composite
def _pairs(draw: st.DrawFn, item: StoredObject, chances: Chances, numbers: Any) -> list[ObservedRun]:
    """Pairs of the recorded version, or of another one, some of them surplus, some half there."""
    made: list[ObservedRun] = []
    count = effective("AgentService", item.spec).pairs
    for index in range(max(1, count + draw(st.sampled_from([0, 0, 1, -1])))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
            other = stored("AgentService", item.name, draw(st.sampled_from(AGENT_SPECS)))
            version, number = draw(st.sampled_from([item, item, other])), next(numbers)
            phase, seen = draw(chances.fates("worker"))
            worker = _at_port(
                _started(version, "worker", index, phase, seen, f"tau-worker-{index}-{number:03}"), 27000 + number
            )
            made.append(worker)
            if draw(st.integers(0, 4)):
                phase, seen = draw(chances.fates("data-proxy"))
                if seen is Seen.READY and not answers(worker):
                    seen = Seen.NOT_READY
                told = draw(st.sampled_from([PLACE, PLACE, PLACE_BEFORE])) if version.spec.get("inference") else {}
                uid = f"tau-data-proxy-{index}-{number:03}"
                proxy = _started(version, "data-proxy", index, phase, seen, uid, workerUrl=worker.url, **told)
                settings = session_settings(effective("AgentService", version.spec))
                made.append(replace(_at_port(proxy, 28000 + number), settings=settings))
    return made


def _at_port(one: ObservedRun, port: int) -> ObservedRun:
    spec = replace(one.state.spec, ports=(port,), url=f"http://127.0.0.1:{port}")
    return replace(one, state=replace(one.state, spec=spec))


@st.composite
def _routed(draw: st.DrawFn, world: Simulation) -> None:
    """A router that answers knows some of the data proxies; gateways know what a router told them once."""
    for home in (SERVICE, AGENTS):
        draw(_routed_by(world, home))


@st.composite
def _routed_by(draw: st.DrawFn, world: Simulation, home: str) -> None:
    proxies = [one for one in world.runs.values() if one.state.spec.component == "data-proxy" and one.may_live]
    known: dict[str, tuple[tuple[str, str, str], ...]] = {}
    for one in proxies:
        if (one.state.spec.owner == AGENTS) != (home == AGENTS):
            continue
        model = one.state.spec.owner.partition("/")[2]
        if draw(st.integers(0, 3)):
            state = draw(st.sampled_from(["ready", "ready", "ready", "draining"]))
            known[model] = (*known.get(model, ()), (one.uid, one.url, state))
    if draw(st.integers(0, 9)) == 0:
        known["stranger"] = (("stranger-1", "http://127.0.0.1:9", "ready"),)
    synced = draw(st.booleans())
    if any(answers(one) for one in world.of(home, "router")):
        strategy = draw(st.sampled_from(["auto", "round_robin"]))
        readiness = Readiness(period_seconds=5.0) if home == AGENTS else DEFAULT_READINESS
        world.tables[home] = snapshot(known, strategy, synced=synced, readiness=readiness)
        if draw(st.integers(0, 15)) == 0:
            world.unreadable = frozenset({home, *world.unreadable})
    for gate in filter(answers, world.of(home, "gateway")):
        relay = Relay(inherited={model: {w[0]: w[2] for w in workers} for model, workers in known.items()})
        relay.view = dict(relay.inherited)
        if home in world.tables:
            relay.follow(world.tables[home])
        world.relays[gate.uid] = relay


@st.composite
def rollouts(draw: st.DrawFn) -> Wish:
    """Wishes under which every model, and the agent service, goes on serving."""
    models = {f"Model/{name}": {"service": "default", **draw(st.sampled_from(SERVING_MODELS))} for name in MODELS}
    front = {SERVICE: draw(st.sampled_from(SERVING_SERVICES))} if draw(st.booleans()) else {}
    agents = {AGENTS: draw(st.sampled_from(SERVING_AGENTS))} if draw(st.booleans()) else {}
    return Wish({**front, **models, **agents}, Policy(allow_downtime=draw(st.booleans())))


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    """Keep, change, add or delete any of the objects; name all of them or only some."""
    specs: dict[str, Mapping[str, Any] | None] = {}
    if draw(st.booleans()):
        specs[SERVICE] = draw(st.sampled_from(SERVICE_SPECS))
    for name in MODELS:
        fate = draw(st.sampled_from(["apply", "apply", "apply", "leave", "delete"]))
        if fate != "leave":
            spec = {"service": "default", **draw(st.sampled_from(MODEL_SPECS))}
            specs[f"Model/{name}"] = spec if fate == "apply" else None
    fate = draw(st.sampled_from(["apply", "leave", "delete"]))
    if fate != "leave":
        specs[AGENTS] = draw(st.sampled_from(AGENT_SPECS)) if fate == "apply" else None
    if draw(st.integers(0, 9)) == 0:
        specs = {SERVICE: None, **{f"Model/{name}": None for name in MODELS}, AGENTS: None}
    return Wish(specs, Policy(allow_downtime=draw(st.booleans())))
