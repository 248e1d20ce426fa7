"""``areal convert``: the table, the exit statuses, and the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Areal

SCRIPT = r"""
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=train.parquet data.train_batch_size=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.model.path=org/model \
    custom_reward_function.path=score.py trainer.n_gpus_per_node=2 actor_rollout_ref.rollout.name=vllm \
    data.filter_overlong_prompts=True $@
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return str(path)


def test_table_lists_each_key_and_its_result(areal: Areal, script: str) -> None:
    ran = areal("convert", script, "--from", "verl", "-o", "json")
    assert ran.code == 0, ran.err
    rows = {row["key"]: row for row in ran.json["items"]}
    assert rows["data.train_files"]["target"] == "train_dataset.path"
    assert rows["data.filter_overlong_prompts"]["fate"] == "ignored"
    assert "vllm:d1 serves, fsdp:d1 trains" in rows["trainer.n_gpus_per_node"]["note"]


def test_written_manifests_validate_and_plan(
    areal: Areal, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "job"
    assert areal("convert", script, "--from", "verl", "--out", str(out), "--name", "mine").code == 0
    assert sorted(each.name for each in out.iterdir()) == ["config.yaml", "manifests.yaml", "reward.py"]
    monkeypatch.chdir(out)
    assert areal("validate", "-f", "manifests.yaml").code == 0
    assert areal("convert", script, "--from", "verl", "--out", str(out)).code == 5, "the files are there"
    assert areal("convert", script, "--from", "verl", "--out", str(out), "--force").code == 0


def test_lossy_conversion_exits_9_without_writing(areal: Areal, script: str, tmp_path: Path) -> None:
    words = ("convert", script, "--from", "verl", "data.truncation=left", "--out", str(tmp_path / "job"))
    ran = areal(*words)
    assert ran.code == 9 and "1 key is lossy; nothing was written" in ran.err
    assert not (tmp_path / "job").exists()
    assert areal(*words, "--allow-lossy").code == 0 and (tmp_path / "job" / "config.yaml").is_file()


def test_command_line_backends_override_framework_backends(areal: Areal, script: str, tmp_path: Path) -> None:
    words = ("--backend", "embedded:d1", "--train-backend", "fsdp:d1", "--out", str(tmp_path / "job"))
    assert areal("convert", script, "--from", "verl", *words).code == 0
    assert "backend: embedded:d1" in (tmp_path / "job" / "manifests.yaml").read_text()
    assert "engineArgs" not in (tmp_path / "job" / "manifests.yaml").read_text()


def test_files_of_the_working_folder_are_found_from_the_folder_that_is_written(
    areal: Areal, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "score.py"):
        (tmp_path / name).touch()
    assert areal("convert", script, "--from", "verl", "--out", "job").code == 0
    assert f"path: {tmp_path / 'train.parquet'}" in (tmp_path / "job" / "config.yaml").read_text()
    assert repr(str(tmp_path / "score.py")) in (tmp_path / "job" / "reward.py").read_text()


@pytest.mark.parametrize("words", [("--backend", "embeded:d1"), ("--backend", "fsdp:d1"), ("--train-backend", "d0")])
def test_backend_that_is_none_is_refused_with_its_flag(areal: Areal, script: str, words: tuple[str, str]) -> None:
    ran = areal("convert", script, "--from", "verl", *words)
    assert ran.code == 2 and f"error: {' '.join(words)}: column 1: " in ran.err


@pytest.mark.parametrize(
    ("text", "name", "code", "message"),
    [
        ("echo", "run.sh", 1, "no command in it runs a trainer that is known here"),
        ("print(1)", "run.py", 1, "hint: a script with `python3 -m verl.trainer.main_ppo KEY=VALUE ...`"),
        ("trl grpo --seed 1", "run.sh", 1, "hint: --from trl"),
        ("a: [", "run.yaml", 1, "not YAML"),
        ("- 1", "run.yaml", 1, "its top level is not a map"),
        ("jobs: {test: {steps: []}}", "run.yaml", 1, "which trainer reads it is not in the file"),
        ("\x00\xff", "run.sh", 1, "no command in it runs"),
        ("a" * (1 << 21), "run.yaml", 1, "more than 1,048,576 characters"),
    ],
)
def test_file_without_a_configuration_is_an_error(
    areal: Areal, tmp_path: Path, text: str, name: str, code: int, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    ran = areal("convert", str(path), "--from", "verl")
    assert (ran.code, message in ran.err) == (code, True), ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [("actor: &a [*a]\n", "the alias *a is inside its own anchor"), ("seed: 1\nseed: 2\n", 'duplicate key "seed"')],
)
@pytest.mark.parametrize("source", ["areal", "verl"])
def test_yaml_with_a_fault_is_an_error(areal: Areal, tmp_path: Path, text: str, message: str, source: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    ran = areal("convert", str(tmp_path / "c.yaml"), "--from", source)
    assert ran.code == 1 and message in ran.err and "unexpected" not in ran.err


def test_command_that_is_read_is_named_in_table_and_manifests(areal: Areal, script: str, tmp_path: Path) -> None:
    text = Path(script).read_text()
    Path(script).write_text(f"{text}\n{text.replace('train_batch_size=8', 'train_batch_size=16')}")
    ran = areal("convert", script, "--from", "verl", "-o", "json")
    row = ran.json["items"][0]
    assert (row["key"], row["value"]) == ("other commands", ["verl.trainer.main_ppo (lines 2-6)"])
    assert row["note"] == "verl.trainer.main_ppo (lines 9-13) is read; --line N reads another"
    assert "other commands" in areal("convert", script, "--from", "verl").out
    for words, batch, lines in (((), 16, "9-13"), (("--line", "4"), 8, "2-6")):
        out = tmp_path / f"job{batch}"
        assert areal("convert", script, "--from", "verl", *words, "--out", str(out)).code == 0
        assert f"batch_size: {batch}\n" in (out / "config.yaml").read_text()
        first, *_ = (out / "manifests.yaml").read_text().splitlines()
        assert first == f"# Converted from {script} verl.trainer.main_ppo (lines {lines})"
        assert areal("validate", "-f", str(out / "manifests.yaml")).code == 0


def test_line_of_a_configuration_of_areal_is_refused(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    ran = areal("convert", str(tmp_path / "c.yaml"), "--from", "areal", "--line", "1")
    assert ran.code == 2 and "--line chooses a command of a script" in ran.err
