"""Where manifests come from on the command line: ``-f -R -k --set --values --profile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.reconcilers.requests import Source
    from areal.resources.resource import Rendered

STDIN = "-"


class SourceFlags(NamedTuple):
    """The flags as given. ``read`` turns them into what the reconcilers take, reading stdin at most once."""

    files: tuple[str, ...] = ()
    recursive: bool = False
    overlay: str | None = None
    sets: tuple[str, ...] = ()
    values_files: tuple[str, ...] = ()
    profile: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.files and self.overlay is None

    def require(self, verb: str) -> SourceFlags:
        if self.is_empty:
            raise UsageFault("no manifests: neither -f nor -k is given", hint=f"areal {verb} -f FILE")
        if self.files.count(STDIN) > 1:
            raise UsageFault("stdin can be read once: -f - is given twice")
        return self

    def read(self) -> Source:
        from areal.reconcilers.requests import Source

        return Source(**self._asdict(), stdin=self._stdin())

    def render(self) -> Rendered:
        """The resources, by file and values alone."""
        from areal.resources.render import RenderRequest, render

        return render(RenderRequest(**self._asdict(), stdin=self._stdin()))

    def _stdin(self) -> str | None:
        return sys.stdin.read() if STDIN in self.files else None


def _value_assignment(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not value.partition("=")[0].strip() or "=" not in value:
            raise click.BadParameter(f"{value!r} is not PATH=VALUE, e.g. model/qwen:spec.replicas=2", ctx, param)
    return values


_OPTIONS = (
    click.option("-f", "--filename", "files", multiple=True, metavar="FILE|DIR|-", help="Manifest; may be repeated."),
    click.option("-R", "--recursive", is_flag=True, help="Read folders given with -f recursively."),
    click.option("-k", "--kustomize", "overlay", metavar="DIR", help="Overlay folder."),
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="PATH=VALUE",
        callback=_value_assignment,
        help="Set a field: spec.x=1, or KIND/NAME:spec.x=1 when there are several objects.",
    ),
    click.option("--values", "values_files", multiple=True, metavar="FILE", help="Values for ${{ values.* }}."),
    click.option("--profile", metavar="NAME", help="Profile of the overlay."),
)


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags and hand them to the verb as ``source``."""

    @functools.wraps(function)
    def gather(*args: Any, **given: Any) -> Any:
        flags = {name: given.pop(name) for name in SourceFlags._fields}
        return function(*args, source=SourceFlags(**flags), **given)

    decorated: Callable[..., Any] = gather
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
