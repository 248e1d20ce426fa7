"""Claim, before the first effect, a uid and a port for every run that a plan starts: all of them or none.

Ports are sticky: a run that follows a dead or stopped one takes its port again, so that neighbours' URLs stay true.
A successor that runs beside its predecessor takes a new port, but for a gateway, whose address users know: that port
is shared between the two for as long as both live.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from areal.errors import NoCapacity
from areal.reconcilers.job_phase import DRIVER
from areal.reconcilers.launch import LOOPBACK, Slot
from areal.reconcilers.observed import Observed, ObservedRun
from areal.reconcilers.plan import Op, Plan, Verb
from areal.reconcilers.replicas import ENGINE, PROXY
from areal.resources.inference_service import InferenceServiceSpec
from areal.runtime.ports import PortOwner, port_owner


class PortSource(Protocol):
    """The part of a backend that slots need."""

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]: ...


def claim_slots(
    plan: Plan,
    observed: Observed,
    services: Mapping[str, InferenceServiceSpec],
    backend: PortSource,
    *,
    owner_of: Callable[[int], PortOwner | None] = port_owner,
    new_suffix: Callable[[], str] = lambda: secrets.token_hex(4),
) -> dict[str, Slot]:
    """Symbol -> slot for every SPAWN of the plan. Raises NoCapacity naming who holds a declared port."""
    stopping = frozenset(op.run for op in plan.ops if op.verb is Verb.STOP)
    claims = _Claims(observed, services, backend, stopping, owner_of)
    return {op.run: claims.slot(op, new_suffix()) for op in plan.ops if op.verb is Verb.SPAWN}


@dataclass(frozen=True)
class _Claims:
    observed: Observed
    services: Mapping[str, InferenceServiceSpec]
    backend: PortSource
    stopping: frozenset[str]
    owner_of: Callable[[int], PortOwner | None]

    def slot(self, op: Op, suffix: str) -> Slot:
        component, _, replica = op.target.rpartition("/")
        uid = f"{op.ref.partition('/')[2]}-{component}-{replica}-{suffix}"
        if component == DRIVER:
            return Slot(uid, op.ref, component, int(replica), port=0)
        if component == "gateway":
            gateway = self.services[op.ref].gateway
            self._require_free(op.ref, component, gateway.port, "spec.gateway.port")
            return Slot(uid, op.ref, component, int(replica), gateway.port, gateway.host, shared=True)
        return Slot(uid, op.ref, component, int(replica), self._port(op, component, int(replica)), LOOPBACK)

    def _port(self, op: Op, component: str, replica: int) -> int:
        former = self.observed.of(op.ref, component, replica)
        if component == "router":
            declared = self.services[op.ref].router.port
            if declared:
                self._require_free(op.ref, component, declared, "spec.router.port")
                return declared
            held = [port for run in former if run.is_live and run.uid in self.stopping for port in _ports(run)]
            if held:
                return held[0]  # a router is replaced in place: its port is free when it is needed
        if op.args.get("successor"):
            return self.backend.claim_ports(1, owner=op.ref)[0]  # nobody may take it for the one that was there
        ended = sorted((run for run in former if not run.is_live), key=lambda run: run.ended_at, reverse=True)
        sticky = [port for run in ended for port in _ports(run)]
        if component in (ENGINE, "router"):
            sticky = [*self._called(op.ref, component, replica), *sticky]
        (port,) = self.backend.claim_ports(1, owner=op.ref, prefer=sticky)
        return port

    def _called(self, ref: str, component: str, replica: int) -> list[int]:
        """Where living neighbours look for this process: data proxies for their engine, gateways for their router."""
        caller, told = (PROXY, "engineUrl") if component == ENGINE else ("gateway", "routerUrl")
        callers = [run for run in self.observed.of(ref, caller, replica) if run.is_live]
        urls = [urlsplit(str(run.state.spec.inputs.get(told, ""))) for run in callers]
        return [url.port for url in urls if url.port is not None]

    def _require_free(self, ref: str, component: str, port: int, field: str) -> None:
        """A declared port that a stranger holds fails here, before anything is changed."""
        if any(run.is_live and port in _ports(run) for run in self.observed.of(ref, component)):
            return
        owner = self.owner_of(port)
        if owner is not None:
            raise NoCapacity(
                f"{ref}: port {port} is in use by {owner}",
                hint=f"stop that process, or choose another {field}",
            )


def _ports(run: ObservedRun) -> tuple[int, ...]:
    return (*run.state.spec.ports, *run.state.spec.shared_ports)
