"""Keys out of scripts and YAML files, without running anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.convert.reading import Unread, assignments, read_yaml, script_command

PROGRAMS = ("pkg.trainer.main",)
SCRIPT = r"""
#!/bin/bash
set -x
# a comment with pkg.trainer.main in it
NODES=${NODES:-2}
export per_node=$((4 * 2))
length=$(((1024 + 512) * 1))
files="['$HOME/a.parquet', '${HOME}/b.parquet']"
EXTRA=(
    x.first=1      # of an array
    # x.gone=1
    x.second='two words'
)
FLAGS="y.a=1 y.b=False"
python3 -m pkg.trainer.main \
    a.nodes=$NODES \
    a.gpus=$(( NODES * per_node )) \
    # a.gone=3 \
    a.length=${length} \
    a.files="$files" \
    a.rate=1e-6 a.name='run 1' \
    +a.added=null \
    a.logger='["console","wandb"]' \
    "${EXTRA[@]}" $FLAGS \
    a.engine=${1:-vllm} \
    a.unset=$NOWHERE \
    $@ 2>&1 | tee log
"""


def keys(script: str, **environment: str) -> dict[str, object]:
    return assignments(script_command(script, PROGRAMS, {"HOME": "/h", **environment}, "run.sh"), "run.sh")


def test_variables_arrays_arithmetic_and_defaults_of_a_script_are_expanded() -> None:
    assert keys(SCRIPT) == {
        "a.nodes": 2,
        "a.gpus": 16,
        "a.length": 1536,
        "a.files": ["/h/a.parquet", "/h/b.parquet"],
        "a.rate": 1e-6,
        "a.name": "run 1",
        "a.added": None,
        "a.logger": ["console", "wandb"],
        "x.first": 1,
        "x.second": "two words",
        "y.a": 1,
        "y.b": False,
        "a.engine": "vllm",
        "a.unset": "$NOWHERE",
    }


def test_environment_comes_before_a_default_of_the_script() -> None:
    assert (keys(SCRIPT, NODES="3")["a.nodes"], keys(SCRIPT, NODES="3")["a.gpus"]) == (3, 24)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "no command in it runs pkg.trainer.main"),
        ("python -m pkg.trainer.main a.b", "'a.b' is not key=value"),
        ("python -m pkg.trainer.main a='b", "the command cannot be read"),
    ],
)
def test_script_without_a_readable_command_is_an_error_that_says_why(script: str, message: str) -> None:
    with pytest.raises(Unread, match=message):
        keys(script)


@pytest.mark.parametrize("expression", ["$((1 / 0))", "$((2 ** 9))", "$((x))", "$((__import__('os')))"])
def test_expression_that_is_not_arithmetic_stays_as_it_is(expression: str) -> None:
    assert str(keys(f'python -m pkg.trainer.main a="{expression}"')["a"]).startswith("$((")


def test_yaml_is_flattened_and_its_numbers_are_numbers() -> None:
    assert read_yaml("a: {b: 1e-6, c: [1], d: {}}\ne: text\n", "c.yaml") == {
        "a.b": 1e-6,
        "a.c": [1],
        "a.d": {},
        "e": "text",
    }
    for text in ("- 1\n", "a: [\n"):
        with pytest.raises(Unread, match=r"c\.yaml"):
            read_yaml(text, "c.yaml")


def test_references_of_omegaconf_are_replaced_and_missing_values_left_out() -> None:
    text = "a: {b: 2, c: '${a.b}', d: '${oc.select:x.y,7}', e: '${oc.select:.b,1}', f: '${no.key}', g: '???'}\n"
    assert read_yaml(text, "c.yaml") == {"a.b": 2, "a.c": 2, "a.d": 7, "a.e": 2, "a.f": "${no.key}"}


@given(st.text(max_size=80))
def test_any_text_is_read_or_is_an_error(text: str) -> None:
    try:
        keys(f"python -m pkg.trainer.main {text}")
    except Unread:
        return
