"""GPUs through a stand-in for the NVML binding, found by the real helper process on its import path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.errors import NoCapacity
from areal.runtime.backends.base import Phase
from areal.runtime.gpus import Gpu, GpuListing, GpuProcess, list_gpus, squatter, visible, wait_for_memory

from .conftest import MakeBackend, Spawn
from .support import log_text, run_spec, until_phase

GIB = 1 << 30
STAND_IN = """
import json, os, time
from types import SimpleNamespace as N
class NVMLError(Exception): pass
def _state(): return json.load(open(os.environ["NVML_STATE"]))
def nvmlInit():
    if _state() == "hang": time.sleep(1000)
    if _state() == "broken": raise NVMLError("Driver/library version mismatch")
def nvmlDeviceGetCount(): return len(_state())
def nvmlDeviceGetHandleByIndex(i): return _state()[i]
def nvmlDeviceGetMemoryInfo(h): return N(total=h["total"], used=h["used"])
def nvmlDeviceGetUUID(h): return h["uuid"].encode()
def nvmlDeviceGetName(h): return "H200"
def nvmlDeviceGetComputeRunningProcesses(h):
    if h["processes"] is None: raise NVMLError("Not Supported")
    return [N(pid=pid, usedGpuMemory=memory) for pid, memory in h["processes"]]
