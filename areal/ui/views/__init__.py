"""The contract of views, their registry, and the gateways that they call, whose keys stay in this module. A view is a
module with ``read``, and ``marks`` if changes can be found cheaply. A module may have further views, in ``BESIDE``.

``read(view)`` returns a JSON-able dict, or yields the parts of one; it raises the errors of commands. ``marks(view)``
maps names to cursors (the size of a file in bytes, or a text): the page reads again when one differs. It is asked once
a second, and only stats. Both may be called by several threads at once.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from areal.client.gateway import GatewayClient
from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.reconcilers.usage import service_key
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, Ref, check_name, resolve_kind
from areal.state.home import Home
from areal.state.objects import ObjectStore

T = TypeVar("T")
SERVICES = (INFERENCE_SERVICE, AGENT_SERVICE)
REMOTE = "remote"  # the name of the service of a remote gateway, which only its own home knows


class RemoteGateway(NamedTuple):
    """The gateway of ``--gateway``. ``documents``: itself and its models with their health, as for ``get``."""

    client: GatewayClient
    documents: Callable[[GatewayClient], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class ViewContext:
    """``query``: the parameters of the request, path parameters of the page among them. ``body``: of a POST.
    ``remote``: asked instead of the home. ``actions``: ``Actions``, where the page may change something."""

    home: Home
    query: Mapping[str, str] = field(default_factory=dict)
    body: object = None
    remote: RemoteGateway | None = None
    actions: Any = None

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


class Asked(NamedTuple):
    """One service. ``answer`` is None where ``why`` says why it is not known."""

    ref: Ref
    answer: Any
    why: str = ""


def gateway_of(view: ViewContext, ref: Ref, timeout_s: float) -> GatewayClient:
    """Return the gateway of a service. Raises NotFound, and ArealError with the cause for one that does not run."""
    if view.remote is not None:
        return replace(view.remote.client, timeout_s=timeout_s)
    ObjectStore(view.home).expect(ref)
    home = HomeView(view.home)
    address = home.address(ref)
    if not address:
        raise NotFound(f"{ref} does not run{_cause(home, ref)}", hint=f"areal describe {ref}")
    return GatewayClient(address, service_key(view.home, ref.name, ref.kind), timeout_s)


def explained(view: ViewContext, ref: Ref, error: ArealError) -> ArealError:
    """Return the failure of a call to a service's gateway, with what its processes show."""
    if view.remote is not None or isinstance(error, NotFound | UsageFault | Conflict):
        return error
    cause = _cause(HomeView(view.home), ref)
    return ArealError(f"{error.message}{cause}", hint=f"areal describe {ref}", detail=error.detail) if cause else error


def _cause(home: HomeView, ref: Ref) -> str:
    item = next((item for item in home.of_kind(ref.kind) if item.ref == ref), None)
    if item is None:
        return ""
    status = home.statuses([item])[str(ref)]
    message = next((each.message for each in status.conditions if each.type == "Ready"), "")
    return f"; it is {status.phase}{': ' if message else ''}{message}" if status.phase != "Ready" else ""


def ask_all(view: ViewContext, kind: str, ask: Callable[[Ref, GatewayClient], T], timeout_s: float) -> list[Asked]:
    """Ask each service of a kind that runs at the same time, or the remote gateway. A failure hides no other."""

    def one(ref: Ref) -> Asked:
        try:
            client = gateway_of(view, ref, timeout_s)
            return Asked(ref, ask(ref, client))
        except (ArealError, OSError, ValueError, KeyError, TypeError) as error:
            return Asked(ref, None, str(error))

    if view.remote is not None:
        return [one(Ref(kind, REMOTE))]
    home = HomeView(view.home)
    refs = [item.ref for item in home.of_kind(kind) if home.address(item.ref)]
    with ThreadPoolExecutor(8, thread_name_prefix="gateways") as pool:
        return list(pool.map(one, refs))


def entries(client: GatewayClient, path: str, name: str, what: str) -> list[Mapping[str, Any]]:
    """Return the list ``name`` of the answer to a GET. Raises ArealError, also for a server of another kind."""
    document = client.get(path)
    if not isinstance(document, dict) or not isinstance(document.get(name), list):
        raise ArealError(f"GET {client.url}{path} answers without {what}")
    return [each for each in document[name] if isinstance(each, dict)]


_OF_GATEWAYS = ("about", "alerts", "chat", "home", "sessions", "weights")  # also of a remote one
_OF_HOME = ("compare", "evaluations", "job", "logs", "object", "plan", "step", "top")
VIEWS = (*_OF_GATEWAYS, *_OF_HOME, "action")
_BESIDE = {  # view -> its module
    **dict.fromkeys(("about", "object", "plan", "top"), "home"),
    **dict.fromkeys(("alerts", "compare", "step"), "job"),
}

Marks = Mapping[str, int | str]


def cursor_of(values: Iterable[object]) -> str:
    """Return a cursor that differs when one of the values does."""
    return f"{hash(tuple(values)) & 0xFFFFFFFFFFFF:x}"


def period(seconds: float) -> int:
    """Return a cursor that changes once in a period: what no file shows is asked again."""
    return int(time.monotonic() / seconds)


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
