"""``docs/reliability.md``, made by the tests of this folder.

``python -m tests.reliability.table --write [pytest arguments]`` runs them, the slow ones too, and writes what they saw;
with arguments only some of them, whose rows replace the old ones. ``--check`` runs nothing: it compares the page's
faults with the tests' own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.reliability.faults import PAGE, Fault, Row, fault_of, read_page

WRITING = "AREAL_WRITE_RELIABILITY"
_FOLDER = Path(__file__).parent
_HEAD = "| fault | when | callers see | recorded | afterwards |\n|---|---|---|---|---|\n"
_INTRODUCTION = """# Reliability

What happens when something breaks, found by breaking it: each row is a test in `tests/reliability/` that injects
the fault into real processes on loopback and writes down what it saw. A test that sees anything else fails. The page
is made by the suite (`python -m tests.reliability.table --write`) and never by hand.

*Once* means: exactly one interaction, with exactly the tokens, log-probabilities and weight versions that the engine
says in its own log. Callers try a failed call again as SDKs do, with the same `Idempotency-Key`. Beside the table,
`test_data_plane_machine.py` compares random histories of callers, operators and kills with a simple model.
"""

_CONCLUSION = """## What these tests found

Each is fixed, and stays so by the row that found it.

- An engine's answer that cannot be true (log-probabilities missing or `NaN`, tokens that are none, a choice too many)
  was recorded as training data, or was a 500. It is the engine's failure now, a 502, and nothing of it is recorded.
- Rewards and exports of a session waited for its engine, though what is recorded needs none.
- A turn in whose middle a special token had been sampled was tokenised again by the next one, and its row torn in two.

## Known limits

- A worker that answers its probes and never a call is waited for as long as the router finds it ready.
- A relay that is held still holds its own callers until it goes on: its supervisor sees deaths only.
- A caller that closes its sending side has left, for these services as for most.
- A plain completion is known to go on from one of the newest 64 turns of its trajectory; from an older one, it begins
  a row of its own.
- Sessions expire by the wall clock: a step of two days ends what lay idle.
"""


class _Collector:
    """Which faults there are, in the order of the tests, and what was seen of them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.rows: dict[Fault, Row] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.faults = [fault for item in items if (fault := fault_of(item)) is not None]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            for name, plain in report.user_properties:
                if name == "fault" and isinstance(plain, dict):
                    row = Row.of(plain)
                    self.rows[row.fault] = row


def _all_faults() -> list[Fault]:
    collector = _Collector()
    status = pytest.main(["-q", "-q", "--collect-only", "-m", "", "-p", "no:cacheprovider", str(_FOLDER)], [collector])
    assert status == 0, "the tests cannot be collected"
    assert len(set(collector.faults)) == len(collector.faults), "two tests of one fault"
    return collector.faults


def render(rows: Iterable[Row]) -> str:
    """One table a part, in the order of the rows."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row.fault.part, []).append(row)
    tables = [f"## {part}\n\n{_HEAD}{''.join(map(_line, of))}" for part, of in parts.items()]
    return "\n".join([_INTRODUCTION, *tables, _CONCLUSION])


def _line(row: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |\n"


def _read() -> dict[Fault, Row]:
    return read_page(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}


def write(arguments: list[str]) -> int:
    os.environ[WRITING] = "1"
    collector = _Collector()
    status = pytest.main(["-m", "", *(arguments or [str(_FOLDER)])], [collector])
    known = _read() | collector.rows
    PAGE.write_text(render(known[fault] for fault in _all_faults() if fault in known), encoding="utf-8")
    return int(status)


def check() -> int:
    faults, rows = _all_faults(), _read()
    wrong = [f"no row for {fault}" for fault in faults if fault not in rows]
    wrong += [f"no test for {fault}" for fault in rows if fault not in faults]
    if not wrong and PAGE.read_text(encoding="utf-8") != render(rows[fault] for fault in faults):
        wrong.append("the page was changed by hand, or its order is old")
    sys.stderr.write("".join(f"{PAGE}: {line}\n" for line in wrong))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.table")
    parser.add_argument("--write", nargs="*", metavar="PYTEST_ARGUMENT")
    parser.add_argument("--check", action="store_true")
    args, more = parser.parse_known_args()
    return check() if args.check else write([*(args.write or []), *more])


if __name__ == "__main__":
    sys.exit(main())
