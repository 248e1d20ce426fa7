"""How much memory a data proxy takes that the same sessions use without end.

    python benchmarks/growth.py [--turns 200000] [--sessions 512] [--write]

The load is the ``turn at once`` of ``gateway.py``: short turns of conversations of eight, recorded on disk, from an
engine that answers at once, 64 at a time. A conversation takes the next session, and no session is rewarded or
exported. Resident memory is that of the data proxy alone. Target: after all turns at most 1.1 times what it is after a
tenth of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.relaying.floor import PARTS, Floor, System, ask, resident_bytes
from benchmarks.relaying.loads import Spent, start_sessions, talked
from benchmarks.relaying.vocabulary import write_vocabulary
from benchmarks.reporting import header, publish, table

CONNECTIONS, PARTS_OF_RUN, TARGET = 64, 40, 1.1


def measure(turns: int, sessions: int) -> list[dict[str, Any]]:
    """Memory and CPU after each tenth, and after the first fortieth."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        floor = Floor(Path(name))
        try:
            _, mock = floor.start(sys.executable, str(PARTS / "mock.py"))
            pid, port = floor.data_proxy(mock, write_vocabulary(floor.folder / "tokenizer"))
            keys = start_sessions(port, sessions)
            ask(mock, "POST", "/pace", {"gap_s": 0.0})
            system, each = System("data proxy", port, {"data proxy": pid}), turns // PARTS_OF_RUN
            for part in range(1, PARTS_OF_RUN + 1):
                with Spent(system, each) as spent:
                    talked(port, keys, CONNECTIONS, each)
                if part == 1 or part % (PARTS_OF_RUN // 10) == 0:
                    size = round(resident_bytes(pid) / 2**20, 1)
                    rows.append({"turns": each * part, "residentMiB": size, "cpuUs": round(spent.cpu_us)})
        finally:
            floor.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200_000)
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--write", action="store_true", help="keep the table and the JSON in benchmarks/results")
    options = parser.parse_args()
    found = {**header("growth"), "sessions": options.sessions, "rows": measure(options.turns, options.sessions)}
    by_turns = {row["turns"]: row["residentMiB"] for row in found["rows"]}
    found["ratio"] = round(by_turns[options.turns] / by_turns[options.turns // 10], 3)
    text = table(("turns", "resident MiB", "CPU us a turn"), [list(row.values()) for row in found["rows"]])
    verdict = f"After {options.turns:,} turns of {options.sessions} sessions over a tenth of them: {found['ratio']}"
    publish(found, f"{text}\n\n{verdict} (target: {TARGET}).", options.write)
    return 0 if found["ratio"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