"""

SetGpus = Callable[[object], None]


@pytest.fixture
def set_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetGpus:
    binding, state = tmp_path / "binding", tmp_path / "nvml.json"
    binding.mkdir()
    (binding / "pynvml.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{binding}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("NVML_STATE", str(state))
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)

    def write(value: object) -> None:
        state.write_text(json.dumps(value))

    return write


def card(uuid: str, used: int = 0, processes: object = ()) -> dict[str, object]:
    return {"uuid": uuid, "total": 141 * GIB, "used": used, "processes": processes}


def gpu(uuid: str = "GPU-a", index: int = 0, used: int = 0, *processes: GpuProcess) -> Gpu:
    return Gpu(uuid, index, "H200", 141 * GIB, used, processes)


def test_listing_reports_memory_and_processes(set_gpus: SetGpus) -> None:
    set_gpus([card("GPU-a", 3 * GIB, [[17, GIB], [18, None]]), card("GPU-b", 0, None)])

    listing = list_gpus()

    assert listing.reason == ""
    assert listing.gpus == (
        gpu("GPU-a", 0, 3 * GIB, GpuProcess(17, GIB), GpuProcess(18, None)),
        gpu("GPU-b", 1),
    )


@pytest.mark.parametrize(
    ("state", "reason"), [("broken", "NVML: Driver/library version mismatch"), ([], "NVML lists no GPU")]
)
def test_listing_without_gpus_gives_reason(set_gpus: SetGpus, state: object, reason: str) -> None:
    set_gpus(state)

    assert list_gpus() == GpuListing(reason=reason)


def test_listing_with_hanging_driver_ends_at_deadline(set_gpus: SetGpus) -> None:
    set_gpus("hang")

    assert list_gpus(timeout_s=0.5).reason == "the NVIDIA driver did not answer within 0.5 s"


def test_listing_without_binding_names_the_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert "pip install nvidia-ml-py" in list_gpus().reason


def test_capacity_excludes_leased_and_occupied_gpus(make_local: MakeBackend, set_gpus: SetGpus, spawn: Spawn) -> None:
    squatting = spawn(["sleep", "1000"])
    set_gpus([card("GPU-a"), card("GPU-b", GIB, [[squatting.pid, GIB]]), card("GPU-c"), card("GPU-d", 90 * GIB)])
    local = make_local()
    local.start(run_spec(gpus=("GPU-c",)))

    capacity = make_local("other").capacity()

    assert capacity.gpus == ("GPU-a",)
    assert capacity.leased == ("GPU-c",)
    assert set(capacity.squatters) == {"GPU-b", "GPU-d"}
    assert f"pid {squatting.pid} (sleep 1000, user id {os.getuid()})" in capacity.squatters["GPU-b"]
    assert "90.0 GiB are used by processes that cannot be seen" in capacity.squatters["GPU-d"]
    set_gpus([])


def test_run_gets_its_gpus_by_uuid_exclusively(make_local: MakeBackend, set_gpus: SetGpus) -> None:
    set_gpus([card("GPU-a"), card("GPU-b")])
    local = make_local()
    local.start(run_spec(argv=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 1000"), gpus=("GPU-b", "GPU-a")))

    with pytest.raises(NoCapacity, match="GPU GPU-a is held by Model/qwen"):
        make_local("other").start(run_spec(gpus=("GPU-a",)))

    until_phase(local, "r1", Phase.RUNNING)
    local.stop("r1")
    assert "GPU-b,GPU-a\n" in log_text(local, "r1")


def test_claimed_gpus_are_distinct_and_all_or_nothing(make_local: MakeBackend, set_gpus: SetGpus) -> None:
    set_gpus([card("GPU-a"), card("GPU-b"), card("GPU-c")])
    one, other = make_local("one"), make_local("other")
    first = one.claim_gpus(1, owner="Model/a")

    with pytest.raises(NoCapacity, match="Model/b needs 3 GPUs and only 2 are free"):
        other.claim_gpus(3, owner="Model/b")
    second = other.claim_gpus(2, owner="Model/b")
    one.start(run_spec(gpus=first))

    assert first == ("GPU-a",)
    assert second == ("GPU-b", "GPU-c")
    assert one.observe()["r1"].spec.gpus == ("GPU-a",)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["GPU-aa", "GPU-ab", "GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["GPU-aa", "GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, ["GPU-aa", "GPU-ab"]),
        ({"SLURM_JOB_GPUS": "1"}, ["GPU-ab"]),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-b"}, ["GPU-ab"]),
    ],
)
def test_visible_gpus_follow_environment(environment: dict[str, str], expected: list[str]) -> None:
    gpus = (gpu("GPU-aa", 0), gpu("GPU-ab", 1), gpu("GPU-b", 2))

    assert [found.uuid for found in visible(gpus, environment)] == expected


def test_idle_gpu_has_no_squatter() -> None:
    assert squatter(gpu(used=GIB // 2)) is None


def test_squatter_outside_container_is_reported() -> None:
    assert squatter(gpu("GPU-a", 0, GIB, GpuProcess(2**22 + 1, GIB))) == f"pid {2**22 + 1} (outside this container)"


def listings(*used_gib: int) -> Callable[[], GpuListing]:
    """One listing after the other; the last one stays."""
    values = list(used_gib)
    return lambda: GpuListing((gpu(used=(values.pop(0) if len(values) > 1 else values[0]) * GIB),))


def test_wait_for_memory_returns_once_memory_is_freed() -> None:
    assert wait_for_memory({"GPU-a": 140 * GIB}, listings(100, 50, 1), period_s=0) == {}


def test_wait_for_memory_reports_shortfall_at_deadline() -> None:
    missing = wait_for_memory({"GPU-a": 140 * GIB}, listings(11), timeout_s=0, period_s=0)

    assert missing == {"GPU-a": 10 * GIB}


def test_wait_for_memory_of_removed_gpu_returns_at_once() -> None:
    assert wait_for_memory({"GPU-z": GIB}, listings(0), timeout_s=1000) == {}


def test_stop_waits_for_gpu_memory(make_local: MakeBackend) -> None:
    used = iter([2, 90, 90, 3])
    local = make_local(list_gpus=lambda: GpuListing((gpu(used=next(used) * GIB),)))
    local.start(run_spec(gpus=("GPU-a",)))

    report = local.stop("r1")

    assert report.note == ""
    assert list(used) == []


def test_stop_reports_memory_not_freed(make_local: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.runtime.lifecycle.MEMORY_TIMEOUT_S", 0.0)
    used = iter([1, 101])
    local = make_local(list_gpus=lambda: GpuListing((gpu(used=next(used) * GIB),)))
    local.start(run_spec(gpus=("GPU-a",)))

    assert local.stop("r1").note == "GPU-a has not got 86.0 GiB back"
