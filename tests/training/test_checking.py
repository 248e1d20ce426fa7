"""What is wrong with a job's configuration before its driver reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from areal.training.checking import check_all
from tests.hub_standin import fill_cache, hub_environment, hub_standin

__all__ = ["hub_environment"]

WELL: dict[str, Any] = {
    "experiment_name": "e",
    "trial_name": "t",
    "trainer": {"type": "grpo"},
    "train_dataset": {"path": "rows.jsonl"},
    "reward_fn": "rewards:right",
    "actor": {"path": "model"},
    "total_train_steps": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("import nowhere\n\n\ndef right(**row):\n    return 1\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def faults(folder: Path, values: dict[str, Any] | str, *overrides: str, **request: Any) -> list[dict[str, Any]]:
    asked = {
        "config": "GRPOConfig",
        "file": "",
        "text": values if isinstance(values, str) else json.dumps({**WELL, **values}),
        "overrides": list(overrides),
        "folder": str(folder),
        "env": {},
        "built_in": True,
        "trains": True,
        "later": False,
        **request,
    }
    (answer,) = check_all([asked])
    return answer["faults"]


@pytest.mark.parametrize(
    ("values", "path", "message"),
    [
        ({"actor": {"path": "model", "optimzer": {"lr": 1}}}, ["actor", "optimzer"], "optimizer"),
        ({"seed": "many"}, ["seed"], "whole number"),
        ({"seed": None}, ["seed"], "whole number"),
        ({"gconfig": {"n_samples": 0}}, ["gconfig", "n_samples"], "at least 1"),
        ({"trial_name": ""}, ["trial_name"], "is needed"),
        ({"actor": {"path": "./none"}}, ["actor", "path"], "no model folder './none'"),
        ({"ref": {"path": "/no/where"}}, ["ref", "path"], "no model folder"),
        ({"train_dataset": {}}, ["train_dataset", "path"], "is needed"),
        (
            {"train_dataset": {"path": "rows.jsonl", "batch_size": 4}},
            ["train_dataset", "batch_size"],
            "a batch of 4 is more than the 1 rows of the data set: lower it, or set train_dataset.drop_last=false",
        ),
        ({"train_dataset": {"path": "none.jsonl"}}, ["train_dataset", "path"], "no data set 'none.jsonl'"),
        ({"valid_dataset": {"path": "/no/where"}}, ["valid_dataset", "path"], "no data set"),
        ({"reward_fn": ""}, ["reward_fn"], "what an answer is worth"),
        ({"reward_fn": "rewards:rihgt"}, ["reward_fn"], 'did you mean "right"'),
        ({"reward_fn": ["rewards:right", "rewads:right"]}, ["reward_fn"], "no module rewads"),
        ({"reward_fn": "./rewards.py:rihgt"}, ["reward_fn"], 'did you mean "right"'),
        ({"reward_fn": "rewads.py:right"}, ["reward_fn"], "there is no file /"),
        ({"actor": {"path": "model", "loss_fn": "rewards:los"}}, ["actor", "loss_fn"], "no 'los'"),
        ({"actor": {"path": "model", "advantage_fn": "rewads:right"}}, ["actor", "advantage_fn"], "no module rewads"),
        ({"actor": {"path": "model", "gae_lambda": "rewads:right"}}, ["actor", "gae_lambda"], "no module rewads"),
        ({"reward_fn": "right"}, ["reward_fn"], "module:name or path/to/file.py:name"),
        ({"workflow": "rlvr"}, ["workflow"], "module:name or path/to/file.py:name"),
        ({"actor": {"path": "model", "gae_lambda": "high"}}, ["actor", "gae_lambda"], "module:name or path/to"),
        ({"workflow": "areal.workflow.rlvr:RLVRWorkflo"}, ["workflow"], 'did you mean "RLVRWorkflow"'),
    ],
)
def test_fault_is_reported_with_its_key(folder: Path, values: dict[str, Any], path: list[str], message: str) -> None:
    (found,) = faults(folder, values)
    assert (list(found["path"]), found["override"]) == (path, None) and message in found["message"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_tokenizer_without_chat_template_is_reported(folder: Path, name: str) -> None:
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    (found,) = faults(folder, {})
    assert list(found["path"]) == ["actor", "path"] and "has no chat template: take the tokenizer" in found["message"]
    assert not faults(folder, {"workflow_kwargs": {"get_input_ids_fn": "rewards:right"}})
    assert not faults(folder, {"workflow": "rewards:right", "reward_fn": ""})  # it may make prompts in its own way
    (folder / "model" / name).write_text('{"chat_template": "{{ messages }}"}')
    assert not faults(folder, {})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.eps_clp=1", 'there is no key actor.eps_clp (did you mean "actor.eps_clip"?)'),
        ("+actor.eps_clp=1", 'there is no such key (did you mean "eps_clip"?)'),
        ("gconfig.n_samples=none", "a whole number"),
        ("=1", "no override"),
        ("seed=${nothing}", "nothing"),
    ],
)
def test_override_faults_are_reported_together(folder: Path, override: str, message: str) -> None:
    found = faults(folder, {}, "total_train_steps=2", override)
    assert [each["override"] for each in found] == [override] and message in found[0]["message"]
    if "${" not in override:  # of an interpolation nothing else can be read
        assert len(faults(folder, {"sed": 1}, override, "trialname=x")) == 3


def test_missing_function_or_dataset_is_placed_at_its_key(folder: Path) -> None:
    text = "\n".join(
        f"{key}: {json.dumps(value)}" for key, value in {**WELL, "valid_dataset": {"path": "x.jsonl"}}.items()
    )
    workflow, dataset = faults(folder, text, "workflow=rewards:Wrong")
    assert workflow["override"] == "workflow=rewards:Wrong"
    assert dataset["override"] is None and dataset["mark"][0] == len(text.splitlines())


def test_runnable_config_is_accepted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    before = dict(os.environ)
    assert faults(folder, {}) == []
    assert faults(folder, {"train_dataset": {"path": "openai/gsm8k"}, "actor": {"path": "org/model"}}) == []
    assert faults(folder, {"actor": {"path": "./made/later"}}, later=True) == []
    assert faults(folder, {"train_dataset": {}}, trains=False) == []
    assert faults(folder, {"train_dataset": {"path": "rows.jsonl", "batch_size": 4, "drop_last": False}}) == []
    assert faults(folder, {"train_dataset": {"path": ["rows.jsonl"] * 4, "batch_size": 4}}) == []
    assert faults(folder, {"reward_fn": ["rewards.py:right", "./rewards.py:right"]}) == []
    assert faults(folder, {"train_dataset": {}, "reward_fn": "", "rollout": {"openai": {"mode": "online"}}}) == []
    assert faults(folder, {"trial_name": "${oc.env:NAME_OF_A_TRIAL}"}, env={"NAME_OF_A_TRIAL": "t"}) == []
    assert faults(folder, {"trial_name": "${oc.env:NAME_OF_A_TRIAL}"}) != []
    assert faults(folder, {"reward_fn": "elsewhere:f"}, env={"PYTHONPATH": str(folder / "none")}) != []
    (folder / "lib").mkdir()
    (folder / "lib" / "elsewhere.py").write_text("def f(**row): return 0\n")
    assert faults(folder, {"reward_fn": "elsewhere:f"}, env={"PYTHONPATH": str(folder / "lib")}) == []
    assert faults(folder, {"reward_fn": "unknown:f"}, built_in=False) == [], "a driver of one's own knows"
    assert dict(os.environ) == before and Path.cwd() == Path("/")


_ROW = '{"question": "1+1?", "%s": "2"}\n'


@pytest.mark.parametrize(
    ("reward", "rows", "message"),
    [
        ("def right(prompt, completions, gold): ...", [_ROW % "answer"], "row"),
        ("async def right(prompt, completions, a, b, *, level): ...", [_ROW % "levle"], 'did you mean "levle"'),
        ("def right(gold, *rest): ...\ndef right(prompt, completions, gold): ...", [_ROW % "answer"], ""),
        ("@cache\ndef right(prompt, completions, gold): ...", [_ROW % "answer"], ""),
        ("def right(prompt, completions, gold=None): ...", [_ROW % "answer"], ""),
        ("def right(prompt, completions, **row): ...", [_ROW % "answer"], ""),
        (
            "def right(completions, **row):\n    return float(row['sum'] == completions)",
            [_ROW % "answer"],
            "it reads 'sum' from its **",
        ),
        (
            "def right(prompt, completions, gold): ...",
            [_ROW % "gold"] * 2 + [_ROW % "answer"],
            "rows.jsonl:3: the reward right",
        ),
        ("def right(prompt, completions): ...", ['{"text": "1+1?"}'], "rows.jsonl:1: a row of type rl has no question"),
    ],
)
def test_row_without_reward_column_is_a_dataset_fault(folder: Path, reward: str, rows: list[str], message: str) -> None:
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "rewards.py").write_text(f"import nowhere\n\n\n{reward}\n")
    found = faults(folder, {})
    assert len(found) == bool(message)
    assert all(list(each["path"]) == ["train_dataset", "path"] and message in each["message"] for each in found)
    if "gold" in reward and found:
        assert (
            "missing a required argument: 'gold'" in found[0]["message"]
            and "a row has question, answer" in found[0]["message"]
        )


@pytest.mark.parametrize(
    "files",
    [
        {"rewards.py": "def right(completions: list[str], **kwargs) -> list[float]: ...\n"},
        {
            "rewards.py": "from grading.batch import all_right as right\n",
            "grading/__init__.py": "",
            "grading/batch.py": "import sys\nif sys:\n    from .rules import all_right\n",
            "grading/rules.py": "def all_right(completions: list[str], **kwargs) -> list[float]: ...\n",
        },
    ],
)
def test_batch_reward_is_refused_also_for_hub_dataset(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (found,) = faults(folder, {"train_dataset": {"path": "org/rows"}})
    assert list(found["path"]) == ["reward_fn"]
    assert "(completions: list[str], **kwargs) -> list[float] cannot be called" in found["message"]


@pytest.fixture
def cached(folder: Path) -> dict[str, str]:
    """A data set of the hub in a cache, and the environment of a job that uses it."""
    made = folder / "made"
    made.mkdir()
    (made / "train.jsonl").write_text(_ROW % "gold" + _ROW % "answer")
    (made / "test.jsonl").write_text(_ROW % "gold")
    fill_cache(folder / "hf" / "hub", "org/rows", made, kind="dataset")
    (folder / "rewards.py").write_text("def right(prompt, completions, gold): ...\n")
    return {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}


def test_dataset_in_hub_cache_is_checked_offline(folder: Path, cached: dict[str, str]) -> None:
    place = {"path": "org/rows", "batch_size": 3}
    rows, batch = faults(folder, {"train_dataset": place}, env=cached)
    assert list(rows["path"]) == ["train_dataset", "path"]
    assert "train.jsonl:2: the reward right" in rows["message"] and "a row has question, answer" in rows["message"]
    assert list(batch["path"]) == ["train_dataset", "batch_size"]
    assert "a batch of 3 is more than the 2 rows" in batch["message"]
    assert not faults(folder, {"train_dataset": {"path": "org/rows:test"}}, env=cached)
    assert not faults(folder, {"train_dataset": {"path": "org/other"}}, env=cached), "not in the cache"
    (found,) = faults(
        folder, {"train_dataset": {"path": "org/rows:test"}, "valid_dataset": {"path": "org/rows:train"}}, env=cached
    )
    assert list(found["path"]) == ["valid_dataset", "path"]


@pytest.mark.parametrize("change", ["none", "down", "new commit", "more files"])
def test_fault_of_cached_dataset_is_that_of_hub(folder: Path, cached: dict[str, str], change: str) -> None:
    files = {each.name: each.read_bytes() for each in (folder / "made").iterdir()}
    with hub_standin() as hub:
        environment = {"HF_HOME": cached["HF_HOME"], "HF_ENDPOINT": hub.url}
        more = {"train-00001.jsonl": (_ROW % "gold").encode()} if change == "more files" else {}
        hub.repository("org/rows", "dataset").push({**files, **more}, "new" if change == "new commit" else "org/rows")
        hub.down = change == "down"
        found = faults(folder, {"train_dataset": {"path": "org/rows", "batch_size": 3}}, env=environment)
        assert len(found) == (2 if change in ("none", "down") else 0)
        asked = len(hub.asked)
        assert asked and not faults(folder, {"train_dataset": {"path": "org/rows:test"}}, env=environment)
        assert len(hub.asked) == asked, "a data set without a fault asks no server"


@pytest.mark.parametrize(("trainer", "config"), [("sft", "SFTConfig"), ("rw", "RWConfig")])
def test_unreadable_rows_are_refused_for_every_trainer(folder: Path, trainer: str, config: str) -> None:
    (folder / "rows.jsonl").write_text("")
    model = {"path": "model"}
    values = {"trainer": {"type": trainer}, "model": model, "train_dataset": {"path": "rows.jsonl"}}
    text = json.dumps({**{name: WELL[name] for name in ("experiment_name", "trial_name")}, **values})
    (found,) = faults(folder, text, config=config)
    assert (list(found["path"]), found["message"]) == (["train_dataset", "path"], "rows.jsonl: there are no rows")


def test_valid_local_dataset_passes_and_remote_is_not_checked(folder: Path) -> None:
    (folder / "rewards.py").write_text("def right(prompt, completions, gold): ...\nclass Mine: ...\n")
    (folder / "good.jsonl").write_text(_ROW % "gold")
    good = {"path": "good.jsonl"}
    (found,) = faults(folder, {"train_dataset": good, "valid_dataset": {"path": "rows.jsonl"}})
    assert list(found["path"]) == ["valid_dataset", "path"]
    assert not faults(folder, {"train_dataset": {"path": "org/rows"}})
    assert not faults(folder, {"workflow": "rewards:Mine"})
