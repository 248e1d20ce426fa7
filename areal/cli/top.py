"""``areal top``: CPU, memory, GPU and tokens per second of each process.

CPU and memory are sums over the process's session (engines fork). CPU needs two samples, half a second apart. Processes
on nodes of a cluster cannot be measured from here: their values are Unknown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.objects import complete_targets, parse_refs
from areal.cli.options import Invocation, watch_options
from areal.cli.output import Column, age, clear, compact, emit_rows, field, size, write
from areal.cli.remote import local_options, service_key
from areal.errors import ArealError
from areal.reconcilers.home_view import HomeView, process_row, service_of
from areal.terminal import fancy

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState


UNKNOWN = "Unknown"
_SAMPLE_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_COLUMNS = (
    field("OWNER", "owner"),
    field("PROCESS", "process"),
    field("PID", "pid", right=True),
    Column("CPU", lambda row: _cell(row, "cpuPercent", "{:.0f}%".format), right=True),
    Column("MEMORY", lambda row: _cell(row, "memoryBytes", size), right=True),
    Column("GPU", lambda row: [_gpu_cell(row, gpu) for gpu in row["gpus"]]),
    field("TOKENS/S", "tokensPerSecond", right=True),
    field("STATE", "state", state=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True),
    field("PROCESSES", "processes", wide=True, right=True),
    field("NODE", "node", wide=True),
)


def _cell(row: Mapping[str, Any], name: str, form: Callable[[Any], str | None]) -> str | None:
    if row[name] is None:
        return UNKNOWN if row["node"] else None
    return form(row[name])


def _gpu_cell(row: Mapping[str, Any], gpu: Mapping[str, Any]) -> str:
    name = gpu["uuid"] if gpu["index"] is None else gpu["index"]
    return f"{name}:{_cell({**gpu, 'node': row['node']}, 'usedBytes', size) or '-'}"


class Usage(NamedTuple):
    """Resource usage of one session (setsid) at one moment."""

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
    help="Order: the largest first, or by name.",
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
    gpus = _gpus([uuid for state in states if not state.job_id for uuid in state.spec.gpus])
    rows = []
    for state in states:
        row, uid = process_row(state), state.spec.uid
        elsewhere = bool(state.node or state.job_id)  # its pids are from another machine
        session = None if elsewhere else state.shim_pid
        before, after = (each.get(session) if session else None for each in (usage_before, usage))
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
                "node": state.node or None,
                "gpus": [_of_node(gpu) for gpu in state.gpus]
                if elsewhere
                else [gpus[uuid] for uuid in state.spec.gpus],
                "tokensPerSecond": None if generated < 0 else round(generated / took, 1),
            }
        )
    return rows


def _usage() -> dict[int, Usage]:
    """Returns the usage (CPU time, resident memory) of all visible processes, by session id."""
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


def _gpus(uuids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Returns GPUs of this machine by UUID. A GPU that the driver does not list has no figures."""
    if not uuids:
        return {}
    from areal.runtime.gpus import list_gpus

    listed = {
        gpu.uuid: {"uuid": gpu.uuid, "index": gpu.index, "usedBytes": gpu.used_bytes, "totalBytes": gpu.total_bytes}
        for gpu in list_gpus().gpus
    }
    return {uuid: listed.get(uuid, {"uuid": uuid, "index": None, "usedBytes": None}) for uuid in uuids}


def _of_node(name: str) -> Mapping[str, Any]:
    """Returns a GPU of a cluster node, which is named by its index on the node or by its UUID."""
    index = int(name) if name.isdecimal() else None
    return {"uuid": None if index is not None else name, "index": index, "usedBytes": None}


# -- token counters, from /stats of the embedded engine and /metrics of other engines

_TIMEOUT_S = 1.0
_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")


def _tokens(home: HomeView, states: Sequence[RunState]) -> dict[str, float]:
    """Returns the tokens generated since the engine started, by uid, for engines with a readable counter."""
    engines = [state for state in states if state.spec.component == "engine" and state.spec.url]
    if not engines:
        return {}
    services = {str(item.ref): service_of(item) for item in home.objects}
    keys: dict[str, str] = {}  # admin keys that can be read here; without its key, an engine refuses its counters
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
