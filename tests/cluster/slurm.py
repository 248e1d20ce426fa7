"""A Slurm cluster on this machine: munged, slurmctld and a slurmd for each of two nodes with eight fake GPUs.

    python -m tests.cluster.slurm FOLDER

starts one in ``FOLDER``, prints the line that a shell needs (``export SLURM_CONF=...``), and ends it at SIGTERM or
SIGINT. Debian's packages ``slurm-wlm`` and ``munge`` have the daemons; their services are not used. Each daemon is
ended by its pid, and so is every process whose environment names this cluster: the ``slurmstepd`` that a killed slurmd
leaves, and the jobs of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from areal.client.command import free_port
from areal.runtime import procfs

NODES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
GPUS = 8
PARTITION = "main"
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
_START_S = 30.0
_END_S = 10.0

# SlurmdTimeout: how long a node may be silent before its jobs are ended as NODE_FAIL.
_CONF = """
ClusterName=areal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmdTimeout={node_timeout_s}
SlurmctldTimeout=10
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
AccountingStorageType=accounting_storage/none
KillWait=2
MinJobAge=300
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,defer_batch
InactiveLimit=0
Waittime=0
{nodes}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=64 Sockets=1 CoresPerSocket=64"
    " ThreadsPerCore=1 RealMemory=64000 Gres=gpu:{gpus} State=UNKNOWN"
)


def is_installed() -> bool:
    return all(map(shutil.which, _DAEMONS))


