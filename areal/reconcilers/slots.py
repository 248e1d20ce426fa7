"""Claim the slots of a plan: a uid and a port for every run that it starts.

A uid and a port are claimed, before the first effect, for every run that a plan starts: all of them or none. Ports are
sticky: a run that follows a dead or stopped one takes its port again, so that neighbours' URLs stay true. A successor
that runs beside its predecessor takes a new port, but for a gateway, whose address users know: the two share it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from areal.errors import NoCapacity
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.kinds.base import Endpoint
from areal.reconcilers.launch import Slot
from areal.reconcilers.observe import Observed, ObservedRun
from areal.reconcilers.plan import Op, Plan, Verb
from areal.runtime.leases import PortOwner, port_owner


class PortSource(Protocol):
    """The part of a backend that slots need."""

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]: ...


def claim_slots(
    plan: Plan,
    observed: Observed,
    specs: Mapping[str, Mapping[str, Any]],
    backend_named: Callable[[str], PortSource],
    scheduler_of: Callable[[str], str],
    *,
    owner_of: Callable[[int], PortOwner | None] = port_owner,
    new_suffix: Callable[[], str] = lambda: secrets.token_hex(4),
) -> dict[str, Slot]:
    """Symbol -> slot for every SPAWN of the plan. ``scheduler_of``: the name of an object's backend. Raises NoCapacity
    naming who holds a declared port."""
    stopping = frozenset(op.run for op in plan.ops if op.verb is Verb.STOP)
    picker = _SlotPicker(observed, specs, backend_named, scheduler_of, stopping, owner_of)
    return {op.run: picker.slot(op, new_suffix()) for op in plan.ops if op.verb is Verb.SPAWN}


@dataclass(frozen=True)
class _SlotPicker:
    observed: Observed
    specs: Mapping[str, Mapping[str, Any]]
    backend_named: Callable[[str], PortSource]
    scheduler_of: Callable[[str], str]
    stopping: frozenset[str]
    owner_of: Callable[[int], PortOwner | None]

    def slot(self, op: Op, suffix: str) -> Slot:
        component, _, replica = op.target.rpartition("/")
        uid = f"{op.ref.partition('/')[2]}-{component}-{replica}-{suffix}"
        make = partial(Slot, uid, op.ref, component, int(replica), backend=self.scheduler_of(op.ref))
        endpoint = controller_of(op.ref.partition("/")[0]).endpoint(self.specs[op.ref], component)
        if endpoint is None:
            return make(port=0)
        port = self._port(op, component, int(replica), endpoint)
        return make(port=port, host=endpoint.host, shared=endpoint.shared)

    def _port(self, op: Op, component: str, replica: int, endpoint: Endpoint) -> int:
        if endpoint.port:
            self._require_free(op.ref, component, endpoint.port, endpoint.field)
            return endpoint.port
        backend = self.backend_named(self.scheduler_of(op.ref))
        former = self.observed.of(op.ref, component, replica)
        held = [port for run in former if run.is_live and run.uid in self.stopping for port in _ports(run)]
        if endpoint.in_place and held:
            return held[0]
        if op.args.get("successor"):
            return backend.claim_ports(1, owner=op.ref)[0]  # nobody may take it for the one that was there
        ended = sorted((run for run in former if not run.is_live), key=lambda run: run.ended_at, reverse=True)
        sticky = [*self._called(op.ref, replica, endpoint), *(port for run in ended for port in _ports(run))]
        (port,) = backend.claim_ports(1, owner=op.ref, prefer=sticky)
        return port

    def _called(self, ref: str, replica: int, endpoint: Endpoint) -> list[int]:
        """Where living neighbours look for this process: data proxies for their engine, gateways for their router."""
        if endpoint.caller is None:
            return []
        caller, told = endpoint.caller
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
