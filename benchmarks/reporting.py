"""What every benchmark says about where and when it was measured, and how it writes its results."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("AREAL_BENCH_RESULTS") or Path(__file__).resolve().parent / "results")


def header(name: str, **versions: str) -> dict[str, Any]:
    return {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **versions},
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def publish(found: dict[str, Any], text: str, write: bool) -> None:
    """Print the table; with ``write`` keep it and the JSON under ``benchmarks/results``."""
    machine = found["machine"]
    title = f"# {found['benchmark']}\n\n{found['date']}, {machine['cpu']}, {machine['cores']} cores\n\n{text}\n"
    print(title)
    if write:
        RESULTS.mkdir(exist_ok=True)
        stem = RESULTS / found["benchmark"]
        stem.with_suffix(".json").write_text(json.dumps(found, indent=2) + "\n")
        stem.with_suffix(".md").write_text(title)
