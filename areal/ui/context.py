"""What a view is given: the home, the query of the request, and what this server may do."""

from __future__ import annotations

from collections.abc import Mapping

from areal.dataclasses import dataclass, field
from areal.errors import UsageFault
from areal.resources.kinds import Ref, check_name, resolve_kind
from areal.state.home import Home


@dataclass(frozen=True)
class ViewContext:
    """``query``: the parameters of the request, path parameters of the page among them. ``body``: of a POST."""

    home: Home
    query: Mapping[str, str] = field(default_factory=dict)
    body: object = None

    def need(self, name: str) -> str:
        """The parameter. Raises UsageFault without it."""
        value = self.query.get(name)
        if not value:
            raise UsageFault(f"the request has no {name}", hint=f"add {name}=... to the address")
        return value

    def name(self) -> str:
        """The parameter ``name``, of an object. Raises UsageFault for what names none."""
        return check_name(self.need("name"))

    def number(self, name: str, default: int, *, least: int = 0, most: int = 1 << 53) -> int:
        """The parameter as an integer. Raises UsageFault for anything else."""
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
        """The object of the parameters ``kind`` and ``name``. Raises UsageFault and NotFound."""
        return Ref(resolve_kind(self.need("kind")), self.name())
