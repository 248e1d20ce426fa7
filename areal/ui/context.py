"""What a view is given: the home or a remote gateway, the query of the request, and what this server may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.client.gateway import GatewayClient
from areal.dataclasses import dataclass, field
from areal.errors import UsageFault
from areal.resources.kinds import Ref, check_name, resolve_kind
from areal.state.home import Home

if TYPE_CHECKING:
    from areal.ui.actions import Actions

REMOTE = "remote"  # the name of the service of a remote gateway, which only its own home knows


class RemoteGateway(NamedTuple):
    """The gateway of ``--gateway``. ``documents``: itself and its models with their health, as ``areal get`` has
    them."""

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
