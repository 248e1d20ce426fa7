"""Jobs that cannot run are refused before anything of them starts, at the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from areal.cli.train import job_manifest
from areal.reconcilers.kinds.job_config import config_class
from areal.resources.paths import import_fault
from areal.state.home import Home
from tests.cli.conftest import Areal
from tests.hub_standin import fill_cache

CONFIG = """\
experiment_name: e
trial_name: t
trainer: {type: grpo}
train_dataset: {path: rows.jsonl}
reward_fn: areal.reward.gsm8k:gsm8k_reward_fn
total_train_steps: 1
actor:
  path: model
"""
JOB = "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: %s}\nspec:\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "grpo.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize("verb", ["diff", "apply"])
def test_job_faults_give_manifest_and_config_positions(areal: Areal, folder: Path, home: Home, verb: str) -> None:
    (folder / "bad.yaml").write_text(CONFIG + "  optimzer: {lr: 1.0e-5}\nsead: 1\n")
    jobs = [
        JOB % "file" + "  config: bad.yaml\n  overrides: [seed=2, actor.lrr=3]\n",
        JOB % "inline" + "  config:\n    trainer: {type: sft}\n    experiment_name: e\n    trial_name: t\n"
        "    train_dataset: {path: rows.jsonl}\n    model: {path: model, optimizer: {lr: fast}}\n",
        JOB % "lost" + "  config: grpoo.yaml\n",
        JOB % "placed" + "  config: grpo.yaml\n  workingDir: ./none\n",
        JOB % "secret" + "  driver: m:f\n  envFrom:\n    TOKEN: {env: NO_SUCH_VARIABLE}\n",
        JOB % "unknown" + "  config: {trainer: {type: gropo}}\n",
        JOB % "number" + "  config: {driver: 3}\n",
        JOB % "nested" + "  config: {experiment_name: e, trial_name: t,\n"
        "    train_dataset: {path: rows.jsonl}, trainer: {type: sft, sft: {model: {pth: x}}}}\n",
    ]
    (folder / "jobs.yaml").write_text("---\n".join(jobs))
    result = areal(*verb.split(), "-f", "jobs.yaml")
    assert result.code == 3, result.err
    for reply in (
        f'{folder}/bad.yaml:9:3: actor.optimzer: there is no such key (did you mean "optimizer"?)',
        f'{folder}/bad.yaml:10:1: sead: there is no such key (did you mean "seed"?)',
        "jobs.yaml:6:23: spec.overrides[1]: actor.lrr=3: there is no key actor.lrr",
        "jobs.yaml:17:42: spec.config.model.optimizer.lr: must be a number, not 'fast'",
        "spec.config: there is no file 'grpoo.yaml' (did you mean \"grpo.yaml\"?)",
        "spec.workingDir: there is no folder",
        "spec.config: '3' is not a driver",
        "spec.config.trainer.sft.model.pth: there is no such key",
        "spec.envFrom.TOKEN.env: environment variable NO_SUCH_VARIABLE is not set",
        "trainer.type 'gropo' has no built-in driver (did you mean \"grpo\"?)",
    ):
        assert reply in result.err
    assert ("10 errors in the manifests" if verb == "apply" else "8 blocked") in result.out + result.err
    assert not (home.root / "objects").exists()


def test_train_run_validates_before_recording(areal: Areal, folder: Path, home: Home) -> None:
    result = areal("train", "run", "--config", "grpo.yaml", "actor.lrr=3", "actor.path=nowhere/at/all")
    assert result.code == 3
    assert "actor.lrr=3: there is no key actor.lrr" in result.err
    assert "stdin" not in result.err and ":1:" not in result.err
    result = areal("train", "run", "--config", "grpo.yaml", "actor.path=nowhere/at/all")
    assert result.code == 3
    assert "error: actor.path: there is no model folder 'nowhere/at/all'" in result.err
    assert not (home.root / "objects").exists()


def test_restarts_are_refused_for_never_restart_policy(areal: Areal, folder: Path) -> None:
    words = ("train", "start", "--config", "grpo.yaml", "--dry-run=client", "-o", "yaml")
    refused = areal(*words, "--max-restarts", "5")
    assert refused.code == 2 and "--max-restarts has no effect without --restart on-failure" in refused.err
    restart = ("--restart", "on-failure")
    assert yaml.safe_load(areal(*words, *restart).out)["spec"]["restart"] == {"policy": "OnFailure"}
    limited = yaml.safe_load(areal(*words, *restart, "--max-restarts", "0").out)
    assert limited["spec"]["restart"] == {"policy": "OnFailure", "maxRestarts": 0}


def test_custom_driver_using_areal_class_is_checked(areal: Areal, folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import not_installed_here\nfrom areal.api.cli_args import GRPOConfig, load_expr_config\n\n\n"
        "def main(args):\n    config, _ = load_expr_config(args, GRPOConfig)\n"
    )
    (folder / "wrong.yaml").write_text(CONFIG + "sead: 1\n")
    for driver in ("mine:main", "mine.py"):
        result = areal("train", "start", "--config", "wrong.yaml", "--driver", driver, "--dry-run")
        assert result.code == 3 and "wrong.yaml:9:1: sead: there is no such key" in result.err
    missing = areal("train", "start", "--config", "grpo.yaml", "--driver", "mine:mian", "--dry-run")
    assert missing.code == 2 and "no 'mian' in" in missing.err and 'did you mean "main"' in missing.err


IMPORT = "from areal.api.cli_args import GRPOConfig as C, load_expr_config as load\nimport sys\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def main(a):\n    load(a, C)", "GRPOConfig"),
        ("def main(a):\n    load(a, C)\nif __name__ == '__main__':\n    main(sys.argv[1:])", "GRPOConfig"),
        ("def main(a):\n    load(a, C)\nmain(sys.argv[1:] + ['seed=1'])", None),
        ("def main(a):\n    load([*a, 'seed=1'], C)", None),
        ("def main(a):\n    a = a[1:]\n    load(a, C)", None),
        ("def main(a):\n    load(a, C)\n    load(a, C)", None),
        ("def main(a):\n    class C: pass\n    load(a, Mine)", None),
        ("def other(a):\n    load(a, C)", None),
        ("def main(a):\n    print(a)", None),
    ],
)
def test_driver_config_class_is_found_only_if_unambiguous(text: str, found: str | None) -> None:
    assert config_class(IMPORT + text, "main") == found


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("pack.deep:there", None),
        ("pack.deep.there", None),
        ("pack:deep", None),
        ("pack.deep:Class.method", None),
        ("pack.deep:found", None),
        ("pack.open:anything", None),
        ("pack.lazy:anything", None),
        ("json:loads", None),
        ("math:sqrt", None),
        ("os.path:join", None),
        ("pack.deep:ther", 'did you mean "there"'),
        ("pack.dep:there", "no module pack.dep"),
        ("pak.deep.there", "no module pak"),
        ("pack.broken:there", "broken.py:1"),
        ("space.deeper.mod:there", None),
        ("space.deeper:mod", None),
        ("space.deeper.mod:ther", 'did you mean "there"'),
        ("space.deper.mod:there", "no module space.deper"),
        ("sys:exit", None),
    ],
)
def test_name_lookup_does_not_import(tmp_path: Path, name: str, fault: str | None) -> None:
    import sys

    (tmp_path / "space" / "deeper").mkdir(parents=True)  # no __init__.py
    (tmp_path / "space" / "deeper" / "mod.py").write_text("def there(): pass\n")
    (tmp_path / "pack").mkdir()
    for file, text in {
        "__init__": "",
        "deep": "import gone\ndef there(): pass\nclass Class: pass\nfor found in (): pass\n",
        "open": "from os import *\n",
        "lazy": "def __getattr__(name): ...\n",
        "broken": "def there(:\n",
    }.items():
        (tmp_path / "pack" / f"{file}.py").write_text(text)
    output = import_fault(name, [str(tmp_path), *sys.path])
    assert output is None if fault is None else output is not None and fault in output


IDS = """\
  config:
    experiment_name: e
    trial_name: t
    trainer: {type: sft}
    model: {path: org/model}
    tokenizer_path: org/words
    train_dataset: {path: "org/rows:train"}
