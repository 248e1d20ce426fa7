"""Claim, before the first effect, a uid and a port for every run that a plan starts: all of them or none.

Ports are sticky: a run that follows a dead or stopped one takes its port again, so that neighbours' URLs stay true.
A successor that runs beside its predecessor takes a new port, but for a gateway, whose address users know: that port
is shared between the two for as long as both live.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from areal.errors import NoCapacity
from areal.reconcilers.launch import LOOPBACK, Slot
from areal.reconcilers.observed import Observed
from areal.reconcilers.plan import Op, Plan, Verb
from areal.resources.inference_service import InferenceServiceSpec
from areal.runtime.backends.base import Backend
from areal.runtime.ports import port_owner


def claim_slots(
    plan: Plan, observed: Observed, services: Mapping[str, InferenceServiceSpec], backend: Backend
) -> dict[str, Slot]:
    """Symbol -> slot for every SPAWN of the plan. Raises NoCapacity naming who holds a declared port."""
    stopping = {op.run for op in plan.ops if op.verb is Verb.STOP}
    return {op.run: _claim(op, observed, services, backend, stopping) for op in plan.ops if op.verb is Verb.SPAWN}


def _claim(
    op: Op,
    observed: Observed,
    services: Mapping[str, InferenceServiceSpec],
    backend: Backend,
    stopping: set[str],
) -> Slot:
    component, _, replica = op.target.rpartition("/")
    uid = f"{op.ref.partition('/')[2]}-{component}-{replica}-{secrets.token_hex(4)}"
    if component == "gateway":
        spec = services[op.ref]
        port = spec.gateway.port
        _require_free(op.ref, port, observed)
        return Slot(uid, op.ref, component, int(replica), port, spec.gateway.host, shared=True)
    former = [run for run in observed.of(op.ref, component, int(replica)) if run.state.spec.ports]
    sticky = [
        port
        for run in sorted(former, key=lambda run: run.ended_at, reverse=True)
        if not run.is_live or (run.uid in stopping and not op.args.get("successor"))
        for port in run.state.spec.ports
    ]
    declared = services[op.ref].router.port if component == "router" else None
    if declared:
        return Slot(uid, op.ref, component, int(replica), declared)
    held = [port for run in former if run.is_live and run.uid in stopping for port in run.state.spec.ports]
    if component == "router" and held and not op.args.get("successor"):
        return Slot(uid, op.ref, component, int(replica), held[0])
    (port,) = backend.claim_ports(1, owner=op.ref, prefer=sticky)
    return Slot(uid, op.ref, component, int(replica), port, LOOPBACK)


def _require_free(ref: str, port: int, observed: Observed) -> None:
    """A declared port that a stranger holds fails here, before anything is changed."""
    owner = port_owner(port)
    if owner is None:
        return
    ours = {pid for run in observed.of(ref, "gateway") for pid in (run.state.pid, run.state.shim_pid) if pid}
    if owner.pid in ours or any(run.is_live for run in observed.of(ref, "gateway")):
        return
    raise NoCapacity(
        f"{ref}: port {port} is in use by {owner}",
        hint="stop that process, or choose another spec.gateway.port",
    )
