"""``areal top``: CPU, memory, GPU and tokens a second of each process.

CPU and memory are summed over the process's whole session (engines fork). CPU needs two samples, half a second apart.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.objects import HomeView, complete_targets, parse_refs, process_row, service_of
from areal.cli.options import Invocation, watch_options
from areal.cli.output import Column, age, clear, compact, emit_rows, field, size, write
from areal.cli.remote import local_options, service_key
from areal.errors import ArealError
from areal.terminal import fancy

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState


_SAMPLE_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_COLUMNS = (
    field("OWNER", "owner"),
    field("PROCESS", "process"),
    field("PID", "pid", right=True),
    Column("CPU", lambda row: None if row["cpuPercent"] is None else f"{row['cpuPercent']:.0f}%", right=True),
    Column("MEMORY", lambda row: size(row["memoryBytes"]), right=True),
    Column("GPU", lambda row: [f"{gpu['index']}:{size(gpu['usedBytes'])}" for gpu in row["gpus"]]),
    field("TOKENS/S", "tokensPerSecond", right=True),
    field("STATE", "state", state=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True),
    field("PROCESSES", "processes", wide=True, right=True),
)


class Usage(NamedTuple):
    """The usage of one session at one moment."""

    cpu_s: float
    memory_bytes: int
    processes: int


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@watch_options()
@click.option(
    "--sort-by",
    type=click.Choice(["cpu", "memory", "name"]),
    default="name",
    show_default=True,
    help="What comes first: the largest, or by name.",
)
@local_options
def top(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float, sort_by: str) -> int:
    """CPU, memory, GPU and tokens a second of each process; of a service, its models' too."""
    while True:
        rows = _measure(cli, targets, max(_SAMPLE_S, interval) if watch else _SAMPLE_S)
        if sort_by != "name":
            key = {"cpu": "cpuPercent", "memory": "memoryBytes"}[sort_by]
            rows.sort(key=lambda row: -(row[key] or 0))
        if watch and not cli.format.is_table:
            write(compact(rows))
        else:
            if watch and fancy(sys.stdout):
                clear()
            emit_rows(cli, rows, _COLUMNS, name="{owner} {process}".format_map, empty="no process runs")
        if not watch:
            return 0
        sys.stdout.flush()


def _measure(cli: Invocation, targets: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    home = HomeView(cli.home)
    refs = [each for ref in parse_refs(targets) for each in home.family(ref)] if targets else None
    states = [state for state in home.states(refs) if state.phase in ("queued", "starting", "running", "backoff")]
    usage_before, tokens_before, at = _usage(), _tokens(home, states), time.monotonic()
    time.sleep(seconds)
    usage, tokens, took = _usage(), _tokens(home, states), time.monotonic() - at
    gpus = _gpus(states)
    rows = []
    for state in states:
        row, uid = process_row(state), state.spec.uid
        session = 0 if state.node else state.shim_pid or 0  # of this machine's /proc
        before, after = usage_before.get(session), usage.get(session)
        cpu_s = max(0.0, after.cpu_s - before.cpu_s) if before is not None and after is not None else None
        generated = tokens[uid] - tokens_before[uid] if uid in tokens and uid in tokens_before else -1.0
        rows.append(
            {
                "owner": row["owner"],
                "process": f"{row['component']}/{row['replica']}",
                "pid": row["pid"],
                "state": row["state"],
                "uptimeSeconds": row["uptimeSeconds"],
                "cpuPercent": None if cpu_s is None else round(100 * cpu_s / took, 1),
                "memoryBytes": after.memory_bytes if after else None,
                "processes": after.processes if after else None,
                "gpus": [gpus.get(uuid, {"uuid": uuid, "index": None, "usedBytes": None}) for uuid in state.spec.gpus],
                "tokensPerSecond": None if generated < 0 else round(generated / took, 1),
            }
        )
    return rows


def _usage() -> dict[int, Usage]:
    """CPU time and resident memory of every visible process, by session id."""
    found: dict[int, Usage] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        session = int(fields[3])
        so_far = found.get(session, Usage(0.0, 0, 0))
        found[session] = Usage(
            so_far.cpu_s + (int(fields[11]) + int(fields[12])) / _TICKS,
            so_far.memory_bytes + int(fields[21]) * _PAGE,
            so_far.processes + 1,
        )
    return found


def _gpus(states: Sequence[RunState]) -> dict[str, Mapping[str, Any]]:
    if not any(state.spec.gpus for state in states):
        return {}
    from areal.runtime.gpus import list_gpus

    return {
        gpu.uuid: {"uuid": gpu.uuid, "index": gpu.index, "usedBytes": gpu.used_bytes, "totalBytes": gpu.total_bytes}
        for gpu in list_gpus().gpus
    }


# -- token counters: our engine's statistics, other engines' Prometheus pages

_TIMEOUT_S = 1.0
_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")


def _tokens(home: HomeView, states: Sequence[RunState]) -> dict[str, float]:
    """Tokens generated since the engine started, by uid. An engine without a readable counter is left out."""
    engines = [state for state in states if state.spec.component == "engine" and state.spec.url]
    if not engines:
        return {}
    services = {str(item.ref): service_of(item) for item in home.objects}
    keys: dict[str, str] = {}  # admin keys, where they can be read: other counters stay closed to us
    for owner in {state.spec.owner for state in engines}:
        if (service := services.get(owner)) is not None:
            with contextlib.suppress(ArealError):
                keys[owner] = service_key(home.home, service)
    with ThreadPoolExecutor(min(16, len(engines)), thread_name_prefix="counter") as pool:
        found = pool.map(lambda state: _generated_tokens(str(state.spec.url), keys.get(state.spec.owner)), engines)
        return {state.spec.uid: count for state, count in zip(engines, found, strict=True) if count is not None}


def _generated_tokens(url: str, key: str | None) -> float | None:
    from areal.client.http import AdminClient
    from areal.client.prometheus import parse

    client = AdminClient(url, key, timeout_s=_TIMEOUT_S)
    try:
        status, document = client.get("/stats")
        if status == 200 and isinstance(document, dict) and "generated_tokens" in document:
            return float(document["generated_tokens"])
        status, text = client.get("/metrics")
    except OSError:
        return None
    page = parse(text) if status == 200 and isinstance(text, str) else parse("")
    return next((total for total in map(page.total, _COUNTERS) if total is not None), None)
