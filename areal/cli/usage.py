"""The table of ``areal top`` and of the live view: CPU, memory, GPU and tokens per second of each process.

CPU and memory are sums over the process's session (engines fork). CPU needs two samples, half a second apart. Processes
on nodes of a cluster cannot be measured from here: their values are Unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from areal.cli.objects import parse_refs
from areal.cli.options import Invocation
from areal.cli.output import Column, Table, field
from areal.numbers import age, size
from areal.reconcilers.home_view import HomeView

if TYPE_CHECKING:
    from areal.reconcilers.usage import Sample

UNKNOWN = "Unknown"
SAMPLE_S = 0.5

USAGE_COLUMNS = (
    field("OWNER", "owner"),
    field("PROCESS", "process"),
    field("PID", "pid", right=True),
    Column("CPU", lambda row: _cell(row, "cpuPercent", "{:.0f}%".format), right=True, order=itemgetter("cpuPercent")),
    Column("MEMORY", lambda row: _cell(row, "memoryBytes", size), right=True, order=itemgetter("memoryBytes")),
    Column("GPU", lambda row: [_gpu_cell(row, gpu) for gpu in row["gpus"]]),
    field("TOKENS/S", "tokensPerSecond", right=True),
    field("STATE", "state", state=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True, order=itemgetter("uptimeSeconds")),
    field("PROCESSES", "processes", wide=True, right=True),
    field("NODE", "node", wide=True),
)


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str | None]) -> str | None:
    if row[name] is None:
        return UNKNOWN if row["node"] else None
    return form(row[name])


def _gpu_cell(row: Mapping[str, object], gpu: Mapping[str, object]) -> str:
    name = gpu["uuid"] if gpu["index"] is None else gpu["index"]
    return f"{name}:{_cell({**gpu, 'node': row['node']}, 'usedBytes', size) or '-'}"


class UsageMeter:
    """``read``: the figures since the last read; the first one takes ``seconds``."""

    def __init__(
        self, cli: Invocation, targets: tuple[str, ...], sort_by: str = "name", seconds: float = SAMPLE_S
    ) -> None:
        self._cli = cli
        self._key = {"cpu": "cpuPercent", "memory": "memoryBytes"}.get(sort_by)
        self._refs = parse_refs(targets)
        self._seconds = seconds
        self._before: Sample | None = None

    def read(self) -> list[dict[str, Any]]:
        from areal.reconcilers.usage import MEASURED, figures, sample

        home = HomeView(self._cli.home)
        refs = [each for ref in self._refs for each in home.family(ref)] if self._refs else None
        states = [state for state in home.states(refs) if state.phase in MEASURED]
        before = self._before or sample(home, states)
        if self._before is None:
            time.sleep(self._seconds)
        self._before = sample(home, states)
        rows = figures(states, before, self._before)
        if (key := self._key) is not None:
            rows.sort(key=lambda row: -(row[key] or 0))
        return rows

    def table(self) -> Table:
        return Table(self.read(), USAGE_COLUMNS, "{owner} {process}".format_map)
