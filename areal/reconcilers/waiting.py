"""``areal wait``: one deadline, all objects at once, and failure at once when a condition can no longer be met."""

from __future__ import annotations

import time
from collections.abc import Sequence

from areal.errors import NotFound, TargetFailed, TimedOut
from areal.reconcilers.context import Context, ObjectOutcome, Outcome, Progress
from areal.reconcilers.document import object_document
from areal.reconcilers.job_phase import started_again_by
from areal.reconcilers.status import ObjectStatus, statuses
from areal.resources.kinds import Ref
from areal.runtime.backends import open_backend
from areal.state.home import Home
from areal.state.job_metrics import bottleneck, eta_s, newest_step
from areal.state.locks import holder
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject

POLL_S = 0.2

Conditions = tuple[tuple[str, ...], ...]


def wait(
    ctx: Context, refs: Sequence[Ref], conditions: Conditions, timeout_s: float, *, stopped_fails: bool = False
) -> Outcome:
    """Every object meets every condition (each one an or of alternatives). ``stopped_fails``: a job that somebody stops
    is not waited for. Raises TimedOut, TargetFailed, NotFound."""
    store = ObjectStore(ctx.home)
    backend = open_backend("local", ctx.home.root)
    deadline = time.monotonic() + timeout_s
    began = time.monotonic()
    pending = list(dict.fromkeys(refs))
    _refuse_unknown(store, pending, conditions)
    while True:
        runs = backend.observe()
        found = {ref: stored for ref in pending if (stored := store.get(ref)) is not None}
        seen = statuses(ctx.home, found.values(), runs)
        pending = [ref for ref in pending if not _met(ctx, ref, found.get(ref), seen.get(str(ref)), conditions)]
        if not pending:
            return Outcome(tuple(ObjectOutcome(str(ref), "met", _words(conditions)) for ref in refs))
        if ctx.interrupted.is_set():
            return Outcome(notes=("interrupted",), exit_code=130)
        if time.monotonic() >= deadline:
            names = ", ".join(str(ref) for ref in pending)
            raise TimedOut(
                f"timed out after {timeout_s:g} s waiting for {_words(conditions)}: {names}",
                hint=f"areal describe {pending[0]}",
            )
        for ref in pending:
            status = seen.get(str(ref))
            if stopped_fails and status is not None and status.phase == "Stopped":
                raise TargetFailed(f"{ref} was stopped", hint=f"areal resume {ref} goes on with it")
            ctx.progress(_progress(ctx.home, ref, status, _words(conditions), time.monotonic() - began))
        time.sleep(POLL_S)


def _refuse_unknown(store: ObjectStore, refs: Sequence[Ref], conditions: Conditions) -> None:
    if any("deleted" in alternatives for alternatives in conditions):
        return
    for ref in refs:
        if store.get(ref) is None:
            raise NotFound(f"{ref} does not exist", hint=f"areal get {ref.kind.lower()}")


def _met(
    ctx: Context, ref: Ref, stored: StoredObject | None, status: ObjectStatus | None, conditions: Conditions
) -> bool:
    if all(any(_holds(text, stored, status) for text in alternatives) for alternatives in conditions):
        return True
    if status is not None and stored is not None:
        _refuse_hopeless(ctx.home, ref, status, conditions)
    elif stored is None and not any("deleted" in alternatives for alternatives in conditions):
        raise TargetFailed(f"{ref} was deleted while it was waited for")
    return False


def _holds(text: str, stored: StoredObject | None, status: ObjectStatus | None) -> bool:
    if text == "deleted":
        return stored is None
    if stored is None or status is None:
        return False
    if text == "ready":
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions)
    if text == "completed":
        return status.phase == "Succeeded"
    if text.startswith("condition="):
        name, _, value = text.removeprefix("condition=").partition("=")
        wanted = value or "True"
        return any(c.type.lower() == name.lower() and c.status.lower() == wanted.lower() for c in status.conditions)
    from areal.resources.jsonpath import evaluate

    expression, _, value = text.removeprefix("jsonpath=").rpartition("=")
    return evaluate(expression, object_document(stored, status)) == value


def _refuse_hopeless(home: Home, ref: Ref, status: ObjectStatus, conditions: Conditions) -> None:
    """A failure that nobody is working on ends the wait, unless it is what is waited for."""
    ends_well = all(any(text in ("ready", "completed") for text in alternatives) for alternatives in conditions)
    if not ends_well:
        return
    stalled = any(c.type == "Stalled" and c.status == "True" for c in status.conditions)
    rolled_out = any(c.type == "Degraded" and c.reason == "RolloutFailed" for c in status.conditions)
    if (stalled or rolled_out) and holder(home, ref) is None:
        raise TargetFailed(
            f"{ref} has failed: {status.message}", hint=f"areal logs {ref}; {started_again_by(ref)} starts it again"
        )


def _progress(home: Home, ref: Ref, status: ObjectStatus | None, words: str, waited_s: float) -> Progress:
    """Of a job that runs: its step, since when, and how long it takes; of others, since when they are waited for."""
    step = newest_step(home.job_metrics(ref.name)) if ref.kind == "TrainJob" else {}
    if status is None or status.phase != "Running" or not step:
        return Progress(str(ref), f"waiting for {words}", elapsed_s=waited_s)
    reward = step.get("reward/mean")
    told = [f"reward {reward:.3f}"] if isinstance(reward, int | float) else []
    detail = ", ".join([*told, *filter(None, [bottleneck(step)])])
    total = step.get("total_steps")
    stage = "step" if isinstance(total, int) else f"step {step['step']}"
    return Progress(str(ref), stage, step["step"], total, status.age_s, detail, eta_s(step))


def _words(conditions: Conditions) -> str:
    return " and ".join(" or ".join(alternatives) for alternatives in conditions)
