"""Run as a script: a command that starts, stops or forgets a run of Slurm, and may die on the way.

``slurm_cli.py VERB HOME UID [CRASH_POINT]``. At ``CRASH_POINT`` it leaves with 137, as if killed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from areal.runtime.backends.base import RunSpec
from areal.runtime.backends.slurm import SlurmBackend


def main(verb: str, home: str, uid: str, crash_point: str = "") -> None:
    def crash(name: str) -> None:
        if name == crash_point:
            os._exit(137)

    backend = SlurmBackend(Path(home), None, crash)
    print("starting", flush=True)
    if verb == "start":
        ports = backend.claim_ports(1, owner="Model/qwen")
        backend.start(RunSpec(uid, "Model/qwen", "engine", 0, ("sleep", "1000"), ports=ports))
    elif verb == "stop":
        backend.stop(uid)
    else:
        backend.forget(uid)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