class SlurmCluster:
    """See the module. ``env`` is what a client command needs beside its own environment."""

    def __init__(self, folder: Path, node_timeout_s: int = 6) -> None:
        self.folder = folder.resolve()
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._node_timeout_s = node_timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Return when both nodes are idle. Raises TimeoutError with what the daemons logged."""
        for name in ("state", "spool", "log", "run", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._write_conf()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.start_munged()
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.until(lambda: self.node_states().count("idle") == len(NODES), "its nodes to be idle")

    def _write_conf(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], [free_port() for _ in range(1 + len(NODES))]
        nodes = [
            _NODE.format(name=name, host=host, address=address, port=port, gpus=GPUS)
            for (name, address), port in zip(NODES.items(), ports[1:], strict=True)
        ]
        conf = _CONF.format(
            host=host,
            ports=ports,
            folder=self.folder,
            node_timeout_s=self._node_timeout_s,
            nodes="\n".join(nodes),
            partition=PARTITION,
        )
        (self.folder / "slurm.conf").write_text(conf)
        gres = f"NodeName={','.join(NODES)} Name=gpu File=/dev/tty[0-{GPUS - 1}]\n"  # any character device will do
        (self.folder / "gres.conf").write_text(gres)

    def start_munged(self) -> None:
        run, log = self.folder / "run", self.folder / "log"
        self._daemon(
            "munged",
            *("munged", "-F", "--force", "--num-threads=2", f"--key-file={self.folder}/munge.key"),
            *(f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid", f"--seed-file={run}/munge.seed"),
            f"--log-file={log}/munged.log",
        )
        self.until(lambda: (run / "munge.sock").exists(), "munged")

    def start_controller(self) -> None:
        self._daemon("slurmctld", "slurmctld", "-D", "-i")

    def start_node(self, node: str, unseen: Path | None = None) -> None:
        """``unseen``: a folder that this node has another one of, empty."""
        slurmd = ("slurmd", "-D", "-N", node)
        mounted = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(unseen))
        self._daemon(node, *(slurmd if unseen is None else (*mounted, *slurmd)))

    def end_daemon(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """``munged``, ``slurmctld`` or a node's slurmd; by SIGKILL it leaves its slurmstepd and their jobs."""
        process = self._daemons.pop(name)
        process.send_signal(number)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill_node(self, node: str) -> None:
        """As if the machine had lost its power: its slurmd, its slurmstepd and every process of its jobs, at once."""
        of_node = {pid for pid in self._processes() if procfs.environment(pid).get("SLURMD_NODENAME") == node}
        parents = {stat.ppid for stat in procfs.processes() if stat.pid in of_node} - of_node
        steps = parents.intersection(self._stepds())
        self.end_daemon(node, signal.SIGKILL)
        for pid in (*steps, *of_node):  # a slurmstepd that outlives its job tells slurmctld of its end
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def other_key(self, folder: Path) -> Iterator[dict[str, str]]:
        """The environment of commands whose munge has another key than the cluster's."""
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "pid"}
        names |= {"seed-file": "seed", "log-file": "munged.log"}
        options = [f"--{name}={folder / file}" for name, file in names.items()]
        munged = subprocess.Popen(["munged", "-F", "--force", *options], stderr=subprocess.DEVNULL)
        try:
            self.until((folder / "munge.sock").exists, "the other munged")
            conf = (self.folder / "slurm.conf").read_text()
            own, other = f"{self.folder}/run/munge.sock", f"{folder}/munge.sock"
            (folder / "slurm.conf").write_text(conf.replace(own, other))
            (folder / "gres.conf").write_text("")
            yield {"SLURM_CONF": str(folder / "slurm.conf")}
        finally:
            munged.terminate()
            munged.wait()

    def command(self, *argv: str) -> str:
        """The output of one of Slurm's commands. Raises CalledProcessError."""
        done = subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout

    def node_states(self) -> list[str]:
        try:
            return self.command("sinfo", "-h", "-N", "-p", PARTITION, "-o", "%t").split()
        except (subprocess.SubprocessError, OSError):
            return []

    def jobs(self) -> list[str]:
        """``ID NAME STATE`` of the jobs that have not ended."""
        return self.command("squeue", "-h", "-o", "%i %j %T").splitlines()

    def end(self) -> None:
        """Cancel what runs, end the daemons, and kill by pid whatever is left of them."""
        if "slurmctld" in self._daemons:
            with suppress(subprocess.SubprocessError):
                self.command("scancel", "--signal=KILL", "--full", "--user", "root")
                self.command("scancel", "--user", "root")
                self.until(lambda: not self.jobs(), "its jobs to end", _END_S)
        for name in reversed(list(self._daemons)):
            self.end_daemon(name)
        for pid in (*self._processes(), *self._stepds()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _daemon(self, name: str, *argv: str) -> None:
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                argv,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _processes(self) -> list[int]:
        """Processes of its jobs."""
        conf = self.env["SLURM_CONF"]
        ours = {process.pid for process in self._daemons.values()}
        found = (stat.pid for stat in procfs.processes() if stat.alive)
        return [
            pid
            for pid in found
            if pid not in ours and (env := procfs.environment(pid)).get("SLURM_CONF") == conf and "SLURM_JOB_ID" in env
        ]

    def _stepds(self) -> list[int]:
        """slurmstepd rewrites its command line; its spool folder tells whose it is."""
        found = (stat.pid for stat in procfs.processes() if stat.alive and stat.comm == "slurmstepd")
        return [pid for pid in found if f"{self.folder}/" in _open_files(pid)]

    def until(self, condition: Callable[[], bool], what: str, patience_s: float = _START_S) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in (self.folder / "log").iterdir())
                raise TimeoutError(f"waited {patience_s:g} s in vain for {what}\n{logs}")
            time.sleep(0.05)


def _open_files(pid: int) -> str:
    """Working folder and open files of a process, in lines."""
    found = []
    with suppress(OSError):
        found.append(str(Path(f"/proc/{pid}/cwd").readlink()))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(str(entry.readlink()))
    found.append(procfs.environment(pid).get("SLURM_CONF", ""))
    return "\n".join(found)


@contextmanager
def cluster(folder: Path) -> Iterator[SlurmCluster]:
    made = SlurmCluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if not is_installed():
        pytest.skip("needs slurm-wlm and munge (CONTRIBUTING.md)")
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def main(folder: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt), cluster(Path(folder)) as made:
        print(f"export SLURM_CONF={made.env['SLURM_CONF']}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
