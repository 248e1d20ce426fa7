"""What a caller asks of the reconcilers, as frozen values. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

DryRun = Literal["server", "client"]


@dataclass(frozen=True)
class Source:
    """Where the desired resources come from: files and values, or manifests that an imperative verb has built."""

    files: tuple[str, ...] = ()
    recursive: bool = False
    overlay: str | None = None
    sets: tuple[str, ...] = ()
    values_files: tuple[str, ...] = ()
    profile: str | None = None
    stdin: str | None = None
    manifests: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class ApplyRequest:
    """One ``apply`` or ``diff``. ``plan_file`` is a plan saved by ``diff --out``; it carries its own source. ``anew``:
    uids of stored objects to be deleted and created again though nothing differs."""

    source: Source = field(default_factory=Source)
    dry_run: DryRun | None = None
    prune: bool = False
    set_name: str | None = None
    allow_empty: bool = False
    replace: bool = False
    anew: tuple[str, ...] = ()
    force_conflicts: bool = False
    allow_downtime: bool = False
    wait: bool = True
    timeout_s: float = 600.0
    plan_file: str | None = None