"""


@pytest.mark.parametrize("missing", ["org/model", "org/words", "org/rows"])
def test_model_id_in_neither_cache_nor_hub_is_reported_early(
    areal: Areal, folder: Path, home: Home, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = folder / "hf" / "hub"
    for name, file in {"org/model": "model.safetensors", "org/words": "tokenizer.json"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / ("README.md" if name == missing else file)).write_text("{}")
        fill_cache(cache, name, folder / name)
    if missing != "org/rows":
        (folder / "org" / "rows").mkdir()
        (folder / "org" / "rows" / "train.jsonl").write_text("{}\n")
        fill_cache(cache, "org/rows", folder / "org" / "rows", kind="dataset")
    (folder / "org").rename(folder / "elsewhere")
    (folder / "job.yaml").write_text(JOB % "ids" + IDS + f"  env: {{HF_HOME: {folder / 'hf'}}}\n")
    assert areal("diff", "-f", "job.yaml").code == 1, "a plan asks no server"
    result = areal("apply", "-f", "job.yaml")
    kind, extent = ("dataset", "not in") if missing == "org/rows" else ("model", "only in part in")
    assert result.code == 4 and f"TrainJob/ids: {kind} {missing} is {extent} the cache" in result.err, result.err
    assert not home.objects.exists() and not home.runs.exists()


@pytest.mark.parametrize(
    ("trial", "name"),
    [
        ("2024-01-02", "e-2024-01-02"),
        ("0012", "e-0012"),
        ("20241129_01", "e-20241129-01"),
        ("12:30", "e-12-30"),
        ("2024-13-01", "e-2024-13-01"),
        ("'a'", "e-a"),
    ],
)
def test_job_name_is_taken_from_overrides_verbatim(trial: str, name: str) -> None:
    overrides = ("experiment_name=e", f"trial_name={trial}")
    manifest = job_manifest(None, name=None, driver="m:f", overrides=overrides, restart={})
    assert manifest["metadata"]["name"] == name
