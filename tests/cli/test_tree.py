"""The command tree is frozen: names and flags only ever grow."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from areal.cli.main import run
from areal.cli.reference import commands
from areal.cli.tree import Leaf

SNAPSHOT = Path(__file__).with_name("tree.json")
COMMANDS = {path: (command, leaf) for path, command, leaf in commands()}
IDS = [" ".join(path) for path in COMMANDS]

COMMON = {"--home", "--context", "--quiet", "--verbose", "--debug"}
READ = """get describe wait history logs events top validate render graph schema explain init doctor diff version
completion config_view config_get-contexts config_current-context config_path inf_status inf_ps inf_models inf_logs
inf_chat agent_status agent_ps agent_logs agent_sessions_list agent_sessions_show agent_chat train_ps train_status
train_logs train_metrics weight-update_status weight-update_pairs weight-update_ps weight-update_logs""".split()
REMOTE = """get describe wait history logs events top inf_status inf_ps inf_models inf_logs inf_chat inf_collect
agent_status agent_ps agent_logs agent_chat agent_sessions_list agent_sessions_show agent_sessions_new
agent_sessions_switch agent_sessions_close agent_reward agent_export train_ps train_status train_logs train_metrics
weight-update_status weight-update_pairs weight-update_ps weight-update_logs weight-update_force-sync""".split()
LOCKING = """apply diff delete scale restart suspend resume rollback reconcile adopt doctor inf_run inf_stop inf_register
inf_deregister inf_scaleup inf_scaledown agent_run agent_stop agent_scaleup agent_scaledown train_start
train_stop""".split()
PENDING = [path for path in COMMANDS if path[0] in ("agent", "train", "weight-update") or path == ("inf", "collect")]


def flags(command: click.Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


def path_of(words: str) -> tuple[str, ...]:
    return tuple(words.split("_"))


def test_tree_against_the_snapshot_only_grows() -> None:
    frozen: dict[str, list[str]] = json.loads(SNAPSHOT.read_text())
    now = {" ".join(path): flags(command) for path, (command, _) in COMMANDS.items()}
    lost = {name: sorted(set(was) - now.get(name, set())) for name, was in frozen.items() if set(was) - now.get(name, set())}
    assert not lost, "scripts depend on these"
    assert set(frozen) <= set(now)
    assert {name: sorted(found) for name, found in now.items()} == frozen, "grown: add the new ones to tree.json"


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_command_has_the_common_flags_and_a_text(path: tuple[str, ...]) -> None:
    command, leaf = COMMANDS[path]
    assert flags(command) >= COMMON
    assert command.help and isinstance(leaf, Leaf)
    assert leaf.help.endswith(".") and len(leaf.help) <= 75
    assert all(option.help for option in command.params if isinstance(option, click.Option))


@pytest.mark.parametrize("words", READ)
def test_read_verb_has_output_and_json(words: str) -> None:
    assert flags(COMMANDS[path_of(words)][0]) >= {"-o", "--output", "--json"}


@pytest.mark.parametrize("words", REMOTE)
def test_verb_that_a_gateway_can_answer_takes_a_gateway(words: str) -> None:
    assert flags(COMMANDS[path_of(words)][0]) >= {"--gateway", "--api-key-file"}


@pytest.mark.parametrize("words", LOCKING)
def test_verb_that_locks_takes_a_lock_timeout(words: str) -> None:
    assert "--lock-timeout" in flags(COMMANDS[path_of(words)][0])


@pytest.mark.parametrize("path", PENDING, ids=lambda path: " ".join(path))
def test_pending_verb_says_so_in_one_line_and_fails(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code = run([*path, *required(COMMANDS[path][0])])
    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    assert captured.err == f"error: `areal {' '.join(path)}` is not implemented yet\n"


def required(command: click.Command) -> list[str]:
    words: list[str] = []
    for param in command.params:
        if isinstance(param, click.Option) and param.required:
            words += [param.opts[-1], __file__]
        elif isinstance(param, click.Argument) and param.required:
            words.append("1")
    return words


@pytest.mark.parametrize("words", [[], ["inf"], ["agent"], ["agent", "sessions"], ["train"], ["weight-update"], ["config"]])
def test_group_without_a_command_prints_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(" ".join(["Usage: areal", *words]))
    assert captured.err == ""


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_help_of_every_command_is_printed(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"Usage: areal {' '.join(path)} ")
