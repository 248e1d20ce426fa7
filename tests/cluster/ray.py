"""A Ray cluster on this machine: a head and a second node on loopback addresses, with four fake GPUs each.

    python -m tests.cluster.ray FOLDER

starts one in ``FOLDER``, prints its address, and ends it at SIGTERM or SIGINT. Ports are free ones, files are below the
folder, and a Ray that somebody else runs here is not touched: every process of this cluster has its folder in its
environment and is ended by its pid, never by ``ray stop``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from areal.client.command import free_port
from areal.runtime import procfs
from areal.runtime.backends.base import NODE_ADDRESS_VARIABLE

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
GPUS = 4
_CLUSTER_VARIABLE = "AREAL_TEST_RAY"
_START_S = 180.0
_QUICK = {  # a node that refuses for five seconds is dead; no worker is started before it is needed
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_LOG_TO_DRIVER": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def is_installed() -> bool:
    from importlib.util import find_spec

    return find_spec("ray") is not None


class RayCluster:
    """See the module. ``address`` is that of its Jobs API."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._gcs_port, self._dashboard_port = free_port(), free_port()
        self.address = f"http://127.0.0.1:{self._dashboard_port}"
        self._sessions = Path(tempfile.mkdtemp(prefix="rt"))  # a socket's path is at most 107 characters
        self._environment = {**os.environ, **_QUICK, _CLUSTER_VARIABLE: str(self.folder)}
        self._environment.pop("CUDA_VISIBLE_DEVICES", None)  # the nodes' GPUs are made up
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Return when both nodes are alive. Raises TimeoutError with what they wrote."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start_head()
        self.start_node(SECOND)

    def start_head(self) -> None:
        options = ("--head", f"--port={self._gcs_port}", "--dashboard-host=127.0.0.1", "--include-dashboard=true")
        ports = (f"--dashboard-port={self._dashboard_port}", f"--temp-dir={self._sessions}")
        self._start(HEAD, *options, *ports)
        self.until(lambda: HEAD in self.living_nodes(), "the head")

    def start_node(self, address: str, gpus: int = GPUS) -> None:
        """One that gives up, as it does on a busy machine, is started again."""

        def lives() -> bool:
            if self._nodes[address].poll() is not None:
                self._start(address, f"--address={HEAD}:{self._gcs_port}", gpus=gpus)
            return address in self.living_nodes()

        self._start(address, f"--address={HEAD}:{self._gcs_port}", gpus=gpus)
        self.until(lives, f"node {address}")

    def _start(self, address: str, *options: str, gpus: int = GPUS) -> None:
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        argv += [f"--node-ip-address={address}", "--num-cpus=16", f"--num-gpus={gpus}", "--disable-usage-stats"]
        ports = zip(("listen", "grpc"), (free_port(), free_port()), strict=True)
        argv += ["--object-store-memory=80000000", *(f"--dashboard-agent-{name}-port={port}" for name, port in ports)]
        with open(self.folder / f"{address}.log", "ab") as log:
            node = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, NODE_ADDRESS_VARIABLE: address},
                start_new_session=True,
            )
        self._nodes[address] = node

    def kill_node(self, address: str) -> None:
        """SIGKILL to the node's raylet: the rest of the node ends with it, and the cluster learns of it by silence."""
        for pid in self._processes():
            line = procfs.command_line(pid)
            if "/raylet/raylet " in line and f"--node_ip_address={address} " in line:
                os.kill(pid, signal.SIGKILL)

    def kill_head(self) -> None:
        """SIGKILL to everything of the head node but the runs that it has."""
        head = self._nodes.pop(HEAD)
        head.kill()
        head.wait()
        for pid in self._processes():
            line = procfs.command_line(pid)
            if "gcs_server" in line or "dashboard" in line or ("raylet" in line and f"={HEAD} " in line):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def living_nodes(self) -> list[str]:
        try:
            found = self.get("/api/v0/nodes")["data"]["result"]["result"]
        except (OSError, ValueError, KeyError):
            return []
        return [node["node_ip"] for node in found if node["state"] == "ALIVE"]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:
            return json.loads(answer.read())

    def live_jobs(self) -> list[str]:
        """Submission ids of jobs that wait or run."""
        return [job["submission_id"] for job in self.get("/api/jobs/") if job["status"] in ("PENDING", "RUNNING")]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(file.read_text() for file in self.folder.glob("*.log"))
                raise TimeoutError(f"waited {_START_S:g} s in vain for {what}:\n{logs[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Nothing of it is left afterwards."""
        while left := self._processes():  # all at once: a parent's end would part its descendants from it
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for node in self._nodes.values():
            node.wait()
        shutil.rmtree(self._sessions, ignore_errors=True)

    def _processes(self) -> list[int]:
        """Those whose environment names this cluster, and their descendants: Ray's agents write their long titles over
        their environment."""
        living = [stat for stat in procfs.processes() if stat.alive]
        mine = {stat.pid for stat in living if procfs.environment(stat.pid).get(_CLUSTER_VARIABLE) == str(self.folder)}
        while children := {stat.pid for stat in living if stat.ppid in mine} - mine:
            mine |= children
        return sorted(mine)


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Skips the tests where there is no Ray."""
    if not is_installed():
        pytest.skip("Ray is not installed: pip install -e '.[ray]'")
    cluster = RayCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), ray_cluster(Path(sys.argv[1])) as running:
        print(running.address, flush=True)
        signal.pause()
