"""What is told of an object while it is waited for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.reconcilers.context import Progress
from areal.reconcilers.status import _progress
from areal.resources.kinds import Ref
from areal.state.home import Home

JOB = "TrainJob/learn"
STEP = {"step": 12, "total_steps": 200, "time/step": 0.5, "reward/mean": 0.41, "bottleneck": "training"}


@pytest.mark.parametrize(
    ("phase", "step", "told"),
    [
        ("Running", STEP, Progress(JOB, "step", 12, 200, 90.0, "reward 0.410, training", 94.0)),
        ("Running", {"step": 12}, Progress(JOB, "step 12", 12, None, 90.0)),
        ("Running", {}, Progress(JOB, "waiting for completed", elapsed_s=7.0)),
        ("Pending", STEP, Progress(JOB, "waiting for completed", elapsed_s=7.0)),
    ],
)
def test_job_that_runs_tells_its_step_its_age_and_what_is_left(
    tmp_path: Path, phase: str, step: dict[str, Any], told: Progress
) -> None:
    home = Home(tmp_path)
    home.job_metrics("learn").parent.mkdir(parents=True)
    home.job_metrics("learn").write_text(json.dumps(step) + "\n" if step else "")
    status: Any = SimpleNamespace(phase=phase, age_s=90.0)
    assert _progress(home, Ref("TrainJob", "learn"), status, "completed", 7.0) == told
