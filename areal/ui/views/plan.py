"""``/plan``: what left the record now, or what ``areal apply`` of a manifest would do. The plan of ``areal diff``.

``path`` is a manifest of this machine, by its name's ending, or a folder; the body of a POST has ``text``, a manifest
that was pasted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.errors import UsageFault
from areal.files import stamp
from areal.reconcilers.context import ApplyRequest, Context
from areal.reconcilers.plan import Plan
from areal.reconcilers.prepare import drift
from areal.ui.context import ViewContext
from areal.ui.views import home

_MANIFESTS = (".yaml", ".yml", ".json")


def read(view: ViewContext) -> dict[str, Any]:
    plan = _plan(view)
    return {**plan.to_json(), "text": plan.to_text(), "steps": {str(op.id): op.to_words() for op in plan.ops}}


def marks(view: ViewContext) -> Mapping[str, int | str]:
    """Return the marks of the objects, and the manifest's."""
    path = view.query.get("path")
    return {**home.marks(view), **({"manifest": repr(stamp(Path(path).expanduser()))} if path else {})}


def _plan(view: ViewContext) -> Plan:
    from areal.reconcilers.apply import diff
    from areal.resources.render import RenderRequest

    context, assume = Context(view.home, "", ""), bool(view.query.get("assume"))
    if isinstance(view.body, dict):
        text = view.body.get("text")
        if not isinstance(text, str) or not text.strip():
            raise UsageFault("no manifest was given", hint="paste a manifest, or give its path")
        return diff(context, ApplyRequest(RenderRequest(files=("-",), stdin=text), assume_capacity=assume))
    path = view.query.get("path")
    if not path:
        return drift(context, assume_capacity=assume)
    file = Path(path).expanduser()
    if not file.is_absolute():
        raise UsageFault(f"{path[:200]} is no absolute path", hint="write the whole path, beginning with /")
    if file.suffix not in _MANIFESTS and not file.is_dir():  # errors quote parts of the file
        raise UsageFault(f"{path[:200]} is no manifest", hint=f"its name ends in {', '.join(_MANIFESTS)}")
    source = RenderRequest(files=(str(file),), recursive=bool(view.query.get("recursive")))
    return diff(context, ApplyRequest(source, assume_capacity=assume))
