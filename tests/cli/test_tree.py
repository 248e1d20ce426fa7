"""The command tree is frozen: names and flags only ever grow."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from areal.cli.main import Leaf, run
from areal.cli.reference import commands

SNAPSHOT = Path(__file__).with_name("tree.json")
COMMANDS = {path: (command, leaf) for path, command, leaf in commands()}
IDS = [" ".join(path) for path in COMMANDS]

COMMON = {"--home", "--context", "--quiet", "--verbose", "--debug"}
SPEAKING_ONLY = {f"config {verb}" for verb in ("use-context", "set-context", "delete-context", "set", "unset")} | {
    "train run",
    "models rm",
}
OWN_OUTPUT = {"inf collect", "agent export", "eval"}  # their --output is a place, so that the format has -o alone
STATELESS = {
    "train estimate",
    "init",
    "convert",
    "validate",
    "render",
    "graph",
    "schema",
    "explain",
    "completion",
    "version",
    "doctor",
}
CHANGING = {"apply", "diff", "delete", "scale", "restart", "suspend", "resume", "rollback", "reconcile", "adopt"}
CHANGING |= {f"inf {verb}" for verb in ("run", "stop", "register", "deregister", "scaleup", "scaledown")}
CHANGING |= {f"agent {verb}" for verb in ("run", "stop", "scaleup", "scaledown")}
CHANGING |= {"train start", "train stop"}


def flags(command: click.Command) -> set[str]:
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


def test_command_tree_only_grows() -> None:
    frozen: dict[str, list[str]] = json.loads(SNAPSHOT.read_text())
    now = {" ".join(path): flags(command) for path, (command, _) in COMMANDS.items()}
    lost = {
        name: sorted(set(was) - now.get(name, set())) for name, was in frozen.items() if set(was) - now.get(name, set())
    }
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


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_data_command_has_output_and_json(path: tuple[str, ...]) -> None:
    name, found = " ".join(path), flags(COMMANDS[path][0])
    assert ({"-o", "--output", "--json"} <= found) is (name not in SPEAKING_ONLY)
    if name not in SPEAKING_ONLY | OWN_OUTPUT:
        option = next(param for param in COMMANDS[path][0].params if "-o" in param.opts)
        assert option.opts == ["-o", "--output"]


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_reading_command_takes_gateway(path: tuple[str, ...]) -> None:
    name, found = " ".join(path), flags(COMMANDS[path][0])
    local = name in STATELESS | CHANGING | SPEAKING_ONLY or path[0] in ("config", "generate", "models")
    if name != "config set-context":
        assert ({"--gateway", "--api-key-file"} <= found) is not local


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_mutating_command_takes_timeouts(path: tuple[str, ...]) -> None:
    if " ".join(path) in CHANGING:
        assert flags(COMMANDS[path][0]) >= {"--lock-timeout", "--timeout"}


@pytest.mark.parametrize(
    "words", [[], ["inf"], ["agent"], ["agent", "sessions"], ["train"], ["weight-update"], ["config"]]
)
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
