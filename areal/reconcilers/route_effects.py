"""The effects on routes, through the router's admin routes. Each is declarative, so doing it twice does no harm."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from areal.client.admin import AdminClient
from areal.errors import ArealError, TargetFailed
from areal.reconcilers.hands import Hands, brief
from areal.reconcilers.plan import Op
from areal.resources.kinds import served_name
from areal.runtime.probes import Unreachable, http_get

POLL_S = 0.02
SLOW_POLL_S = 0.1
ROUTED_S = 10.0
DRAIN_SETTLE_S = 0.3  # a relay may have picked the worker just before it heard of the drain


def route(hands: Hands, op: Op, number: int) -> None:
    """The model's whole set, none of it draining."""
    cordoned = op.args.get("cordoned", ())
    workers = [
        {"worker_id": hands.uid(run), "worker_addr": hands.url(run), **({"cordoned": True} if run in cordoned else {})}
        for run in op.runs
    ]
    body = {"model": _served(hands, op), "workers": workers, "expected": op.args["expected"]}
    body["readiness"] = op.args["readiness"]
    answer = _ask(hands, op, "/register_model", body)
    for worker in answer.get("workers", ()) if isinstance(answer, dict) else ():
        if worker.get("state") == "draining":
            _ask(hands, op, "/undrain", {"worker_id": worker["worker_id"]})
    hands.event(op.ref, "Normal", "Routed", f"{len(workers)} replicas: {op.cause}")


def unroute(hands: Hands, op: Op, number: int) -> None:
    name = op.args.get("model") or _served(hands, op)
    _ask(hands, op, "/remove_model", {"model": name}, missing_is_fine=True)


def _served(hands: Hands, op: Op) -> str:
    model = hands.object(op.ref)
    return served_name(model.name, model.spec)


def configure(hands: Hands, op: Op, number: int) -> None:
    _ask(hands, op, "/configure", dict(op.args))


def synced(hands: Hands, op: Op, number: int) -> None:
    _ask(hands, op, "/synced", {})


def drain(hands: Hands, op: Op, number: int) -> None:
    """No new picks, then wait until no request is in flight at the data proxy, or the drain's own deadline."""
    _ask(hands, op, "/drain", {"worker_id": op.run, "stopping": True}, missing_is_fine=True)
    url, seconds, began = hands.url(op.run), float(op.args["seconds"]), time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        busy = _in_flight(url)
        if busy is None or (busy == 0 and waited_s >= min(DRAIN_SETTLE_S, seconds)):
            return
        if waited_s >= seconds:
            hands.event(op.ref, "Warning", "DrainTimeout", f"{op.run} still had {busy} requests after {seconds:g} s")
            return
        hands.say(op, f"draining, {busy} requests in flight")
        hands.pause(op, SLOW_POLL_S)


def _in_flight(url: str) -> int | None:
    """Requests in flight at a data proxy; None when it cannot say, which means it is gone."""
    try:
        return int(json.loads(http_get(f"{url}/health", 2.0).body).get("in_flight", 0))
    except (Unreachable, ValueError):
        return None


def settle(hands: Hands, op: Op, number: int) -> None:
    """The gateway lists the model, and the router sends requests to its replicas: what `Ready` promises is what a
    user's client sees. A replica that the router does not find well is waited for a moment, and is no failure here."""
    service, name = str(op.args["service"]), _served(hands, op)
    gateway = _gateway_url(hands, service)
    if gateway is None:
        raise TargetFailed(f"{service} has no running gateway", hint=f"areal describe {service.lower()}")
    client = hands.admin(service, gateway)
    while True:
        try:
            status, answer = client.get("/v1/models")
        except OSError as error:
            status, answer = 0, str(error)
        if status == 200 and any(entry.get("id") == name for entry in answer.get("data", ())):
            break
        hands.require_time(op, f"{op.ref}: {gateway} does not list the model: {status or ''} {brief(answer)}")
        hands.pause(op, POLL_S)
    until = time.monotonic() + ROUTED_S
    while not op.args.get("trainer") and _lacks_requests(client, name) and time.monotonic() < until:
        hands.pause(op, SLOW_POLL_S)


def _lacks_requests(gateway: AdminClient, model: str) -> bool:
    """Whether a worker of the model gets none: the router has yet to find it well."""
    try:
        status, answer = gateway.get("/workers")
    except OSError:
        return True
    workers = answer.get("workers", ()) if status == 200 and isinstance(answer, dict) else ()
    return any(worker["model"] == model and worker["state"] not in ("ready", "draining") for worker in workers)


def _gateway_url(hands: Hands, service: str) -> str | None:
    for slot in hands.slots.values():
        if slot.ref == service and slot.component == "gateway":
            return slot.url
    return next((run.url for run in hands.observed.of(service, "gateway") if run.is_live), None)


def _ask(hands: Hands, op: Op, path: str, body: Mapping[str, Any], *, missing_is_fine: bool = False) -> Any:
    """POST to the service's router. Raises ArealError when it does not do as it is told."""
    service = str(op.args.get("service") or op.ref)
    hint = f"areal logs {service.lower()} -c router; then the same command again"
    url = hands.url(op.args.get("router") or op.run)
    try:
        status, answer = hands.admin(service, url).post(path, dict(body))
    except OSError as error:
        why = error or type(error).__name__
        raise ArealError(f"{op.ref}: the router at {url} does not answer POST {path}: {why}", hint=hint) from error
    if status >= 400 and not (missing_is_fine and status == 404):
        raise ArealError(f"{op.ref}: the router answers {status} to POST {path}: {brief(answer)}", hint=hint)
    return answer
