"""The frameworks that ``areal convert`` reads: how a command of each is found and read, and its trainers."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areal.convert import openrlhf, trl, verl, verl_async, verl_sft
from areal.convert.reading import Command, Unread, assignments, flags, read_yaml, script_commands
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

    def of_script(self, text: str, environment: Mapping[str, str], name: str, trainer: str | None) -> Command:
        """Return the last command of ``trainer``, else the last of any; with ``trainer`` also one of a script of its
        own. Raises Unread."""
        if name.endswith(".py"):  # its docstring shows its commands
            text = ast.get_docstring(syntax_tree(text, name)) or ""
        found = script_commands(text, self.programs, environment, name)
        scripts = [] if found else script_commands(text, _ANY_SCRIPT, environment, name)
        if scripts and trainer and not scripts[-1].program[0].endswith("sh"):
            found = scripts[-1:]
        if not found:
            others = (f"--from {each}" for each, of in SOURCES.items() if of is not self and of.programs.search(text))
            other = scripts[-1].program[0] if scripts and not name.endswith(".py") else ""
            runs = f"it runs {other}: convert that file{'' if other.endswith('sh') else ', or add --trainer NAME'}"
            hint = next(others, runs if other else self.readable)
            raise Unread(f"{name}: no command in it runs a trainer that is known here", hint=hint)
        return next((each for each in reversed(found) if self.trainer(each) == trainer), found[-1])

    def trainer(self, command: Command) -> str | None:
        """Return the trainer that a command runs; None for that of another script."""
        return self.called.get(command.program[command.program.lastindex or 0])


_ANY_SCRIPT = re.compile(r"(?:^|(?<= ))[\w./~-]+\.(?:py|sh)(?!\S)")


def _full(key: str, framework: Framework) -> str:
    """Return the one known key that ``key`` begins, as argparse does; else ``key``."""
    known = {*framework.rules, *framework.aliases}
    begun = {framework.aliases.get(each, each) for each in known if each.startswith(key)}
    return key if key in known or len(begun) != 1 else begun.pop()


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
    r"verl[./]trainer[./](main_ppo|fsdp_sft_trainer|sft_trainer|sft_trainer_ray)(?:_sync)?",
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
        {**{name: name for name in ("grpo", "rloo", "sft", "dpo", "reward")}, "gspo": "grpo"},
        flags,
        "a script with `trl grpo --KEY VALUE ...` or one of TRL's own scripts, Python code that calls `GRPOConfig(...)`"
        " with arguments, or a YAML file is read",
        nested=False,
    ),
    "openrlhf": SourceFormat(
        {"ppo": openrlhf.PPO, "sft": openrlhf.SFT, "dpo": openrlhf.DPO, "rm": openrlhf.RM},
        re.compile(r"(?:openrlhf[./]cli[./]|(?:^|[/ ])(?=train_\w+\.py))train_(ppo_ray|ppo|sft|dpo|rm)(?:\.py)?(?!\S)"),
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
    if name.endswith(".ipynb"):
        text, name = _code_of_notebook(text, name), f"{name} (its code).py"
    if source == "trl" and name.endswith(".py") and (made := read_python(text, name)) is not None:
        return trainer or made[0], made[1]
    if not name.endswith((".yaml", ".yml")):
        command = of.of_script(text, environment, name, trainer)
        trainer = trainer or str(of.trainer(command))
        found = {**_launched(command, name), **of.read(command.words, name)}
        return trainer, {_full(key, of.trainers[trainer]) if of.read is flags else key: found[key] for key in found}
    keys = read_yaml(text, name, nested=of.nested)
    chosen = trainer or of.trainer_of(keys)
    if not chosen:
        raise Unread(f"{name}: which trainer reads it is not in the file", hint=f"--trainer {', '.join(of.trainers)}")
    return chosen, keys


# TRL's configuration in Python code: the keywords of ``GRPOConfig(...)`` and of the trainer that gets it. The script is
# parsed and never run: a keyword has a value where it is made of literals, of names that are bound once, to one, and of
# the script's own arguments, which have their defaults.

_CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RewardConfig": "reward",
}
_TRAINERS = {name.replace("Config", "Trainer"): trainer for name, trainer in _CONFIGS.items()}
_OF_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": ""}
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's, which are not those of TRL's options
_LORA_NEUTRAL = {"bias": "none", "init_lora_weights": True, "inference_mode": False}  # they ask for nothing
_OF_MODEL = {
    "pretrained_model_name_or_path": "model_name_or_path",
    "revision": "model_revision",
    "torch_dtype": "dtype",
}
_OF_DATASET = {
    "path": "dataset_name", "argument 2": "dataset_config", "name": "dataset_config", "split": "dataset_train_split"
}  # fmt: skip
_IMPORT = "import"  # of a constant that is a dotted name
_ARGUMENT = "argument of the script "  # before the name of one, among the names of the script
_REWARDS = "trl.rewards."  # functions that are known by their names


def read_python(text: str, name: str) -> tuple[str, dict[str, object]] | None:
    """Return the trainer and the keys of a script; None if it makes no configuration with arguments. Raises Unread for
    a script that makes several, or several trainers."""
    tree = syntax_tree(text, name)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [each for each in calls if _called(each) in _CONFIGS and (each.args or each.keywords)]
    if not configs:
        return None
    names, trainer = _bound(tree) | _arguments_of_script(tree), _CONFIGS[_called(configs[0])]
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


def _code_of_notebook(text: str, name: str) -> str:
    """Return the code of a Jupyter notebook, without its commands of the shell and of IPython."""
    try:
        cells = [each["source"] for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unread(f"{name}: not a notebook: {error}") from error
    lines = "\n".join("".join(each) for each in cells).splitlines()
    return "\n".join("pass" if line.lstrip().startswith(("!", "%")) else line for line in lines)


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


def _parsed(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the defaults of the script's arguments: of ``argparse``, and of the fields of its dataclasses."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "add_argument":
            flags = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            given = {each.arg: each.value for each in node.keywords}
            name = next((each for each in flags if each.startswith("--")), *flags[:1]) if flags else ""
            name = str(ast.literal_eval(given["dest"])) if "dest" in given else name.lstrip("-").replace("-", "_")
            stored = {"'store_true'": False, "'store_false'": True}.get(ast.unparse(given.get("action", node)))
            default = given.get("default", ast.Constant(stored))
            asked = "required" in given or not any(each.startswith("-") for each in flags)
            found[name] = default if name not in found and not asked else None
        elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    made = each.value if isinstance(each.value, ast.Call) and _called(each.value) == "field" else None
                    defaults = [it.value for it in made.keywords if it.arg == "default"] if made else [each.value]
                    found[each.target.id] = defaults[0] if defaults and each.target.id not in found else None
    return {name: node for name, node in found.items() if node is not None}


def _arguments_of_script(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the script's arguments as ``_parsed`` has them, by the names that what is parsed is assigned to."""

    def parses(node: ast.AST) -> bool:
        return any(isinstance(each, ast.Call) and "parse_" in _called(each) for each in ast.walk(node))

    makers = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and parses(each)}
    holders = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and (parses(node.value) or (isinstance(node.value, ast.Call) and _called(node.value) in makers))
        for target in node.targets
        for name in getattr(target, "elts", [target])
        if isinstance(name, ast.Name)
    }
    changed = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    named = {f"{holder}.{name}": node for holder in holders for name, node in _parsed(tree).items()}
    return {f"{_ARGUMENT}{name}": node for name, node in named.items() if name not in changed}


