"""Execute a plan: claim slots, run its ops in dependency order and in parallel, journal each. Makes no decisions.

Invariants: an op begins only when all ops in its ``needs`` have succeeded; if one of them fails, the op is skipped, and
so are all ops that need it. Ops in its ``after`` must have ended, successfully or not. After an interrupt no op begins;
running ops finish or give up by themselves. Every effect is idempotent. Records that can be written at the same time
are written together, as one journal entry and one change of the store; if that fails, each is written by itself.

Before the first effect, a uid and a port are claimed for every run that the plan starts: all of them or none. Ports are
sticky: a run that follows a dead or stopped one takes its port, so that its neighbors' URLs stay valid. A successor
that runs beside its predecessor takes a new port, except a gateway, whose address users know: the two share the port.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Protocol
from urllib.parse import urlsplit

from areal.client.gateway import NoResponse, error_message
from areal.errors import ArealError, FieldName, NoCapacity, TargetFailed, TimedOut, Wording
from areal.reconcilers.kinds import Endpoint, controller_of, host_of
from areal.reconcilers.launch import EffectContext, Interrupted, Slot
from areal.reconcilers.observe import (
    KEYS,
    Observed,
    ObservedRun,
    Seen,
    Trouble,
    key_file,
    key_headers,
    key_ids,
    port_trouble,
    probe_run,
    ready_path,
    trouble_of,
)
from areal.reconcilers.plan import (
    NO_PROCESS,
    AtRouter,
    AwaitReady,
    DoesNotFit,
    DrainWorker,
    Op,
    Plan,
    RemoveRoutes,
    Report,
    SetRoutes,
    SettleRoutes,
    SoakRuns,
    StartRun,
    StopRun,
    Verb,
)
from areal.resources.addresses import is_loopback
from areal.resources.kinds import parse_ref, served_name
from areal.runtime.backends.base import NODE_HOST, Phase, Problem, ProblemKind
from areal.runtime.leases import PortOwner, port_owner
from areal.runtime.probes import NoAnswer, ProbeFailed, ProbeResponse, failure, http_get, wait_ready
from areal.state.events import events_file
from areal.state.records import StoredObject, new_uid
from areal.wire.bodies import ModelWorker, NameWorker, RegisterModel, RemoveModel
from areal.wire.fields import write_fields
from areal.wire.routing import DRAINING, READY, Snapshot

PARALLEL_OPS = 32
_INTERRUPT_POLL_S = 0.2


def execute(plan: Plan, perform: Callable[[Sequence[Op[Any]]], None], interrupted: Event) -> Report:
    """Perform every op that can be performed. Only ArealErrors count as an op's failure; other errors propagate."""
    report = Report(plan)
    waiting = {op.id: op for op in plan.ops}
    known = frozenset(waiting)
    order = TopologicalSorter({op.id: known & {*op.needs, *op.after} for op in plan.ops})
    order.prepare()
    running: dict[Future[None], Sequence[Op[Any]]] = {}
    ended: SimpleQueue[Future[None]] = SimpleQueue()
    with ThreadPoolExecutor(PARALLEL_OPS, thread_name_prefix="op") as pool:

        def start(batches: Iterable[Sequence[Op[Any]]]) -> None:
            for ops in batches:
                future = pool.submit(perform, ops)
                running[future] = ops
                future.add_done_callback(ended.put)

        while order.is_active():
            if interrupted.is_set() and waiting:
                report.interrupted = True
                report.skipped |= waiting.keys()
                waiting.clear()
            while ready := order.get_ready():
                possible: list[Op[Any]] = []
                for number in ready:
                    op = waiting.pop(number, None)
                    if op is not None and known.intersection(op.needs) <= report.done:
                        possible.append(op)
                    else:
                        report.skipped.add(number)
                        order.done(number)
                if records := [op for op in possible if op.verb is Verb.RECORD]:
                    start([records])
                start([op] for op in possible if op.verb is not Verb.RECORD)
            if running:
                with suppress(Empty):
                    future = ended.get(timeout=_INTERRUPT_POLL_S)
                    ops = running.pop(future)
                    if len(ops) > 1 and isinstance(future.exception(), ArealError):
                        start([op] for op in ops)
                        continue
                    _note_end(report, {op.id for op in ops}, future)
                    order.done(*(op.id for op in ops))
    return report


