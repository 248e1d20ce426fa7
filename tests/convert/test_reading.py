"""Keys out of scripts and YAML files, without running anything."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.convert.reading import Unread, assignments, flags, read_yaml, with_dollars, without_references
from areal.convert.shell import Command, script_commands

PROGRAMS = re.compile(r"pkg\.trainer\.(main)(?!\S)")
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


def last(script: str, **environment: str) -> Command:
    return script_commands(script, PROGRAMS, {"HOME": "/h", **environment}, "run.sh")[-1]


def keys(script: str, **environment: str) -> dict[str, object]:
    return assignments(last(script, **environment).words, "run.sh")


def test_script_variables_arrays_and_arithmetic_are_expanded() -> None:
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


def test_multi_line_quoted_variable_is_one_value() -> None:
    script = """
ACTOR="
    a.size=2
    # a.gone=1
    a.name=$NAME"
if [ "$KIND" = "b" ]; then
    ACTOR="$ACTOR
        a.more=1"
fi
python3 -m pkg.trainer.main a.first=1 $ACTOR
"""
    assert keys(script, NAME="x", KIND="a") == {"a.first": 1, "a.size": 2, "a.name": "x"}
    with pytest.raises(Unread, match=r"\$KIND is not set, or set under a condition that is not known here"):
        keys(script)
    assert keys(script, NAME="x", KIND="b") == {"a.first": 1, "a.size": 2, "a.name": "x", "a.more": 1}


def test_environment_overrides_script_default() -> None:
    assert (keys(SCRIPT, NODES="3")["a.nodes"], keys(SCRIPT, NODES="3")["a.gpus"]) == (3, 24)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("python -m pkg.trainer.main a.b", "'a.b' is not key=value"),
        ("python -m pkg.trainer.main a='b", "the command cannot be read"),
    ],
)
def test_script_without_readable_command_is_an_error(script: str, message: str) -> None:
    with pytest.raises(Unread, match=message):
        keys(script)


@pytest.mark.parametrize("expression", ["$((1 / 0))", "$((2 ** 99))", "$((x))", "$((__import__('os')))"])
def test_non_arithmetic_expression_is_kept(expression: str) -> None:
    assert str(keys(f'python -m pkg.trainer.main a="{expression}"')["a"]).startswith(("$((", "${"))


def test_yaml_is_flattened_with_typed_numbers() -> None:
    assert read_yaml("a: {b: 1e-6, c: [1], d: {}}\ne: text\n", "c.yaml") == {
        "a.b": 1e-6,
        "a.c": [1],
        "a.d": {},
        "e": "text",
    }
    for text in ("- 1\n", "a: [\n"):
        with pytest.raises(Unread, match=r"c\.yaml"):
            read_yaml(text, "c.yaml")


def test_omegaconf_references_are_resolved() -> None:
    text = "a: {b: 2, c: '${a.b}', d: '${oc.select:x.y,7}', e: '${oc.select:.b,1}', f: '${no.key}', g: '???'}\n"
    assert read_yaml(text, "c.yaml") == {"a.b": 2, "a.c": 2, "a.d": 7, "a.e": 2, "a.f": "${no.key}"}
    text = "a: /x, b: '${a}/y', c: '${b}/z', d: '${no}/y'".join("{}")
    assert read_yaml(text, "c.yaml") == {"a": "/x", "b": "/x/y", "c": "/x/y/z", "d": "${no}/y"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {b: *a}", "c.yaml:1:11: not YAML: the alias *a is inside its own anchor"),
        ("a: 1\nb: 2\na: 3", 'c.yaml:3:1: not YAML: duplicate key "a": first at line 1'),
        ("a: !!python/name:os.system x", "c.yaml:1:4: not YAML: the tag"),
        ("[" * 9999, "not YAML: nested more than"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: 2024-13-01", "c.yaml: not YAML: month must be in 1..12"),
    ],
)
def test_yaml_that_frameworks_refuse_or_read_differently_is_an_error(text: str, message: str) -> None:
    with pytest.raises(Unread) as caught:
        read_yaml(text, "c.yaml")
    assert message in str(caught.value)


def test_references_to_the_environment_are_resolved() -> None:
    text = "a: '${oc.env:ROOT}/x'\nb: '${oc.env:UNSET,7}'\nc: '${oc.env:UNSET}'\n"
    assert read_yaml(text, "c.yaml", environment={"ROOT": "/r"}) == {"a": "/r/x", "b": 7, "c": "${oc.env:UNSET}"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("${b}", 2),
        ("x${b}y${b}", "x2y2"),
        ("${.near}", "far"),
        ("${oc.select:no, 7}", 7),
        ("${chain}", 2),
        ("${no}", "${no}"),
        ("${loop}", "${loop}"),
        (["${b}"], ["${b}"]),
    ],
)
def test_reference_resolves_to_target_value(value: object, found: object) -> None:
    keys = {"b": 2, "a.near": "${.next}", "a.next": "far", "chain": "${b}", "loop": "${loop}", "a.key": value}
    assert without_references(keys, {})["a.key"] == found


@given(st.text(max_size=80))
def test_any_text_is_read_or_is_an_error(text: str) -> None:
    try:
        keys(f"python -m pkg.trainer.main {text}")
    except Unread:
        return


@pytest.mark.parametrize(
    ("test", "mode", "expected"),
    [
        ('[ "$MODE" = "fast" ]', "fast", 1),
        ('[ "$MODE" = "fast" ]', "slow", 2),
        ("[[ $MODE != fast ]]", "slow", 1),
        ("[[ $MODE == fast ]]", "other", 2),
        ("[ -n $MODE ]", "fast", 1),
        ('[ -z "$MODE" ]', "fast", 2),
        ('[[ -z "$NOWHERE" ]]', "fast", 1),
        ('[[ "$NOWHERE" == "" ]]', "fast", 1),
        ('[ "" != "$MODE" ]', "fast", 1),
        ("[ $MODE -gt 4 ]", "8", 1),
        ("[ $MODE -le 4 ]", "8", 2),
        ("[ $# -lt 2 ]", "fast", "${A}"),  # a condition that is not known, and so is what depends on it
        ('[ -z "$1" ]', "fast", "${A}"),
    ],
)
def test_comparison_takes_branch_of_its_value(test: str, mode: str, expected: int | str) -> None:
    command = "python -m pkg.trainer.main a=$A\n"
    for script in (
        f"if {test}; then\n  A=1\nelse\n  A=2\nfi\n",
        f"if {test}; then A=1; else A=2; fi\n",
        f"B=3\nif {test}; then B=1; A=1\nelse A=2\nfi\n",
        f"A=2\n{test} && A=1\n",
        f"A=1\n{test} || A=2\n",
    ):
        assert keys(script + command, MODE=mode) == {"a": expected}


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("ARGS='a=1'\nARGS+=' b=2'", {"a": 1, "b": 2}),
        ("ARGS=a=0; B=7", {"a": 0}),
        ("B=7; ARGS=a=0", {"a": 0}),
        ("ARGS=a=9\nexport B=7 ARGS=a=0", {"a": 0}),
        ("export ARGS='a=1'\ndeclare -r ARGS+=' b=2'", {"a": 1, "b": 2}),
        ("case x in\nx)\n  ARGS=a=1\n  ;;\n*)\n  ARGS=a=2\n  ;;\nesac\nARGS=a=3", {"a": 3}),
    ],
)
def test_extended_or_declared_variable_has_whole_value(before: str, expected: dict[str, int]) -> None:
    assert keys(f"{before}\npython -m pkg.trainer.main $ARGS\n") == expected


def test_extended_array_has_all_its_words() -> None:
    script = "A=(a=1)\nif [ x = x ]; then\n  A+=(\n    b=2\n    c=3\n  )\nfi\nlocal -a B=(d=4)\n"
    assert keys(f'{script}python -m pkg.trainer.main "${{A[@]}}" "${{B[@]}}"\n') == {"a": 1, "b": 2, "c": 3, "d": 4}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("case $1 in\nx)\n  A=1\n  ;;\n*)\n  A=2\n  ;;\nesac", "${A}"),
        ("for B in $(ls); do A=$B; done", "${B}"),
        ("for A in *.txt; do :; done", "${A}"),
        ("while hostname; do A=$((A + 1)); done", "${A}"),
        ("while true; do A=$((A + 1)); hostname && break; done", "${A}"),
        ("read -r A < file", "${A}"),
        ("unset A", "$A"),
        ("((A++))", 2),
        ("let A=4", 4),
    ],
)
def test_variable_is_unknown_if_code_that_is_not_run_changes_it(script: str, expected: object) -> None:
    assert keys(f"A=1\n{script}\npython -m pkg.trainer.main a=$A\n") == {"a": expected}


@pytest.mark.parametrize(
    "line",
    ["{} >log", "{} >> log 2>&1", "{} 2>err", "{} &>log", "{}; echo done", "{} ; echo done", "cd /x && {} || exit 1"],
)
def test_redirections_and_other_commands_are_ignored(line: str) -> None:
    command = line.format("python -m pkg.trainer.main a=1 b=text")
    assert keys(f'{command}\necho "pkg.trainer.main a=7"\n') == {"a": 1, "b": "text"}


def test_leading_zero_is_decimal_and_time_is_text() -> None:
    assert assignments(["a=010", "b=12:30", "c=0", "d=0.5"], "run.sh") == {"a": 10, "b": "12:30", "c": 0, "d": 0.5}


@pytest.mark.parametrize("text", ["2024-01-01", "2024-13-01", "[" * 9999])
def test_text_that_yaml_reads_as_something_else_stays_text(text: str) -> None:
    assert assignments([f"a={text}"], "run.sh") == {"a": text}
    assert len(text) > 99 or text == "2024-13-01" or read_yaml(f"a: {text}", "c.yaml") == {"a": text}


def test_program_and_words_in_variables_are_read() -> None:
    script = """
