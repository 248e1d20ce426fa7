"""What a run holds before it starts: ports chosen for it, ports it declares, GPUs. All of it, or nothing.

A port or GPU is *chosen* by ``choose_...`` and held by this process until ``take`` hands its descriptor to a shim;
what was not chosen here is leased by ``take`` itself. Nothing waits for anything, so nothing can deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from areal.errors import NoCapacity
from areal.runtime.backends.base import RunSpec
from areal.runtime.leases import Lease, LeaseDir
from areal.runtime.ports import bind_error, candidates, port_owner


def port_lease(port: int) -> str:
    return f"port-{port}"


def gpu_lease(uuid: str) -> str:
    return f"gpu-{uuid}"


class Claims:
    def __init__(self, leases: LeaseDir) -> None:
        self._leases = leases
        self._chosen: dict[str, Lease] = {}
        self._lock = threading.Lock()

    def choose_ports(self, count: int, owner: str, prefer: Sequence[int]) -> tuple[int, ...]:
        """``count`` ports that nobody holds and nobody listens on, ``prefer`` first; raises NoCapacity."""
        found: list[Lease] = []
        ports: list[int] = []
        for port in (*prefer, *candidates(owner)):
            if len(ports) == count:
                break
            if port in ports:
                continue
            lease = self._leases.try_acquire(port_lease(port), owner=owner)
            if lease is None:
                continue
            if bind_error(port):
                lease.close()
                continue
            found.append(lease)
            ports.append(port)
        if len(ports) < count:
            _close(found)
            raise NoCapacity(f"{owner} needs {count} ports and only {len(ports)} are free", hint="areal doctor")
        self._keep(found)
        return tuple(ports)

    def choose_gpus(self, count: int, owner: str, uuids: Sequence[str]) -> tuple[str, ...]:
        """The first ``count`` of ``uuids`` that nobody holds; raises NoCapacity and then holds none."""
        found: list[Lease] = []
        chosen: list[str] = []
        for uuid in uuids:
            if len(chosen) == count:
                break
            lease = self._leases.try_acquire(gpu_lease(uuid), owner=owner)
            if lease is not None:
                found.append(lease)
                chosen.append(uuid)
        if len(chosen) < count:
            _close(found)
            raise NoCapacity(f"{owner} needs {count} GPUs and only {len(chosen)} are free", hint="areal doctor")
        self._keep(found)
        return tuple(chosen)

    def release(self, names: Iterable[str] | None = None) -> None:
        """Give back chosen leases that will not be started (all of them when None)."""
        with self._lock:
            for name in list(self._chosen) if names is None else list(names):
                if lease := self._chosen.pop(name, None):
                    lease.close()

    def take(self, spec: RunSpec) -> list[Lease]:
        """Every lease of the run; the caller closes its copies once the shim has them. Raises NoCapacity."""
        held: list[Lease] = []
        try:
            for port in sorted(spec.ports):
                held.append(self._exclusive(port, spec))
            for port in sorted(spec.shared_ports):
                held.append(self._shared(port, spec))
            for uuid in sorted(spec.gpus):
                held.append(self._gpu(uuid, spec))
        except BaseException:
            _close(held)
            raise
        return held

    def _exclusive(self, port: int, spec: RunSpec) -> Lease:
        chosen = self._pop(port_lease(port), spec)
        if chosen:
            return chosen
        lease = self._leases.acquire(port_lease(port), owner=spec.owner, uid=spec.uid)
        _refuse_stranger(port, lease)
        return lease

    def _shared(self, port: int, spec: RunSpec) -> Lease:
        chosen = self._pop(port_lease(port), spec)
        if chosen:
            self._leases.share(chosen)
            return chosen
        lease, first = self._leases.acquire_shared(port_lease(port), owner=spec.owner, uid=spec.uid)
        if first:
            _refuse_stranger(port, lease)
        return lease

    def _gpu(self, uuid: str, spec: RunSpec) -> Lease:
        name = gpu_lease(uuid)
        return self._pop(name, spec) or self._leases.acquire(name, owner=spec.owner, uid=spec.uid)

    def _keep(self, leases: Iterable[Lease]) -> None:
        with self._lock:
            self._chosen.update((lease.name, lease) for lease in leases)

    def _pop(self, name: str, spec: RunSpec) -> Lease | None:
        with self._lock:
            lease = self._chosen.pop(name, None)
        if lease:
            self._leases.describe(lease, owner=spec.owner, uid=spec.uid)
        return lease


def _refuse_stranger(port: int, lease: Lease) -> None:
    """A process that knows nothing of leases may listen on a port that nobody leased."""
    error = bind_error(port)
    if error is None:
        return
    lease.close()
    owner = port_owner(port)
    if owner:
        raise NoCapacity(f"port {port} is in use by {owner}", hint="stop that process, or choose another port")
    raise NoCapacity(f"port {port} cannot be bound: {error.strerror}", hint="choose another port")


def _close(leases: list[Lease]) -> None:
    for lease in leases:
        lease.close()
