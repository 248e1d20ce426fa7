"""What can be known of a job before anything starts: its driver's module, its scheduler, its trackers' packages.

A driver is looked for as its process will: from the working folder, then PYTHONPATH, then the interpreter's own path.
Nothing of it is imported; what its module says when it is, the driver's process tells.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from areal.errors import InvalidManifest, UsageFault
from areal.reconcilers.desired import Wanted
from areal.reconcilers.job_config import JobConfig

_TRACKERS = {  # the setting, what turns the tracker off, its package
    "wandb": ("stats_logger.wandb.mode", "disabled"),
    "swanlab": ("stats_logger.swanlab.mode", "disabled"),
    "trackio": ("stats_logger.trackio.mode", "disabled"),
    "tensorboard": ("stats_logger.tensorboard.path", None),
}


def require_runnable(job: Wanted, config: JobConfig) -> None:
    """Raises UsageFault, InvalidManifest."""
    if job.spec.get("suspend"):
        return
    scheduler = config.get("scheduler.type")
    if scheduler not in (None, "", "local"):
        raise InvalidManifest(
            f"{job.ref}: scheduler.type {scheduler} is not there yet; nothing was started",
            hint="scheduler.type=local runs it on this machine",
        )
    for package, (key, off) in _TRACKERS.items():
        if config.get(key) not in (None, off, "") and importlib.util.find_spec(package) is None:
            raise UsageFault(
                f"{job.ref}: {key} is {config.get(key)}, and the package {package} is not installed",
                hint=f"pip install {package}; metrics.jsonl is written in any case",
            )
    driver = job.spec.get("driver") or config.get("driver")
    if isinstance(driver, str):
        _require_module(job, driver)


def _require_module(job: Wanted, driver: str) -> None:
    """Raises UsageFault where the driver's module, or its file, is not there."""
    folder = Path(str(job.spec.get("workingDir") or Path.cwd()))
    file = driver.partition(":")[0]
    if file.endswith(".py"):
        if not (folder / file).is_file():
            raise UsageFault(f"{job.ref}: driver {driver!r}: there is no file {folder / file}")
        return
    name = file if ":" in driver else driver.rpartition(".")[0]
    given = (job.spec.get("env") or {}).get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    places: list[str] | None = [str(folder), *(str(folder / each) for each in str(given).split(os.pathsep)), *sys.path]
    parts = name.split(".")
    for count, _ in enumerate(parts, 1):
        module = ".".join(parts[:count])
        found = PathFinder.find_spec(module, places)
        if found is None:
            raise UsageFault(
                f"{job.ref}: driver {driver!r}: there is no module {module}",
                hint=f"looked in {folder}, PYTHONPATH and where packages are installed",
            )
        places = list(found.submodule_search_locations or ()) or None
        if places is None:
            return  # a plain module: what follows are its attributes, or an error of the driver's own
