"""``metrics.jsonl`` has each step once, also of a run that took some again; the progress line; the bottleneck."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

from areal.cli.train import step_of
from areal.state.job_metrics import eta_s, newest_step, steps_of
from areal.training.metrics import MetricsLog, ProgressLine, bottleneck, step_line


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
    assert [(line["step"], line["attempt"], line["loss"]) for line in steps_of(path)] == [
        (1, 1, 1.0),
        (2, 1, 2.0),
        (3, 2, -3.0),
        (4, 2, -4.0),
    ]
    assert {line["total_steps"] for line in steps_of(path)} == {6}


def test_driver_and_trainer_metrics_form_one_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, 1, []).write(1, {"loss": 9.0, "gone": 1.0})
    trainer, driver = MetricsLog(path, 2, []), MetricsLog(path, 2, [])
    trainer.rewind(-1)  # replaces the file
    for step in (1, 2):
        trainer.write(step, {"loss": float(step)}, 6)
        driver.write(step, {"own": -float(step)})
    lines = steps_of(path)
    assert [(line["step"], line["loss"], line["own"], line["total_steps"]) for line in lines] == [
        (1, 1.0, -1.0, 6),
        (2, 2.0, -2.0, 6),
    ]
    assert newest_step(path) == lines[-1] and "gone" not in lines[0]


def test_job_progress_shows_step_total_and_eta() -> None:
    assert step_of({"step": 12, "totalSteps": 200}) == "12/200"
    assert step_of({"step": 12, "totalSteps": None}) == "12"
    assert step_of({"step": None, "totalSteps": None}) is None
    assert eta_s({"step": 12, "total_steps": 200, "time/step": 0.5}) == 94.0
    assert eta_s({"step": 12, "time/step": 0.5}) is None
    assert eta_s({}) is None


def test_bottleneck_names_longest_phase() -> None:
    assert bottleneck({"time/step": 2.0, "time/rollout": 1.42, "time/weights": 0.2}) == "waited 71% for rollouts"
    assert bottleneck({"time/step": 2.0, "time/rollout": 0.1}) == "training"
    assert bottleneck({}) == ""


def test_step_line_shows_available_metrics() -> None:
    metrics = {"reward/mean": 0.4123, "tokens_per_second": 12345.0, "staleness/max": 2.0, "time/step": 0.02}
    assert step_line(12, 200, metrics) == "step 12/200  reward 0.4123  12345 tokens/s  staleness 2  20ms/step  training"


def test_progress_without_terminal_is_at_most_a_hundred_lines() -> None:
    stream = io.StringIO()
    progress = ProgressLine(1000, stream)
    for step in range(1, 1001):
        progress.step(step, {})
    assert len(stream.getvalue().splitlines()) == 100


def test_rewritten_step_is_read_from_last_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 2, [])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "loss": 9.0}) + '\n{"step": 3, "lo\n')
    log.write(1, {"loss": float("nan")})
    log.write(2, {"loss": 1.0})
    log.close()
    lines = steps_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert math.isnan(lines[0]["loss"]) and lines[1]["loss"] == 1.0
