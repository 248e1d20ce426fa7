"""Trackers beside ``metrics.jsonl``: optional, and named where their package is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal.api.cli_args import (
    SFTConfig,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.errors import UsageFault
from areal.training.metrics import open_trackers


def _config(**trackers: object) -> SFTConfig:
    return SFTConfig(experiment_name="e", trial_name="t", stats_logger=StatsLoggerConfig(**trackers))  # type: ignore[arg-type]


def test_no_tracker_is_opened_where_none_is_asked_for(tmp_path: Path) -> None:
    assert open_trackers(_config(), tmp_path) == []


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("tensorboard", TensorBoardConfig(path="tb")),
        ("wandb", WandBConfig(mode="offline")),
        ("swanlab", SwanlabConfig(mode="local")),
        ("trackio", TrackioConfig(mode="local")),
    ],
)
def test_tracker_whose_package_is_missing_is_an_error_that_names_it(
    name: str, section: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageFault, match=rf"stats_logger\.{name} needs the package {name}") as caught:
        open_trackers(_config(**{name: section}), tmp_path)
    assert caught.value.hint is not None and f"pip install {name}" in caught.value.hint