def _note_end(report: Report, numbers: Collection[int], future: Future[None]) -> None:
    try:
        future.result()
    except Interrupted:
        report.interrupted = True
        report.skipped.update(numbers)
    except ArealError as error:
        report.failed |= dict.fromkeys(numbers, error)
    else:
        report.done.update(numbers)


class PortSource(Protocol):
    """The part of a backend that slots need."""

    host: str

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]: ...


def claim_slots(
    plan: Plan,
    observed: Observed,
    specs: Mapping[str, Mapping[str, object]],
    backend_named: Callable[[str], PortSource],
    scheduler_of: Callable[[str], Mapping[str, object]],
    *,
    owner_of: Callable[[int], PortOwner | None] = port_owner,
    new_suffix: Callable[[], str] = lambda: secrets.token_hex(4),
) -> dict[str, Slot]:
    """Return the slot of every SPAWN of the plan, by symbol. ``scheduler_of`` returns ``spec.scheduler`` of an object,
    with its ``type``. Raises NoCapacity naming the holder of a declared port."""
    require_ports(plan, observed, specs, backend_named, scheduler_of, owner_of=owner_of)
    stopping = frozenset(op.run for op in plan.ops if op.verb is Verb.STOP)
    slots = {}
    for op in plan.ops:
        if op.verb is not Verb.SPAWN:
            continue
        (kind, _, name), (component, _, replica) = op.ref.partition("/"), op.target.rpartition("/")
        scheduler = scheduler_of(op.ref)
        backend = str(scheduler["type"])
        uid = f"{name}-{component}-{replica}-{new_suffix()}"
        slot = partial(Slot, uid, op.ref, component, int(replica), backend=backend, scheduler=scheduler)
        ports = backend_named(backend)
        endpoint = controller_of(kind).endpoint(specs[op.ref], component)
        if endpoint is None:
            slots[op.run] = slot(port=0)
            continue
        late = ports.host == NODE_HOST
        port = endpoint.port or _choose_port(op, observed, endpoint, stopping, ports)
        host = NODE_HOST if late and is_loopback(endpoint.host) else endpoint.host
        called = NODE_HOST if late else ""
        slots[op.run] = slot(port=port, host=host, called=called, shared=endpoint.shared)
    return slots


def require_ports(
    plan: Plan,
    observed: Observed,
    specs: Mapping[str, Mapping[str, object]],
    backend_named: Callable[[str], PortSource],
    scheduler_of: Callable[[str], Mapping[str, object]],
    *,
    owner_of: Callable[[int], PortOwner | None] = port_owner,
    without: Collection[str] = (),
) -> None:
    """Raise DoesNotFit, before anything is changed, for a declared port of this machine that a process of another
    object holds, or that the plan would give to two. Ports of the objects ``without`` are not checked."""
    taken: dict[int, tuple[str, str]] = {}
    for op in plan.ops:
        component = op.target.rpartition("/")[0]
        if op.verb is not Verb.SPAWN or op.ref in without:
            continue
        endpoint = controller_of(op.ref.partition("/")[0]).endpoint(specs[op.ref], component)
        if endpoint is None or not endpoint.port or backend_named(str(scheduler_of(op.ref)["type"])).host == NODE_HOST:
            continue
        port, mine, remedies = (
            endpoint.port,
            (op.ref, component),
            [Wording("choose another ", FieldName(endpoint.field))],
        )
        if (holder := taken.setdefault(port, mine)) != mine:
            message = f"port {port} is also that of the {holder[1]} of {holder[0]}"
        elif any(run.is_live and port in _ports(run) for run in observed.of(*mine)):
            continue
        elif (owner := owner_of(port)) is not None:
            message = f"port {port} is in use by {owner}"
            ends = next(
                (each.ref for each in plan.ops if each.verb is Verb.ERASE and _holds(observed, each.ref, port)), ""
            )
            remedies.insert(0, Wording(f"areal delete {ends} first" if ends else owner.remedy, ", or "))
        else:
            continue
        raise DoesNotFit(op.ref, NoCapacity(f"{op.ref}: {message}", hint=Wording(*remedies)))


def _holds(observed: Observed, ref: str, port: int) -> bool:
    return any(run.is_live and port in _ports(run) for run in observed.of(ref))


