"""The driver of a run over several nodes, on a Ray cluster: the entrypoint of its job.

    python ray_driver.py RUN_DIR NODES BUNDLE STRATEGY NAMESPACE NODE_PYTHON

A placement group of ``NODES`` equal bundles, and in each an actor that runs the node program with the rank of its node
and the address of the first. ``RUN_DIR/driver.json`` says what it waits for. The actors belong to this job, so that
nothing of them outlives it. The end of any node is the run's: the others' supervisors are killed, and where the node
has recorded how it ended, the run's record says it. Exit status: that of the node program, 75 where a node was lost.

It is started by the first Python of the node that has Ray, which need not have areal: standard library and Ray only.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

NODE_LOST = 75
_ADVANCE_S = 60.0  # others end by themselves when one of them does, as torchrun's agents do


class NodeProgram:
    """An actor: the node program of one bundle. Its methods run in threads of their own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self, python: str) -> str:
        argv = [python, "-P", "-m", "areal.runtime.backends.node", "--address"]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if found.returncode:
            raise RuntimeError(found.stderr.strip()[-600:])
        return found.stdout.strip()

    def run(self, python: str, run_dir: str, rank: int, first: str) -> int:
        """Return the node program's exit status."""
        import ctypes

        libc = ctypes.CDLL(None)

        def die_with_actor() -> None:
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: of the thread that forks, which waits below

        environ = {**os.environ, "AREAL_NODE_RANK": str(rank), "AREAL_FIRST_NODE": first}
        argv = [python, "-P", "-m", "areal.runtime.backends.node", run_dir, "--watch"]
        with subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, preexec_fn=die_with_actor) as process:
            self._process = process
            return process.wait()

    def kill(self, folder: str) -> None:
        """Kill the supervisor, so that it writes no record, and with it its component."""
        try:
            with open(f"{folder}/id.json") as file:
                os.kill(int(json.load(file)["pid"]), signal.SIGKILL)
        except (OSError, ValueError, KeyError):
            if self._process is not None:
                self._process.terminate()


def report(run_dir: str, reason: str) -> None:
    """Write ``driver.json``. It is replaced as a whole, since the backend may read it at any time."""
    temporary = f"{run_dir}/driver.json.tmp{os.getpid()}"
    with open(temporary, "w") as file:
        json.dump({"reason": reason, "at": time.time()}, file)
    os.rename(temporary, f"{run_dir}/driver.json")


def folder_of(run_dir: str, rank: int) -> str:
    return run_dir if rank == 0 else f"{run_dir}/{os.path.basename(run_dir)}-node-{rank}"


def main(argv: Sequence[str]) -> int:
    run_dir, nodes, bundle, strategy, namespace, python = argv
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    uid, count, each = os.path.basename(run_dir), int(nodes), json.loads(bundle)
    asked = ", ".join(f"{name} {size:g}" for name, size in sorted(each.items()))
    report(run_dir, f"Resources: {count} x ({asked}), {strategy}")
    ray.init(address="auto", namespace=namespace, log_to_driver=True, logging_level=logging.WARNING)
    group = placement_group([each] * count, strategy=strategy, name=uid)
    ray.get(group.ready())
    report(run_dir, "")
    wanted = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, object] = {wanted[name]: size for name, size in each.items() if name in wanted}
    custom = {name: size for name, size in each.items() if name not in wanted}
    actors: list[Any] = [
        ray.remote(NodeProgram)
        .options(
            **options,
            resources=custom,
            max_concurrency=4,
            name=f"{uid}-node-{rank}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote()
        for rank in range(count)
    ]
    try:
        first = ray.get(actors[0].address.remote(python))
        ends = {actor.run.remote(python, run_dir, rank, first): rank for rank, actor in enumerate(actors)}
        return _supervise(ray, RayError, run_dir, actors, ends)
    except RayError as error:
        print(f"areal: {_words(error)}", file=sys.stderr, flush=True)
        return NODE_LOST
    finally:
        remove_placement_group(group)


def _supervise(ray: Any, error_type: type[Exception], run_dir: str, actors: Sequence[Any], ends: dict[Any, int]) -> int:
    """Wait for the first actor to end. The others then have a grace period, and are killed."""
    done, left = ray.wait(list(ends), num_returns=1)
    rank = ends[done[0]]
    try:
        status = int(ray.get(done[0]))
    except error_type as error:
        print(f"areal: node {rank} was lost: {_words(error)}", file=sys.stderr, flush=True)
        status = NODE_LOST
    ended = os.path.exists(f"{run_dir}/stop.json") or status == 0
    _, left = ray.wait(left, num_returns=len(left), timeout=_ADVANCE_S if ended else 2.0) if left else ((), ())
    for end in left:
        actors[ends[end]].kill.remote(folder_of(run_dir, ends[end]))
    if left:
        ray.wait(left, num_returns=len(left), timeout=20.0)
    record = f"{folder_of(run_dir, rank)}/exit.json"
    if rank and status not in (0, NODE_LOST) and os.path.exists(record):
        shutil.copy(record, f"{run_dir}/exit.json.tmp")
        os.rename(f"{run_dir}/exit.json.tmp", f"{run_dir}/exit.json")
    return status


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[-400:]


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose ray.py is not Ray
    sys.exit(main(sys.argv[1:]))