class _Literals(ast.NodeTransformer):
    """Replaces names that stand for literals, and the branch of a condition that is one."""

    def __init__(self, names: Mapping[str, ast.expr], depth: int = 8) -> None:
        self.names, self.depth = names, depth

    def _named(self, name: str, node: ast.expr) -> Any:
        found = self.names.get(name, node)
        if found is node or self.depth == 0 or (isinstance(found, ast.Constant) and found.kind == _IMPORT):
            return node
        return _Literals(self.names, self.depth - 1).visit(copy.deepcopy(found))

    def visit_Name(self, node: ast.Name) -> Any:
        return self._named(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if ast.unparse(node.value) == "torch":  # a dtype
            return ast.Constant(node.attr)
        return self._named(f"{_ARGUMENT}{ast.unparse(node)}", node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        known = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant)
        return ast.Constant(not node.operand.value) if known else node  # type: ignore[attr-defined]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node


def _value(node: ast.expr, names: Mapping[str, ast.expr], file: str) -> Any:
    try:
        return ast.literal_eval(_Literals(names).visit(copy.deepcopy(node)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return NotLiteral(ast.unparse(node), f"{file}:{node.lineno}: not a literal: add KEY=VALUE")


def _of_trainer(call: ast.Call, names: Mapping[str, ast.expr], file: str) -> dict[str, object]:
    """Model, rewards, data set and adapters are arguments of the trainer."""
    keys: dict[str, object] = {}

    def of_call(call: ast.Call, first: str, renamed: Mapping[str, str]) -> dict[str, object]:
        return {renamed.get(key, key): _value(node, names, file) for key, node in _arguments(call, first)}

    for key, node in _arguments(call, "model"):
        given = names.get(node.id, node) if isinstance(node, ast.Name) else node
        part = given.slice if isinstance(given, ast.Subscript) and isinstance(given.value, ast.Name) else None
        given = names.get(given.value.id, given) if part is not None else given  # type: ignore[attr-defined]
        made = _called(given) if isinstance(given, ast.Call) else ""
        if key == "reward_funcs":
            keys[key] = _rewards(node, names, file)
        elif key == "model" and isinstance(given, ast.Call) and made == "from_pretrained":
            keys |= of_call(given, "model_name_or_path", _OF_MODEL)
        elif key == "model":
            keys["model_name_or_path"] = _value(node, names, file)
        elif key == "train_dataset" and isinstance(given, ast.Call) and made == "load_dataset":
            loaded = of_call(given, "path", {})
            if loaded.get("path") in ("json", "csv", "parquet") and "data_files" in loaded:
                loaded["path"] = loaded.pop("data_files")
            keys |= {_OF_DATASET.get(each, f"dataset_{each}"): value for each, value in loaded.items()}
            if part is not None:
                keys["dataset_train_split"] = _value(part, names, file)
        elif key == "train_dataset":
            keys["dataset_name"] = _value(node, names, file)
        elif key == "peft_config" and isinstance(given, ast.Call) and made == "LoraConfig":
            values = of_call(given, "task_type", _OF_LORA)
            kept = {
                each: value for each, value in values.items() if each and (each, value) not in _LORA_NEUTRAL.items()
            }
            keys |= {"use_peft": True, **_LORA_DEFAULTS, **kept}
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
