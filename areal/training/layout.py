"""As many processes as a run's configuration lays out (``actor.backend: fsdp:d4``): a plain ``python driver.py`` starts
itself again as that many ranks, as ``areal train run`` does; what was started otherwise must agree."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from areal.api.alloc_mode import train_backend
from areal.errors import UsageFault

_JOB = "AREAL_RUN_FOLDER"  # a job has as many as its manifest says


def processes_of(config: Any) -> int | None:
    """None where the configuration says nothing about it."""
    engine = getattr(config, "actor", None) or getattr(config, "model", None)
    backend, allocation = getattr(engine, "backend", "") or "", config.allocation_mode or ""
    return train_backend(backend, allocation).world_size if backend or allocation else None


def ensure_layout(config: Any) -> None:
    """Returns in a process of a run that is laid out as ``config`` says. The main script of a single process is
    replaced by the ranks; any other process raises UsageFault."""
    wanted, started = processes_of(config), int(os.environ.get("WORLD_SIZE", "1"))
    if wanted is None or wanted == started or _JOB in os.environ:
        return
    script = _main_script()
    if started > 1 or script is None:
        raise UsageFault(
            f"the configuration lays out {wanted} training processes, and {started} "
            f"{'was' if started == 1 else 'were'} started",
            hint=f"areal train run starts as many; or torchrun --nproc-per-node={wanted}, or backend=fsdp:d{started}",
        )
    launch = [sys.executable, "-m", "areal.training.launch", "--processes", str(wanted)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*launch, "--", "--driver", str(script), "--", *sys.argv[1:]])


def _main_script() -> Path | None:
    """The file of ``python driver.py``; None in a notebook, a test or ``python -m``."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or not file.endswith(".py"):
        return None
    return Path(file).absolute()
