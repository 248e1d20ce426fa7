"""What can be known of a job before anything starts: its driver's module, its scheduler, its trackers' packages.

A driver is looked for as its process will: from the working folder, then PYTHONPATH, then the interpreter's own path.
Nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from areal.errors import InvalidManifest, UsageFault
from areal.installation import install_command
from areal.reconcilers.desired import Wanted
from areal.reconcilers.job_config import JobConfig
from areal.resources.importable import file_fault, import_fault, module_of

_TRACKERS = {  # the setting, what turns the tracker off, its package
    "wandb": ("stats_logger.wandb.mode", "disabled"),
    "swanlab": ("stats_logger.swanlab.mode", "disabled"),
    "trackio": ("stats_logger.trackio.mode", "disabled"),
    "tensorboard": ("stats_logger.tensorboard.path", None),
}
_TRAINING = ("omegaconf", "numpy", "torch", "transformers", "safetensors")  # what every built-in driver imports


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
        _require_driver(job, driver)
    else:
        _require_extra(job)


def _require_driver(job: Wanted, driver: str) -> None:
    """Raises UsageFault where the driver's module, its file, or the function in it is not there."""
    file, _, function = driver.partition(":")
    if not file.endswith(".py"):
        fault = import_fault(driver, import_places(job))
        hint = f"looked in {_folder(job)}, PYTHONPATH and where packages are installed"
    elif (script := _folder(job) / Path(file).expanduser()).is_file():
        fault, hint = file_fault(script, function), None
    else:
        fault, hint = f"there is no file {script}", None
    if fault is not None:
        raise UsageFault(f"{job.ref}: driver {driver!r}: {fault}", hint=hint)


def import_places(job: Wanted) -> list[str]:
    """Where its driver's process looks for modules."""
    folder = _folder(job)
    given = (job.spec.get("env") or {}).get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    return [str(folder), *(str(folder / each) for each in str(given).split(os.pathsep)), *sys.path]


def _folder(job: Wanted) -> Path:
    return Path(str(job.spec.get("workingDir") or Path.cwd()))


def _require_extra(job: Wanted) -> None:
    """Raises UsageFault where this installation cannot train at all."""
    places = import_places(job)
    for package in _TRAINING:
        if isinstance(module_of(package, places), str):
            raise UsageFault(f"{job.ref}: training needs the package {package}", hint=install_command("train"))
