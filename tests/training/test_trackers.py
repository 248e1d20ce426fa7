"""Trackers beside ``metrics.jsonl``: optional, named where their package is missing, told what is configured."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

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
from areal.training.metrics import MetricsLog, open_trackers


def _config(**trackers: object) -> SFTConfig:
    return SFTConfig(experiment_name="e", trial_name="t", stats_logger=StatsLoggerConfig(**trackers))  # type: ignore[arg-type]


def test_no_trackers_are_opened_by_default(tmp_path: Path) -> None:
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
def test_missing_tracker_package_is_named(
    name: str, section: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageFault, match=rf"stats_logger\.{name} needs the package {name}") as caught:
        open_trackers(_config(**{name: section}), tmp_path)
    assert caught.value.hint is not None and f"pip install {name}" in caught.value.hint


Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def recorded(monkeypatch: pytest.MonkeyPatch, name: str, *functions: str) -> list[Call]:
    """The calls of these functions of a package: with the signatures of the real one where it is installed."""
    calls: list[Call] = []
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        package = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, package)
    else:
        package = importlib.import_module(name)
    for function in functions:

        def record(*args: Any, _name: str = function, **kwargs: Any) -> mock.Mock:
            calls.append((_name, args, kwargs))
            return mock.Mock()

        real = getattr(package, function, None)
        stand_in = mock.create_autospec(real, side_effect=record) if real is not None else record
        monkeypatch.setattr(package, function, stand_in, raising=False)
    return calls


SECTIONS = {"wandb": WandBConfig, "swanlab": SwanlabConfig, "trackio": TrackioConfig}
FIELDS: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    "wandb": {
        "mode": ({}, "offline"),
        "entity": ({}, "our-team"),
        "project": ({}, "our-project"),
        "name": ({}, "our-name"),
        "job_type": ({}, "our-type"),
        "group": ({}, "our-group"),
        "notes": ({}, "a note"),
        "tags": ({}, ["one-tag", "other-tag"]),
        "config": ({}, {"lr": 1}),
        "id_suffix": ({}, "-second"),
    },
    "swanlab": {
        "mode": ({}, "local"),
        "project": ({}, "our-project"),
        "name": ({}, "our-name"),
        "config": ({}, {"lr": 1}),
        "logdir": ({}, "elsewhere"),
        "api_key": ({}, "sk-1"),
    },
    "trackio": {
        "mode": ({"mode": "online", "space_id": "us/old"}, "local"),
        "project": ({}, "our-project"),
        "name": ({}, "our-name"),
        "space_id": ({"mode": "online", "space_id": "us/old"}, "us/new"),
    },
}
"""Of each field of a tracker what is set before, and another value."""
DEFAULT_MODE = {"wandb": "online", "swanlab": "online", "trackio": "local"}


def calls_of(monkeypatch: pytest.MonkeyPatch, tracker: str, folder: Path, **settings: Any) -> list[Call]:
    if tracker == "trackio" and settings.get("mode") == "local":
        settings.pop("space_id", None)
    section = SECTIONS[tracker](**{"mode": DEFAULT_MODE[tracker], **settings})
    with monkeypatch.context() as patch:
        calls = recorded(patch, tracker, "init", "login")
        (_,) = open_trackers(_config(**{tracker: section}), folder)
    return calls


@pytest.mark.parametrize(("tracker", "field"), [(tracker, field) for tracker in FIELDS for field in FIELDS[tracker]])
def test_tracker_receives_setting(tracker: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACKIO_SPACE_ID", raising=False)
    beside, value = FIELDS[tracker][field]
    before, after = (
        [
            (name, args, {key: each for key, each in given.items() if key != "config" or field == "config"})
            for name, args, given in calls_of(monkeypatch, tracker, tmp_path, **settings)
        ]
        for settings in (beside, beside | {field: value})
    )
    assert before != after
    if (tracker, field) != ("trackio", "mode"):  # which has no such argument: its effect is a Space or none
        assert repr(value).strip("'") in repr(after) and repr(value).strip("'") not in repr(before)


def test_trackio_is_online_with_space_and_local_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "us/runs")
    for mode, space in (("online", "us/runs"), ("local", None)):
        ((_, _, given),) = calls_of(monkeypatch, "trackio", tmp_path, mode=mode)
        assert given["space_id"] == space
    monkeypatch.delenv("TRACKIO_SPACE_ID")
    with pytest.raises(UsageFault, match="mode online needs the name of a Space"):
        calls_of(monkeypatch, "trackio", tmp_path, mode="online")
    with pytest.raises(ValueError, match="space_id needs mode online"):
        TrackioConfig(mode="local", space_id="us/runs")


def test_tensorboard_writes_to_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tb"
    if importlib.util.find_spec("tensorboard") is None:
        monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", ModuleType("torch.utils.tensorboard"))
        calls = recorded(monkeypatch, "torch.utils.tensorboard", "SummaryWriter")
        (tracker,) = open_trackers(_config(tensorboard=TensorBoardConfig(path=str(path))), tmp_path)
        assert calls == [("SummaryWriter", (str(path),), {})]
        return
    (tracker,) = open_trackers(_config(tensorboard=TensorBoardConfig(path=str(path))), tmp_path)
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert list(path.glob("events.*"))


@pytest.mark.parametrize("tracker", ["wandb", "swanlab", "trackio"])
def test_tracker_receives_the_configuration_of_the_run_without_secrets(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "us/runs")
    secret = {"api_key": "sk-1"} if tracker == "swanlab" else {}
    *_, (_, _, given) = calls_of(monkeypatch, tracker, tmp_path, **secret)
    assert (given["config"]["trial_name"], given["config"]["model"]["dtype"]) == ("t", "bfloat16")
    assert "sk-1" not in repr(given["config"])


def test_only_a_resumed_run_continues_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def id_of(folder: Path, suffix: str | None = None, **resumes: bool) -> str:
        with monkeypatch.context() as patch:
            calls = recorded(patch, "wandb", "init")
            open_trackers(_config(wandb=WandBConfig(mode="offline", id_suffix=suffix)), folder, **resumes)
        return str(calls[0][2]["id"])

    first, second = id_of(tmp_path), id_of(tmp_path)  # W&B would drop the steps of the second
    assert first.startswith("e-t-") and second.startswith("e-t-") and first != second
    assert id_of(tmp_path, resumes=True) == second
    assert id_of(tmp_path, "-b", resumes=True) != second
    (tmp_path / "other").mkdir()
    assert id_of(tmp_path / "other", resumes=True).startswith("e-t-")  # of a version that did not keep it


@pytest.mark.parametrize(("resumed_after", "kept"), [(2, [1, 2, 3]), (None, [1, 2])])
def test_tensorboard_draws_repeated_steps_once(
    resumed_after: int | None, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, metrics = str(tmp_path / "tb"), tmp_path / "metrics.jsonl"
    is_installed = importlib.util.find_spec("tensorboard") is not None
    if not is_installed:
        monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", ModuleType("torch.utils.tensorboard"))
        calls = recorded(monkeypatch, "torch.utils.tensorboard", "SummaryWriter")
    trackers = _config(tensorboard=TensorBoardConfig(path=path))
    killed = MetricsLog(metrics, 1, open_trackers(trackers, tmp_path))
    assert killed.restart() is None  # nothing to forget: other runs may write to the same folder
    for step in (1, 2, 3):
        killed.write(step, {"loss": 1.0})
    killed.close()
    log = MetricsLog(metrics, 2, open_trackers(trackers, tmp_path))
    if resumed_after is not None:
        log.rewind(resumed_after)
    else:
        assert log.restart() is not None
    for step in kept[2:] if resumed_after else kept:
        log.write(step, {"loss": 0.5})
    log.close()
    if not is_installed:
        first = 0 if resumed_after is None else resumed_after + 1
        assert [given for _, _, given in calls] == [{}, {}, {"purge_step": first}]
        return
    found = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(path)
    found.Reload()
    assert [each.step for each in found.Scalars("loss")] == kept
