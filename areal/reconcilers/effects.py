"""Do one op of a plan: journal it, do it, journal that it is done. Decides nothing; every effect is idempotent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from areal.client.http import AdminClient
from areal.errors import ArealError, TargetFailed, TimedOut
from areal.reconcilers.effect_context import EffectContext, brief, interrupted
from areal.reconcilers.kinds import controller_of, host_of
from areal.reconcilers.kinds.model_files import COMMITS
from areal.reconcilers.observe import Seen, key_headers, probe_run, ready_path
from areal.reconcilers.plan import Op, Verb
from areal.resources.kinds import parse_ref, served_name
from areal.runtime.backends.base import Phase
from areal.runtime.probes import ProbeFailed, ProbeResponse, failure, http_get, wait_ready
from areal.state.records import new_uid

POLL_S = 0.02
SLOW_POLL_S = 0.1
KICK_SETTLE_S = 2.0
WARM_TIMEOUT_S = 120.0
WEIGHTS_BEHIND = "weights_behind"  # a data proxy's answer to calls while its engine lacks what a trainer published


def spawn(context: EffectContext, op: Op, number: int) -> None:
    slot = context.slots[op.run]
    context.say(op, f"starting {slot.component}")
    spec = controller_of(parse_ref(op.ref).kind).launch(context, op, slot)
    context.backend.start(spec, on_pid=lambda pid: context.tx.note(number, pid=pid))
    with context.lock:
        context.spawned[op.run] = slot.uid
    where = f" on port {slot.port}" if slot.port else ""
    context.event(op.ref, "Normal", "Started", f"{op.target}{where}: {op.cause}")


def kick(context: EffectContext, op: Op, number: int) -> None:
    context.say(op, "restarting now")
    context.backend.kick(op.run)
    until = time.monotonic() + KICK_SETTLE_S
    while context.state(op.run).phase is Phase.BACKOFF and time.monotonic() < until:
        time.sleep(POLL_S)
    context.event(op.ref, "Normal", "Restarted", f"{op.target}: {op.cause}")


def await_ready(context: EffectContext, op: Op, number: int) -> None:
    """The run's own child lives, owns its port and answers; a child that ends while starting fails at once."""
    patience_s = controller_of(parse_ref(op.ref).kind).start_deadline_s(context, op.ref)
    left_s = context.left_s
    spec = context.state(op.run).spec
    try:
        wait_ready(
            context.backend,
            context.uid(op.run),
            path=ready_path(spec),
            headers=key_headers(spec),
            timeout_s=min(left_s, patience_s),
            on_wait=lambda state, elapsed_s: _say_stage(context, op, state.spec.uid),
            interrupted=context.ctx.interrupted,
            accept=partial(_accepts, op, bool(op.args.get("trainer"))),
        )
    except KeyboardInterrupt:
        raise interrupted(op) from None
    except TimedOut as error:
        if patience_s > left_s:
            raise
        context.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
        raise TargetFailed(error.message, hint=error.hint, detail=error.detail) from error
    except TargetFailed as error:
        context.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
        raise
    context.say(op, "ready")


def _accepts(op: Op, has_trainer: bool, response: ProbeResponse) -> bool:
    """Ready; or all that a data proxy lacks are the weights that its model's trainer is to bring. Raises TargetFailed
    where the process says that waiting will not make it ready."""
    if response.status == 200 or (has_trainer and _field(response.body, "awaits_version") is not None):
        return True
    if fault := _field(response.body, "fault"):
        what, _, advice = str(fault).rpartition("; ")
        raise TargetFailed(f"{op.ref} {op.target}: {what}", hint=f"{advice}; then the same command again")
    return False


def _field(body: bytes, name: str) -> Any:
    try:
        data = json.loads(body)
    except ValueError:
        return None
    return data.get(name) if isinstance(data, dict) else None


def _say_stage(context: EffectContext, op: Op, uid: str) -> None:
    stage = context.backend.stage(uid)
    if stage is not None:
        context.say(op, stage.stage, stage.done, stage.total)


def warm(context: EffectContext, op: Op, number: int) -> None:
    """A one-token completion through the data proxy itself: the model answers, or it is not ready."""
    context.say(op, "warming up")
    client = context.admin(host_of(context.object(op.ref)) or op.ref, context.url(op.run), WARM_TIMEOUT_S)
    model = context.object(op.ref)
    body = {
        "model": served_name(model.name, model.spec),
        "prompt": "1",
        "max_tokens": 1,
        "temperature": 0,
        "store": False,
    }
    logs = f"areal logs {op.ref.lower()}"
    try:
        status, answer = client.post("/v1/completions", body)
    except OSError as error:
        why = error or type(error).__name__
        raise TargetFailed(f"{op.ref} {op.target}: no answer to a first completion: {why}", hint=logs) from error
    refused = answer.get("error") if isinstance(answer, dict) else None
    if op.args.get("trainer") and isinstance(refused, dict) and refused.get("code") == WEIGHTS_BEHIND:
        context.say(op, f"waits for the weights of {op.args['trainer']}")
        return
    if status != 200:
        raise TargetFailed(f"{op.ref} {op.target}: the model does not complete: {status} {brief(answer)}", hint=logs)