def _choose_port(
    op: Op[StartRun], observed: Observed, endpoint: Endpoint, stopping: frozenset[str], ports: PortSource
) -> int:
    component, _, replica = op.target.rpartition("/")
    former = observed.of(op.ref, component, int(replica))
    held = [port for run in former if run.is_live and run.uid in stopping for port in _ports(run)]
    if endpoint.in_place and held:
        return held[0]
    if op.args.successor:
        return ports.claim_ports(1, owner=op.ref)[0]  # not to be taken for its predecessor
    called: list[int] = []  # ports that live neighbors use: an engine's by its data proxies, a router's by its gateways
    if endpoint.caller is not None:
        caller, input_name = endpoint.caller
        callers = [run for run in observed.of(op.ref, caller, int(replica)) if run.is_live]
        urls = [urlsplit(str(run.state.spec.inputs.get(input_name, ""))) for run in callers]
        called = [url.port for url in urls if url.port is not None]
    ended = sorted((run for run in former if not run.is_live), key=lambda run: run.ended_at, reverse=True)
    sticky = [*called, *(port for run in ended for port in _ports(run))]
    return ports.claim_ports(1, owner=op.ref, prefer=sticky)[0]


def _ports(run: ObservedRun) -> tuple[int, ...]:
    return (*run.state.spec.ports, *run.state.spec.shared_ports)


POLL_S = 0.02
SLOW_POLL_S = 0.1
KICK_SETTLE_S = 60.0  # a supervisor on a busy machine has taken 10 s
WARM_TIMEOUT_S = 120.0
WEIGHTS_BEHIND = "weights_behind"  # a data proxy's error while its engine lacks the published weights


def perform(context: EffectContext, ops: Sequence[Op[Any]]) -> None:
    """Perform one op, or several records. Raises ArealError if that fails. Only a killed command leaves the op open in
    the journal."""
    op, together = ops[0], [op.ref for op in ops[1:]]
    also = {"also": together} if together else {}
    number = context.tx.begin(op.verb.value, ref=op.ref, target=op.target, run=context.uid(op.run), **also)
    try:
        if op.verb is Verb.RECORD:
            record(context, ops)
        else:
            _EFFECTS[op.verb](context, op, number)
    except ArealError:
        context.tx.end(number, failed=True)
        raise
    context.tx.end(number)


def spawn(context: EffectContext, op: Op[StartRun], number: int) -> None:
    slot = context.slots[op.run]
    context.report(op, f"starting {slot.component}")
    spec = controller_of(parse_ref(op.ref).kind).launch(context, op, slot)
    keys = key_ids(spec)
    inputs = {**spec.inputs, KEYS: keys} if keys else spec.inputs
    spec = replace(spec, inputs=inputs, events=str(events_file(context.ctx.home, parse_ref(op.ref))))
    context.backend.start(spec, on_pid=lambda pid: context.tx.note(number, pid=pid))
    with context.lock:
        context.spawned[op.run] = slot.uid
    where = f" on port {slot.port}" if slot.port else ""
    cause = "" if op.cause == NO_PROCESS else f": {op.cause}"
    context.event(op.ref, "Normal", "Started", f"{op.target}{where}{cause}")


def kick(context: EffectContext, op: Op[Any], number: int) -> None:
    context.report(op, "restarting now")
    restarts = context.state(op.run).restarts
    context.backend.kick(op.run)
    until = time.monotonic() + KICK_SETTLE_S
    while time.monotonic() < until and not context.ctx.interrupted.is_set():
        state = context.state(op.run)
        if state.phase is not Phase.BACKOFF or state.restarts > restarts:
            break
        time.sleep(POLL_S)
    context.event(op.ref, "Normal", "Restarted", f"{op.target}: {op.cause}")


def repair(context: EffectContext, op: Op[Any], number: int) -> None:
    context.backend.repair(Problem(ProblemKind.DAMAGED_RECORD, op.run, op.cause))
    context.event(op.ref, "Normal", "Mended", f"{op.target}: {op.cause}")