ENTRY=${ENTRY:-"-m pkg.trainer.main"}
ROOT=${ROOT:-${HOME}/data}
MORE="\\
    b.x=1 \\
    b.list="[0.9,0.95]""
RUN="torchrun --nproc-per-node=${N:-4} ${ENTRY}"
$RUN \\
    a.path="${ROOT}/x" ${MORE}
"""
    command = last(script)
    assert command.launcher == ["torchrun", "--nproc-per-node=4", "-m"]
    assert assignments(command.words, "run.sh") == {"a.path": "/h/data/x", "b.x": 1, "b.list": [0.9, 0.95]}


def test_nested_command_and_here_document_are_read() -> None:
    quoted = (
        'srun --overlap bash -c \\\n"pip install x && ray submit -- python3 -m pkg.trainer.main a=1 \\\n  b=2" &>> log'
    )
    assert keys(quoted) == {"a": 1, "b": 2}
    several = "ray submit \\\n --env='{\n  \"dir\": \"'${HOME}'\"\n}' \\\n  -- python -m pkg.trainer.main a=1 \\\n  b=2"
    assert keys(several) == {"a": 1, "b": 2}
    here = "read -r -d '' commands <<EOF\npkg.trainer.main \\\n  a=1 \\\n  b=2\nEOF\ndeepspeed --module $commands\n"
    assert keys(here) == {"a": 1, "b": 2}


def test_flags_are_parsed_like_argparse() -> None:
    words = ["--a.rate", "1e-6", "--flag", "--n=3", "--two", "0.2", "0.3", "--names", "q_proj,", "v_proj", "--no_drop"]
    words += ["--with-dashes", "x", "--below", "-1"]
    expected = {"a.rate": 1e-6, "flag": True, "n": 3, "two": [0.2, 0.3], "names": ["q_proj", "v_proj"], "drop": False}
    assert flags(words, "run.sh") == {**expected, "with_dashes": "x", "below": -1}
    with pytest.raises(Unread, match=r"run\.sh: 'x' is not --key"):
        flags(["x"], "run.sh")


def test_empty_word_is_the_value_of_its_flag() -> None:
    command = last('python -m pkg.trainer.main --a "" --b 1 "" $@')
    assert flags(command.words, "run.sh") == {"a": None, "b": 1}


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_words_are_flags_or_an_error(words: list[str]) -> None:
    try:
        assert all(isinstance(key, str) for key in flags(words, "run.sh"))
    except Unread:
        return


def test_flags_of_hydra_are_keys() -> None:
    words = ["--config-path", "$(pwd)/config", "--config-name=own", "a.b=1", "+c=x"]
    assert assignments(words, "s") == {"--config-path": "$(pwd)/config", "--config-name": "own", "a.b": 1, "c": "x"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('case "$MODE" in\n  slow | fast)\n    A=${A:-1}\n    ;;\n  *) A=${A:-2} ;;\nesac\n', {"a": 1}),
        ('case "$MODE" in\n  slow) A=1; B=1 ;;\n  *) A=2; B=1 ;;\nesac\n', {"a": 2}),
        ("case $KIND in\n  slow)\n    A=${A:-1} ;;\n  fast)\n    A=${A:-2} ;;\nesac\n", {"a": "${KIND}"}),
        ("case $KIND in\n  slow) A=1 ;;\n  *) exit 1 ;;\nesac\n", {"a": 1}),
        ("KIND=$(uname)\nif [ $KIND = Linux ]; then\n  A=${A:-1}\nelse\n  A=${A:-2}\nfi\n", {"a": "${KIND}"}),
        ("N=4\nif hostname; then\n  A=$N\nelse\n  A=5\nfi\n", {"a": "${A}"}),
        ("A=1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --a) A=$2; shift 2 ;;\n  esac\ndone\n", {"a": 1}),
        ('A=1\nif [ "$MODE" = slow ] || [ "$MODE" = fast ]; then\n  A=2\nfi\n', {"a": 2}),
        ('A=1\n[ "$MODE" = fast ] && [ 2 -gt 3 ] && A=2\n', {"a": 1}),
        ("[ 1 -gt 2 ] && A=1 || A=2\n", {"a": 2}),
        ("A=1\nif [ -f /no/such/file ]; then\n  A=2\nfi\n", {"a": 1}),
        ("A=1\nif [ ! -d / ] || [ -e /no/such/file ]; then\n  A=2\nfi\n", {"a": 1}),
        ("GIVEN=\nA=${GIVEN:-3}\n", {"a": 3}),
        ("A=$((${UNSET:-5} * 2))\n", {"a": 10}),
        ("A=$(( 17 % 5 ))\n", {"a": 2}),
        ("A=$(( UNSET + 1 ))\n", {"a": "${UNSET}"}),
        ("GPUS=(0 1 2)\nA=${#GPUS[@]}\n", {"a": 3}),
    ],
)
def test_variables_are_those_of_branch_that_runs(script: str, expected: dict[str, object]) -> None:
    assert keys(script + "python -m pkg.trainer.main a=$A", MODE="fast") == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("{} a=1\nexit 0\n{} a=2\n", 1),
        ("{} a=1\nif [ -z $NOWHERE ]; then\n  exit\nfi\n{} a=2\n", 1),
        ("usage() {{\n  exit 0\n}}\n{} a=1\n", 1),
        ("function usage {{\n  exit\n}}\n{} a=1\n", 1),
        ("if hostname; then\n  {} a=1\n  exit\nfi\n{} a=2\n", 2),
        ("if [ -z $MODEL ]; then\n  exit 1\nfi\n{} a=2\n", 2),  # the variable may be exported
    ],
)
def test_commands_behind_exit_do_not_run(script: str, expected: int) -> None:
    assert keys(script.format(*["python -m pkg.trainer.main"] * 2)) == {"a": expected}


def test_array_that_branches_extend_differently_has_unknown_values() -> None:
    branches = "case $KIND in\n  one) E+=(b=1 c=2) ;;\n  two) E+=(b=1 c=3 d=4) ;;\nesac\n"
    command = 'python -m pkg.trainer.main "${E[@]}"'
    assert keys("E=(a=$((1 + UNSET)) x=0)\n" + branches + command) == {
        "a": "${UNSET}", "x": 0, "b": 1, "c": "${KIND}", "d": "${KIND}"
    }  # fmt: skip
    assert keys("E=(\n  f=$((2 * 3))\n  g=1\n)\n" + branches + command, KIND="one") == {"f": 6, "g": 1, "b": 1, "c": 2}
    assert keys('E=(a=1)\nB="${E[@]}"\npython -m pkg.trainer.main $B') == {"a": 1}


def test_command_behind_output_of_another_is_read() -> None:
    assert keys('SCRIPT=pkg.trainer.main\nlaunch --n="${N:-2}" "${SCRIPT}" a=1') == {"a": 1}
    assert keys('DEVICES=$(IFS=,; echo "${GPUS[*]}") python3 -m pkg.trainer.main a=1') == {"a": 1}
    assert keys('LINE="python3 -m pkg.trainer.main a=1 $@"\neval ${LINE}') == {"a": 1}


def test_output_of_a_command_is_kept_as_its_text() -> None:
    script = "N=$(nvidia-smi -L | wc -l)\npython -m pkg.trainer.main a=$N b=$((N * 2)) c=$(pwd)/x d=`pwd` $MORE"
    found = keys(script, PWD="/w", MORE="e=1")
    assert (found["a"], found["b"]) == ("$(nvidia-smi -L | wc -l)", "$(...)")
    assert (found["c"], found["d"], found["e"]) == ("/w/x", "/w", 1)
    assert last("N=$(a | b)\nrun --n ${N} pkg.trainer.main x=1").launcher == ["run", "--n", "$(a | b)"]
    several = "N=$(python3 - <<'EOF'\nprint(len(')'))\nEOF\n)\n[ -n $N ] && A=1 || A=2\n"
    assert keys(f"{several}python -m pkg.trainer.main a=$A") == {"a": "${N}"}


RUN = "python -m pkg.trainer.main"


def test_comment_behind_a_backslash_ends_the_command() -> None:
    command = last(f"{RUN} a.b=1 \\\n  # a.c=2 \\\n  a.d=3 \\\n  a.e=4\necho done\n")
    assert assignments(command.words, "run.sh") == {"a.b": 1}
    assert (command.first, command.last, command.rest) == (1, 1, (3, "a.d=3    a.e=4"))
    assert last(f"{RUN} a.b=1 \\\n  # a.c=2\n\necho done\n").rest is None
    quoted = f"launch -- '{RUN} a.b=1 \\\n # a.c=2\n a.d=3'\nE=(\n  x.y=1 \\\n  # no\n  x.z=2\n)\n{RUN} ${{E[@]}}"
    assert keys(quoted) == {"x.y": 1, "x.z": 2}


def test_commands_have_their_lines() -> None:
    script = f"N=1\n{RUN} a.b=1 \\\n  a.c=2\nif true; then\n  {RUN} a.b=3\nfi\n"
    found = script_commands(script, PROGRAMS, {}, "run.sh")
    assert [(each.first, each.last) for each in found] == [(2, 3), (5, 5)]


@pytest.mark.parametrize(
    "line",
    [
        "{} a=1 && {} a=2",
        "{} a=1 > log; {} a=2 | tee log",
        "{} a=1 & {} a=2",
        "(cd x && {} a=1 && {} a=2) > log",
        "echo {} a=0; {} a=1; printf '%s' x && {} a=2",
    ],
)
def test_each_command_of_a_line_is_read(line: str) -> None:
    found = script_commands(line.replace("{}", RUN), PROGRAMS, {}, "run.sh")
    assert [assignments(each.words, "run.sh") for each in found] == [{"a": 1}, {"a": 2}]


def test_number_sign_within_a_word_begins_no_comment() -> None:
    assert keys(f"{RUN} a=x#1 b=http://h/#f c='#2' d=\"e #3\" # f=1\n") == {
        "a": "x#1", "b": "http://h/#f", "c": "#2", "d": "e #3"
    }  # fmt: skip


def test_arguments_of_a_function_are_not_those_of_the_script() -> None:
    (inner, outer) = script_commands(f"f() {{\n  {RUN} a=${{1:-8}}\n}}\nf 3\n{RUN} a=${{1:-8}}", PROGRAMS, {}, "run.sh")
    assert (inner.words, inner.calls, inner.first) == (["a=3"], (4,), 2)
    assert (outer.words, outer.calls, outer.first) == (["a=8"], (), 5)


def test_name_of_a_trainer_among_arguments_of_another_script_is_no_command() -> None:
    for other in (
        "-c 'import pkg.trainer.main'",
        "patch.py --target pkg.trainer.main",
        "-m pkg.other path=pkg.trainer.main",
    ):
        assert not script_commands(f"python3 {other}\n", PROGRAMS, {}, "run.sh")
    assert keys("accelerate launch --multi_gpu pkg.trainer.main a=1") == {"a": 1}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("source env.sh", {"a": 1, "b": "$1", "n": 4}),  # of no arguments
        (". ./env.sh\nA=5", {"a": 5, "b": "$1", "n": 4}),
        ('source "$(dirname "$0")/env.sh"', {"a": 1, "b": "$1", "n": 4}),
        ("source missing.sh", {"a": "$A", "b": "$1", "n": 4}),
    ],
)
def test_sourced_file_beside_the_script_sets_variables(
    script: str, expected: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "env.sh").write_text("A=1\nsource env.sh\n")
    text = f"{script}\n{RUN} a=$A b=$1 n=${{N:-4}}\n"
    (command,) = script_commands(text, PROGRAMS, {}, str(tmp_path / "run.sh"))
    assert assignments(command.words, "run.sh") == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=9\nbash train.sh x 2 c=3", {"a": "$A", "b": "x", "n": 2, "c": 3}),  # A is not exported
        ("export A=9\nbash train.sh", {"a": 9, "b": "$1", "n": 8}),
        ("set -a\nA=9\nset +a\nN=2 nohup bash train.sh x &", {"a": 9, "b": "x", "n": 8}),
        ("A=9 bash train.sh x 2 &> log", {"a": 9, "b": "x", "n": 2}),
        ("A=9 sbatch train.sh x", {"a": 9, "b": "x", "n": 8}),
        ('bash "$ROOT/scripts/train.sh" x', {"a": "$A", "b": "x", "n": 8}),
        ("./train.sh x", {"a": "$A", "b": "x", "n": 8}),
    ],
)
def test_file_that_a_script_runs_gets_what_is_exported(
    script: str, expected: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(f'bash train.sh\n{RUN} a=$A b=$1 n=${{2:-8}} "${{@:3}}"\n')
    (command,) = script_commands(f"\n{script}\n", PROGRAMS, {}, str(tmp_path / "run.sh"))
    assert assignments(command.words, "run.sh") == expected
    assert command.first > 1, "the line of the script that runs it"


def test_file_that_reads_its_arguments_in_a_loop_is_followed(tmp_path: Path) -> None:
    loop = "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --a) A=$2; shift 2 ;;\n    *) shift ;;\n  esac\ndone\n"
    (tmp_path / "train.sh").write_text(f"A=1\n{loop}{RUN} a=$A\n")
    (command,) = script_commands("bash train.sh --x --a 2\n", PROGRAMS, {}, str(tmp_path / "run.sh"))
    assert command.words == ["a=2"]


IN_BASH = r"""
model=Org/Qwen-7B; N=3; ARR=(x=1 "y=two words"); declare -A OF=([small]=8 [big]=16); size=big
join() { local IFS=,; echo "$*"; }
train() { local name=$1; shift; python -m pkg.trainer.main name="$name" "$@" count=$#; }
python -m pkg.trainer.main a='$N' b="\$N" c='x > y | z' d="$N" e=$'t\tb' --stop '>' '&&' ';'
python -m pkg.trainer.main a=${model##*/} b=${model%%/*} c=${model/-7B/_x} d=${model,,} e=${model:0:3} f=${#model}
python -m pkg.trainer.main a=${N:+set} b=${NO:+set} c=${NO:-"de fault"} d=${NO-x} ${NO:-e f}
python -m pkg.trainer.main e="${ARR[1]}" f=${#ARR[@]} "${ARR[@]}"
python -m pkg.trainer.main a=${OF[$size]} b="${!OF[*]}" c=$(join 1 2 3) d=$(basename $model .x)
python -m pkg.trainer.main a=$(echo 0,1,2 | tr ',' '\n' | wc -l) b=$((N > 2 && N != 4 ? N ** 2 : 20)) c=$((-7 / 2))
train first a=1 "b=2 3"
for n in 1 2 {3..4}; do [ $n -eq 2 ] && continue; python -m pkg.trainer.main n=$n; done
for ((i = 0; i < 2; i++)); do python -m pkg.trainer.main i=$i; done
i=0; while (( i < 4 )); do i=$((i + 2)); python -m pkg.trainer.main i=$i; done
case "$model" in Org/*7B) size=small ;; *) size=none ;; esac
if [[ $size == sm* && ( -z $NO || $N -lt 1 ) ]]; then python -m pkg.trainer.main size=$size; fi
IFS=, read -ra DEVICES <<< "0,1,5"; python -m pkg.trainer.main n=${#DEVICES[@]} last=${DEVICES[-1]}
cat > made.sh <<EOF
python -m pkg.trainer.main made=$N later=\$N
EOF
N=4 bash made.sh
bash -c "python -m pkg.trainer.main quoted=$N a='b c'"
CMD="python -m pkg.trainer.main"; CMD="$CMD x=1"; CMD+=" y='q'"; $CMD; eval "$CMD z='q r'"
args=(); args+=(a=1); [ "$N" = 3 ] && args+=(b=2) || args+=(b=3)
python -m pkg.trainer.main "${args[@]:1}" $(printf '%s ' u v)
set -- one two; python -m pkg.trainer.main a=$1 n=$# "${@:2}"
"""


def test_words_are_those_that_bash_passes(tmp_path: Path) -> None:
    """The script runs in bash, with a ``python`` that prints its arguments."""
    (tmp_path / "python").write_text('#!/bin/bash\nshift 2\n{ printf "%s\\0" "$@"; echo; } >> "$LOG"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "HOME": "/h"}
    subprocess.run(["bash", "-c", IN_BASH], env=environment, cwd=tmp_path, check=True)
    ran = [line.split("\0")[:-1] for line in (tmp_path / "log").read_text().splitlines()]
    found = script_commands(IN_BASH, PROGRAMS, environment, str(tmp_path / "run.sh"))
    assert [[with_dollars(word) for word in each.words] for each in found] == ran


def test_text_of_a_command_that_is_not_run_decides_nothing() -> None:
    script = "DEVICE=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n"
    assert keys(f"{script}{RUN} a=$DEVICE") == {"a": "gpu"}, "areal runs on CUDA and CPUs"
    assert keys(f"N=$(python3 -c 'print(1)')\n{RUN} a=$N") == {"a": "$(python3 -c 'print(1)')"}


def test_variable_that_is_never_set_gives_no_word() -> None:
    command = last(f"{RUN} a=1 $MORE $MORE b=2 --c $NO")
    assert (command.words, command.unset) == (["a=1", "b=2", "--c", "$NO"], ("MORE",))


def test_script_with_a_fault_is_read_up_to_it_and_after_it() -> None:
    assert keys(f"A=1\n)\n{RUN} a=$A\n") == {"a": 1}
    with pytest.raises(Unread, match=r"run\.sh:2: the command cannot be read: no closing '"):
        keys(f"A=1\n{RUN} a='b\n")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("f() {\n  for n in {1..99}; do f; done\n}\nf\n", "it runs more than 100,000 commands"),
        ("A=x\nfor n in {1..60}; do A=$A$A; done\n", "grows beyond"),
        ("A=(x)\nfor n in {1..60}; do A+=(${A[@]}); done\n", "grows beyond"),
        (f"A={'${a:-' * 280}x{'}' * 280}", "too deeply nested"),
    ],
)
def test_endless_script_is_an_error(script: str, message: str) -> None:
    with pytest.raises(Unread, match=message):
        keys(script)


def test_line_of_many_spaces_is_read_in_linear_time() -> None:
    assert keys(f"{' ' * 100_000}x\npython -m pkg.trainer.main a=1") == {"a": 1}  # a quadratic reader takes minutes
