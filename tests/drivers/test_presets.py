"""The presets that docs/training.md lists, each for two steps of the example against a served model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from areal.api.cli_args import PRESETS
from areal.state.job_metrics import steps_of
from areal.training import drivers
from tests.drivers.conftest import Service
from tests.services.processes import REPOSITORY

DOCS = REPOSITORY / "docs" / "training.md"
CONFIG = "examples/reverse_digits/grpo.yaml"
SMALL = (
    "rollout.model=m",
    "total_train_steps=2",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "evaluator.freq_steps=null",
    "evaluator.eval_before_train=false",
    "recover.mode=off",
)


def length_adaptive(lengths: torch.Tensor) -> torch.Tensor:
    return 1 - 1 / (2 * lengths.float())


def table(head: str) -> list[list[str]]:
    """The cells of the rows of a table of the documentation."""
    rows = DOCS.read_text(encoding="utf-8").partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def overrides() -> dict[str, list[str]]:
    """Of each preset, and of each row of settings that go with any: by its name."""
    found = {row[0].strip("`"): ["actor.preset=" + row[0].strip("`")] for row in table("| `preset` |")}
    found["dapo"].append("actor.overlong_tokens=2")
    for name, keys, *_ in table("| with any of them |"):
        spans = [span for span in re.findall(r"`([^`]*)`", keys) if ": " in span]
        settings = yaml.safe_load(
            "{" + ", ".join(spans).replace("my.module:lambdas", f"{__name__}:length_adaptive") + "}"
        )
        found[name] = [f"actor.{key}={json.dumps(value)}" for key, value in settings.items()]
        if "`ref`" in name:
            found[name].append("ref={}")
    return found


@pytest.fixture
def served(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder; the working folder is the repository."""
    monkeypatch.chdir(REPOSITORY)
    for name, value in {**service.environment(), "AREAL_RUN_FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", overrides())
def test_documented_preset_trains(name: str, served: Path) -> None:
    drivers.grpo(["--config", CONFIG, *SMALL, "actor.reward_norm=null", *overrides()[name]])
    lines = steps_of(served / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)


def test_preset_table_names_each() -> None:
    assert {row[0].strip("`") for row in table("| `preset` |")} == set(PRESETS)


@pytest.mark.slow
def test_null_trainer_evaluates_without_training(served: Path) -> None:
    rows = (REPOSITORY / "examples/reverse_digits/test.jsonl").read_text().splitlines(keepends=True)[:8]
    (served / "few.jsonl").write_text("".join(rows))
    drivers.evaluate(["--config", CONFIG, *SMALL, "trainer.type=null", f"valid_dataset.path={served}/few.jsonl"])
    evaluation = json.loads((served / "evaluation.json").read_text())
    assert evaluation["eval/rollouts"] == 32 and evaluation["eval/failed"] == 0
    once = ["eval_gconfig={n_samples: 1, greedy: true}", f"valid_dataset.path={served}/few.jsonl"]
    drivers.evaluate(["--config", CONFIG, *SMALL, "trainer.type=null", *once])
    assert json.loads((served / "evaluation.json").read_text())["eval/rollouts"] == 8
    assert 0 <= evaluation["eval/reward/mean"] <= 1
    assert not (served / "checkpoints").exists()
