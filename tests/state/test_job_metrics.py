"""What a job wrote, read while it writes."""

from __future__ import annotations

import json
from pathlib import Path

from areal.state.job_metrics import bottleneck, newest_step, steps_of
from areal.training.metrics import MetricsLog


def test_resumed_job_is_at_last_written_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_step(path) == {} and steps_of(path) == []
    path.write_text('{"step": 1}\n{"step": 2, "loss": 5}\n{"step": 9}\n[1]\n{"step": 1e999}\n{"step": 2}\n{"ste')
    assert newest_step(path) == {"step": 2}
    assert steps_of(path) == [{"step": 1}, {"step": 2}, {"step": 9}]


def test_newest_step_of_a_long_run_is_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "pad": "x" * 100}) for step in range(2_000)]
    path.write_text("\n".join(lines) + '\n{"step": 2000, "pad')
    assert newest_step(path)["step"] == 1_999
    assert len(steps_of(path)) == 2_000


def test_bottleneck_comes_from_step_record(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", 1, [])
    log.write(1, {"time/step": 2.0, "time/rollout": 1.42})
    assert bottleneck(newest_step(tmp_path / "metrics.jsonl")) == "waited 71% for rollouts"
    log.write(2, {"time/step": 2.0, "time/rollout": 0.1})
    assert bottleneck(newest_step(tmp_path / "metrics.jsonl")) == "training"
    log.write(3, {"loss": 1.0})
    log.close()
    assert bottleneck(newest_step(tmp_path / "metrics.jsonl")) is None
