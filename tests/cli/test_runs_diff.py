"""``areal train diff``: configurations, metrics at equal steps, significance over seeds."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Areal


def run(folder: Path, name: str, values: Sequence[float], seed: int = 1, lr: float = 1e-5, **more: object) -> str:
    path = folder / name
    path.mkdir()
    lines = [{"step": step, "attempt": 1, "reward/mean": value} for step, value in enumerate(values, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"seed": seed, "experiment_name": name, "actor": {"optimizer": {"lr": lr}, **more}}
    config["cluster"] = {"fileroot": str(path), "name_resolve": {"nfs_record_root": f"{path}/names"}}  # of each run
    (path / "config.yaml").write_text(json.dumps(config))
    return str(path)


def test_two_runs_are_compared_at_common_steps(areal: Areal, tmp_path: Path) -> None:
    a = run(tmp_path, "a", [0.1] * 20, kl_ctl=0.1)
    b = run(tmp_path, "b", [0.1 + step / 100 for step in range(1, 31)], lr=1e-4)
    found = areal("train", "diff", a, b, "--last", "2", "-o", "json").json
    assert found["config"] == [
        {"key": "actor.kl_ctl", "a": 0.1, "b": None},
        {"key": "actor.optimizer.lr", "a": 1e-5, "b": 1e-4},
    ]
    (metric,) = found["metrics"]
    assert (metric["from_step"], metric["to_step"], metric["steps"][-1]) == (19, 20, 20)
    assert metric["difference"] == pytest.approx(0.195)
    assert (metric["method"], metric["p"], found["method"]) == ("none", None, "none")
    page = areal("train", "diff", a, f"{b}/metrics.jsonl").out
    assert "no significance: a side has one run" in page and "▁" in page and "19-20" in page


def test_keys_are_not_compared_without_a_configuration(areal: Areal, tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", [0.1] * 3), run(tmp_path, "b", [0.2] * 3)
    (tmp_path / "b" / "config.yaml").unlink()
    assert areal("train", "diff", a, b, "-o", "json").json["config"] == []
    assert f"no config.yaml beside the metrics of {b}: no keys compared" in areal("train", "diff", a, b).out


def test_runs_are_paired_by_seed_or_compared_by_welch(areal: Areal, tmp_path: Path) -> None:
    chance = random.Random(1)
    levels = [chance.uniform(0, 1) for _ in range(4)]
    a = ",".join(run(tmp_path, f"a{seed}", [level] * 10, seed) for seed, level in enumerate(levels))
    order = [2, 0, 3, 1]  # of the seeds: pairs are found by seed, not by place
    gains = [0.05, 0.07, 0.06, 0.06]
    b = ",".join(run(tmp_path, f"b{seed}", [levels[seed] + gains[seed]] * 10, seed, lr=2e-5) for seed in order)
    (paired,) = areal("train", "diff", a, b, "-o", "json").json["metrics"]
    assert paired["method"] == "paired" and paired["difference"] == pytest.approx(0.06)
    # The differences have a deviation of 0.00816 and an error of 0.00408; t of 3 degrees is 3.182 at 0.975.
    assert (paired["low"], paired["high"]) == (
        pytest.approx(0.06 - 0.01299, abs=1e-5),
        pytest.approx(0.07299, abs=1e-5),
    )
    assert 0 < paired["p"] < 0.001
    (welch,) = areal("train", "diff", a, b, "--unpaired", "-o", "json").json["metrics"]
    assert welch["method"] == "welch" and welch["p"] > 0.5 and welch["low"] < 0 < welch["high"]
    document = areal("train", "diff", a, b, "-o", "json").json
    assert document["config"] == [{"key": "actor.optimizer.lr", "a": 1e-5, "b": 2e-5}]  # seeds are those of both sides
    assert paired["p_holm"] == paired["p"], "one metric"
    assert "paired by seed" in areal("train", "diff", a, b).out


def test_p_values_are_corrected_for_number_of_metrics(areal: Areal, tmp_path: Path) -> None:
    def several(name: str, gains: Sequence[float]) -> str:
        paths = [Path(run(tmp_path, f"{name}{seed}", [0.5], seed)) for seed in range(3)]
        for seed, path in enumerate(paths):
            line = {"step": 1, "reward/mean": 0.5 + gains[seed], "eval/reward/mean": 0.1 * seed, "kl": 1.0}
            (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return ",".join(map(str, paths))

    a, b = several("a", [0, 0, 0]), several("b", [0.1, 0.11, 0.12])
    words = ("--metric", "reward/mean", "--metric", "eval/reward/mean", "--metric", "kl", "--unpaired")
    rows = areal("train", "diff", a, b, *words, "-o", "json").json["metrics"]
    assert rows[0]["p_holm"] == 2 * rows[0]["p"], "of three metrics, one has no test"
    assert (rows[1]["p"], rows[1]["p_holm"], rows[2]["p_holm"]) == (1.0, 1.0, None)
    assert "P (HOLM)" in areal("train", "diff", a, b, *words).out


def test_diverged_run_is_named_with_first_bad_step(areal: Areal, tmp_path: Path) -> None:
    a = run(tmp_path, "a", [0.5] * 20)
    b = run(tmp_path, "b", [0.5] * 15 + [math.nan] * 5)
    found = areal("train", "diff", a, b, "-o", "json").json
    assert found["not_finite"] == [{"run": b, "metric": "reward/mean", "step": 16}]
    assert found["metrics"][0]["to_step"] == 15
    page = areal("train", "diff", a, b).out
    assert "reward/mean is NaN or infinite, first at step 16; such steps are not compared" in page
    assert "NaN" not in areal("train", "diff", a, a).out
    never = areal("train", "diff", a, run(tmp_path, "never", [math.nan] * 3))
    assert never.code == 0 and "first at step 1;" in never.out and "not recorded" not in never.out


@pytest.mark.parametrize(
    ("sides", "words", "code", "message"),
    [
        (("a", "nowhere/x"), [], 4, "nowhere/x"),
        (("a", "a,,a"), [], 2, "several different runs"),
        (("a", "b"), ["--metric", "loss"], 4, "not every run has the metric loss"),
        (("a", "empty"), [], 4, "has written no metrics yet"),
    ],
)
def test_missing_run_or_metric_is_named(
    areal: Areal, tmp_path: Path, sides: tuple[str, str], words: list[str], code: int, message: str
) -> None:
    made = {"a": run(tmp_path, "a", [1.0]), "b": run(tmp_path, "b", [1.0]), "empty": run(tmp_path, "empty", [])}
    a, b = (",".join(made.get(name, name) for name in side.split(",")) for side in sides)
    ran = areal("train", "diff", a, b, *words)
    assert ran.code == code and message in ran.err, ran.err


def test_metric_that_one_run_lacks_is_named(areal: Areal, tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", [0.1] * 3), run(tmp_path, "b", [0.2] * 3)
    line = {"step": 3, "attempt": 1, "reward/mean": 0.2, "eval/reward/mean": 0.3, "mine": 1.0}
    (tmp_path / "b" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = areal("train", "diff", a, b, "-o", "json").json
    assert found["not_everywhere"] == [{"metric": "eval/reward/mean", "without": [a]}]
    assert f"mine: not compared, because it is not recorded by {a}" in areal("train", "diff", a, b, "--all").out
    assert areal("train", "diff", a, b, "--metric", "reward/mean", "-o", "json").json["not_everywhere"] == []


def test_folder_of_deleted_job_is_named(areal: Areal, tmp_path: Path) -> None:
    jobs = tmp_path / "home" / "jobs"
    jobs.mkdir(parents=True)
    kept = run(jobs, "gone", [0.1] * 3)
    for words in (("metrics", "gone"), ("diff", "gone", kept)):
        ran = areal("train", *words)
        assert ran.code == 4 and f"hint: its metrics are kept in {kept}" in ran.err, ran.err
    assert areal("train", "metrics", kept).code == areal("train", "diff", kept, kept).code == 0
