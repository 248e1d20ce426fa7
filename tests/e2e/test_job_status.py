"""A job says what it does before its first step, and that it learns nothing."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.conftest import MODEL, Box

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def test_job_of_init_reports_stage_and_missing_gradient(box: Box) -> None:
    """An answer of one token has one digit, and the right ones have two: no answer has a reward."""
    box.ok("init", "trainjob", "--out", "job.yaml")
    overrides = [f"actor.path={MODEL}", "total_train_steps=12", "gconfig.max_new_tokens=1"]
    box.ok("apply", "-f", "job.yaml", "--set", f"trainjob/my-job:spec.overrides={json.dumps(overrides)}")

    stages: set[str] = set()
    deadline = time.monotonic() + 120
    while (row := json.loads(box.areal("train", "status", "my-job", "-o", "json").out))["step"] is None:
        assert time.monotonic() < deadline and row["phase"] == "Running", row
        stages |= {row["stage"]} - {None}
    assert stages & {
        "importing the driver areal.training.drivers:grpo",
        f"loading actor from {MODEL}",
        "publishing the weights",
        "sampling the first answers",
    }, stages
    box.ok("wait", "trainjob/my-job", "--for", "completed", "--timeout", "2m")

    row = json.loads(box.ok("train", "status", "my-job", "-o", "json").out)
    assert row["stage"] is None and row["warnings"] == ["no gradient: all groups alike for 12 steps"]
    assert "no gradient: all groups alike for 12 steps" in box.ok("train", "status", "my-job").out
    assert "warning: no gradient: all groups alike for 10 steps" in box.ok("logs", "trainjob/my-job").out
