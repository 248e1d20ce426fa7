"""``/api/action``, which exists with ``--allow-actions`` only: the changes of this run, newest first.

A POST with ``verb`` is its plan, of an object by the reconciler of the command, of a session by a gateway; with the
plan's ``digest`` and the name in ``confirm`` as well it begins.

One change runs at a time. A change of an object is that of its command: the same plan, made again under the locks and
refused unless its digest is the one that was shown. A change of a session is one call of its gateway, refused unless
the session is as it was shown. The change runs in a thread of the server's, so that a reader who leaves does not stop
it; a server that ends lets the operation at hand finish, as Ctrl-C of the command does.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from areal.client.gateway import GatewayClient, call_session, close_session, read_session
from areal.dataclasses import dataclass, field
from areal.errors import ArealError, Conflict, UsageFault
from areal.resources.kinds import AGENT_SERVICE, Ref
from areal.state.locks import actor
from areal.ui.views import SERVICES, Marks, ViewContext, gateway_of

OBJECT_VERBS = ("restart", "suspend", "resume", "scale")
SESSION_VERBS = ("end-session", "reward")
_CALL_S = 60.0
_MOST_LINES = 400  # of progress
_NAME = 20  # characters of a session's key that are asked for
_MOST_REPLICAS = 100_000
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


def read(view: ViewContext) -> dict[str, object]:
    actions = _actions(view)
    if view.body is None:
        return {"actions": [each.document() for each in actions.all()]}
    if not isinstance(view.body, dict):
        raise UsageFault("the body is not an object")
    plan = plan_of(view, view.body)
    if "digest" not in view.body:
        return {"plan": plan.document()}
    return {"action": actions.start(plan, view.body["digest"], view.body.get("confirm")).document()}


def marks(view: ViewContext) -> Marks:
    return {f"{each.number}": each.changes for each in _actions(view).all()}


def _actions(view: ViewContext) -> Actions:
    assert isinstance(view.actions, Actions)  # the route exists with it only
    return view.actions


def plan_of(view: ViewContext, asked: Mapping[str, object]) -> ActionPlan:
    """Return the plan of ``verb`` for what ``kind``, ``name`` and ``session`` name. Raises as the command does."""
    verb = asked.get("verb")
    named = ViewContext(view.home, {each: str(asked.get(each) or "") for each in ("kind", "name")})
    if verb in OBJECT_VERBS:
        if view.remote is not None:
            raise UsageFault(f"a gateway cannot {verb} objects", hint=f"run `areal {verb}` on its machine")
        return _object_plan(view, str(verb), named.ref(), asked)
    if verb in SESSION_VERBS:
        ref = named.ref()
        if ref.kind not in SERVICES:
            raise UsageFault(f"{ref} has no sessions")
        return _session_plan(view, str(verb), ref, asked)
    raise UsageFault(f"verb={str(verb)[:40]!r} is none of {', '.join((*OBJECT_VERBS, *SESSION_VERBS))}")


def _object_plan(view: ViewContext, verb: str, ref: Ref, asked: Mapping[str, object]) -> ActionPlan:
    from areal.reconcilers import operations
    from areal.reconcilers.context import Context, Progress
    from areal.reconcilers.plan import Plan

    words = f"areal {verb} {ref.kind.lower()}/{ref.name}"
    replicas = asked.get("replicas")
    if verb == "scale":
        if type(replicas) is not int or not 0 <= replicas <= _MOST_REPLICAS:
            raise UsageFault("replicas is not a number from 0")
        words += f" --replicas {replicas}"

    def change(context: Context) -> operations.ObjectChange:
        if verb == "scale":
            return operations.scaling(context, ref, int(str(replicas)))
        return operations.CHANGES[verb](context, ref)

    who = Context(view.home, actor(), f"{words} (areal ui)")
    planned = change(who)
    plan = operations.plan_change(who, planned)

    def check(now: Plan) -> None:
        if now.digest != plan.digest:
            raise changed(str(planned.ref))

    def run(action: RunningAction) -> list[str]:
        def note(progress: Progress) -> None:
            count = f" {progress.done}/{progress.total}" if progress.done is not None and progress.total else ""
            if progress.ref in action.progress or len(action.progress) < _MOST_LINES:
                action.progress[progress.ref] = f"{progress.stage}{count}  {progress.detail}".rstrip()
            action.changes += 1

        context = Context(who.home, who.actor, who.command, progress=note, interrupted=action.interrupted)
        outcome = operations.carry_out(context, change(context), check=check)
        failed = next((item.error for item in outcome.objects if item.error is not None), None)
        lines = [
            f"{item.ref} {item.action}" + (f": {item.message}" if item.message else "") for item in outcome.objects
        ]
        if failed is not None:
            raise failed
        if outcome.exit_code:
            raise ArealError("\n".join((*lines, *outcome.notes)), hint=f"`{words}` goes on from here")
        return [*lines, *outcome.notes]

    lines = [line for item in plan.objects for line in item.to_lines()]
    lines += [item.refusal.message for item in plan.objects if item.refusal is not None]
    lines += [f"unknown: {reason}" for reason in plan.unknown]
    lines += [op.to_words() for op in plan.ops]
    destructive, target = list(plan.destructive), planned.ref
    return ActionPlan(words, str(target), target.name, lines, destructive, plan.is_empty, plan.digest, run)


def _session_plan(view: ViewContext, verb: str, ref: Ref, asked: Mapping[str, object]) -> ActionPlan:
    session, interaction, value = asked.get("session"), asked.get("interaction"), asked.get("reward")
    if not isinstance(session, str) or not session or not isinstance(interaction, str | None):
        raise UsageFault("the session is not named")
    of_agent = ref.kind == AGENT_SERVICE
    chosen = gateway_of(view, ref, _CALL_S)
    if verb == "reward":
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageFault(f"a reward is a finite number, not {str(value)[:40]!r}")
        words = f"areal agent reward {value:g} --session {session}" if of_agent else f"POST /rl/set_reward of {session}"
        line = f"{interaction or 'the last call'} gets the reward {value:g}"
        line += "" if interaction else ", which seals its trajectory: it is ready to be exported, and stays as it is"
    else:
        words = f"areal agent sessions close {session}" if of_agent else f"POST /rl/end_session of {session}"
        line = "it takes no further turn" + (": a running one is cancelled, its history is forgotten" * of_agent)

    def look() -> tuple[list[str], str]:
        found = call_session(chosen, "GET", session) if of_agent else read_session(chosen, session)
        names = ("state", "turns", "running") if of_agent else ("state", "interaction_count", "reward")
        now = {name: found.get(name) for name in names}
        parts = [ref.name, session, verb, interaction, value, now]
        about = [f"{name.replace('_', ' ')}: {shown}" for name, shown in now.items() if shown is not None]
        return about, hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    about, digest = look()

    def run(action: RunningAction) -> list[str]:
        if look()[1] != digest:
            raise changed(f"session {session}")
        return [_call(chosen, of_agent, verb, session, value, interaction)]

    destructive = [f"session {session} ends"] if verb != "reward" else []
    confirm = session if len(session) <= _NAME else session[:8]
    return ActionPlan(words, f"session {session}", confirm, [line, *about], destructive, False, digest, run)


def _call(
    chosen: GatewayClient, of_agent: bool, verb: str, session: str, value: object, interaction: str | None
) -> str:
    """End a session or reward a call of it; one sentence."""
    body: dict[str, object] = {"interaction_id": interaction} if interaction else {}
    if verb == "end-session":
        if of_agent:
            close_session(chosen, session)
        else:
            _post(chosen, "/rl/end_session", {"session_id": session})
        return f"session {session} has ended"
    if of_agent:
        found = call_session(chosen, "POST", session, "/reward", {"reward": value, **body})
    else:
        found = _post(chosen, "/rl/set_reward", {"reward": value, "session_id": session, **body})
    ready = "ready to be exported" if found["trajectory_ready"] else "not sealed yet"
    return f"trajectory {found['trajectory_id']} of {found['interaction_count']} calls is {ready}"


def _post(chosen: GatewayClient, path: str, body: Mapping[str, object]) -> dict[str, object]:
    status, document = chosen.ask("POST", path, body)
    if status in (400, 404, 409, 410, 422, 425) and isinstance(document, Mapping):
        error = document.get("error")
        raise Conflict(str(error.get("message")) if isinstance(error, Mapping) else f"{path} answers {status}")
    return dict(chosen.checked("POST", path, status, document))
