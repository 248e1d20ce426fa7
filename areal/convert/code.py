"""TRL's configuration in Python code: the keywords of ``GRPOConfig(...)`` and of the trainer that receives it.

The script is parsed and never run. A keyword has a value if it consists of literals, of names that the script binds
once, and of arguments of the script, which have their defaults.
"""

from __future__ import annotations

import ast
import copy
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from areal.convert.reading import Unread
from areal.convert.rules import NotLiteral

_CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RewardConfig": "reward",
}
_TRAINERS = {name.replace("Config", "Trainer"): trainer for name, trainer in _CONFIGS.items()}
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's, which are not those of TRL's options
_LORA_NEUTRAL = {"bias": "none", "init_lora_weights": True, "inference_mode": False, "loftq_config": None}
_RENAMED: Mapping[str, Mapping[str, str]] = {  # the key of an argument with another name, "" for none
    "LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": ""},
    "get_peft_model": {
        "r": "lora_r", "target_modules": "lora_target_modules", "model": "", "random_state": "",
        "use_gradient_checkpointing": "gradient_checkpointing_kwargs",
    },
    "from_pretrained": {
        "pretrained_model_name_or_path": "model_name_or_path", "model_name": "model_name_or_path",
        "revision": "model_revision", "torch_dtype": "dtype",
    },
    "load_dataset": {
        "path": "dataset_name", "argument 2": "dataset_config", "name": "dataset_config",
        "split": "dataset_train_split", "data_files": "data_files",
    },
}  # fmt: skip
_FIRST = {"LoraConfig": "task_type", "from_pretrained": "model_name_or_path", "load_dataset": "path"}
_IMPORT = "import"  # the kind of a constant that is an imported name
_REWARDS = "trl.rewards."  # its functions are known without their module
_ARGUMENT = "argument of the script "  # distinguishes arguments from names of the script
_OPERATORS: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv
}  # fmt: skip

_CASTS: Mapping[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool}


