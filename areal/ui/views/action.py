"""``/api/action``, which exists with ``--allow-actions`` only: the changes of this run, newest first.

A POST with ``verb`` is its plan; with the plan's ``digest`` and the name in ``confirm`` as well it begins.
"""

from __future__ import annotations

from typing import Any

from areal.errors import UsageFault
from areal.ui.action_plans import plan_of
from areal.ui.actions import Actions
from areal.ui.context import ViewContext
from areal.ui.views import Marks


def read(view: ViewContext) -> dict[str, Any]:
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
    assert view.actions is not None  # the route exists with it only
    return view.actions
