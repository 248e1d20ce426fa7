"""Rendering in a line, for tests: text in, resources or the diagnostics' text out."""

from __future__ import annotations

import textwrap
from typing import Any

from areal.resources.nodes import Diagnostic, ManifestError
from areal.resources.render import RenderRequest, render
from areal.resources.resource import Rendered

HEAD = "apiVersion: areal.dev/v1alpha1\n"


def rendered(text: str, **request: Any) -> Rendered:
    request.setdefault("env", {})
    return render(RenderRequest(("-",), stdin=textwrap.dedent(text), **request))


def diagnostics(request: RenderRequest) -> tuple[Diagnostic, ...]:
    try:
        found = render(request)
    except ManifestError as error:
        return error.diagnostics
    raise AssertionError(f"no fault found in {found.resources}")


def faults(text: str, **request: Any) -> list[str]:
    """Every diagnostic as text, the file's name left out."""
    request.setdefault("env", {})
    found = diagnostics(RenderRequest(("-",), stdin=textwrap.dedent(text), **request))
    return [str(fault).removeprefix("<stdin>:") for fault in found]


def model(spec: str = "", name: str = "qwen") -> str:
    """A Model manifest in flow style; ``spec`` may override what makes it valid."""
    body = spec or "{backend: embedded, path: ./m}"
    return f"{HEAD}kind: Model\nmetadata: {{name: {name}}}\nspec: {body}\n"
