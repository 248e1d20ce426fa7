"""Completion as the shells ask for it, and label selectors against a plain reading of Kubernetes' rules."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.objects import parse_selector
from areal.errors import UsageFault
from tests.cli.conftest import Areal, Spawner

Record = Callable[..., Any]


def complete(spawn: Spawner, line: str, **env: Any) -> list[str]:
    words = line.split(" ")
    process = spawn(_AREAL_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1), **env)
    return [item.partition(",")[2] for item in process.finish().out.splitlines() if item]


@pytest.fixture
def objects(record: Record) -> None:
    record("InferenceService", "default")
    record("Model", "qwen", {"backend": "embedded", "path": "./q"})
    record("Model", "llama", {"backend": "embedded", "path": "./l"})


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("areal ap", ["apply"]),
        ("areal inf sc", ["scaleup", "scaledown"]),
        ("areal agent sessions s", ["show", "switch"]),
        ("areal get model/", ["model/llama", "model/qwen"]),
        ("areal get models q", ["qwen"]),
        ("areal describe mdl/l", ["mdl/llama"]),
        ("areal inf chat --model q", ["qwen"]),
        ("areal inf chat --service ", ["default"]),
        ("areal get -o js", ["json", "jsonl", "jsonpath="]),
        ("areal init t", ["trainjob"]),
        ("areal config set o", ["output"]),
        ("areal config use-context l", ["local"]),
        ("areal get --show-o", ["--show-origin"]),
        ("areal logs model/qwen -c e", ["engine"]),
        ("areal get nonsense/", []),
        ("areal explain tr", ["trainjob"]),
        ("areal explain Tr", ["TrainJob"]),
        ("areal explain model.", ["model.metadata", "model.spec"]),
        ("areal explain TrainJob.spec.ro", ["TrainJob.spec.rollout"]),
        (
            "areal explain TrainJob.spec.rollout.",
            [f"TrainJob.spec.rollout.{n}" for n in ("service", "model", "agents")],
        ),
        ("areal explain inf.spec.models.exter", ["inf.spec.models.external"]),
        ("areal explain model.metadata.N", ["model.metadata.name"]),
        ("areal explain model.spec.path.", []),
        ("areal explain nothing.spec.", []),
    ],
)
def test_completion_offers_matching_words(spawn: Spawner, objects: None, line: str, offered: list[str]) -> None:
    assert complete(spawn, line) == offered


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("areal apply -f ma", "file"),
        ("areal apply -k ma", "dir"),
        ("areal render --values ma", "file"),
        ("areal get --home ma", "dir"),
        ("areal inf run --model-path ma", "file"),
    ],
)
def test_completion_leaves_files_and_folders_to_the_shell(spawn: Spawner, line: str, kind: str) -> None:
    words = str(len(line.split()) - 1)
    process = spawn(_AREAL_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=words)
    assert process.finish().out == f"{kind},ma\n"


def test_completion_without_home_offers_kinds(spawn: Spawner, tmp_path: Path) -> None:
    assert complete(spawn, "areal get infer", AREAL_HOME=str(tmp_path / "none")) == [
        "inferenceservices",
        "inferenceservice",
    ]


def test_completion_uses_home_from_command_line(spawn: Spawner, objects: None, home: Any) -> None:
    line = f"areal get --home {home.root} model/q"
    assert complete(spawn, line, AREAL_HOME="/nonexistent") == ["model/qwen"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_areal(areal: Areal, shell: str) -> None:
    result = areal("completion", shell)
    assert result.code == 0
    assert "_AREAL_COMPLETE" in result.out
    assert "areal" in result.out


def test_fish_keeps_descriptions_with_commas(areal: Areal) -> None:
    assert 'string split -m 1 ","' in areal("completion", "fish").out


def test_bash_accepts_completion_script(areal: Areal) -> None:
    script = areal("completion", "bash").out + "\ncomplete -p areal\n"
    done = subprocess.run(["bash", "-e"], input=script, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "_areal_completion areal" in done.stdout


# -- label selectors

KEYS = st.sampled_from(["app", "tier", "in", "notin", "a.b/c-d"])
VALUES = st.sampled_from(["x", "y", "v1.2", "", "in"])
LABELS = st.dictionaries(KEYS, VALUES)


@pytest.mark.parametrize(
    ("text", "labels", "matches"),
    [
        ("a=b", {"a": "b"}, True),
        ("a==b", {"a": "c"}, False),
        ("a!=b", {}, True),
        ("a", {"a": ""}, True),
        ("!a", {"a": "b"}, False),
        ("!a", {}, True),
        ("a in (b, c)", {"a": "c"}, True),
        ("a in (b,c)", {}, False),
        ("a notin (b,c)", {}, True),
        ("a notin (b,c)", {"a": "b"}, False),
        ("a=b,c", {"a": "b", "c": "d"}, True),
        ("a=b,c", {"a": "b"}, False),
        ("in in (in)", {"in": "in"}, True),
        ("in", {"in": ""}, True),
        ("a=", {"a": ""}, True),
    ],
)
def test_selector_over_labels_matches(text: str, labels: dict[str, str], matches: bool) -> None:
    assert parse_selector(text)(labels) is matches


@pytest.mark.parametrize("text", ["", ",", "a=b,", "a in b", "a in (b", "=b", "a=b c", "a = b = c", "!a=b", "a b"])
def test_unparsable_selector_is_refused(text: str) -> None:
    with pytest.raises(UsageFault):
        parse_selector(text)


@given(KEYS, VALUES, LABELS)
def test_equal_and_unequal_are_opposites(key: str, value: str, labels: dict[str, str]) -> None:
    assert parse_selector(f"{key}={value}")(labels) is not parse_selector(f"{key}!={value}")(labels)


@given(KEYS, st.lists(VALUES, min_size=1), LABELS)
def test_in_is_equivalent_to_or_of_equals(key: str, values: list[str], labels: dict[str, str]) -> None:
    inside = parse_selector(f"{key} in ({','.join(values)})")(labels)
    assert inside is any(parse_selector(f"{key}={value}")(labels) for value in values)
    assert parse_selector(f"{key} notin ({', '.join(values)})")(labels) is not inside


@given(st.lists(st.sampled_from(["app=x", "tier", "!in", "a.b/c-d notin (y,v1.2)"]), min_size=1), LABELS)
def test_comma_means_and(terms: list[str], labels: dict[str, str]) -> None:
    assert parse_selector(", ".join(terms))(labels) is all(parse_selector(term)(labels) for term in terms)
