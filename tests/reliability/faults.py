"""The fault table: what is injected, and what was seen to come of it.

A test that injects a fault is marked with it and tells the ``outcome`` fixture what it saw, in words made from what
it saw. Those words are its row of ``docs/reliability.md``; a row that says anything else fails the test. So the page
is what the suite found when it last wrote it (``table``), and what it finds each time again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@dataclass(frozen=True)
class Fault:
    """``part`` is its section of the page."""

    part: str
    what: str
    when: str


@dataclass(frozen=True)
class Row:
    fault: Fault
    callers: str
    recorded: str
    healed: str

    def cells(self) -> tuple[str, ...]:
        return (self.fault.what, self.fault.when, self.callers, self.recorded, self.healed)

    def plain(self) -> dict[str, str]:
        """What another process can be sent, a test runner's worker its controller."""
        return asdict(self.fault) | {"callers": self.callers, "recorded": self.recorded, "healed": self.healed}

    @classmethod
    def of(cls, plain: dict[str, str]) -> Row:
        cells = dict(plain)
        return cls(Fault(cells.pop("part"), cells.pop("what"), cells.pop("when")), **cells)


@dataclass
class Outcome:
    """What a test saw. Each is reported at least once; several are joined in the order in which they were seen."""

    fault: Fault
    _seen: dict[str, list[str]] = field(default_factory=lambda: {"callers": [], "recorded": [], "healed": []})

    def callers(self, *effects: str) -> None:
        self._seen["callers"] += effects

    def recorded(self, *effects: str) -> None:
        self._seen["recorded"] += effects

    def healed(self, *effects: str) -> None:
        self._seen["healed"] += effects

    def row(self) -> Row:
        missing = [name for name, seen in self._seen.items() if not seen]
        assert not missing, f"the test of {self.fault} says nothing of {missing}"
        return Row(self.fault, *("; ".join(dict.fromkeys(seen)) for seen in self._seen.values()))


def fault_of(node: pytest.Item) -> Fault | None:
    mark = node.get_closest_marker("fault")
    return mark.args[0] if mark is not None else None


def fault(part: str, what: str, when: str) -> pytest.MarkDecorator:
    return pytest.mark.fault(Fault(part, what, when))


def slow_fault(part: str, what: str, when: str) -> tuple[pytest.MarkDecorator, ...]:
    """One whose test runs with the slow ones."""
    return fault(part, what, when), pytest.mark.slow


def read_page(text: str) -> dict[Fault, Row]:
    """The rows of the page, by fault."""
    rows: dict[Fault, Row] = {}
    part = ""
    for line in text.splitlines():
        if line.startswith("## "):
            part = line[3:]
        cells = [cell.strip().replace("\\|", "|") for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "fault":
            what, when, *seen = cells
            found = Fault(part, what, when)
            rows[found] = Row(found, *seen)
    return rows
