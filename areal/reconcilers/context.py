"""Arguments and results of every reconciler. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from areal.dataclasses import dataclass, field
from areal.errors import ArealError
from areal.state.home import Home

if TYPE_CHECKING:
    from areal.resources.render import RenderRequest


@dataclass(frozen=True)
class Progress:
    """One step of long work, for people: ``ref`` is the target ("Model/qwen engine/0"), times in seconds.

    ``detail`` may change at any time: outside a terminal, its change alone writes no line. ``eta_s``: the estimated
    time left; with it, other outputs get one line for each tenth of the work.
    """

    ref: str
    stage: str
    done: int | None = None
    total: int | None = None
    elapsed_s: float = 0.0
    detail: str = ""
    eta_s: float | None = None


@dataclass(frozen=True)
class Context:
    home: Home
    actor: str
    command: str
    lock_timeout_s: float = 0.0
    progress: Callable[[Progress], None] = lambda progress: None
    interrupted: threading.Event = field(default_factory=threading.Event)

    def report(self, ref: str, stage: str) -> None:
        """Report the stage of ``ref`` before a slow step."""
        self.progress(Progress(ref, stage))


@dataclass(frozen=True)
class ObjectOutcome:
    """The result for one object: ``kind/name action``."""

    ref: str
    action: str
    message: str = ""
    exit_code: int = 0
    error: ArealError | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a command, ready to print. ``addresses`` maps an InferenceService to its gateway's URL."""

    objects: tuple[ObjectOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    exit_code: int = 0
    addresses: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ApplyRequest:
    """One ``apply`` or ``diff``. ``plan_file`` is a plan saved by ``diff --out``; it carries its own source.
    ``recreate``: uids of stored objects to delete and create again even without changes. ``assume_capacity``: plan
    without asking which GPUs are free."""

    source: RenderRequest
    prune: bool = False
    set_name: str | None = None
    allow_empty: bool = False
    replace: bool = False
    recreate: tuple[str, ...] = ()
    force_conflicts: bool = False
    allow_downtime: bool = False
    assume_capacity: bool = False
    wait: bool = True
    timeout_s: float = 600.0
    plan_file: str | None = None


@dataclass
class Deadline:
    """When a command times out, in ``time.monotonic()``; a download extends it by its duration."""

    at: float
