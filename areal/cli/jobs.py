"""Training jobs as the verbs of ``areal train`` see them: manifests from flags, rows, the numbers that a job writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.cli import view
from areal.errors import UsageFault
from areal.resources.kinds import API_VERSION, Ref, check_name, name_problem

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation
    from areal.reconcilers.job_phase import JobStanding
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.records import StoredObject

KIND = "TrainJob"
_LONGEST_NAME = 63
_WAITS = {
    "time/rollout": "rollouts",
    "time/weights": "weight updates",
    "time/save": "saving",
    "time/checkpoint": "checkpoints",
    "time/eval": "evaluation",
}
_WORTH_TELLING = 0.25  # of a step


def ref_of(name: str) -> Ref:
    return Ref(KIND, check_name(name))


def job_manifest(
    config: str, *, name: str | None, driver: str | None, overrides: Sequence[str], restart: Mapping[str, Any]
) -> dict[str, Any]:
    """Raises UsageFault for a configuration that cannot be read, or that says no driver."""
    from areal.reconcilers.driver_choice import choose_driver, read_config

    path = Path(config).absolute()
    content = read_config(path)
    choose_driver(driver, content, overrides, config)
    spec: dict[str, Any] = {"config": str(path), "workingDir": os.getcwd(), "restart": dict(restart)}  # noqa: PTH109
    if driver:
        spec["driver"] = driver
    if overrides:
        spec["overrides"] = list(overrides)
    found = name or name_from(content, path)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": check_name(found)}, "spec": spec}


def name_from(config: Mapping[str, Any], path: Path) -> str:
    """What the configuration calls its experiment and trial, else the file's name."""
    parts = [config.get("experiment_name"), config.get("trial_name")]
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


def job_row(cli: Invocation, found: StoredObject, runs: Mapping[str, RunState]) -> dict[str, Any]:
    """One job, typed: where it is, and the last step's numbers."""
    from areal.reconcilers.job_phase import exit_code
    from areal.reconcilers.status import object_status

    mine = view.runs_of(runs, [found.ref])
    status = object_status(cli.home, found, mine, probe=False)
    now = standing_of(found, mine)
    state = now.run.state if now.run is not None else None
    last = newest_step(folder_of(cli.home, found.name) / "metrics.jsonl")
    return {
        "name": found.name,
        "phase": status.phase,
        "attempt": now.attempt or None,
        "step": last.get("step"),
        "reward": last.get("reward/mean"),
        "tokensPerSecond": last.get("tokens_per_second"),
        "staleness": last.get("staleness/max"),
        "waitingFor": waiting_for(last) if status.phase == "Running" else None,
        "message": status.message,
        "exitCode": exit_code(state) if state is not None else None,
        "pid": state.pid if state is not None else None,
        "folder": str(folder_of(cli.home, found.name)),
        "ageSeconds": status.age_s,
    }


def steps_of(path: Path) -> list[dict[str, Any]]:
    """The last line of each step, in order: a job that resumes writes some steps again. A torn line is left out."""
    by_step = {int(found["step"]): found for found in _lines(path)}
    return [by_step[step] for step in sorted(by_step)]


def newest_step(path: Path) -> dict[str, Any]:
    """Where the job is: after a resume that is not the highest step that it ever took. Empty before the first."""
    return next(reversed(_lines(path)), {})


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole ones, as they were written."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            found = json.loads(line)
            int(found["step"])
            lines.append(found)
    return lines


def waiting_for(step: Mapping[str, Any]) -> str | None:
    """What took the most of the last step beside training, where that is worth telling."""
    whole = float(step.get("time/step") or 0.0)
    shares = {what: float(step.get(name) or 0.0) / whole for name, what in _WAITS.items()} if whole > 0 else {}
    what = max(shares, key=lambda each: shares[each], default="")
    return f"{what} ({shares[what]:.0%} of a step)" if what and shares[what] >= _WORTH_TELLING else None
