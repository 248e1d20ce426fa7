"""CPU, memory, GPU and engine counters of each process, from two samples.

CPU and memory are sums over the process's session (engines fork). Processes on cluster nodes cannot be measured from
here: their values are None.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.errors import ArealError
from areal.reconcilers.home_view import HomeView, process_row, service_of
from areal.resources.kinds import INFERENCE_SERVICE, Ref
from areal.runtime import procfs

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
MEASURED = ("queued", "starting", "running", "backoff")


class Usage(NamedTuple):
    """Resource usage of one session (setsid) at one moment."""

    cpu_s: float
    memory_bytes: int
    processes: int


class EngineCounters(NamedTuple):
    """Counters of an engine: generated tokens, waiting sequences, and the used share of its KV cache."""

    generated: float
    waiting: float | None = None
    cache: float | None = None


class Sample(NamedTuple):
    """Usage by session, and counters by uid, at one moment (``time.monotonic``)."""

    at: float
    usage: Mapping[int, Usage]
    counters: Mapping[str, EngineCounters]


def sample(home: HomeView, states: Sequence[RunState]) -> Sample:
    return Sample(time.monotonic(), _usage(), _counters(home, states))


def figures(states: Sequence[RunState], before: Sample, after: Sample) -> list[dict[str, Any]]:
    """Return a row for each process. Values missing in one of the samples are None."""
    took = max(1e-6, after.at - before.at)
    gpus = _gpus([uuid for state in states if not state.job_id for uuid in state.spec.gpus])
    rows = []
    for state in states:
        row, uid = process_row(state), state.spec.uid
        elsewhere = bool(state.node or state.job_id)  # its pids are from another machine
        session = None if elsewhere else state.shim_pid
        old, new = (each.usage.get(session) if session else None for each in (before, after))
        cpu_s = max(0.0, new.cpu_s - old.cpu_s) if old is not None and new is not None else None
        first, last = before.counters.get(uid), after.counters.get(uid)
        generated = last.generated - first.generated if first is not None and last is not None else -1.0
        rows.append(
            {
                "owner": row["owner"],
                "process": f"{row['component']}/{row['replica']}",
                "pid": row["pid"],
                "state": row["state"],
                "uptimeSeconds": row["uptimeSeconds"],
                "cpuPercent": None if cpu_s is None else round(100 * cpu_s / took, 1),
                "memoryBytes": new.memory_bytes if new else None,
                "processes": new.processes if new else None,
                "node": state.node or None,
                "gpus": [_of_node(gpu) for gpu in state.gpus]
                if elsewhere
                else [gpus[uuid] for uuid in state.spec.gpus],
                "tokensPerSecond": None if generated < 0 else round(generated / took, 1),
            }
        )
    return rows


def _usage() -> dict[int, Usage]:
    """Return the usage (CPU time, resident memory) of all visible processes, by session id."""
    found: dict[int, Usage] = {}
    for stat in filter(None, map(procfs.read_stat, procfs.pids())):
        so_far = found.get(stat.session, Usage(0.0, 0, 0))
        found[stat.session] = Usage(
            so_far.cpu_s + stat.cpu_ticks / _TICKS,
            so_far.memory_bytes + stat.resident_pages * _PAGE,
            so_far.processes + 1,
        )
    return found


def _gpus(uuids: Sequence[str]) -> dict[str, Mapping[str, object]]:
    """Return GPUs of this machine by UUID. A GPU that the driver does not list has no figures."""
    if not uuids:
        return {}
    from areal.runtime.gpus import list_gpus

    listed = {
        gpu.uuid: {"uuid": gpu.uuid, "index": gpu.index, "usedBytes": gpu.used_bytes, "totalBytes": gpu.total_bytes}
        for gpu in list_gpus().gpus
    }
    return {uuid: listed.get(uuid, {"uuid": uuid, "index": None, "usedBytes": None}) for uuid in uuids}


def _of_node(name: str) -> Mapping[str, object]:
    """Return a GPU of a cluster node, named by its index on the node or by its UUID."""
    index = int(name) if name.isdecimal() else None
    return {"uuid": None if index is not None else name, "index": index, "usedBytes": None}


_TIMEOUT_S = 1.0
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")


def _counters(home: HomeView, states: Sequence[RunState]) -> dict[str, EngineCounters]:
    """Return the counters of engines that can be read, by uid."""
    engines = [state for state in states if state.spec.component == "engine" and state.spec.url]
    if not engines:
        return {}
    services = {str(item.ref): service_of(item) for item in home.objects}
    keys: dict[str, str] = {}  # admin keys readable here; an engine refuses to show its counters without its key
    for owner in {state.spec.owner for state in engines}:
        if (service := services.get(owner)) is not None:
            with contextlib.suppress(ArealError):
                keys[owner] = service_key(home.home, service)
    with ThreadPoolExecutor(min(16, len(engines)), thread_name_prefix="counter") as pool:
        found = pool.map(lambda state: _read(str(state.spec.url), keys.get(state.spec.owner)), engines)
        return {state.spec.uid: count for state, count in zip(engines, found, strict=True) if count is not None}


def _read(url: str, key: str | None) -> EngineCounters | None:
    from areal.client.gateway import NoResponse, ServiceClient
    from areal.client.prometheus import parse

    client = ServiceClient(url, key, timeout_s=_TIMEOUT_S)
    try:
        status, document = client.ask("GET", "/stats")
        if status == 200 and isinstance(document, dict) and "generated_tokens" in document:
            waiting = document.get("waiting")
            return EngineCounters(float(document["generated_tokens"]), None if waiting is None else float(waiting))
        status, text = client.ask("GET", "/metrics")
    except NoResponse:
        return None
    page = parse(text) if status == 200 and isinstance(text, str) else parse("")

    def first(names: Sequence[str]) -> float | None:
        return next((total for total in map(page.total, names) if total is not None), None)

    generated = first(_GENERATED)
    return None if generated is None else EngineCounters(generated, first(_WAITING), first(_CACHE))


def service_key(home: Home, service: str, kind: str = INFERENCE_SERVICE) -> str:
    """Return the admin key of a service of this home. Raises ArealError with the reason if there is none."""
    from areal.reconcilers.launch import key_path
    from areal.state.home import admin_key_path, read_key
    from areal.state.objects import ObjectStore

    found = ObjectStore(home).get(Ref(kind, service))
    return read_key(key_path(home, found) if found is not None else admin_key_path(home, service, kind))
