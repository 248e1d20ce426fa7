"""What the page is of, and what it may show and change: asked once, when it opens."""

from __future__ import annotations

from typing import Any

from areal.ui.context import ViewContext
from areal.ui.views import home, shown_by


def read(view: ViewContext) -> dict[str, Any]:
    return {
        "home": home.short(view.home.root),
        "gateway": view.remote.client.url if view.remote is not None else None,
        "views": list(shown_by(view)),
        "actions": view.actions is not None,
    }
