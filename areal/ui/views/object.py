"""``/object/KIND/NAME``: all that ``areal describe`` knows of one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.reconcilers.home_view import description
from areal.resources.kinds import TRAIN_JOB
from areal.ui.context import ViewContext
from areal.ui.views import home


def read(view: ViewContext) -> dict[str, Any]:
    ref = view.ref()
    found = description(view.home, ref)
    if ref.kind == TRAIN_JOB:
        found["job"] = home.job_progress(view.home, ref.name)
    return found


def marks(view: ViewContext) -> Mapping[str, int | str]:
    view.ref()
    return home.marks(view)