def await_ready(context: EffectContext, op: Op[AwaitReady], number: int) -> None:
    """Wait until the run's own process owns its port and answers. A process that ends while it starts fails the wait at
    once."""
    context.placed(op, op.run)
    patience_s = controller_of(parse_ref(op.ref).kind).start_deadline_s(context, op.ref)
    left_s = context.left_s
    spec = context.state(op.run).spec
    try:
        wait_ready(
            context.backend,
            context.uid(op.run),
            path=ready_path(spec),
            headers=key_headers(key_file(spec)),
            timeout_s=min(left_s, patience_s),
            on_wait=lambda state, elapsed_s: _say_stage(context, op, state.spec.uid),
            interrupted=context.ctx.interrupted,
            accept=partial(_accepts, op),
            beside=context.uid(op.args.engine) if op.args.engine else "",
        )
    except KeyboardInterrupt:
        raise Interrupted(op) from None
    except TimedOut as error:
        if patience_s > left_s:
            raise
        context.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
        raise TargetFailed(error.message, hint=error.hint, detail=error.detail) from error
    except TargetFailed as error:
        context.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
        raise
    if spec.shared_ports and (shared := port_trouble(context.state(op.run), context.backend.observe().values())):
        raise _failed(op, shared)
    context.report(op, "ready")


def _failed(op: Op[Any], trouble: Trouble) -> TargetFailed:
    return TargetFailed(f"{op.ref} {op.target}: {trouble.message}", hint=trouble.hint)


def _accepts(op: Op[AwaitReady], response: ProbeResponse) -> bool:
    """Return whether the process is ready, or is a data proxy that only waits for weights that its model's trainer will
    publish. Raises TargetFailed if the process reports a fault that waiting does not clear."""
    readiness = response.json()
    if trouble := trouble_of(readiness):
        raise _failed(op, trouble)
    if response.status == 200 or (op.args.trainer and readiness.get("awaits_version") is not None):
        return True
    if advice := readiness.get("advice"):
        raise TargetFailed(
            f"{op.ref} {op.target}: {readiness['reason']}", hint=f"{advice}; then the same command again"
        )
    return False


def _say_stage(context: EffectContext, op: Op[Any], uid: str) -> None:
    stage = context.backend.stage(uid)
    if stage is not None:
        context.report(op, stage.stage, stage.done, stage.total)


def warm(context: EffectContext, op: Op[AwaitReady], number: int) -> None:
    """Request a one-token completion from the data proxy. Raises TargetFailed if that fails."""
    context.report(op, "warming up")
    model = context.object(op.ref)
    client = context.admin(host_of(model) or op.ref, context.url(op, op.run), WARM_TIMEOUT_S)
    body = {
        "model": served_name(model.name, model.spec),
        "prompt": "1",
        "max_tokens": 1,
        "temperature": 0,
        "store": False,
    }
    logs = f"areal logs {op.ref.lower()}"
    try:
        status, answer = client.ask("POST", "/v1/completions", body)
    except NoResponse as error:
        raise TargetFailed(f"{op.ref} {op.target}: no answer to a first completion: {error.why}", hint=logs) from error
    refused = answer.get("error") if isinstance(answer, dict) else None
    if op.args.trainer and isinstance(refused, dict) and refused.get("code") == WEIGHTS_BEHIND:
        context.report(op, f"waits for the weights of {op.args.trainer}")
        return
    if status != 200:
        raise TargetFailed(f"{op.ref} {op.target}: the model does not complete: {status} {_brief(answer)}", hint=logs)


def soak(context: EffectContext, op: Op[SoakRuns], number: int) -> None:
    """Wait while the new processes stay ready. Raises TargetFailed if one does not."""
    until = time.monotonic() + op.args.seconds
    while time.monotonic() < until:
        for symbol in op.runs:
            run = probe_run(context.state(symbol))
            if run.seen in (Seen.REFUSING, Seen.SILENT) or run.state.phase is not Phase.RUNNING:
                raise failure(context.backend, run.state)
        context.report(op, f"must stay ready for {until - time.monotonic():.0f} s more")
        context.pause(op, SLOW_POLL_S)


def stop(context: EffectContext, op: Op[StopRun], number: int) -> None:
    context.report(op, "stopping")
    report = context.backend.stop(op.run, grace_s=op.args.grace_seconds)
    if report.was_alive or report.swept_pids:
        swept = f"; swept {len(report.swept_pids)} left-over processes" if report.swept_pids else ""
        note = f"; {report.note}" if report.note else ""
        context.event(op.ref, "Normal", "Stopped", f"{op.target}: {op.cause}{swept}{note}")