def soak(context: EffectContext, op: Op, number: int) -> None:
    """The new processes stay up for as long as they must before old ones go."""
    until = time.monotonic() + float(op.args["seconds"])
    while time.monotonic() < until:
        for symbol in op.runs:
            run = probe_run(context.state(symbol))
            if run.seen in (Seen.REFUSING, Seen.SILENT) or run.state.phase is not Phase.RUNNING:
                raise failure(context.backend, run.state)
        context.say(op, f"must stay ready for {until - time.monotonic():.0f} s more")
        context.pause(op, SLOW_POLL_S)


def stop(context: EffectContext, op: Op, number: int) -> None:
    context.say(op, "stopping")
    report = context.backend.stop(op.run, grace_s=op.args.get("graceSeconds"))
    if report.was_alive or report.swept_pids:
        swept = f"; swept {len(report.swept_pids)} left-over processes" if report.swept_pids else ""
        note = f"; {report.note}" if report.note else ""
        context.event(op.ref, "Normal", "Stopped", f"{op.target}: {op.cause}{swept}{note}")


def forget(context: EffectContext, op: Op, number: int) -> None:
    context.backend.forget(op.run)


def give_up(context: EffectContext, runs: tuple[str, ...]) -> None:
    """Stop what was started in vain. What cannot be stopped is left to `areal doctor`, and to the next plan."""
    for symbol in runs:
        slot = context.slots[symbol]
        try:
            context.backend.stop(context.spawned[symbol])
        except ArealError as error:
            message = f"{slot.component}/{slot.replica} was given up and could not be stopped: {error.message}"
            context.event(slot.ref, "Warning", "StopFailed", message)


# -- routes, through the router's admin routes

ROUTED_S = 10.0
DRAIN_SETTLE_S = 0.3  # a relay may have picked the worker just before it heard of the drain


def route(context: EffectContext, op: Op, number: int) -> None:
    """The model's whole set, none of it draining."""
    cordoned = op.args.get("cordoned", ())
    workers = [
        {
            "worker_id": context.uid(run),
            "worker_addr": context.url(run),
            **({"cordoned": True} if run in cordoned else {}),
        }
        for run in op.runs
    ]
    body = {"model": _served(context, op), "workers": workers, "expected": op.args["expected"]}
    body["readiness"] = op.args["readiness"]
    answer = _post(context, op, "/register_model", body)
    for worker in answer.get("workers", ()) if isinstance(answer, dict) else ():
        if worker.get("state") == "draining":
            _post(context, op, "/undrain", {"worker_id": worker["worker_id"]})
    context.event(op.ref, "Normal", "Routed", f"{len(workers)} replicas: {op.cause}")


def unroute(context: EffectContext, op: Op, number: int) -> None:
    name = op.args.get("model") or _served(context, op)
    _post(context, op, "/remove_model", {"model": name}, missing_is_fine=True)


def _served(context: EffectContext, op: Op) -> str:
    model = context.object(op.ref)
    return served_name(model.name, model.spec)


def configure(context: EffectContext, op: Op, number: int) -> None:
    _post(context, op, "/configure", dict(op.args))


def synced(context: EffectContext, op: Op, number: int) -> None:
    _post(context, op, "/synced", {})


def drain(context: EffectContext, op: Op, number: int) -> None:
    """No new picks, then wait until no request is in flight at the data proxy, or the drain's own deadline."""
    _post(context, op, "/drain", {"worker_id": op.run, "stopping": True}, missing_is_fine=True)
    url, seconds, began = context.url(op.run), float(op.args["seconds"]), time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        busy = _in_flight(url)
        if busy is None or (busy == 0 and waited_s >= min(DRAIN_SETTLE_S, seconds)):
            return
        if waited_s >= seconds:
            context.event(op.ref, "Warning", "DrainTimeout", f"{op.run} still had {busy} requests after {seconds:g} s")
            return
        context.say(op, f"draining, {busy} requests in flight")
        context.pause(op, SLOW_POLL_S)


def _in_flight(url: str) -> int | None:
    """Requests in flight at a data proxy; None when it cannot say, which means it is gone."""
    try:
        return int(json.loads(http_get(f"{url}/health", 2.0).body).get("in_flight", 0))
    except (ProbeFailed, ValueError):
        return None


