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

An engine is killed in the middle of a training run. This happens next, without a command from you:

1. The engine's supervisor records how it ended and starts it again: at once the first time, then after 10 seconds,
   then with a doubled delay.
2. The router takes the replica out of rotation. The gateway sends new calls to other replicas, and a call that no
   engine has begun is tried on another one. If there is no other replica, calls wait.
3. A stream that was open ends with an error. If the client sends the call again with the same `Idempotency-Key`, it
   is answered, and recorded once.
4. What the session had recorded is on disk. Rewards and exports go on while the engine is away.
5. The new engine loads the weights that the trainer published last. It gets calls after that, not before.
6. A rollout that failed has no reward; it is never a reward of 0. The trainer samples its prompt again.

If the trainer is killed, its job starts a new attempt from the newest checkpoint, as its restart policy says. It
samples again the prompts that were not trained on, and publishes versions above those that are served.

If a command is killed, the next one recovers its journal and finishes the operation. If the machine reboots,
`areal apply` starts what the records name. [Concepts](concepts.md) lists what remains after
each kind of death. To try one: [break the quickstart](quickstart.md#break-it).

`areal events` lists what happened, `areal describe` how each process last ended, with its last log lines.

## How to read the tables

Each row below is a test in `tests/reliability/`. It injects the fault into real processes on loopback, and fails when
it sees anything else than the row. The tests write this page (`python -m tests.reliability.table --write`).

*Recorded: once* means exactly one interaction, with exactly the tokens, log-probabilities and weight versions of the
engine's own log. Callers retry a failed call with the same `Idempotency-Key`. Besides, `test_data_plane_machine.py`
compares random histories of callers, operators and kills with a simple model.
"""

_CONCLUSION = """## What these tests found

Each fault is fixed, and the row that found it is its regression test.

- An engine's impossible answer (log-probabilities missing or `NaN`, invalid tokens, too many choices) was recorded as
  training data, or was a 500. It is now a 502, and nothing of it is recorded.
- Rewards and exports of a session waited for its engine, although recorded data does not need it.
- If a special token was sampled in the middle of a turn, the next turn tokenized that turn again and split its row in
  two.

## Known limits

- A worker that answers its probes but no calls stays in rotation as long as the router finds it ready.
- A relay that is stopped (`SIGSTOP`) holds its callers until it continues: its supervisor detects only its end.
- A caller that closes its sending side is treated as one that has left.
- A plain completion continues one of the newest 64 turns of its trajectory; a continuation of an older turn begins a
  row of its own.
- Sessions expire by the wall clock: if the clock jumps two days ahead, idle sessions end.
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
