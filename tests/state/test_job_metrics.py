"""What a job wrote, read while it writes."""

from __future__ import annotations

import json
from pathlib import Path

from areal.state.job_metrics import newest_step, steps_of, waiting_for


def test_job_that_has_resumed_is_at_the_step_that_it_wrote_last(tmp_path: Path) -> None:
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


def test_waiting_for_names_what_took_most_and_nothing_small() -> None:
    assert waiting_for({"time/step": 2.0, "time/rollout": 1.5, "time/eval": 0.1}) == "rollouts (75% of a step)"
    assert waiting_for({"time/step": 2.0, "time/rollout": 0.1}) is None
    assert waiting_for({}) is None