def code_of_notebook(text: str, name: str) -> str:
    """Return the code of a Jupyter notebook without the commands of the shell and of IPython. Raises Unread."""
    try:
        cells = ["".join(each["source"]) for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Unread(f"{name}: not a notebook: {error}") from error
    python = (each for each in cells if re.match(r"\s*%%(?!capture|time)", each) is None)  # not in another language
    return re.sub(r"(?m)^([ \t]*)[!%](?:.*\\\n)*.*$", r"\1pass", "\n".join(python))


def syntax_tree(text: str, name: str) -> ast.Module:
    """Parse a script. Raises Unread with the line of a syntax error."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        place = name if error.lineno is None else f"{name}:{error.lineno}"
        raise Unread(f"{place}: not a Python script: {error.msg}") from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise Unread(f"{name}: not a Python script: {error}") from error


def read_python(
    text: str, name: str, wanted: str | None, line: int | None = None
) -> tuple[str, dict[str, object]] | None:
    """Return the trainer and the keys of a script, or None if no configuration is created with arguments. Raises Unread
    if the script creates several that match ``line`` and ``wanted`` (the trainer), or has several trainers."""
    tree = syntax_tree(text, name)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [each for each in calls if _called(each) in _CONFIGS and (each.args or each.keywords)]
    if line is not None:
        configs = [each for each in configs if each.lineno <= line <= (each.end_lineno or line)]
    configs = [each for each in configs if _CONFIGS[_called(each)] == wanted] or configs
    if not configs:
        return None
    script, trainer = _Script(name, {**_bound(tree), **_own_arguments(tree)}), _CONFIGS[_called(configs[0])]
    trainers = [each for each in calls if _TRAINERS.get(_called(each)) == trainer]
    if line is not None:
        names = _names_of(tree, configs[0])
        given = ((each, dict(_arguments(each)).get("args")) for each in trainers)
        trainers = [each for each, args in given if args is configs[0] or getattr(args, "id", None) in names]
    for what, found in (("configurations", configs), ("trainers", trainers)):
        if len(found) > 1:
            lines = ", ".join(str(each.lineno) for each in found)
            hint = f"add --line N{'' if wanted else ', or --trainer NAME'}, or keep the one that is to be converted"
            raise Unread(f"{name}: several {what}, in the lines {lines}", hint=hint)
    keys = {key: script.value(node) for key, node in _arguments(configs[0])} | _assigned(tree, configs[0], name)
    for call in trainers:
        keys |= script.of_trainer(call)
    loaded = [each for each in calls if _called(each) == "from_pretrained" and "Model" in ast.unparse(each.func)]
    if len(loaded) == 1 and isinstance(keys.get("model_name_or_path"), NotLiteral):  # the trainer gets an object
        keys |= script.of_call(loaded[0])
    for key in [each for each, value in keys.items() if isinstance(value, ast.Call)]:
        keys[key] = script.tokenizer(keys[key], keys.get("model_name_or_path"), tree)
    if "use_peft" not in keys and (wrapped := [each for each in calls if _called(each) == "get_peft_model"]):
        keys |= script.adapters(wrapped[0])
    return trainer, keys


class _Script(NamedTuple):
    """A parsed script. ``names``: the expression of each name that the script binds once. ``file``: its name, for the
    position of a value."""

    file: str
    names: Mapping[str, ast.expr]

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; a NotLiteral if it is not known without running the script."""
        try:
            return ast.literal_eval(_Literals(self.names).visit(copy.deepcopy(node)))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, ArithmeticError):
            return NotLiteral(ast.unparse(node), f"{self.file}:{node.lineno}: not a literal: add KEY=VALUE")

    def named(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for; other expressions unchanged."""
        return self.names.get(node.id, node) if isinstance(node, ast.Name) else node

    def of_call(self, call: ast.Call) -> dict[str, object]:
        """Return the arguments of a call, with the keys that they correspond to."""
        renamed, first = _RENAMED[_called(call)], _FIRST.get(_called(call), "model")
        named = ((renamed.get(key, key), node) for key, node in _arguments(call, first))
        return {key: self.value(node) for key, node in named if key}

    def of_trainer(self, call: ast.Call) -> dict[str, object]:
        """Return the keys that a trainer's arguments set: its model, rewards, data set and adapters."""
        keys: dict[str, object] = {}
        for key, node in _arguments(call, "model"):
            given = self.named(node)
            part = given.slice if isinstance(given, ast.Subscript) else None
            given = self.named(given.value) if isinstance(given, ast.Subscript) else given
            made = _called(given) if isinstance(given, ast.Call) else ""
            if key == "reward_funcs":
                keys[key] = self.rewards(node)
            elif isinstance(given, ast.Call) and made == "from_pretrained" and "Tokenizer" in ast.unparse(given.func):
                keys[key] = given
            elif isinstance(given, ast.Call) and (key, made) == ("model", "from_pretrained"):
                keys |= self.of_call(given)
            elif isinstance(given, ast.Call) and (key, made) == ("train_dataset", "load_dataset"):
                keys |= self.of_call(given)
                if keys["dataset_name"] in ("json", "csv", "parquet") and "data_files" in keys:
                    keys["dataset_name"] = keys.pop("data_files")
                if part is not None:
                    keys["dataset_train_split"] = self.value(part)
            elif isinstance(given, ast.Call) and (key, made) == ("peft_config", "LoraConfig"):
                keys |= self.adapters(given)
            elif key != "args":
                name = {"model": "model_name_or_path", "train_dataset": "dataset_name", "peft_config": "use_peft"}
                keys[name.get(key, key)] = self.value(node)
        return keys

    def tokenizer(self, call: Any, model: object, tree: ast.Module) -> Any:
        """Return None for the tokenizer of the model's own folder, whose template the script does not set."""
        path = self.of_call(call).get("model_name_or_path")
        sets = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
        is_own = (
            isinstance(path, str) and str(path) == str(model) and all(each.attr != "chat_template" for each in sets)
        )
        note = f"{self.file}:{call.lineno}: the tokenizer is the model's own"
        return None if is_own else NotLiteral(ast.unparse(call), note)

    def adapters(self, call: ast.Call) -> dict[str, object]:
        """Return the keys of ``LoraConfig(...)``, or of ``get_peft_model(model, ...)``, which has such a configuration
        or, in Unsloth, the same arguments."""
        made = [self.named(node) for _, node in _arguments(call)]
        config = next((each for each in made if isinstance(each, ast.Call) and _called(each) == "LoraConfig"), call)
        values = self.of_call(config)
        if _called(config) != "LoraConfig" and "lora_r" not in values:
            note = f"{self.file}:{call.lineno}: adapters made by the script: add use_peft=true lora_r=N lora_alpha=N"
            return {"use_peft": NotLiteral(ast.unparse(call.func), note)}
        kept = {key: value for key, value in values.items() if (key, value) not in _LORA_NEUTRAL.items()}
        return {"use_peft": True, **_LORA_DEFAULTS, **kept}

    def rewards(self, node: ast.expr) -> Any:
        """Return the dotted names of imported reward functions (TRL's own without their module); a NotLiteral for a
        function that the script defines."""
        found = []
        for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            given = self.names.get(each.id) if isinstance(each, ast.Name) else None
            if not isinstance(given, ast.Constant) or given.kind != _IMPORT:
                note = f"{self.file}:{node.lineno}: a function of the script: add reward_funcs=module.function"
                return NotLiteral(ast.unparse(node), note)
            found.append(str(given.value).removeprefix(_REWARDS))
        return found


class _Literals(ast.NodeTransformer):
    """Replaces names by the literals that they stand for, and a conditional expression by its selected branch."""

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
        if ast.unparse(node.value) == "torch":  # torch.bfloat16
            return ast.Constant(node.attr)
        return self._named(f"{_ARGUMENT}{ast.unparse(node)}", node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return self._named(f"{_ARGUMENT}{ast.unparse(node)}", node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        cast = _CASTS.get(getattr(node.func, "id", ""))
        known = cast is not None and not node.keywords and [type(each) for each in node.args] == [ast.Constant]
        return ast.Constant(cast(node.args[0].value)) if known else node  # type: ignore[attr-defined, misc]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        known = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant)
        return ast.Constant(not node.operand.value) if known else node  # type: ignore[attr-defined]

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        numbers = [getattr(each, "value", None) for each in (node.left, node.right)]
        known = type(node.op) in _OPERATORS and all(type(each) in (int, float) for each in numbers)
        return ast.Constant(_OPERATORS[type(node.op)](*numbers)) if known else node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return (node.body if node.test.value else node.orelse) if isinstance(node.test, ast.Constant) else node


def _assigned(tree: ast.Module, config: ast.Call, file: str) -> dict[str, object]:
    """Return the fields that the script assigns to the configuration after it was created."""
    names = _names_of(tree, config)
    return {
        node.attr: NotLiteral(ast.unparse(node), f"{file}:{node.lineno}: assigned by the script: add KEY=VALUE")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in names
    }


def _names_of(tree: ast.Module, config: ast.Call) -> set[str]:
    """Return the names to which the script assigns the new configuration."""
    made = [node for node in ast.walk(tree) if getattr(node, "value", None) is config]
    targets = [each for node in made for each in getattr(node, "targets", [getattr(node, "target", None)])]
    return {each.id for each in targets if isinstance(each, ast.Name)}


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _arguments(call: ast.Call, first: str = "output_dir") -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a call with their names; ``first`` is the name of the first positional one. A mapping
    (``**more``) is one argument with the name of the mapping."""
    for place, node in enumerate(call.args):
        yield (first if place == 0 else f"argument {place + 1}"), node
    for keyword in call.keywords:
        yield keyword.arg or f"**{ast.unparse(keyword.value)}", keyword.value


def _bound(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the names that the script binds once, each with its expression, or with the dotted name of its import."""
    found: dict[str, ast.expr] = {}
    bound: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
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
    """Return the defaults of the script's arguments, which are options of ``argparse`` or fields of a dataclass."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "add_argument":
            flags = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            given = {each.arg: each.value for each in node.keywords}
            name = next((each for each in flags if each.startswith("--")), "".join(flags[:1])).lstrip("-")
            name = str(getattr(given.get("dest"), "value", name)).replace("-", "_")
            stored = {"'store_true'": False, "'store_false'": True}.get(ast.unparse(given.get("action", node)))
            default = given.get("default", ast.Constant(stored))
            asked = "required" in given or not any(each.startswith("-") for each in flags)
            found[name] = default if name not in found and not asked else None
        elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            for key, value in _fields(node).items():
                found[key] = value if key not in found else None
    return {name: node for name, node in found.items() if node is not None}


def _fields(made: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the attributes of a class with their values, or the defaults of ``field(default=...)``; None if there is
    none."""
    found: dict[str, ast.expr | None] = {}
    for node in made.body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and _called(value) == "field":
            value = next((each.value for each in value.keywords if each.arg == "default"), None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {each.id: value for each in targets if isinstance(each, ast.Name)}
    return found


def _settings(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of a class's attributes (``Config.lr``), of its only instance (``config.lr``) and of a
    dictionary (``CONFIG['lr']``) by the expressions that read them. A class that computes its attributes has none."""
    classes = {
        node.name: {key: value for key, value in _fields(node).items() if value is not None}
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and not any(getattr(each, "name", "").endswith("init__") for each in node.body)
    }
    found = {f"{name}.{key}": value for name, fields in classes.items() for key, value in fields.items()}
    for name, node in _bound(tree).items():
        if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Name) and node.func.id in classes:
            given = {each.arg: each.value for each in node.keywords if each.arg is not None}
            found |= {f"{name}.{key}": value for key, value in {**classes[node.func.id], **given}.items()}
        elif isinstance(node, ast.Dict) and f"{name}.update(" not in ast.unparse(tree):
            keys = zip(node.keys, node.values, strict=True)
            found |= {f"{name}[{key.value!r}]": value for key, value in keys if isinstance(key, ast.Constant)}
    return found


def _own_arguments(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the defaults of the script's arguments by the expressions that read them (``args.lr``), except those that
    the script assigns later."""

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
    changed |= {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    named = {f"{holder}.{name}": node for holder in holders for name, node in _parsed(tree).items()} | _settings(tree)
    return {f"{_ARGUMENT}{name}": node for name, node in named.items() if name not in changed}
