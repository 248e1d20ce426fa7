"""Opens backends, and combines all backends of a home into one.

``base`` has the contract, ``local`` the processes of this machine; ``areal.resources.kinds`` says how a package
registers its own backend. A factory is called as ``factory(home_root, lease_dir, crash)``: the home's folder
(``Path``), the folder of machine-wide leases (``Path``, or None for the default), and a function that fault-injection
tests provide and that is called with the name of each point where a caller may die.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal.errors import UsageFault
from areal.resources.kinds import BACKENDS
from areal.runtime.backends.base import Backend, Capacity, Problem, RunControl, RunSpec, RunState, Stage, StopReport

LOCAL = "local"
_USED = "backends"  # $AREAL_HOME/backends/<name>: an empty file for each backend but ``local`` that has started runs

Crash = Callable[[str], None]


def declared_backend(spec: Mapping[str, Any]) -> str:
    """Return the name of the backend that a sparse spec declares, ``spec.scheduler.type``."""
    return str((spec.get("scheduler") or {}).get("type", LOCAL))


def open_backend(
    name: str, home_root: Path, *, lease_dir: Path | None = None, crash: Crash = lambda point: None
) -> Backend:
    """Return the backend of a ``spec.scheduler.type``. Raises UsageFault for an unknown name."""
    if name not in BACKENDS:
        raise UsageFault(
            f"scheduler type {name!r} is not available in this version; use local",
            hint="or install the package that registers it as a backend (docs/extending.md)",
        )
    backend: Backend = BACKENDS.make(name, home_root, lease_dir, crash)
    return backend


class Backends(RunControl):
    """All backends that a home uses. Their runs are observed together; other operations are passed to the run's
    backend. ``local`` is always in use, any other backend from its first ``start`` on. Thread-safe."""

    def __init__(self, home_root: Path, *, lease_dir: Path | None = None, crash: Crash = lambda point: None) -> None:
        self._home_root = Path(home_root)
        self._lease_dir = lease_dir
        self._crash = crash
        self._opened: dict[str, Backend] = {}

    def named(self, name: str) -> Backend:
        """Return the backend with this name. Raises UsageFault if there is none."""
        if name not in self._opened:
            backend = open_backend(name, self._home_root, lease_dir=self._lease_dir, crash=self._crash)
            self._opened.setdefault(name, backend)
        return self._opened[name]

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        """Start a run by the backend ``spec.backend``; see ``Backend.start``."""
        backend = self.named(spec.backend)
        if spec.backend != LOCAL:
            folder = self._home_root / _USED
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / spec.backend).touch(mode=0o600)
        return backend.start(spec, on_pid=on_pid)

    def capacity(self, names: Collection[str] | None = None) -> Capacity:
        """Capacity of the named backends, or of all that are in use."""
        found = [self.named(name).capacity() for name in (self._names() if names is None else sorted(names))]
        gpus = tuple(gpu for each in found for gpu in each.gpus)
        leased = tuple(gpu for each in found for gpu in each.leased)
        squatters = {gpu: holder for each in found for gpu, holder in each.squatters.items()}
        return Capacity(gpus, leased, squatters, {name: count for each in found for name, count in each.queued.items()})

    def release_claims(self) -> None:
        """Release all ports and GPUs that were claimed and not started, of every backend."""
        for backend in list(self._opened.values()):
            backend.release_claims()

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        if uids is None:
            return {uid: state for backend in self._in_use() for uid, state in backend.observe().items()}
        found: dict[str, RunState] = {}
        for backend in self._in_use():
            if left := [uid for uid in uids if uid not in found]:
                found |= backend.observe(left)
        return found

    def stage(self, uid: str) -> Stage | None:
        return self._of(uid).stage(uid)

    def log_paths(self, uid: str) -> tuple[str, ...]:
        return self._of(uid).log_paths(uid)

    def kick(self, uid: str) -> None:
        self._of(uid).kick(uid)

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        return self._of(uid).stop(uid, grace_s=grace_s)

    def forget(self, uid: str, *, unprovable: bool = False) -> None:
        self._of(uid).forget(uid, unprovable=unprovable)

    def inspect(self) -> tuple[Problem, ...]:
        return tuple(replace(problem, backend=name) for name in self._names() for problem in self.named(name).inspect())

    def repair(self, problem: Problem) -> str:
        return self.named(problem.backend).repair(problem)

    def _in_use(self) -> list[Backend]:
        return [self.named(name) for name in self._names()]

    def _names(self) -> list[str]:
        """Return the names of the backends in use, ``local`` first."""
        names = set(self._opened)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names.update(os.listdir(self._home_root / _USED))
        return [LOCAL, *sorted(names - {LOCAL})]

    def _of(self, uid: str) -> Backend:
        """Return the backend that has the run; ``local`` for an unknown one."""
        local, *others = self._in_use()
        return next((backend for backend in others if backend.observe([uid])), local)
