"""The frameworks that ``areal convert`` reads: how a command of each is found and read, and its trainers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areal.convert import openrlhf, trl, verl, verl_async, verl_sft
from areal.convert.reading import Command, Unread, assignments, flags, read_yaml, script_command
from areal.convert.rules import Framework, NotLiteral
from areal.dataclasses import dataclass

_LAUNCHER = ("nproc_per_node", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes", "config_file")


@dataclass(frozen=True)
class SourceFormat:
    """A framework. ``programs``: a pattern whose last group that matches names the trainer, in the words of
    ``called``. ``read``: the keys of a command's words. ``readable``: what can be read, in words. ``nested``: whether
    keys of a YAML file have dots. ``trainer_of``: the trainer of a YAML file by its keys, "" where they do not show
    it."""

    trainers: Mapping[str, Framework]
    programs: re.Pattern[str]
    called: Mapping[str, str]
    read: Callable[[Sequence[str], str], dict[str, Any]]
    readable: str
    nested: bool = True
    trainer_of: Callable[[Mapping[str, object]], str] = lambda keys: ""

    def of_script(self, text: str, environment: Mapping[str, str], name: str) -> tuple[str, dict[str, object]]:
        """Return the trainer, and the keys of the command with what its launcher says of processes. Raises Unread."""
        if name.endswith(".py"):  # its docstring shows its commands
            text = ast.get_docstring(syntax_tree(text, name)) or ""
        others = (
            f"--from {other}" for other, each in SOURCES.items() if each is not self and each.programs.search(text)
        )
        command = script_command(text, self.programs, environment, name, next(others, self.readable))
        called = command.program[command.program.lastindex or 0]
        return self.called[called], {**_launched(command, name), **self.read(command.words, name)}


def _launched(command: Command, name: str) -> dict[str, object]:
    """Return the number of processes, of the words before the program."""
    first = next((at for at, word in enumerate(command.launcher) if word.startswith("--")), len(command.launcher))
    given = flags([word for word in command.launcher[first:] if word not in ("-m", "--")], name)
    return {key: given[key] for key in _LAUNCHER if key in given}


def _of_verl(keys: Mapping[str, object]) -> str:
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
    r"verl[./]trainer[./](main_ppo|fsdp_sft_trainer|sft_trainer|sft_trainer_ray)",
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
        {**{name: name for name in ("grpo", "rloo", "sft", "dpo", "reward")}, "gspo": "grpo"},
        flags,
        "a script with `trl grpo --KEY VALUE ...` or one of TRL's own scripts, Python code that calls `GRPOConfig(...)`"
        " with arguments, or a YAML file is read",
        nested=False,
    ),
    "openrlhf": SourceFormat(
        {"ppo": openrlhf.PPO, "sft": openrlhf.SFT, "dpo": openrlhf.DPO, "rm": openrlhf.RM},
        re.compile(r"openrlhf[./]cli[./]train_(ppo_ray|ppo|sft|dpo|rm)(?:\.py)?(?!\S)"),
        {"ppo_ray": "ppo", "ppo": "ppo", "sft": "sft", "dpo": "dpo", "rm": "rm"},
        flags,
        "a script with `python3 -m openrlhf.cli.train_ppo_ray --KEY VALUE ...` is read",
    ),
}


def read_keys(
    source: str, trainer: str | None, text: str, environment: Mapping[str, str], name: str
) -> tuple[str, Any]:
    """Return the trainer and the keys of a file. Raises Unread, also where the trainer of a YAML file is not known."""
    of = SOURCES[source]
    if source == "trl" and name.endswith(".py") and (made := read_python(text, name)) is not None:
        return trainer or made[0], made[1]
    if not name.endswith((".yaml", ".yml")):
        found, keys = of.of_script(text, environment, name)
        return trainer or found, keys
    keys = read_yaml(text, name, nested=of.nested)
    chosen = trainer or of.trainer_of(keys)
    if not chosen:
        raise Unread(f"{name}: which trainer reads it is not in the file", hint=f"--trainer {', '.join(of.trainers)}")
    return chosen, keys


# TRL's configuration in Python code: the keywords of ``GRPOConfig(...)`` and of the trainer that gets it. The script is
# parsed and never run: a keyword has a value where it is a literal, or a name that is bound once, to one.

_CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RewardConfig": "reward",
}
_TRAINERS = {name.replace("Config", "Trainer"): trainer for name, trainer in _CONFIGS.items()}
_OF_TRAINER = {"model": "model_name_or_path", "reward_funcs": "reward_funcs"}
_OF_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": ""}
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's, which are not those of TRL's options
_LORA_NEUTRAL = {"bias": "none", "init_lora_weights": True, "inference_mode": False}  # they ask for nothing
_IMPORT = "import"  # of a constant that is a dotted name
_REWARDS = "trl.rewards."  # functions that are known by their names


def read_python(text: str, name: str) -> tuple[str, dict[str, object]] | None:
    """Return the trainer and the keys of a script; None if it makes no configuration with arguments. Raises Unread for
    a script that makes several, or several trainers."""
    tree = syntax_tree(text, name)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [each for each in calls if _called(each) in _CONFIGS and (each.args or each.keywords)]
    if not configs:
        return None
    names, trainer = _bound(tree), _CONFIGS[_called(configs[0])]
    trainers = [each for each in calls if _TRAINERS.get(_called(each)) == trainer]
    for what, found in (("configurations", configs), ("trainers", trainers)):
        if len(found) > 1:
            lines = ", ".join(str(each.lineno) for each in found)
            raise Unread(f"{name}: several {what}, in the lines {lines}", hint="keep the one that is to be converted")
    keys = {key: _value(node, names, name) for key, node in _arguments(configs[0])} | _assigned(tree, configs[0], name)
    for call in trainers:
        keys |= _of_trainer(call, names, name)
    if wrapped := [each for each in calls if _called(each) == "get_peft_model"]:
        note = f"{name}:{wrapped[0].lineno}: adapters made by the script: add use_peft=true lora_r=N lora_alpha=N"
        keys.setdefault("use_peft", NotLiteral(ast.unparse(wrapped[0].func), note))
    return trainer, keys


def _assigned(tree: ast.Module, config: ast.Call, file: str) -> dict[str, object]:
    """Return the fields that the script assigns to the configuration once it is made."""
    made = [node for node in ast.walk(tree) if getattr(node, "value", None) is config]
    targets = [each for node in made for each in getattr(node, "targets", [getattr(node, "target", None)])]
    names = {each.id for each in targets if isinstance(each, ast.Name)}
    return {
        node.attr: NotLiteral(ast.unparse(node), f"{file}:{node.lineno}: assigned by the script: add KEY=VALUE")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in names
    }


def syntax_tree(text: str, name: str) -> ast.Module:
    """Return the script, parsed. Raises Unread with the line of what is no Python."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        place = name if error.lineno is None else f"{name}:{error.lineno}"
        raise Unread(f"{place}: not a Python script: {error.msg}") from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise Unread(f"{name}: not a Python script: {error}") from error


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _arguments(call: ast.Call, first: str = "output_dir") -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a call by name. Several that a mapping holds (``**more``) are one, of the mapping's
    name."""
    for place, node in enumerate(call.args):
        yield (first if place == 0 else f"argument {place + 1}"), node
    for keyword in call.keywords:
        yield keyword.arg or f"**{ast.unparse(keyword.value)}", keyword.value


def _bound(tree: ast.Module) -> dict[str, ast.expr]:
    """Return what each name stands for that is bound once: an expression, or the dotted name that it is imported as."""
    found: dict[str, ast.expr] = {}
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if node.level == 0:  # a relative module has no name outside of its package
                    found[each.asname or each.name] = ast.Constant(f"{node.module}.{each.name}", kind=_IMPORT)
                bound[each.asname or each.name] += 1
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] += 1
    return {name: node for name, node in found.items() if bound[name] == 1}


def _value(node: ast.expr, names: Mapping[str, ast.expr], file: str) -> Any:
    given = names.get(node.id, node) if isinstance(node, ast.Name) else node
    if not isinstance(given, ast.Constant) or given.kind != _IMPORT:
        try:
            return ast.literal_eval(given)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
    return NotLiteral(ast.unparse(node), f"{file}:{node.lineno}: not a literal: add KEY=VALUE")


def _of_trainer(call: ast.Call, names: Mapping[str, ast.expr], file: str) -> dict[str, object]:
    """Model, rewards, data set and adapters are arguments of the trainer."""
    keys: dict[str, object] = {}
    for key, node in _arguments(call, "model"):
        given = names.get(node.id, node) if isinstance(node, ast.Name) else node
        made = _called(given) if isinstance(given, ast.Call) else ""
        if key == "reward_funcs":
            keys[key] = _rewards(node, names, file)
        elif key in _OF_TRAINER:
            keys[_OF_TRAINER[key]] = _value(node, names, file)
        elif key == "train_dataset" and isinstance(given, ast.Call) and made == "load_dataset":
            values = {each: _value(value, names, file) for each, value in _arguments(given, "path")}
            renamed = {
                "path": "dataset_name",
                "argument 2": "dataset_config",
                "name": "dataset_config",
                "split": "dataset_train_split",
            }
            keys |= {renamed.get(each, f"dataset_{each}"): value for each, value in values.items()}
        elif key == "train_dataset":
            keys["dataset_name"] = _value(node, names, file)
        elif key == "peft_config" and isinstance(given, ast.Call) and made == "LoraConfig":
            keys |= {"use_peft": True, **_LORA_DEFAULTS}
            values = {each: _value(value, names, file) for each, value in _arguments(given, "task_type")}
            named = ((_OF_LORA.get(each, each), value) for each, value in values.items())
            keys |= {each: value for each, value in named if each and (each, value) not in _LORA_NEUTRAL.items()}
        elif key == "peft_config":
            keys["use_peft"] = _value(node, names, file)
        elif key != "args":
            keys[key] = _value(node, names, file)
    return keys


def _rewards(node: ast.expr, names: Mapping[str, ast.expr], file: str) -> Any:
    """Return the names of imported functions, of which TRL's own are known without their module."""
    found = []
    for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        given = names.get(each.id) if isinstance(each, ast.Name) else None
        if not isinstance(given, ast.Constant) or given.kind != _IMPORT:
            return NotLiteral(
                ast.unparse(node), f"{file}:{node.lineno}: a function of the script: add reward_funcs=module.function"
            )
        found.append(str(given.value).removeprefix(_REWARDS))
    return found
