"""The frameworks that ``areal convert`` reads: how their commands are found, and their trainers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from areal.convert import openrlhf, trl, verl, verl_async, verl_sft
from areal.convert.code import code_of_notebook, read_python, syntax_tree
from areal.convert.drafts import Entry, Fate
from areal.convert.reading import DOLLAR, Unread, assignments, flags, flat, read_yaml, with_dollars, without_references
from areal.convert.rules import Framework
from areal.convert.shell import Command, script_commands
from areal.dataclasses import dataclass

_LAUNCHER = ("nproc_per_node", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes", "config_file")


@dataclass(frozen=True)
class SourceFormat:
    """How the files of a framework are read. ``programs``: a pattern of its commands, whose last group that matches is
    the trainer, or its name in ``called``. ``read``: converts the words of a command to keys. ``readable``: for
    errors. ``nested``: keys of a YAML file have dots. ``trainer_of``: the trainer of a YAML file by its keys, or ""."""

    trainers: Mapping[str, Framework]
    programs: re.Pattern[str]
    called: Mapping[str, str]
    read: Callable[[Sequence[str], str], dict[str, Any]]
    readable: str
    nested: bool = True
    trainer_of: Callable[[Mapping[str, object]], str] = lambda keys: ""

    def of_script(
        self, text: str, environment: Mapping[str, str], name: str, trainer: str | None, line: int | None
    ) -> tuple[Command, list[Entry]]:
        """Return the command at ``line``, or the last one of ``trainer`` (also a script of the user's own), or the
        last; and entries for what is not read beside it. Raises Unread."""
        if name.endswith(".py"):  # its docstring contains the commands
            text = _docstring(text, name)
        found = script_commands(text, self.programs, environment, name)
        scripts = [] if found else script_commands(text, _ANY_SCRIPT, environment, name)
        if trainer:
            found = found or [each for each in scripts if not each.program[0].endswith("sh")]
        if not found:
            others = (f"--from {each}" for each, of in SOURCES.items() if of is not self and of.programs.search(text))
            other = scripts[-1].program[0] if scripts and not name.endswith(".py") else ""
            named = "" if other.endswith("sh") else f", or add --trainer NAME, one of {', '.join(self.trainers)}"
            hint = next(others, f"it runs {other}: convert that file{named}" if other else self.readable)
            raise Unread(f"{name}: no command in it runs a trainer that is known here", hint=hint)
        chosen = [each for each in found if line is None or each.first <= line <= each.last or line in each.calls]
        if not chosen:
            places = ", ".join(map(_place, found))
            raise Unread(f"{name}: no command at line {line} runs a trainer", hint=f"its commands: {places}")
        command = next((each for each in reversed(chosen) if self.trainer(each) == trainer), chosen[-1])
        return command, _beside(command, found)

    def trainer(self, command: Command) -> str | None:
        """Return the trainer that a command runs, or None for a script of the user's own."""
        name = command.program[command.program.lastindex or 0]
        return self.called.get(name, name if name in self.trainers else None)


def _docstring(text: str, name: str) -> str:
    """Return the docstring of a Python script with its line numbers unchanged."""
    tree = syntax_tree(text, name)
    if ast.get_docstring(tree) is None:
        return ""
    written = ast.get_source_segment(text, tree.body[0]) or ""
    return "\n" * (tree.body[0].lineno - 1) + written.replace('"""', "").replace("\\\\\n", "\\\n")


def _place(command: Command) -> str:
    lines = f"line {command.first}" if command.first == command.last else f"lines {command.first}-{command.last}"
    return f"{command.program[0].strip(' /')} ({lines})"


def _beside(command: Command, found: Sequence[Command]) -> list[Entry]:
    """Return entries for the other commands, and for what a comment separates from ``command``."""
    others = [_place(each) + _difference(each, command) for each in found if each.words != command.words]
    here = f"{_place(command)}{''.join(f', called at line {line}' for line in command.calls)}"
    note = f"{here} is read; --line N reads another"
    entries = [Entry("other commands", list(dict.fromkeys(others)), Fate.IGNORED, note=note)] if others else []
    note = "it is not set, so the command has no such words: export it, or add KEY=VALUE"
    entries += [Entry(f"${name}", "", Fate.IGNORED, note=note) for name in command.unset]
    if command.rest is not None:
        number, text = command.rest
        note = "the comment above ends the command, as in bash"
        entries.append(Entry(f"line {number}", text, Fate.IGNORED, note=note))
    return entries


def _difference(other: Command, command: Command) -> str:
    """Return how the words of another run of the same lines, in a loop or a function, differ from the command's."""
    if (other.first, other.last) != (command.first, command.last):
        return ""
    return f": {' '.join(each for each in other.words if each not in command.words)}"


_ANY_SCRIPT = re.compile(r"(?:(?:^|(?<= ))[\w./~-]+\.(?:py|sh)|(?<=-m )\w+(?:\.\w+)+)(?!\S)")


def _full(key: str, framework: Framework) -> str:
    """Return the known key that ``key`` abbreviates, as argparse does; ``key`` if there are none or several."""
    known = {*framework.rules, *framework.aliases}
    begun = {framework.aliases.get(each, each) for each in known if each.startswith(key)}
    return key if key in known or len(begun) != 1 else begun.pop()


def _launched(command: Command, name: str) -> dict[str, object]:
    """Return the launcher's options that set the number of processes."""
    first = next((at for at, word in enumerate(command.launcher) if word.startswith("--")), len(command.launcher))
    given = flags([word for word in command.launcher[first:] if word not in ("-m", "--")], name)
    slots = [each.partition(":")[2] for each in str(given.get("include", "")).split("@")]  # of deepspeed, by host
    if all(slots):
        given["num_gpus"] = sum(each.count(",") + 1 for each in slots)
    return {key: given[key] for key in _LAUNCHER if key in given}


def _of_verl(keys: Mapping[str, object]) -> str:
    """Return the trainer of a YAML file of verl by its keys, or ""."""
    if any(key.startswith("async_training.") for key in keys):
        return "fully_async"
    if any(key.startswith("actor_rollout_ref.") for key in keys):
        return "one_step_off" if "rollout.n_gpus_per_node" in keys else "ppo"
    if "model.partial_pretrain" in keys:
        return "fsdp_sft"
    return "sft" if any(key.startswith(("data.", "model.", "optim.", "engine.", "trainer.")) for key in keys) else ""


_VERL = {
    "main_ppo": "ppo",
    "fsdp_sft_trainer": "fsdp_sft",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "fully_async_main": "fully_async",
    "one_step_off_policy.main_ppo": "one_step_off",
    "main_dapo": "ppo",
}
_VERL_PROGRAMS = (
    r"(?<![\w.])verl[./]trainer[./](main_ppo|fsdp_sft_trainer|sft_trainer|sft_trainer_ray)(?:_sync)?",
    r"transfer_queue[./](main_ppo)",
    r"fully_async_policy[./](fully_async_main)",
    r"(one_step_off_policy\.main_ppo)",
    r"dapo[./](?:\w+[./])?(main_dapo)",
)
SOURCES: Mapping[str, SourceFormat] = {
    "verl": SourceFormat(
        {
            "ppo": verl.VERL,
            "one_step_off": verl_async.ONE_STEP_OFF,
            "fully_async": verl_async.FULLY_ASYNC,
            "sft": verl_sft.SFT,
            "fsdp_sft": verl_sft.FSDP_SFT,
        },
        re.compile(rf"(?:{'|'.join(_VERL_PROGRAMS)})(?:\.py)?(?!\S)"),
        _VERL,
        assignments,
        "a script with `python3 -m verl.trainer.main_ppo KEY=VALUE ...`, or the trainer's YAML file, is read",
        trainer_of=_of_verl,
    ),
    "trl": SourceFormat(
        {"grpo": trl.GRPO, "rloo": trl.RLOO, "sft": trl.SFT, "dpo": trl.DPO, "reward": trl.REWARD},
        re.compile(r"(?:^|/| )(?:trl (grpo|rloo|sft|dpo|reward)|(grpo|gspo|rloo|sft|dpo|reward)(?:_\w+)?\.py)(?!\S)"),
        {"gspo": "grpo"},
        flags,
        "a script with `trl grpo --KEY VALUE ...` or one of TRL's own scripts, Python code that calls `GRPOConfig(...)`"
        " with arguments, or a YAML file is read",
        nested=False,
    ),
    "openrlhf": SourceFormat(
        {"ppo": openrlhf.PPO, "sft": openrlhf.SFT, "dpo": openrlhf.DPO, "rm": openrlhf.RM},
        re.compile(
            r"(?:(?<![\w.])openrlhf[./]cli[./]|(?:^|[/ ])(?=train_\w+\.py))"
            r"train_(ppo_ray|ppo|sft|dpo|rm)(?:\.py)?(?!\S)"
        ),
        {"ppo_ray": "ppo"},
        flags,
        "a script with `python3 -m openrlhf.cli.train_ppo_ray --KEY VALUE ...` is read, or train_sft, train_dpo, "
        "train_rm",
    ),
}


class Read(NamedTuple):
    """The content of a file. ``command``: a script's program and its lines. ``beside``: entries for the rest.
    ``written``: the texts of the files that a script writes, by name."""

    trainer: str
    keys: dict[str, Any]
    command: str = ""
    beside: Sequence[Entry] = ()
    written: Mapping[str, str] = MappingProxyType({})


def read_keys(
    source: str, trainer: str | None, text: str, environment: Mapping[str, str], name: str, line: int | None = None
) -> Read:
    """Read a file. ``line``: that of the command, or of the configuration in Python code, if there are several. Raises
    Unread, also if a YAML file does not show its trainer."""
    of = SOURCES[source]
    if name.endswith(".ipynb"):
        text, name = code_of_notebook(text, name), f"{name} (its code).py"
    if source == "trl" and name.endswith(".py") and (made := read_python(text, name, trainer, line)) is not None:
        return Read(trainer or made[0], made[1])
    if not name.endswith((".yaml", ".yml")):
        command, beside = of.of_script(text, environment, name, trainer, line)
        trainer = trainer or str(of.trainer(command))
        found = {**_launched(command, name), **of.read(command.words, name)}
        if of.read is assignments:  # OmegaConf's references are quoted in a script
            quoted = {
                key: with_dollars(value) if f"{DOLLAR}{{" in str(value) else value for key, value in found.items()
            }
            found = without_references(quoted, environment)
            rules = of.trainers[trainer].rules
            inner = {key: value for key, value in found.items() if isinstance(value, Mapping) and key not in rules}
            found = {**{key: value for key, value in found.items() if key not in inner}, **dict(flat(inner))}
        keys = {_full(key, of.trainers[trainer]) if of.read is flags else key: found[key] for key in found}
        return Read(trainer, keys, _place(command), beside, command.written)
    if line is not None:
        raise Unread(f"{name}: --line chooses one of several commands, and a YAML file has none")
    keys = read_yaml(text, name, nested=of.nested, environment=environment)
    chosen = trainer or of.trainer_of(keys)
    if not chosen:
        raise Unread(f"{name}: which trainer reads it is not in the file", hint=f"--trainer {', '.join(of.trainers)}")
    return Read(chosen, keys)
