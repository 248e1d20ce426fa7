"""The program of a run on its node: ``python -m areal.runtime.backends.node RUN_DIR [--watch]``.

A scheduler's job starts it, on each node of the run once. It records the node's address in the run's intent, starts the
run's supervisor as ``local`` does, passes SIGTERM, SIGINT and SIGUSR1 on to it, and ends with the component's status. A
supervisor whose node program dies stops its component, so that nothing outlives the job.

The first node of a run works in the run's folder, the others in ``RUN_DIR/<uid>-node-<rank>/``. A job that its
scheduler has requeued begins again from the unplaced intent; the life lock keeps two nodes from running the same run.
With ``--watch`` (a scheduler that cannot signal the shim alone) the file ``kick`` in the run's folder does what SIGUSR1
does, and ``stop.json`` what SIGTERM does.

``python -m areal.runtime.backends.node --address`` prints the node's address, for ``AREAL_FIRST_NODE`` of a job.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from areal.errors import ArealError, Conflict, NoCapacity, NotFound
from areal.files import try_lock
from areal.resources.addresses import is_loopback
from areal.runtime import procfs, records
from areal.runtime.backends import base
from areal.runtime.lifecycle import fork_shim, sweep_run
from areal.runtime.observation import read_identity
from areal.runtime.runs import EndRecord, Intent, RunStore, placed, read_end, read_intent
from areal.runtime.shim import PARENT_VARIABLE

KICK = "kick"
FAILED = 78  # EX_CONFIG: nothing of the component was started
_LOCK_PATIENCE_S = 20.0  # the submitting command closes its descriptor right after the submission
_WATCH_MS = 250
_NODE_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_OLD_RECORDS = (records.ID, records.CHILD, records.EXIT, records.STOP, records.STAGE, records.NODE)


def node_address(environ: Mapping[str, str]) -> str:
    """Return this node's numeric address for other nodes. Raises ArealError.

    It is the first known of: ``AREAL_NODE_ADDRESS``, Slurm's address of the node, the address of the interface towards
    Ray's head, that of the host's name, and that of the interface with the default route.
    """
    scheduler = [environ.get(base.NODE_ADDRESS_VARIABLE, ""), _slurm_address(environ), *_ray_address(environ)]
    found = [address for address in map(_resolve, filter(None, [*scheduler, socket.gethostname()])) if address]
    if any(scheduler):
        usable = found[:1]  # the scheduler's word, be it a loopback address
    else:
        usable = [*(address for address in found if not is_loopback(address)), *_routed_address()]
    if not usable:
        raise ArealError(
            f"the address of node {socket.gethostname()} cannot be determined",
            hint=f"export {base.NODE_ADDRESS_VARIABLE} in the job's set-up commands",
        )
    return usable[0]


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Return the node's NodeAddr, since its name need not resolve; the name itself if Slurm does not answer."""
    name = environ.get("SLURMD_NODENAME", "")
    if name:
        with suppress(OSError, subprocess.SubprocessError):
            shown = subprocess.run(("scontrol", "show", "node", name, "-o"), capture_output=True, timeout=30, text=True)
            if match := _NODE_ADDRESS.search(shown.stdout):
                return match[1]
    return name


def _ray_address(environ: Mapping[str, str]) -> list[str]:
    """Return the address of the interface towards Ray's head, which Ray passes to its jobs."""
    head, _, port = environ.get("RAY_ADDRESS", "").rpartition(":")
    return _routed_address(head.strip("[]"), int(port)) if head and port.isdecimal() and "/" not in head else []


def _resolve(host: str) -> str:
    """Return a numeric address, IPv4 if there are both; "" if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    addresses = sorted({str(each[4][0]) for each in found}, key=lambda address: (":" in address, address))
    return next((each for each in addresses if not is_loopback(each)), addresses[0])


def _routed_address(towards: str = "192.0.2.1", port: int = 9) -> list[str]:  # TEST-NET-1
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((towards, port))  # a datagram socket sends nothing by connecting
        return [str(probe.getsockname()[0])]
    return []


def prepare(run_dir: str, rank: int, address: str, environ: Mapping[str, str]) -> tuple[str, base.RunSpec, int]:
    """Return folder, placed spec and held life lock of this node's part of the run. Raises NotFound if the run was
    forgotten or its home is not visible here, Conflict if it already runs, ArealError, OSError."""
    store, uid = RunStore(Path(run_dir).parent), Path(run_dir).name
    intent = read_intent(run_dir)
    if intent is None:
        raise NotFound(
            f"run {uid} has no record in {store.root} on {socket.gethostname()}: "
            "$AREAL_HOME has to be a folder that every node sees"
        )
    if rank == 0:
        life = _take_life(run_dir)
        for name in (*_OLD_RECORDS, KICK):
            records.remove(f"{run_dir}/{name}")
        spec, folder = store.place(uid, address), run_dir
    else:
        folder, life, spec = _part_of(run_dir, intent, f"{uid}-node-{rank}", address)
    seen = {
        "node": environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "address": address,
        "rank": rank,
        "job_id": environ.get("SLURM_JOB_ID") or environ.get("RAY_JOB_ID") or "",
        "gpus": [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu],  # indices or UUIDs
        "requeues": int(environ.get("SLURM_RESTART_COUNT") or 0),
        "at": time.time(),
    }
    records.write_json(folder, records.NODE, seen)
    return folder, spec, life


def _part_of(run_dir: str, intent: Intent, uid: str, address: str) -> tuple[str, int, base.RunSpec]:
    """Create a run folder in the run's folder, for a node other than the first."""
    secrets = records.read_object(run_dir, records.SECRET) or {}
    parts = RunStore(Path(run_dir))
    if parts.is_held(uid):
        raise Conflict(f"run {uid} runs on another node already")
    parts.remove(uid)
    spec = replace(placed(intent.submitted, address), uid=uid, secret_env=secrets)  # the first node may have placed it
    return parts.folder(uid), parts.create(spec), spec


