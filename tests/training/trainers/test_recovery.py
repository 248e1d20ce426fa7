"""A run and its disk, and a run that is asked to stop: what it keeps, what it goes on from, what it reports."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import RecoverConfig, SaverConfig, SFTConfig, TrainDatasetConfig, TrainEngineConfig
from areal.dataset.files import Rows
from areal.errors import ArealError
from areal.state.job_metrics import steps_of
from areal.training import stopping
from areal.training.checkpoints import CheckpointFailed
from areal.training.metrics import Metrics
from areal.training.trainers.offline import SFTTrainer
from areal.training.trainers.ppo import version_to_publish
from tests.training.trainers.reversing import engine, experiment, solved


def _trainer(tmp_path: Path, steps: int, rows: int = 64, data: Any = None, **more: Any) -> SFTTrainer:
    config = SFTConfig(
        **experiment(
            tmp_path, total_train_steps=steps, **{"recover": RecoverConfig(mode="auto", freq_steps=2), **more}
        ),
        train_dataset=TrainDatasetConfig(batch_size=8),
        model=TrainEngineConfig(**engine()),
    )
    return SFTTrainer(config, data or solved(rows))


def _before_each_step(trainer: SFTTrainer, do: Callable[[int], None]) -> None:
    take = trainer.train_step

    def step() -> Metrics:
        do(trainer.step)
        return take()

    trainer.train_step = step  # type: ignore[method-assign]


class FullDisk:
    """``RLIMIT_FSIZE`` stands for it: writes past ``room`` bytes of a file fail as ENOSPC would."""

    def __init__(self, room: int = 8192) -> None:
        self._room = room
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set(self, full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._room if full else self._before[0], self._before[1]))


@pytest.fixture
def disk(request: pytest.FixtureRequest):
    made = FullDisk(*getattr(request, "param", ()))
    yield made
    made.set(False)


@pytest.mark.parametrize("disk", [(0,), (700,), (8192,), (30_000,), (300_000,)], indirect=True)
def test_full_disk_skips_checkpoint_until_space_is_free(tmp_path: Path, disk: FullDisk, capsys) -> None:
    with _trainer(tmp_path, 6) as trainer:
        _before_each_step(trainer, lambda step: disk.set(step in (2, 3)))
        trainer.train()
        lines = steps_of(trainer.folder.metrics)
    assert [line["step"] for line in lines if "checkpoint/failed" in line] == [4]
    assert "step 4 cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in trainer.checkpoints.root.iterdir()) == ["step_2", "step_6"]


def test_full_disk_at_end_fails_run_and_keeps_checkpoints(tmp_path: Path, disk: FullDisk) -> None:
    with _trainer(tmp_path, 4) as trainer, pytest.raises(CheckpointFailed, match="step 4 cannot be written"):
        _before_each_step(trainer, lambda step: disk.set(step == 3))
        trainer.train()
    disk.set(False)
    with _trainer(tmp_path, 4) as again:
        again.train()
    assert [line["step"] for line in steps_of(again.folder.metrics)] == [1, 2, 3, 4]


def test_full_disk_skips_saved_model_except_at_end(tmp_path: Path, disk: FullDisk, capsys) -> None:
    often = SaverConfig(freq_steps=2)
    with _trainer(tmp_path, 4, saver=often) as trainer:
        _before_each_step(trainer, lambda step: disk.set(step == 1))
        trainer.train()
        lines = steps_of(trainer.folder.metrics)
    assert [line["step"] for line in lines if "save/failed" in line] == [2]
    assert "the model of step 2 cannot be written" in capsys.readouterr().err
    assert [path.name for path in trainer.folder.models.iterdir()] == ["step_4"]
    with _trainer(tmp_path, 6, saver=often) as again, pytest.raises(ArealError, match="step 6 cannot be written"):
        _before_each_step(again, lambda step: disk.set(step == 5))
        again.train()


@pytest.mark.parametrize(
    "torn",
    [
        "actor/__0_0.distcp",
        pytest.param("actor/.metadata", marks=pytest.mark.extended),
        pytest.param("state.json", marks=pytest.mark.extended),
    ],
)
def test_torn_checkpoint_is_set_aside_and_previous_resumed(tmp_path: Path, torn: str, caplog) -> None:
    with _trainer(tmp_path, 4) as first:
        first.train()
    path = first.checkpoints.root / "step_4" / torn
    os.truncate(path, path.stat().st_size // 2)
    with _trainer(tmp_path, 4) as second:
        steps: list[int] = []
        _before_each_step(second, steps.append)
        second.train()
    assert steps == [2, 3]
    assert any("set aside" in record.message and torn in record.message for record in caplog.records)
    assert sorted(path.name for path in second.checkpoints.root.iterdir()) == ["step_2", "step_4", "step_4.torn"]


@pytest.mark.parametrize("damaged", ["__0_0.distcp", pytest.param(".metadata", marks=pytest.mark.extended)])
def test_unreadable_checkpoint_is_skipped(tmp_path: Path, damaged: str, caplog) -> None:
    with _trainer(tmp_path, 4) as first:
        first.train()
    path = first.checkpoints.root / "step_4" / "actor" / damaged
    path.write_bytes(bytes(64) + path.read_bytes()[64:])
    with _trainer(tmp_path, 4) as second:
        steps: list[int] = []
        _before_each_step(second, steps.append)
        second.train()
    assert steps == [2, 3]
    assert any("set aside" in record.message and "step_4" in record.message for record in caplog.records)
    assert sorted(path.name for path in second.checkpoints.root.iterdir()) == ["step_2", "step_4", "step_4.torn"]


@pytest.mark.extended
def test_concurrent_runs_of_same_names_are_refused(tmp_path: Path) -> None:
    with _trainer(tmp_path, 2) as first:
        second = (
            "from tests.training.trainers.test_recovery import _trainer; from pathlib import Path; "
            f"_trainer(Path({str(tmp_path)!r}), 2)"
        )
        done = subprocess.run([sys.executable, "-c", second], capture_output=True, text=True, timeout=120, check=False)
        assert f"another run of these names writes to {first.folder.root}" in done.stderr
        first.train()
    with _trainer(tmp_path, 3) as after:
        after.train()


def test_run_without_resume_starts_new_metrics(tmp_path: Path, capsys) -> None:
    never = RecoverConfig()
    with _trainer(tmp_path, 4, recover=never) as first:
        first.train()
    with _trainer(tmp_path, 2, recover=never) as second:
        second.train()
        metrics = second.folder.metrics
    assert [(line["step"], line["total_steps"]) for line in steps_of(metrics)] == [(1, 2), (2, 2)]
    earlier = metrics.with_name("metrics.old.jsonl")
    assert len(steps_of(earlier)) == 4 and f"are kept as {earlier}" in capsys.readouterr().err


def test_changed_data_since_checkpoint_is_reported(tmp_path: Path, capsys) -> None:
    with _trainer(tmp_path, 2) as first:
        first.train()
    with _trainer(tmp_path, 4) as same:
        same.train()
    assert "is not that of the checkpoint" not in capsys.readouterr().err
    with _trainer(tmp_path, 6, rows=56) as other:
        other.train()
    assert "is not that of the checkpoint (count 64 -> 56, rows of memory (sha256 " in capsys.readouterr().err


def test_changed_configuration_of_resumed_run_is_reported(tmp_path: Path, capsys) -> None:
    for seed in (1, 1, 2):
        with _trainer(tmp_path, 4, seed=seed) as trainer:
            trainer.train()
        reported = capsys.readouterr().err
        assert ("the configuration is not that of the last attempt (seed 1 -> 2)" in reported) == (seed == 2)


def test_changed_rows_of_same_count_are_reported_with_names(tmp_path: Path, capsys) -> None:
    rows = list(solved(64))
    sources = {"first.jsonl": rows, "copy.jsonl": rows, "second.jsonl": rows[::-1]}
    reported = []
    for number, (source, each) in enumerate(sources.items()):
        with _trainer(tmp_path, 2 * number + 2, data=Rows(each, source)) as trainer:
            trainer.train()
        reported.append(capsys.readouterr().err)
    assert not any("is not that of the checkpoint" in each for each in reported[:2]), "a copy is the same data"
    digest = r"\(sha256 [0-9a-f]{12}\)"
    assert re.search(rf"rows of copy.jsonl {digest} -> second.jsonl {digest}", reported[2])


def test_checkpoint_of_other_model_is_an_error_and_kept(tmp_path: Path) -> None:
    with _trainer(tmp_path, 4) as first:
        first.train()
    with _trainer(tmp_path, 6) as other:
        actor: Any = other.engines["actor"]
        actor.model.add_module("more", torch.nn.Linear(2, 2))
        with pytest.raises(ArealError, match=r"step_4 cannot be loaded: .*more\.") as caught:
            other.train()
    assert len(caught.value.message) < 1000
    assert sorted(path.name for path in first.checkpoints.root.iterdir()) == ["step_2", "step_4"]


def test_stop_request_checkpoints_current_step(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stopping, "_requests", stopping._Requests())
    before = signal.getsignal(signal.SIGTERM)
    stopping.on_sigterm()

    def tell(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with _trainer(tmp_path, 9) as trainer, pytest.raises(stopping.Stopped):
            _before_each_step(trainer, tell)
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    newest = trainer.checkpoints.newest()
    assert newest is not None and newest.step == 3
    assert [line["step"] for line in steps_of(trainer.folder.metrics)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ours", "served", "version"),
    [(0, None, 0), (0, 0, 0), (0, 7, 8), (4, 4, 4), (4, 0, 4), (4, 6, 7)],
)
def test_published_version_never_means_two_weights(ours: int, served: int | None, version: int) -> None:
    assert version_to_publish(ours, served) == version
