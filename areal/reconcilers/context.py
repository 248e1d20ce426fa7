"""Who is acting, on which home, and where progress goes: the one argument that every reconciler takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from areal.errors import ArealError
from areal.state.home import Home


@dataclass(frozen=True)
class Progress:
    """One step of long work, for people: ``ref`` is the target ("Model/qwen engine/0"), times in seconds.

    ``detail`` may change at any time, so it is shown only where a line can be written over. ``eta_s``: what is left, of
    work that says it; of that a line is written at each tenth elsewhere.
    """

    ref: str
    stage: str
    done: int | None = None
    total: int | None = None
    elapsed_s: float = 0.0
    detail: str = ""
    eta_s: float | None = None


def _silent(progress: Progress) -> None:
    """Nobody is looking."""


@dataclass(frozen=True)
class Context:
    home: Home
    actor: str
    command: str
    lock_timeout_s: float = 0.0
    progress: Callable[[Progress], None] = _silent
    interrupted: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class ObjectOutcome:
    """What happened to one object: ``kind/name action``."""

    ref: str
    action: str
    message: str = ""
    exit_code: int = 0
    error: ArealError | None = None


@dataclass(frozen=True)
class Outcome:
    """What a command did, ready to print. ``addresses`` maps an InferenceService to its gateway's URL."""

    objects: tuple[ObjectOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    exit_code: int = 0
    addresses: dict[str, str] = field(default_factory=dict)