def _take_life(run_dir: str) -> int:
    """Return the life lock, which the submitting command may hold a moment. Raises Conflict where the run lives."""
    life = os.open(f"{run_dir}/{records.LIFE_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        if try_lock(life):
            return life
        if time.monotonic() > deadline:
            os.close(life)
            raise Conflict(f"run {Path(run_dir).name} is held by another process: it would run twice")
        time.sleep(0.05)


def require_free_ports(spec: base.RunSpec, address: str) -> None:
    """Raise NoCapacity if a port is taken here: ports are chosen before the node is known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in spec.ports:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise NoCapacity(
                    f"port {port} cannot be used on node {socket.gethostname()} ({address}): {error.strerror}",
                    hint="the next start takes another port",
                ) from error


def supervise(
    folder: str, spec: base.RunSpec, life: int, environ: Mapping[str, str], watched: str | None = None
) -> int:
    """Start the shim, and return the component's exit status, or 0 if stopped. ``watched``: a folder of orders."""
    shim = fork_shim(spec.uid, folder, [life], {**environ, PARENT_VARIABLE: str(os.getpid())})
    os.close(life)

    def forward(number: int, frame: FrameType | None) -> None:
        shim.process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    try:
        shim.go()
        shim.wait_ack()
    finally:
        shim.close()
    _wait(shim.process, watched, folder)
    code = shim.process.wait()
    sweep_run(read_identity(folder), folder)  # a supervisor that was killed has not swept
    return _status(folder, code)


def _wait(shim: subprocess.Popen[bytes], watched: str | None, folder: str) -> None:
    """Wait until the shim has ended. Carry out each order whenever its file is written."""
    ended, poller = os.pidfd_open(shim.pid), select.poll()
    poller.register(ended, select.POLLIN)
    written: dict[str, int] = {}
    while not poller.poll(None if watched is None else _WATCH_MS):
        for name, number in ((KICK, signal.SIGUSR1), (records.STOP, signal.SIGTERM)):
            with suppress(FileNotFoundError):
                at = os.stat(f"{watched}/{name}").st_mtime_ns
                if written.get(name) != at:
                    written[name] = at
                    if watched != folder and name == records.STOP:  # the shim reads its grace there
                        shutil.copy(f"{watched}/{name}", folder)
                    shim.send_signal(number)
    os.close(ended)


def _status(folder: str, shim_code: int) -> int:
    ended = read_end(folder)
    if ended is None:
        return 128 - shim_code if shim_code < 0 else shim_code or FAILED
    if ended.reason == "stopped" or ended.last_exit is None:
        return 0
    return 128 + ended.last_exit.signal if ended.last_exit.signal else ended.last_exit.code or 0


def main(argv: Sequence[str]) -> int:
    environ = dict(os.environ)
    if argv[0] == "--address":
        print(node_address(environ))
        return 0
    run_dir, watch = argv[0].rstrip("/"), "--watch" in argv
    rank, folder = int(environ.get(base.NODE_RANK_VARIABLE) or environ.get("SLURM_NODEID") or 0), ""
    try:
        address = node_address(environ)
        folder, spec, life = prepare(run_dir, rank, address, environ)
        if rank == 0:
            require_free_ports(spec, address)
    except (ArealError, OSError) as error:
        print(f"areal: {error}", file=sys.stderr, flush=True)
        if folder:  # the end as a supervisor would have written it
            records.write_json(folder, records.ID, procfs.identity_fields(os.getpid()))
            end = EndRecord(
                base.Phase.EXITED, str(error), last_exit=base.LastExit(FAILED, None, time.time(), str(error))
            )
            records.write_json(folder, records.EXIT, asdict(end))
        return FAILED
    given = {base.NODE_ADDRESS_VARIABLE: address, base.NODE_RANK_VARIABLE: str(rank)}
    given[base.FIRST_NODE_VARIABLE] = environ.get(base.FIRST_NODE_VARIABLE) or address
    try:
        return supervise(folder, spec, life, {**environ, **given}, run_dir if watch else None)
    except (ArealError, OSError) as error:
        print(f"areal: {error}", file=sys.stderr, flush=True)
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
