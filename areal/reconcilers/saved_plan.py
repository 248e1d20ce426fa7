"""A plan saved by ``diff --out`` and given to ``apply``: it carries its resources, and runs only while it is true."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areal.errors import ArealError, Conflict, UsageFault
from areal.reconcilers.desired import Wanted
from areal.reconcilers.plan import PLAN_FORMAT, Plan
from areal.reconcilers.requests import ApplyRequest

_OPTIONS = ("prune", "set_name", "allow_empty", "replace", "force_conflicts", "allow_downtime")


@dataclass(frozen=True)
class SavedPlan:
    """``request`` and ``wanted`` are what planning again needs; ``serial`` and ``ops`` what it must give."""

    path: str
    request: ApplyRequest
    wanted: tuple[Wanted, ...]
    serial: int
    ops: Sequence[Any]

    def require_current(self, plan: Plan) -> None:
        """Raises Conflict when state or processes have moved since the plan was made."""
        now = json.loads(json.dumps(plan.to_json()))
        if now["serial"] == self.serial and now["ops"] == self.ops:
            return
        moved = "what is recorded has changed" if now["serial"] != self.serial else "processes or routes have changed"
        raise Conflict(
            f"{self.path} is stale: {moved} since it was made; nothing was done",
            hint=f"make a new one: areal diff -f ... --out {self.path}",
        )


def source_of(request: ApplyRequest, wanted: Sequence[Wanted]) -> dict[str, Any]:
    """What a plan must carry to be made again."""
    options = {name: getattr(request, name) for name in _OPTIONS}
    return {"resources": [asdict(item) for item in wanted], "options": options}


def read_plan(request: ApplyRequest) -> SavedPlan:
    """Read ``request.plan_file``. Raises ArealError when it is no plan of this version."""
    path = request.plan_file
    assert path is not None
    if path.endswith((".yaml", ".yml")):
        raise UsageFault(f"{path} is no saved plan; manifests are named by -f", hint=f"areal apply -f {path}")
    try:
        saved = json.loads(Path(path).read_bytes())
        _check_format(path, saved)
        source = saved["source"]
        wanted = tuple(_wanted(item) for item in source["resources"])
        options = {name: source["options"][name] for name in _OPTIONS}
        return SavedPlan(path, replace(request, plan_file=None, **options), wanted, saved["serial"], saved["ops"])
    except OSError as error:
        raise ArealError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArealError(f"{path} is not a plan saved by `areal diff --out`: {error!r}") from error


def _check_format(path: str, saved: Mapping[str, Any]) -> None:
    found = saved.get("format")
    if found is not None and found != PLAN_FORMAT:
        raise ArealError(
            f"{path} was saved by another version of areal (format {found}, this one reads {PLAN_FORMAT})",
            hint="make a new one: areal diff -f ... --out FILE",
        )


def _wanted(item: Mapping[str, Any]) -> Wanted:
    return Wanted(**{**item, "depends_on": tuple(item["depends_on"])})
