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

This page lists what callers see, what is recorded and what happens afterwards when a process dies, a disk is full,
a clock jumps or a caller misbehaves.

## When an engine is killed during training

areal recovers without a command from you:

1. The supervisor of the engine records how the engine exited and restarts it: at once the first time, then after 10
   seconds, then with a doubled delay.
2. The router takes the replica out of rotation. The gateway sends new calls to other replicas, and retries a call
   that no engine has begun on another replica. If there is no other replica, calls wait.
3. An open stream ends with an error. If the client repeats the call with the same `Idempotency-Key`, the call is
   answered and recorded once.
4. The record of the session is on disk. Rewards and exports work while the engine is down.
5. The new engine loads the weights that the trainer published last, and only then gets calls.
6. A failed rollout has no reward; it never counts as a reward of 0. The trainer samples its prompt again.

## When other processes are killed

- **The trainer**: its job starts a new attempt from the newest checkpoint, according to its restart policy. The
  attempt samples the prompts again that were not trained on, and publishes higher versions than the served one.
- **A command**: the next command recovers its journal and finishes the operation.
- **The machine**: `areal apply` starts what the records name.

[Concepts](concepts.md#processes) lists what is left after each kind of death. To try one:
[break the quickstart](quickstart.md#break-it).

`areal events` lists what happened. `areal describe` shows how each process exited last, with its last log lines.

## How to read the tables

Each row below is a test in `tests/reliability/`. The test injects the fault into real processes on loopback, and
fails if it sees anything other than the row. The tests write this page
(`python -m tests.reliability.table --write`).

- *recorded: once* means exactly one interaction, with the tokens, log-probabilities and weight versions of the
  engine's own log.
- Callers retry a failed call with the same `Idempotency-Key`.
- `test_data_plane_machine.py` also compares random histories of callers, operators and kills with a simple model.
"""

_CONCLUSION = """## Faults that these tests found

All are fixed; the rows above are the regression tests.

- An invalid answer of an engine (log-probabilities missing or `NaN`, invalid tokens, too many choices) was recorded
  as training data or answered with a 500. It is now a 502 and is not recorded.
- Rewards and exports of a session waited for its engine, although recorded data does not need the engine.
- If a special token was sampled in the middle of a turn, the next turn tokenized that turn again and split its row.

## Known limits

- A worker that answers probes but no calls stays in rotation as long as the router considers it ready.
- A stopped relay (`SIGSTOP`) delays its callers until it continues, because its supervisor detects only its exit.
- A caller that half-closes its connection is treated as disconnected.
- A plain completion continues one of the newest 64 turns of its trajectory. A continuation of an older turn begins
  a new row.
- Sessions expire by the wall clock: if the clock jumps forward by two days, idle sessions end.
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
