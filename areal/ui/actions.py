"""What the page may change with ``--allow-actions``: one change at a time, each planned first and confirmed by a name.

A change of an object is that of its command: the same plan, made again under the locks and refused unless its digest is
the one that was shown. A change of a session is one call of its gateway, refused unless the session is as it was shown.
The change runs in a thread of the server's, so that a reader who leaves does not stop it; a server that ends lets the
operation at hand finish, as Ctrl-C of the command does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, Conflict, UsageFault

_KEPT = 20  # changes


class ActionPlan(NamedTuple):
    """What would be done. ``confirm``: the name to type. ``run`` does it, if it is still what ``digest`` says."""

    words: str
    target: str
    confirm: str
    lines: list[str]
    destructive: list[str]
    is_empty: bool
    digest: str
    run: Callable[[RunningAction], list[str]]

    def document(self) -> dict[str, object]:
        named = self._asdict()
        return {name: named[name] for name in ("words", "target", "confirm", "lines", "destructive", "digest")} | {
            "empty": self.is_empty
        }


@dataclass
class RunningAction:
    """A change that runs or has ended. ``outcome``: its sentences. Its thread writes, others read."""

    number: int
    words: str
    target: str
    began: float
    ended: float | None = None
    progress: dict[str, str] = field(default_factory=dict)
    outcome: list[str] = field(default_factory=list)
    error: dict[str, str] | None = None
    interrupted: threading.Event = field(default_factory=threading.Event)
    changes: int = 0

    def document(self) -> dict[str, object]:
        state = "running" if self.ended is None else "failed" if self.error is not None else "done"
        return {
            "number": self.number,
            "words": self.words,
            "target": self.target,
            "state": state,
            "seconds": round((self.ended or time.time()) - self.began, 3),
            "progress": [{"ref": ref, "stage": stage} for ref, stage in list(self.progress.items())],
            "outcome": list(self.outcome),
            "error": self.error,
        }


class Actions:
    """The changes of this run of the server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._actions: list[RunningAction] = []
        self._count = 0

    def start(self, plan: ActionPlan, digest: object, confirm: object) -> RunningAction:
        """Raise Conflict for a plan that has changed and while another change runs, UsageFault for another name."""
        if confirm != plan.confirm:
            raise UsageFault(f"the name is not confirmed: type {plan.confirm}", hint=f"to {plan.words}")
        if digest != plan.digest:
            raise changed(plan.target)
        if plan.is_empty:
            raise Conflict(f"there is nothing to do: {'; '.join(plan.lines) or plan.target}")
        with self._lock:
            running = next((each for each in self._actions if each.ended is None), None)
            if running is not None:
                raise Conflict(f"`{running.words}` still runs", hint="wait until it has ended")
            self._count += 1
            action = RunningAction(self._count, plan.words, plan.target, time.time())
            self._actions = [*self._actions, action][-_KEPT:]
            thread = threading.Thread(target=_run, args=(action, plan), name=f"action {action.number}", daemon=True)
            self._threads = {action.number: thread}
            thread.start()
        return action

    def all(self) -> list[RunningAction]:
        """Return the newest first."""
        return self._actions[::-1]

    def close(self) -> None:
        """Let the operation at hand finish, and begin no other."""
        for action in self._actions:
            action.interrupted.set()
        for thread in self._threads.values():
            thread.join()


def _run(action: RunningAction, plan: ActionPlan) -> None:
    try:
        action.outcome = plan.run(action)
    except ArealError as error:
        message = f"{error.message}\n{error.detail}" if error.detail else error.message
        action.error = {"type": type(error).__name__, "message": message, "hint": error.hint or ""}
    except Exception as error:  # noqa: BLE001 - the reader is shown every failure
        action.error = {"type": type(error).__name__, "message": f"it failed: {error!r}", "hint": "areal doctor"}
    finally:
        action.ended = time.time()
        action.changes += 1


def changed(target: str) -> Conflict:
    return Conflict(
        f"the plan for {target} has changed since it was shown; nothing was done", hint="look at the new plan"
    )
