"""``metrics.jsonl`` has each step once, also of a run that took some again; the progress line; the bottleneck."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"step": 2.0, "rollout": 1.42, "weights": 0.2}, "waited 71% for rollouts"),
        ({"step": 2.0, "rollout": 0.5, "weights": 0.6}, "waited 30% for weight updates"),
        ({"step": 2.0, "save": 0.5}, "waited 25% for saving"),  # a quarter
        ({"step": 2.0, "checkpoint": 2.0}, "waited 100% for checkpoints"),
        ({"step": 2.0, "eval": 0.49}, "training"),
        ({"step": 2.0, "rollout": 0.4, "weights": 0.4, "eval": 0.4}, "training"),
        ({"step": 2.0, "train": 2.0}, "training"),
        ({"step": 0.0, "rollout": 1.0}, ""),
        ({}, ""),
    ],
)
def test_bottleneck_is_the_longest_wait_of_at_least_a_quarter(times: dict[str, float], expected: str) -> None:
    assert bottleneck({f"time/{name}": seconds for name, seconds in times.items()}) == expected


def test_step_line_shows_available_metrics() -> None:
    metrics = {"reward/mean": 0.4123, "tokens_per_second": 12345.0, "staleness/max": 2.0, "time/step": 0.02}
    assert step_line(12, 200, metrics) == "step 12/200  reward 0.4123  12345 tokens/s  staleness 2  20ms/step  training"


def test_progress_without_terminal_is_at_most_a_hundred_lines() -> None:
    stream = io.StringIO()
    progress = ProgressLine(1000, stream)
    for step in range(1, 1001):
        progress.step(step, {})
    assert len(stream.getvalue().splitlines()) == 100


@pytest.mark.parametrize(
    ("total", "shown"),
    [(3, [1, 2, 3]), (150, [*range(1, 151)]), (250, [*range(2, 251, 2)]), (301, [*range(3, 301, 3), 301])],
)
def test_progress_shows_each_percent_and_the_last_step(total: int, shown: list[int]) -> None:
    stream = io.StringIO()
    progress = ProgressLine(total, stream)
    for step in range(1, total + 1):
        progress.step(step, {})
    progress.close()
    assert stream.getvalue() == "".join(f"step {step}/{total}\n" for step in shown)


def test_progress_on_a_terminal_redraws_one_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = ProgressLine(9, stream)
    for step in (1, 2):
        progress.step(step, {"loss": 0.5})
    progress.info("saved")
    progress.close()
    lines = "".join(f"\r\x1b[Kstep {step}/9  loss 0.5" for step in (1, 2))
    assert stream.getvalue() == f"{lines}\nsaved\n"


def test_run_goes_on_behind_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n\xff\xfe{"step": 2}\n{"step": 2, "loss": 2.0}\n{"step": 3}\n')
    log = MetricsLog(path, 2, [])
    log.rewind(2)
    log.close()
    assert [(line["step"], line["loss"]) for line in steps_of(path)] == [(1, 1.0), (2, 2.0)]


def test_rewritten_step_is_read_from_last_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 2, [])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "loss": 9.0}) + '\n{"step": 3, "lo\n')
    log.write(1, {"loss": float("nan")})
    log.write(2, {"loss": 1.0})
    log.close()
    lines = steps_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert math.isnan(lines[0]["loss"]) and lines[1]["loss"] == 1.0