def settle(context: EffectContext, op: Op, number: int) -> None:
    """The gateway lists the model, and the router sends requests to its replicas: what `Ready` promises is what a
    user's client sees. A replica that the router does not find well is waited for a moment, and is no failure here."""
    service, name = str(op.args["service"]), _served(context, op)
    gateway = _gateway_url(context, service)
    if gateway is None:
        raise TargetFailed(f"{service} has no running gateway", hint=f"areal describe {service.lower()}")
    client = context.admin(service, gateway)
    while True:
        try:
            status, answer = client.get("/v1/models")
        except OSError as error:
            status, answer = 0, str(error)
        if status == 200 and any(entry.get("id") == name for entry in answer.get("data", ())):
            break
        context.require_time(op, f"{op.ref}: {gateway} does not list the model: {status or ''} {brief(answer)}")
        context.pause(op, POLL_S)
    until = time.monotonic() + ROUTED_S
    while not op.args.get("trainer") and _lacks_requests(client, name) and time.monotonic() < until:
        context.pause(op, SLOW_POLL_S)


def _lacks_requests(gateway: AdminClient, model: str) -> bool:
    """Whether a worker of the model gets none: the router has yet to find it well."""
    try:
        status, answer = gateway.get("/workers")
    except OSError:
        return True
    workers = answer.get("workers", ()) if status == 200 and isinstance(answer, dict) else ()
    return any(worker["model"] == model and worker["state"] not in ("ready", "draining") for worker in workers)


def _gateway_url(context: EffectContext, service: str) -> str | None:
    for slot in context.slots.values():
        if slot.ref == service and slot.component == "gateway":
            return slot.url
    return next((run.url for run in context.observed.of(service, "gateway") if run.is_live), None)


def _post(context: EffectContext, op: Op, path: str, body: Mapping[str, Any], *, missing_is_fine: bool = False) -> Any:
    """POST to the service's router. Raises ArealError when it does not do as it is told."""
    service = str(op.args.get("service") or op.ref)
    hint = f"areal logs {service.lower()} -c router; then the same command again"
    url = context.url(op.args.get("router") or op.run)
    try:
        status, answer = context.admin(service, url).post(path, dict(body))
    except OSError as error:
        why = error or type(error).__name__
        raise ArealError(f"{op.ref}: the router at {url} does not answer POST {path}: {why}", hint=hint) from error
    if status >= 400 and not (missing_is_fine and status == 404):
        raise ArealError(f"{op.ref}: the router answers {status} to POST {path}: {brief(answer)}", hint=hint)
    return answer


# -- objects

Effect = Callable[[EffectContext, Op, int], None]


def perform(context: EffectContext, op: Op) -> None:
    """Raises ArealError when it fails; only a death in the middle leaves the operation open in the journal."""
    number = context.tx.begin(op.verb.value, ref=op.ref, target=op.target, run=context.uid(op.run))
    try:
        _EFFECTS[op.verb](context, op, number)
    except ArealError:
        context.tx.end(number, failed=True)
        raise
    context.tx.end(number)


def record(context: EffectContext, op: Op, number: int) -> None:
    """Write the object as accepted: who, when, under which revision."""
    target, now = context.targets[op.ref], time.time()
    layers = tuple(
        layer if layer.at else replace(layer, at=now, actor=layer.actor or context.ctx.actor)
        for layer in target.object.layers
    )
    stamped = replace(
        target.object,
        uid=target.object.uid or new_uid(),
        created_at=target.object.created_at or now,
        layers=layers,
    )
    stamped = context.store.add_revision(stamped, actor=context.ctx.actor, at=now)
    context.store.put(stamped, keeps=(COMMITS,))  # another op of this plan may have written those
    context.event(op.ref, "Normal", "Created" if target.action in ("create", "replace") else "Configured", op.cause)


def erase(context: EffectContext, op: Op, number: int) -> None:
    """Delete the object, and what its processes recorded, unless that would be a loss."""
    ref = parse_ref(op.ref)
    kept = controller_of(ref.kind).dispose(context.ctx.home, ref)
    context.store.delete(ref)
    if kept is not None:
        context.note(kept)


_EFFECTS: dict[Verb, Effect] = {
    Verb.RECORD: record,
    Verb.SPAWN: spawn,
    Verb.KICK: kick,
    Verb.AWAIT: await_ready,
    Verb.WARM: warm,
    Verb.ROUTE: route,
    Verb.CONFIGURE: configure,
    Verb.SYNC: synced,
    Verb.SETTLE: settle,
    Verb.SOAK: soak,
    Verb.DRAIN: drain,
    Verb.UNROUTE: unroute,
    Verb.STOP: stop,
    Verb.FORGET: forget,
    Verb.ERASE: erase,
}
assert _EFFECTS.keys() == set(Verb)
