"""A job's curves: a line of the terminal each, or a picture."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.cli.curves import CurveGroup, curves_of, draw, grouped, span_of, sparkline
from areal.errors import ArealError
from areal.installation import install_command
from areal.rollout.dump import write_step
from areal.state.home import Home
from areal.state.job_curves import JobCurves, read_curves
from areal.state.records import StoredObject
from areal.trajectories.record import Episode, Interaction
from tests.cli.conftest import Areal, Spawner

STEPS = [
    {"step": step, "attempt": 1, "time": 1.0, "reward/mean": step / 50, "time/step": 0.1, "loss": 1.0 / step}
    for step in range(1, 51)
]


def written(folder: Path, steps: list[dict[str, Any]]) -> JobCurves:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return read_curves(path)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[CurveGroup]:
    return grouped({"job": curves_of(written(tmp_path_factory.mktemp("job"), STEPS))})


def test_curves_show_values_of_each_step(tmp_path: Path) -> None:
    steps = written(tmp_path, [*STEPS, {"step": 51, "loss": "nan", "note": "x", "done": True}])
    curves = curves_of(steps)
    assert sorted(curves) == ["loss", "reward/mean", "time/step"]
    assert curves["reward/mean"][-1] == (50, 1.0)
    assert list(curves_of(steps, ["loss"])) == ["loss"]


def test_sparkline_rises_with_values_within_width() -> None:
    rising = [(step, float(step)) for step in range(1, 4)]
    assert sparkline(rising, (1, 3), (1.0, 3.0)) in ("▁▄█", "▁▅█")
    long = [(step, float(step)) for step in range(1000)]
    assert len(sparkline(long, (0, 999), (0.0, 999.0), 60)) == 60
    assert sparkline([(1, 2.0), (2, 2.0)], (1, 2), (2.0, 2.0)) == "▁▁"
    assert sparkline([(1, -1e308), (2, 1e308)], (1, 2), (-1e308, 1e308)) == "▁█"  # their difference is infinite


def test_late_spike_does_not_flatten_a_curve() -> None:
    rising = [(step, step / 100) for step in range(100)]
    (group,) = grouped({"job": {"loss": [*rising, (100, 1e6)]}})
    assert group.scale == (0.0, 0.99)
    assert sparkline(group.series[0].curve, (0, 100), group.scale, 10) == "▁▂▃▄▄▅▆▆▇█"


def test_curves_of_different_lengths_share_axis() -> None:
    whole, half = [(step, 1.0) for step in range(1, 101)], [(step, 1.0) for step in range(1, 51)]
    late, rare = [(step, 1.0) for step in range(51, 101)], [(10, 0.0), (100, 1.0)]
    assert sparkline(half, (1, 100), (0.0, 1.0), 10) == "█" * 5
    assert sparkline(late, (1, 100), (0.0, 1.0), 10) == " " * 5 + "█" * 5
    assert sparkline(rare, (1, 100), (0.0, 1.0), 10) == "▁" + " " * 8 + "█"
    assert len(sparkline(whole, (1, 100), (0.0, 1.0), 10)) == 10


def test_series_are_grouped_by_unit_with_jobs_side_by_side() -> None:
    one = {"time/step": [(1, 1.0)], "reward/mean": [(1, 0.0)], "eval/reward/mean": [(1, 0.5)], "own": [(1, 2.0)]}
    other = {"reward/mean": [(1, 9.0), (2, 8.0)], "x/avg": [(1, 1.0)], "x/max": [(2, 1.0)]}
    groups = grouped({"a": one, "b": other})
    assert [group.title for group in groups] == ["reward", "own", "x", "time (s)"]
    assert [(each.metric, each.job) for each in groups[0].series] == [
        ("eval/reward/mean", "a"),
        ("reward/mean", "a"),
        ("reward/mean", "b"),
    ]
    assert groups[0].scale == (0.0, 9.0)
    assert span_of(groups) == (1, 2)


def _job(tmp_path: Path, name: str, steps: int, **more: float) -> str:
    folder = tmp_path / name
    folder.mkdir()
    lines = [
        {"step": step, "attempt": 1, "reward/mean": step / 50, "loss": 1.0 / step, **more}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_runs_are_compared_series_by_series(areal: Areal, tmp_path: Path) -> None:
    a, b = _job(tmp_path, "a", 50), _job(tmp_path, "b", 25, entropy=1.0)
    lines = areal("train", "metrics", a, b).out.splitlines()
    rewards = [line for line in lines if "reward/mean" in line]
    assert [line.split()[1] for line in rewards] == [a, b]
    assert len(rewards[0]) - len(rewards[1]) == 25
    assert rewards[1][-1] in "▄▅"  # half as high: one scale
    rows = areal("train", "metrics", a, b, "--json").items
    assert [(row["metric"], row["job"], len(row["steps"])) for row in rows if row["metric"] != "loss"] == [
        ("reward/mean", a, 50),
        ("reward/mean", b, 25),
        ("entropy", b, 25),
    ]


def test_values_that_are_not_finite_are_named(areal: Areal, tmp_path: Path) -> None:
    lines = [{"step": step, "reward/mean": math.nan if step == 3 else 0.5, "loss": math.inf} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = areal("train", "metrics", f"{tmp_path}/")
    assert shown.code == 0 and "reward/mean is NaN or infinite, first at step 3" in shown.err, shown
    assert "loss is NaN or infinite, first at step 1" in shown.err
    alone = areal("train", "metrics", f"{tmp_path}/", "--metric", "loss")
    assert alone.code == 4 and "loss is NaN or infinite" in alone.err and "no metric" not in alone.err


def test_watch_waits_for_the_first_metrics(home: Home, record: Callable[..., StoredObject], spawn: Spawner) -> None:
    record("TrainJob", "learn")
    watching = spawn("train", "metrics", "learn", "-w", PYTHONUNBUFFERED="1").popen
    assert watching.stderr is not None and watching.stdout is not None
    assert watching.stderr.readline() == "waiting for the first metrics of learn\n"
    file = home.job_metrics("learn")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"step": 1, "attempt": 1, "reward/mean": 0.5}) + "\n")
    assert "METRIC" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 130


def test_unknown_metric_is_not_found(areal: Areal, tmp_path: Path) -> None:
    a, b = _job(tmp_path, "a", 2), _job(tmp_path, "b", 2, entropy=1.0)
    assert "entropy" in areal("train", "metrics", a, b, "--metric", "entropy").out
    refused = areal("train", "metrics", a, b, "--metric", "loss", "--metric", "lost")
    assert refused.code == 4 and "no metric lost" in refused.err
    assert areal("train", "metrics", a, b + "/none").code == 4


def test_job_trajectories_are_filtered_by_step_group_and_kind(
    areal: Areal, home: Home, record: Callable[..., StoredObject]
) -> None:
    record("TrainJob", "learn")
    refused = areal("train", "trajectories", "learn")
    assert refused.code == 4 and "rollout.dump_to_file=true" in refused.err
    folder = home.jobs / "learn" / "trajectories"
    for step in (1, 2):
        answers = [(f"t-{step}/{sample}", sample) for sample in (0, 1)]
        told = [Episode(name, (_turn(0.5),), 7, at, 1.0, group=f"t-{step}", step=step) for name, at in answers]
        write_step(folder, step, told)
    write_step(folder, 2, [Episode("t-eval-0/0", (_turn(None),), 0, 0, 0.0, step=2, is_eval=True)], is_eval=True)

    def names(*words: str) -> list[str]:
        return areal("train", "trajectories", "learn", "-o", "name", *words).out.split()

    assert names() == ["t-1/0", "t-1/1", "t-2/0", "t-2/1", "t-eval-0/0"]
    assert names("--step", "2", "--training") == ["t-2/0", "t-2/1"] == names("--group", "t-2")
    assert names("--eval") == ["t-eval-0/0"]
    shown = areal("train", "trajectories", "learn", "--step", "2").out
    assert "training step 2  ·  sample 1 of group t-2" in shown and "advantage 0.5" in shown
    assert "evaluation after step 2" in shown
    page = home.root / "page.html"
    assert areal("train", "trajectories", "learn", "--html", str(page)).code == 0
    assert '"title":"learn"' in page.read_text() and '"leftOut":""' in page.read_text()
    narrow = areal("train", "trajectories", "learn", "--html", str(home.root / "two.html"), "--limit", "2")
    assert "These are 2 of the job's 2" not in narrow.err and "2 trajectories in" in narrow.err
    assert "sample 1 of group t-2" in page.read_text() and '"advantage":0.5' in page.read_text()


def _turn(advantage: float | None) -> Interaction:
    columns: dict[str, Any] = {"loss_mask": [0, 1], "logprobs": [0.0, -0.5], "versions": [-1, 3], "turn_ids": [-1, 0]}
    return Interaction("a", model="m", rewarded=True, reward=1.0, advantage=advantage, input_ids=[1, 2], **columns)


def test_plot_draws_objective_first(tmp_path: Path, groups: list[CurveGroup]) -> None:
    pytest.importorskip("matplotlib")
    draw(groups, str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    draw(groups, str(tmp_path / "p.svg"))
    text = (tmp_path / "p.svg").read_text()
    assert "<!-- job -->" in text, "its title is the run's name"
    assert text.index("reward/mean") < text.index("loss") < text.index("time/step")


def test_unwritable_plot_error_names_path(tmp_path: Path, groups: list[CurveGroup]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ArealError, match=r"cannot draw into .*/none/p.png"):
        draw(groups, str(tmp_path / "none" / "p.png"))
    with pytest.raises(ArealError, match=r"cannot draw into .*p.nothing"):
        draw(groups, str(tmp_path / "p.nothing"))


def test_plot_without_matplotlib_suggests_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[CurveGroup]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ArealError, match="not installed") as caught:
        draw(groups, str(tmp_path / "p.png"))
    assert caught.value.hint == install_command("plot")