def forget(context: EffectContext, op: Op[Any], number: int) -> None:
    """Delete the record of a run, with its output unless the controller keeps that of a deleted object."""
    ref, target = parse_ref(op.ref), context.targets.get(op.ref)
    controller, is_deleted = controller_of(ref.kind), target is not None and (target.is_deleted or target.replaces)
    if controller.runs_to_completion and is_deleted:
        controller.keep_output(context.ctx.home, ref, op.run, context.backend.log_paths(op.run))
    context.backend.forget(op.run)


def give_up(context: EffectContext, runs: tuple[str, ...]) -> None:
    """Stop runs that were started in vain. Those that fail to stop are stopped by `areal doctor` or the next plan."""
    for symbol in runs:
        slot = context.slots[symbol]
        try:
            context.backend.stop(context.spawned[symbol])
        except ArealError as error:
            message = f"{slot.component}/{slot.replica} was given up and could not be stopped: {error.message}"
            context.event(slot.ref, "Warning", "StopFailed", message)


ROUTED_S = 10.0
DRAIN_PROBE_S = 2.0
DRAIN_SETTLE_S = 0.3  # a relay may have picked the worker just before it heard of the drain


def route(context: EffectContext, op: Op[SetRoutes], number: int) -> None:
    """Register the model's whole set of workers, and undrain those that are draining."""
    workers = tuple(
        ModelWorker(worker_id=context.uid(run), worker_addr=context.url(op, run), cordoned=run in op.args.cordoned)
        for run in op.runs
    )
    model, expected = _served(context, op), op.args.expected
    body = RegisterModel(model=model, workers=workers, expected=expected, readiness=op.args.readiness)
    answer = _post(context, op, "/register_model", write_fields(body))
    for worker in answer.get("workers", ()) if isinstance(answer, dict) else ():
        if worker.get("state") == "draining":
            _post(context, op, "/undrain", {"worker_id": worker["worker_id"]})
    context.event(op.ref, "Normal", "Routed", f"{len(workers)} replica{'s' * (len(workers) != 1)}: {op.cause}")


def unroute(context: EffectContext, op: Op[RemoveRoutes], number: int) -> None:
    name = op.args.model or _served(context, op)
    if op.args.declared:
        _post(context, op, "/register_model", write_fields(RegisterModel(model=name, workers=(), expected=0)))
        return
    _post(context, op, "/remove_model", write_fields(RemoveModel(model=name)), missing_is_fine=True)


def _served(context: EffectContext, op: Op[Any]) -> str:
    model = context.object(op.ref)
    return served_name(model.name, model.spec)


def drain(context: EffectContext, op: Op[DrainWorker], number: int) -> None:
    """Stop new requests to the data proxy, then wait until it has none in flight, is gone, or its deadline passes. A
    data proxy that does not answer may only be slow or halted, so the wait continues. In flight are also turns of
    agents whose callers have disconnected."""
    body = NameWorker(worker_id=op.run, stopping=True)
    _post(context, op, "/drain", write_fields(body), missing_is_fine=True)
    url, seconds, began = context.url(op, op.run), op.args.seconds, time.monotonic()
    headers = key_headers(key_file(context.state(op.run).spec))
    while True:
        waited_s = time.monotonic() - began
        try:
            health = json.loads(http_get(f"{url}/health", DRAIN_PROBE_S, headers).body)
            busy = max(int(health.get("in_flight", 0)), int(health.get("busy_sessions", 0)))
            left = f"{busy} requests in flight"
        except NoAnswer:
            busy, left = None, "no answer"
        except (ProbeFailed, ValueError):
            return
        if busy == 0 and waited_s >= min(DRAIN_SETTLE_S, seconds):
            return
        if waited_s >= seconds:
            context.event(op.ref, "Warning", "DrainTimeout", f"{op.run}: still {left} after {seconds:g} s")
            return
        context.report(op, f"draining, {left}")
        context.pause(op, SLOW_POLL_S)


