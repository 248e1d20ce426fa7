"""What was seen, as frozen values: runs with their probe's answer, routing tables, capacity. Unknown is a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from areal.runtime.backends.base import Capacity, Phase, RunState


class Seen(StrEnum):
    """What a run answered to GET /ready."""

    READY = "ready"
    NOT_READY = "not ready"  # it answered, and not with 200
    REFUSING = "refusing"  # nothing listens, or what answers is not HTTP
    SILENT = "silent"  # no answer in time
    UNSEEN = "unseen"  # not asked


@dataclass(frozen=True)
class ObservedRun:
    state: RunState
    seen: Seen = Seen.UNSEEN
    why: str = ""
    age_s: float | None = None  # of the present child, when it was observed

    @property
    def uid(self) -> str:
        return self.state.spec.uid

    @property
    def replica(self) -> int:
        return self.state.spec.replica

    @property
    def url(self) -> str:
        return self.state.spec.url or ""

    @property
    def is_live(self) -> bool:
        return self.state.phase in (Phase.STARTING, Phase.RUNNING, Phase.BACKOFF)

    @property
    def may_live(self) -> bool:
        """Alive, or out of sight."""
        return self.is_live or self.state.phase is Phase.UNKNOWN

    @property
    def leaves_session(self) -> bool:
        """A shim that died may have left members of its session behind: stopping sweeps them."""
        return self.state.phase is Phase.DEAD

    @property
    def ended_at(self) -> float:
        return self.state.last_exit.at if self.state.last_exit else 0.0


@dataclass(frozen=True)
class RouteTable:
    """The router's own view. ``models`` maps a model to its workers' (id, address, state), ``readiness`` to how they
    are probed."""

    models: Mapping[str, tuple[tuple[str, str, str], ...]] = field(default_factory=dict)
    strategy: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    synced: bool = False
    readiness: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """``runs``: by owner, in the order of their uids. ``routes``: of a service, its table, or a sentence saying why it
    could not be read; nothing where there is no router."""

    runs: Mapping[str, tuple[ObservedRun, ...]] = field(default_factory=dict)
    routes: Mapping[str, RouteTable | str] = field(default_factory=dict)
    capacity: Capacity = field(default_factory=Capacity)

    def of(self, ref: str, component: str | None = None, replica: int | None = None) -> tuple[ObservedRun, ...]:
        return tuple(
            run
            for run in self.runs.get(ref, ())
            if (component is None or run.state.spec.component == component)
            and (replica is None or run.state.spec.replica == replica)
        )

    def without(self, ref: str) -> Observed:
        """The same, had there never been a run of ``ref``."""
        return replace(self, runs={owner: runs for owner, runs in self.runs.items() if owner != ref})
