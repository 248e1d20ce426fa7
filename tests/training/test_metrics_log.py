"""``metrics.jsonl`` has each step once, also of a run that took some again."""

from __future__ import annotations

from pathlib import Path

from areal.cli.train import step_of
from areal.state.job_metrics import eta_s
from areal.training.metrics import MetricsLog, read_metrics


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, 1, [])
    for step in (1, 2, 3, 4):
        first.write(step, {"loss": float(step)}, 6)
    first.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed
    second = MetricsLog(path, 2, [])
    second.rewind(2)
    for step in (3, 4):
        second.write(step, {"loss": -float(step)}, 6)
    second.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [(line["step"], line["attempt"], line["loss"]) for line in read_metrics(path)] == [
        (1, 1, 1.0),
        (2, 1, 2.0),
        (3, 2, -3.0),
        (4, 2, -4.0),
    ]
    assert {line["total_steps"] for line in read_metrics(path)} == {6}


def test_progress_of_a_job_is_step_n_of_m_and_what_is_left() -> None:
    assert step_of({"step": 12, "totalSteps": 200}) == "12/200"
    assert step_of({"step": 12, "totalSteps": None}) == "12"
    assert step_of({"step": None, "totalSteps": None}) is None
    assert eta_s({"step": 12, "total_steps": 200, "time/step": 0.5}) == 94.0
    assert eta_s({"step": 12, "time/step": 0.5}) is None
    assert eta_s({}) is None