def settle(context: EffectContext, op: Op[SettleRoutes], number: int) -> None:
    """Wait until the gateway lists the model (for an agent service: is ready) and the router sends requests to its
    replicas, which is what `Ready` promises. An unhealthy replica is waited for up to ``ROUTED_S``, and is no
    failure."""
    service, name = op.args.service, _served(context, op)
    gateway = context.url(op, context.run_of(service, "gateway"))
    client = context.admin(service, gateway)
    while True:
        try:
            status, answer = client.ask("GET", "/ready" if service == op.ref else "/v1/models")
        except NoResponse as error:
            status, answer = 0, error.why
        if status == 200 and (service == op.ref or any(entry.get("id") == name for entry in answer.get("data", ()))):
            break
        context.require_time(op, f"{op.ref}: {gateway} does not list the model: {status or ''} {_brief(answer)}")
        context.pause(op, POLL_S)

    def is_unrouted() -> bool:
        """Return whether the router does not find a worker healthy yet, and sends it no requests."""
        try:
            router = context.admin(service, context.url(op, context.run_of(service, "router")))
            status, answer = router.ask("GET", "/table")
        except NoResponse:
            return True
        entry = Snapshot.from_json(answer).models.get(name) if status == 200 else None
        return entry is not None and any(worker.state not in (READY, DRAINING) for worker in entry.workers)

    until = time.monotonic() + ROUTED_S
    while not op.args.trainer and is_unrouted() and time.monotonic() < until:
        context.pause(op, SLOW_POLL_S)


def _brief(answer: Any) -> str:
    """Return an error body in a few words."""
    message = error_message(answer)
    return str(answer)[:300] if message is None else message


def _post(
    context: EffectContext, op: Op[Any], path: str, body: Mapping[str, object], *, missing_is_fine: bool = False
) -> Any:
    """Post to the service's router, or to the op's own process. Raises ArealError for an error response or no
    response."""
    at = op.args if isinstance(op.args, AtRouter) else AtRouter(op.ref, op.run)
    called = "data proxy" if op.verb is Verb.CONFIGURE and op.target != "router" else "router"
    hint = f"areal logs {at.service.lower()} -c {called.replace(' ', '-')}; then the same command again"
    url = context.url(op, at.router)
    try:
        status, answer = context.admin(at.service, url).ask("POST", path, dict(body))
    except NoResponse as error:
        raise ArealError(
            f"{op.ref}: the {called} at {url} does not answer POST {path}: {error.why}", hint=hint
        ) from error
    if status >= 400 and not (missing_is_fine and status == 404):
        raise ArealError(f"{op.ref}: the {called} answers {status} to POST {path}: {_brief(answer)}", hint=hint)
    return answer


def record(context: EffectContext, ops: Sequence[Op[Any]]) -> None:
    """Write the objects as accepted, with actor, time and revision."""
    now, actor = time.time(), context.ctx.actor

    def stamped(item: StoredObject) -> StoredObject:
        layers = tuple(
            layer if layer.at else replace(layer, at=now, actor=layer.actor or actor) for layer in item.layers
        )
        return replace(item, uid=item.uid or new_uid(), created_at=item.created_at or now, layers=layers)

    items = [stamped(context.targets[op.ref].object) for op in ops]
    accepted = context.store.add_revisions(items, actor=actor, at=now)
    context.store.put_all([(item, controller_of(item.kind).kept_status) for item in accepted])
    for op in ops:
        is_new = context.targets[op.ref].action in ("create", "replace")
        context.event(op.ref, "Normal", "Created" if is_new else "Configured", op.cause)


def erase(context: EffectContext, op: Op[Any], number: int) -> None:
    """Delete the object and its files. The controller may keep some, such as trajectories never exported."""
    ref = parse_ref(op.ref)
    kept = controller_of(ref.kind).dispose(context.ctx.home, ref)
    context.store.delete(ref)
    if kept is not None:
        with context.lock:
            context.notes.append(kept)


_EFFECTS: dict[Verb, Callable[[EffectContext, Op[Any], int], None]] = {
    Verb.SPAWN: spawn,
    Verb.KICK: kick,
    Verb.REPAIR: repair,
    Verb.AWAIT: await_ready,
    Verb.WARM: warm,
    Verb.ROUTE: route,
    Verb.CONFIGURE: lambda context, op, number: _post(context, op, "/configure", write_fields(op.args)),
    Verb.SYNC: lambda context, op, number: _post(context, op, "/synced", {}),
    Verb.SETTLE: settle,
    Verb.SOAK: soak,
    Verb.DRAIN: drain,
    Verb.UNROUTE: unroute,
    Verb.STOP: stop,
    Verb.FORGET: forget,
    Verb.ERASE: erase,
    Verb.BARRIER: lambda context, op, number: None,
}
assert _EFFECTS.keys() == set(Verb) - {Verb.RECORD}
