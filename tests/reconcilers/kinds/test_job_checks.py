"""What of a job is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.cli.main import run
from areal.errors import ArealError
from areal.reconcilers.desired import Wanted
from areal.reconcilers.kinds.job_config import JobConfig, require_runnable


def check(folder: Path, config: dict[str, Any], **spec: Any) -> None:
    whole = {"config": config, "workingDir": str(folder), **spec}
    job = Wanted("TrainJob/j", "TrainJob", "j", whole, {}, {})
    require_runnable(job, JobConfig.of(job))


@pytest.mark.parametrize(
    ("config", "spec", "code", "said"),
    [
        ({"scheduler": {"type": "ray"}}, {}, 3, "scheduler.type ray"),
        ({}, {"overrides": ["scheduler.type=slurm"]}, 3, "scheduler.type slurm"),
        ({"stats_logger": {"swanlab": {"mode": "online"}}}, {}, 2, "package swanlab"),
        ({}, {"overrides": ["stats_logger.trackio.mode=online"]}, 2, "package trackio"),
        ({}, {"driver": "nowhere:main"}, 2, "no module nowhere"),
        ({}, {"driver": "mine.deeper:main"}, 2, "no module mine.deeper"),
        ({}, {"driver": "nowhere.main"}, 2, "no module nowhere"),
        ({"driver": "nowhere:main"}, {}, 2, "no module nowhere"),
        ({}, {"driver": "nowhere.py"}, 2, "no file"),
        ({}, {"driver": "mine:main"}, 2, "no 'main' in"),
    ],
)
def test_job_that_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, config: dict[str, Any], spec: dict[str, Any], code: int, said: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    with pytest.raises(ArealError, match=said) as caught:
        check(tmp_path, config, **spec)
    assert caught.value.exit_code == code
    check(tmp_path, config, **spec, suspend=True)


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({"scheduler": {"type": "local"}, "stats_logger": {"wandb": {"mode": "disabled"}}}, {}),
        ({"scheduler": {"type": None}, "stats_logger": {"tensorboard": {"path": None}}}, {}),
        ({}, {"driver": "areal.training.drivers:grpo"}),
        ({}, {"driver": "mine:main"}),
        ({}, {"driver": "mine.deep.main"}),
        ({}, {"driver": "mine/deep.py:main"}),
        ({}, {"driver": "elsewhere:main", "env": {"PYTHONPATH": "more"}}),
    ],
)
def test_job_that_can_run_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], spec: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    main = "def main(args): ...\nraise SystemExit('imported')\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(main)
    (tmp_path / "mine" / "deep.py").write_text(main)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "elsewhere.py").write_text(main)
    check(tmp_path, config, **spec)


def test_unknown_option_of_train_is_a_usage_error_and_words_after_two_dashes_are_the_drivers(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("driver: nowhere:main\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_HOME", str(tmp_path / "home"))
        for verb in ("run", "start"):
            assert run(["train", verb, "--config", str(config), "--drvier", "x:y"]) == 2
            assert run(["train", verb, "--config", str(config), "--name", "n", "--", "--flag=1"]) == 2  # no such driver
    assert not (tmp_path / "home" / "objects").exists()
