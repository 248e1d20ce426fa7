"""What every effect works with: the command's context, the claimed slots, who is who, and how progress is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.client.http import AdminClient
from areal.errors import ArealError, TargetFailed, TimedOut
from areal.reconcilers.admin_keys import ensure_key
from areal.reconcilers.context import Context, Progress
from areal.reconcilers.desired import Target
from areal.reconcilers.executor import Interrupted
from areal.reconcilers.kinds.model_files import ModelFiles
from areal.reconcilers.launch import Slot
from areal.reconcilers.observe import Observed
from areal.reconcilers.plan import Op
from areal.resources.kinds import parse_ref
from areal.resources.validation import effective
from areal.runtime.backends import Backends
from areal.runtime.backends.base import RunState
from areal.state.events import EventLog
from areal.state.home import read_key
from areal.state.journal import Transaction
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject

ADMIN_TIMEOUT_S = 10.0


@dataclass
class EffectContext:
    """One execution of one plan. ``slots`` maps the plan's symbols to claimed slots; used from several threads."""

    ctx: Context
    backend: Backends
    store: ObjectStore
    targets: Mapping[str, Target]
    observed: Observed
    slots: Mapping[str, Slot]
    tx: Transaction
    deadline: float  # of time.monotonic()
    files: ModelFiles
    spawned: dict[str, str] = field(default_factory=dict)  # symbol -> uid, once it has been started
    lock: threading.Lock = field(default_factory=threading.Lock)
    notes: list[str] = field(default_factory=list)  # for whoever gave the command
    began: float = field(default_factory=time.monotonic)

    # -- who is who

    def uid(self, run: str) -> str:
        return self.slots[run].uid if run in self.slots else run

    def url(self, run: str) -> str:
        if run in self.slots:
            return self.slots[run].url
        for runs in self.observed.runs.values():
            for seen in runs:
                if seen.uid == run:
                    return seen.url
        raise ArealError(f"run {run} has no known address", hint="areal doctor")

    def object(self, ref: str) -> StoredObject:
        """The object as it is wanted, or as it is recorded."""
        found = self.targets[ref].object if ref in self.targets else self.store.get(parse_ref(ref))
        if found is None:
            raise ArealError(f"{ref} is not recorded", hint="areal get")
        return found

    def spec_of(self, ref: str) -> Any:
        """With its defaults: an instance of the spec's model of its kind."""
        return effective(parse_ref(ref).kind, self.object(ref).spec)

    def state(self, run: str) -> RunState:
        uid = self.uid(run)
        found = self.backend.observe([uid]).get(uid)
        if found is None:
            raise TargetFailed(f"run {uid} has no record", hint="areal doctor")
        return found

    # -- talking to services

    def key_file(self, service: str) -> str:
        return str(ensure_key(self.ctx.home, self.object(service)))

    def admin(self, service: str, url: str, timeout_s: float = ADMIN_TIMEOUT_S) -> AdminClient:
        return AdminClient(url, read_key(Path(self.key_file(service))), timeout_s=timeout_s)

    # -- telling

    def say(self, op: Op, stage: str, done: int | None = None, total: int | None = None) -> None:
        key = f"{op.ref} {op.target}".strip()
        self.ctx.progress(Progress(key, stage, done, total, time.monotonic() - self.began))

    def event(self, ref: str, kind: str, reason: str, message: str) -> None:
        EventLog(self.ctx.home).record(parse_ref(ref), kind, reason, message, actor=self.ctx.actor)

    def note(self, sentence: str) -> None:
        with self.lock:
            self.notes.append(sentence)

    # -- time

    @property
    def left_s(self) -> float:
        """What is left of the command's time; downloads do not count."""
        return max(0.1, self.deadline + self.files.waited_s - time.monotonic())

    def pause(self, op: Op, seconds: float) -> None:
        """Sleep, but for an interrupt. Raises Interrupted."""
        if self.ctx.interrupted.wait(seconds):
            raise interrupted(op)

    def require_time(self, op: Op, message: str) -> None:
        if time.monotonic() > self.deadline + self.files.waited_s:
            raise TimedOut(
                message, hint=f"areal logs {op.ref.lower()}; the same command again, with a longer --timeout, goes on"
            )


def interrupted(op: Op) -> Interrupted:
    return Interrupted(f"{op.ref} {op.target}: interrupted", hint="the same command again goes on from here")


def brief(answer: Any) -> str:
    """An error body in a few words."""
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        return str(answer["error"].get("message", ""))
    return str(answer)[:300]
