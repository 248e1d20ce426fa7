"""Data sets of the hub: which files are a split, and their rows from a stand-in and from a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.dataset.examples import load_examples
from areal.dataset.files import configs_of, files_of, hub_rows
from areal.dataset.loading import get_custom_dataset
from areal.errors import NotFound, UsageFault
from areal.hub import Hub
from tests.hub_standin import HubStandin, fill_cache, hub_environment, hub_standin  # noqa: F401 - a fixture

NAME = "org/questions"
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Questions
"""


def lines(*answers: str) -> bytes:
    return "".join(json.dumps({"question": "q", "answer": answer}) + "\n" for answer in answers).encode()


FILES = {
    "README.md": CARD.encode(),
    "main/train-00000-of-00002.jsonl": lines("1", "2"),
    "main/train-00001-of-00002.jsonl": lines("3"),
    "main/test-00000-of-00001.jsonl": lines("4"),
    "socratic/train-00000-of-00001.jsonl": lines("5"),
}


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandin]:
    with hub_standin() as found:
        found.repository(NAME, "dataset").push(FILES, "data")
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


@pytest.mark.parametrize(
    ("source", "split", "answers"),
    [
        (NAME, None, ["1", "2", "3"]),
        (NAME, "test", ["4"]),
        (f"{NAME}:test", None, ["4"]),
        (f"{NAME}:socratic:train", None, ["5"]),
    ],
)
def test_split_downloads_only_its_files(
    standin: HubStandin, source: str, split: str | None, answers: list[str]
) -> None:
    rows = hub_rows(source, split)
    assert [row["answer"] for row in rows] == answers
    got = {line.rpartition("/")[2] for line in standin.asked if line.startswith("GET") and "/resolve/" in line}
    assert all(name == "README.md" or name.startswith(("train-", "test-")) for name in got)
    assert len(got) - 1 == len({name for name in FILES if "jsonl" in name} & set(_wanted(source, split)))


def _wanted(source: str, split: str | None) -> list[str]:
    config = "socratic" if "socratic" in source else "main"
    of = "test" if "test" in (split or source) else "train"
    return [name for name in FILES if name.startswith(f"{config}/{of}-")]


@pytest.mark.parametrize("source", [f"{NAME}:nope", f"{NAME}:nope:train", "org/nothing", "not a name", "a:b:c:d"])
def test_missing_object_is_reported(standin: HubStandin, source: str) -> None:
    with pytest.raises(NotFound):
        hub_rows(source)


def test_cache_suffices_offline_and_for_collecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    (folder / "main").mkdir(parents=True)
    for name in ("README.md", "main/train-00000-of-00002.jsonl", "main/train-00001-of-00002.jsonl"):
        (folder / name).write_bytes(FILES[name])
    fill_cache(tmp_path / "hf" / "hub", NAME, folder, kind="dataset")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(hub_rows(NAME)) == 3
    assert [example.prompt for example in load_examples(NAME).examples] == ["q"] * 3
    assert len(get_custom_dataset(path=f"{NAME}:train")) == 3
    with pytest.raises(NotFound, match="HF_HUB_OFFLINE"):
        Hub.of().snapshot("org/other", kind="dataset")


@pytest.mark.parametrize(
    ("names", "split", "files"),
    [
        (["data.jsonl"], None, ["data.jsonl"]),
        (["train.jsonl", "test.jsonl"], None, ["train.jsonl"]),
        (["data/train-0.parquet", "data/validation-0.parquet"], "validation", ["data/validation-0.parquet"]),
        (["dev.json", "train.json"], "validation", ["dev.json"]),
        (["constraint.jsonl"], None, ["constraint.jsonl"]),  # "train" inside a word is no split
        (["script.py"], None, []),
    ],
)
def test_splits_without_card_are_path_words(names: list[str], split: str | None, files: list[str]) -> None:
    assert files_of(names, {}, None, split, "n") == files


def test_several_configurations_without_a_default_must_be_named() -> None:
    configs = configs_of("---\nconfigs: [{config_name: a, data_files: a/*}, {config_name: b, data_files: b/*}]\n---\n")
    with pytest.raises(UsageFault, match="several configurations: a, b"):
        files_of(["a/x.json", "b/x.json"], configs, None, None, "n")
    assert files_of(["a/x.json", "b/x.json"], configs, "b", None, "n") == ["b/x.json"]


@pytest.mark.parametrize(
    "card", ["", "# no head", "---\nconfigs: 7\n---\n", "---\n: [\n---\n", "---\nconfigs: [7]\n---\n"]
)
def test_malformed_card_declares_no_configs(card: str) -> None:
    assert configs_of(card) == {}
