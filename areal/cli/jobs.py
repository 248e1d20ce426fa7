"""Training jobs as the verbs of ``areal train`` see them: manifests from flags, and rows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.cli import view
from areal.errors import UsageFault
from areal.resources.kinds import API_VERSION, Ref, check_name, name_problem
from areal.state.job_metrics import bottleneck, eta_s, newest_step

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation
    from areal.reconcilers.job_phase import JobStanding
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.records import StoredObject

KIND = "TrainJob"
_LONGEST_NAME = 63
_NAMING = ("experiment_name", "trial_name")
_LAST_LINES, _LONGEST_WORD = 40, 300  # lines, characters
_ERROR = re.compile(r"error: |[A-Za-z_][\w.]*(Error|Exception|Interrupt|Failed): ")


def ref_of(name: str) -> Ref:
    return Ref(KIND, check_name(name))


def job_manifest(
    config: str | None, *, name: str | None, driver: str | None, overrides: Sequence[str], restart: Mapping[str, Any]
) -> dict[str, Any]:
    """Raises UsageFault for a configuration that cannot be read, or that says no driver."""
    from areal.reconcilers.driver_choice import choose_driver, overridden, read_config

    path = Path(config).absolute() if config else None
    content = read_config(path) if path is not None else {}
    choose_driver(driver, content, overrides, config or "a job without --config")
    spec: dict[str, Any] = {"workingDir": os.getcwd(), "restart": dict(restart)}  # noqa: PTH109
    if path is not None:
        spec["config"] = str(path)
    file = (driver or "").partition(":")[0]
    if file.endswith(".py") and not Path(file).expanduser().is_file():
        raise UsageFault(f"there is no driver {file}", hint="--driver path/to/driver.py, or module:function")
    if driver:
        spec["driver"] = driver
    if overrides:
        spec["overrides"] = list(overrides)
    called = {key: overridden(key, overrides) or content.get(key) for key in _NAMING}
    found = name or name_from(called, path or Path(file or "run"))
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": check_name(found)}, "spec": spec}


def name_from(config: Mapping[str, Any], path: Path) -> str:
    """What the configuration calls its experiment and trial, else the file's name."""
    parts = [config.get(key) for key in _NAMING]
    words = [str(part) for part in parts if isinstance(part, str | int) and "${" not in str(part)] or [path.stem]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())[:_LONGEST_NAME].strip("-")
    if name_problem(name) is not None:
        raise UsageFault(f"no name can be made of {path.name}", hint="give the job one: --name NAME")
    return name


def folder_of(home: Home, name: str) -> Path:
    """What the job makes."""
    return home.jobs / name


def drivers_of(cli: Invocation, ref: Ref) -> list[RunState]:
    return view.runs_of(view.read_runs(cli.home), [ref])


def standing_of(found: StoredObject, runs: Sequence[RunState]) -> JobStanding:
    from areal.reconcilers.job_phase import standing
    from areal.reconcilers.observed import ObservedRun

    return standing([ObservedRun(state) for state in runs], suspended=bool(found.spec.get("suspend")))


def _why(cli: Invocation, message: str, state: RunState | None) -> str:
    """The message with the driver's own last word on it."""
    from areal.runtime.backends import open_backend
    from areal.runtime.logs import tail

    if state is None:
        return message
    lines = tail(open_backend("local", cli.home.root).log_paths(state.spec.uid), _LAST_LINES)
    said = [line for line in lines if _ERROR.match(line)]
    return f"{message}: {said[-1].removeprefix('error: ')[:_LONGEST_WORD]}" if said else message


def step_of(row: Mapping[str, Any]) -> str | None:
    """``12/200``."""
    if row["step"] is None:
        return None
    return f"{row['step']}/{row['totalSteps']}" if row["totalSteps"] is not None else str(row["step"])


def job_row(cli: Invocation, found: StoredObject, runs: Mapping[str, RunState]) -> dict[str, Any]:
    """One job, typed: where it is, and the last step's numbers."""
    from areal.reconcilers.job_phase import exit_code
    from areal.reconcilers.status import object_status

    mine = view.runs_of(runs, [found.ref])
    status = object_status(cli.home, found, runs)
    now = standing_of(found, mine)
    state = now.run.state if now.run is not None else None
    last = newest_step(cli.home.job_metrics(found.name))
    return {
        "name": found.name,
        "phase": status.phase,
        "attempt": now.attempt or None,
        "step": last.get("step"),
        "totalSteps": last.get("total_steps"),
        "etaSeconds": eta_s(last) if status.phase == "Running" else None,
        "reward": last.get("reward/mean"),
        "tokensPerSecond": last.get("tokens_per_second"),
        "staleness": last.get("staleness/max"),
        "bottleneck": bottleneck(last) if status.phase == "Running" else None,
        "message": _why(cli, status.message, state) if status.phase == "Failed" else status.message,
        "exitCode": exit_code(state) if state is not None else None,
        "pid": state.pid if state is not None else None,
        "folder": str(folder_of(cli.home, found.name)),
        "ageSeconds": status.age_s,
    }
