"""The gateways that views ask: of the services of the home, or the remote one of ``--gateway``. Keys stay here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from areal.client.gateway import GatewayClient
from areal.dataclasses import replace
from areal.errors import ArealError, Conflict, NotFound, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.reconcilers.usage import service_key
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, Ref
from areal.state.objects import ObjectStore
from areal.ui.views import REMOTE, ViewContext

T = TypeVar("T")


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
    """Return what ``ask`` returns for each service of a kind that runs, asked together; of a remote gateway for that
    one. A failure hides no other service."""

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


SERVICES = (INFERENCE_SERVICE, AGENT_SERVICE)
