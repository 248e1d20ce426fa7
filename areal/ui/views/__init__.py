"""The contract of views, and their registry. A view is a module with ``read``, and ``marks`` where it can tell cheaply
what changed. A module may have further views, in ``BESIDE``.

``read(view)`` returns a JSON-able dict, or yields the parts of an answer that comes in parts; it raises what a command
would raise. ``marks(view)`` maps names to cursors (the size of a file in bytes, or a text): the page reads again when
one differs. It is asked once a second, and only stats. Both may be called by several threads at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.client.gateway import GatewayClient
from areal.dataclasses import dataclass, field
from areal.errors import NotFound, UsageFault
from areal.resources.kinds import Ref, check_name, resolve_kind
from areal.state.home import Home

if TYPE_CHECKING:
    from areal.ui.views.action import Actions

REMOTE = "remote"  # the name of the service of a remote gateway, which only its own home knows


class RemoteGateway(NamedTuple):
    """The gateway of ``--gateway``. ``documents``: itself and its models with their health, as for ``get``."""

    client: GatewayClient
    documents: Callable[[GatewayClient], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class ViewContext:
    """``query``: the parameters of the request, path parameters of the page among them. ``body``: of a POST.
    ``remote``: asked instead of the home. ``actions``: None where the page may change nothing."""

    home: Home
    query: Mapping[str, str] = field(default_factory=dict)
    body: object = None
    remote: RemoteGateway | None = None
    actions: Actions | None = None

    def need(self, name: str) -> str:
        """Return the parameter. Raises UsageFault without it."""
        value = self.query.get(name)
        if not value:
            raise UsageFault(f"the request has no {name}", hint=f"add {name}=... to the address")
        return value

    def name(self) -> str:
        """Return the parameter ``name``, of an object. Raises UsageFault for what names none."""
        return check_name(self.need("name"))

    def number(self, name: str, default: int, *, least: int = 0, most: int = 1 << 53) -> int:
        """Return the parameter as an integer. Raises UsageFault for anything else."""
        text = self.query.get(name, "")
        if not text:
            return default
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise UsageFault(f"{name}={text[:40]!r} is no integer from {least} to {most}")
        return number

    def ref(self) -> Ref:
        """Return the object of the parameters ``kind`` and ``name``. Raises UsageFault and NotFound."""
        return Ref(resolve_kind(self.need("kind")), self.name())


_OF_GATEWAYS = ("about", "alerts", "chat", "home", "sessions", "weights")  # also of a remote one
_OF_HOME = ("compare", "evaluations", "job", "logs", "object", "plan", "step", "top")
VIEWS = (*_OF_GATEWAYS, *_OF_HOME, "action")
_BESIDE = {"about": "home", "alerts": "job", "compare": "job", "object": "home", "plan": "home"}  # view -> its module

Marks = Mapping[str, int | str]


class ViewReader(NamedTuple):
    read: Callable[[ViewContext], dict[str, object] | Iterator[dict[str, object]]]
    marks: Callable[[ViewContext], Marks] = lambda view: {}


def reader_of(name: str) -> ViewReader | None:
    """Return the functions of a view; None for a name that no view has."""
    if name not in VIEWS:
        return None
    module = importlib.import_module(f"areal.ui.views.{_BESIDE.get(name, name)}")
    if name in _BESIDE:
        found: ViewReader = module.BESIDE[name]
        return found
    return ViewReader(module.read, module.marks) if hasattr(module, "marks") else ViewReader(module.read)


def shown_by(view: ViewContext) -> tuple[str, ...]:
    """Return the views that this server has."""
    return (
        *_OF_GATEWAYS,
        *(_OF_HOME if view.remote is None else ()),
        *(("action",) if view.actions is not None else ()),
    )


def expect_reader(name: str, view: ViewContext) -> ViewReader:
    """Raise NotFound for a view that the server does not have, UsageFault for one that a gateway cannot serve."""
    reader = reader_of(name)
    if reader is None or (name == "action" and view.actions is None):
        raise NotFound(f"there is no view {name[:60]!r}")
    if name not in shown_by(view) and view.remote is not None:
        raise UsageFault(
            f"this view reads files of the machine that runs the processes, and {view.remote.client.url} serves none",
            hint="run `areal ui` there, or here with --context local",
        )
    return reader
