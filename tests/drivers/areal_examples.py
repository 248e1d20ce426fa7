"""The table of what AReaL's examples use: ``python -m tests.drivers.areal_examples CHECKOUT [--write]``.

``areal_examples.tsv`` has names and keys only, a line each: kind, subject, verdict, why.

=========== ==============================================================================================
import      ``module name`` that an example or the documentation imports
member      ``module:Class.name`` that an example uses of what it imports; ``name(keyword)`` of a call
string      a dotted name in a configuration, or in a text of an example
key         ``Class key`` of a configuration class, from configurations and from the documentation's reference
allocation  an allocation of devices
file        an example; it works where all that it uses does
config      a configuration of an example, loaded with the class that its driver loads it with
=========== ==============================================================================================

``judge`` of the first five needs no checkout: the default suite holds the table against the code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import logging
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin
from unittest import mock

import yaml

from areal.api import cli_args
from areal.api.cli_args import ConfigError, load_expr_config
from areal.api.config.fields import NoEffect, NotSupported, hints_of
from areal.api.config.rollout import check_training
from areal.resources.backend import parse_backend
from areal.resources.kinds import TRAIN_ENGINES

TABLE = Path(__file__).with_name("areal_examples.tsv")
WORKS, REFUSED, MISSING = "works", "refused", "missing"
BESIDE = "only used beside "


@dataclass(frozen=True, order=True)
class Row:
    kind: str
    subject: str
    verdict: str = WORKS
    why: str = ""

    def __str__(self) -> str:
        return "\t".join((self.kind, self.subject, self.verdict, self.why)).rstrip("\t")

    @classmethod
    def read(cls, line: str) -> Row:
        return cls(*line.split("\t"))


def read_table() -> list[Row]:
    return [Row.read(line) for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


# What can be judged without a checkout


def judge(kind: str, subject: str) -> Row:
    """``missing``: it neither works nor is it refused with a reason, which is a fault of this project."""
    try:
        _JUDGES[kind](subject)
    except _Refused as refusal:
        return Row(kind, subject, REFUSED, " ".join(str(refusal).split()))
    except (LookupError, ImportError, AttributeError) as error:
        return Row(kind, subject, MISSING, " ".join(str(error).split()))
    return Row(kind, subject)


class _Refused(Exception):
    pass


def imported(module: str, name: str = "") -> Any:
    """``from module import name``. Raises _Refused."""
    try:
        found = importlib.import_module(module)
        if not name or name == "*":
            return found
        if hasattr(found, name):
            return getattr(found, name)
        return importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        if "of AReaL is not provided" not in str(error):
            raise
        raise _Refused(str(error).partition(": ")[2]) from error


def _judge_import(subject: str) -> None:
    imported(*subject.split())


def _judge_member(subject: str) -> None:
    path, _, keyword = subject.removesuffix(")").partition("(")
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = _member(found, name)
    if keyword and not takes(found, keyword):
        raise LookupError(f"{path} does not take {keyword}")


def _member(found: Any, name: str) -> Any:
    if name in (hints := _hints(found)):
        return hints[name]
    if not hasattr(found, name):
        raise LookupError(f"{found!r} has no {name}")
    return getattr(found, name)


def _hints(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; of one whose types are imported for type checkers only, the names."""
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        return hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    except NameError:
        return {each.name: Any for each in dataclasses.fields(cls)}


def takes(function: Any, keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a builtin, as a class of an engine's flags is
        return True
    return any(each.kind is each.VAR_KEYWORD or each.name == keyword for each in parameters)


def _judge_string(subject: str) -> None:
    module, _, names = subject.partition(":")
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = imported(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in [*parts[length:], *filter(None, names.split("."))]:
            found = imported(found.__name__, name) if isinstance(found, types.ModuleType) else getattr(found, name)
        if inspect.isclass(found) and found.__init__.__annotations__.get("return") == "NoReturn":
            raise _Refused(found.__doc__ or "")
        return
    raise LookupError(f"there is no {subject}")


def _judge_key(subject: str) -> None:
    """Without a mark, or with ``NoEffect`` (a warning), it is accepted. ``NotSupported``: only its default is."""
    name, _, path = subject.partition(" ")
    hint: Any = getattr(cli_args, name)
    for part in path.split("."):
        kinds = [kind for kind in _kinds(hint) if dataclasses.is_dataclass(kind)]
        if not kinds:
            return  # any key, as of an engine's own flags
        hint = _hints(kinds[0]).get(part)
        if hint is None:
            raise LookupError(f"{name} has no key {path}")
        for mark in hint.__metadata__ if get_origin(hint) is Annotated else ():
            if isinstance(mark, NotSupported):
                raise _Refused(mark.why)
            if isinstance(mark, NoEffect):
                return


def _kinds(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from _kinds(hint.__origin__)
    elif get_args(hint) and get_origin(hint) not in (dict, typing.Literal):
        for each in get_args(hint):
            yield from _kinds(each)
    else:
        yield hint


def _judge_allocation(subject: str) -> None:
    try:
        for part in parse_backend(subject).parts:
            if part.engine in TRAIN_ENGINES:
                check_training(part, "backend")
    except ValueError as error:
        raise _Refused(str(error)) from error


_JUDGES = {
    "import": _judge_import,
    "member": _judge_member,
    "string": _judge_string,
    "key": _judge_key,
    "allocation": _judge_allocation,
}


# What a checkout says


class Uses(ast.NodeVisitor):
    """The subjects that a file uses: imports, members of what it imports, dotted names. Types are inferred from
    annotations, constructors and return annotations; what cannot be inferred is left out."""

    def __init__(self, classes: dict[str, type], own: dict[str, set[str]]) -> None:
        self.found: set[tuple[str, str]] = set()
        self._classes = classes  # by the name of an example's own class, the class of this project that it extends
        self._own = own  # by the same name, its own fields and methods
        self._scopes: list[dict[str, Any]] = [{}]
        self._attributes: list[dict[str, Any]] = [{}]

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {("import", each.name) for each in node.names if each.name.partition(".")[0] == "areal"}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").partition(".")[0] != "areal":
            for each in node.names:
                self._scopes[-1].setdefault(each.asname or each.name, self._classes.get(each.name))
            return
        for each in node.names:
            self.found.add(("import", f"{node.module} {each.name}"))
            with contextlib.suppress(_Refused, ImportError):
                self._scopes[-1][each.asname or each.name] = imported(str(node.module), each.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes[-1][node.name] = self._classes.get(node.name)
        self._attributes.append({})
        for _ in range(2):  # attributes are set in any order
            self.generic_visit(node)
        self._attributes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._scopes.append({each.arg: self._annotated(each.annotation) for each in arguments})
        for _ in range(2):
            self.generic_visit(node)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, self.type_of(node.value))

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self.type_of(item.context_expr))
        for each in node.body:
            self.visit(each)

    visit_AsyncWith = visit_With

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if (base := self.type_of(node.value)) is not None and (named := self._named(base, node.attr)) is not None:
            self.found.add(("member", named))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            base = self.type_of(node.func.value)
            named = self._named(base, node.func.attr) if base is not None else None
        else:
            found = self.object_of(node.func)
            named = _path_of(found) if inspect.isclass(found) or inspect.isfunction(found) else None
            if isinstance(node.func, ast.Name) and node.func.id in self._own:
                named = None
        if named is not None:
            self.found |= {("member", f"{named}({each.arg})") for each in node.keywords if each.arg}

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            self.found.add(("string", node.value))

    def _bind(self, target: ast.expr, found: Any) -> None:
        if isinstance(target, ast.Name):
            if found is not None:
                self._scopes[-1][target.id] = found
        elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self" and found is not None:
            self._attributes[-1][target.attr] = found
        elif isinstance(target, ast.Tuple) and isinstance(found, tuple):
            for each, kind in zip(target.elts, found, strict=False):
                self._bind(each, kind)

    def _annotated(self, node: ast.expr | None) -> Any:
        """A class, as an instance's type: ``(class,)``."""
        options = [node]
        while options:
            each = options.pop(0)
            if isinstance(each, ast.BinOp):
                options += [each.left, each.right]
            elif isinstance(each, ast.Name | ast.Attribute) and inspect.isclass(found := self.object_of(each)):
                return Instance(found, self._own.get(getattr(each, "id", ""), frozenset()))
        return None

    def object_of(self, node: ast.expr) -> Any:
        """The module, class or function that an expression is; None for anything else."""
        if isinstance(node, ast.Name):
            found = next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), None)
            return None if isinstance(found, Instance | tuple) else found
        if isinstance(node, ast.Attribute) and (base := self.object_of(node.value)) is not None:
            return getattr(base, node.attr, None)
        return None

    def type_of(self, node: ast.expr) -> Any:
        """A module, a class, an ``Instance``, a tuple of them, or None."""
        if isinstance(node, ast.Await):
            return self.type_of(node.value)
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self._scopes) if node.id in scope), None)
        if isinstance(node, ast.Attribute):
            if getattr(node.value, "id", "") == "self" and node.attr in self._attributes[-1]:
                return self._attributes[-1][node.attr]
            base = self.type_of(node.value)
            return _attribute(base, node.attr) if base is not None else None
        if isinstance(node, ast.Call):
            if getattr(node.func, "id", "") == "load_expr_config" and len(node.args) == 2:
                name = getattr(node.args[1], "id", "")
                found = self.object_of(node.args[1])
                return (Instance(found, self._own.get(name, frozenset())), None) if inspect.isclass(found) else None
            called = self.type_of(node.func)
            if inspect.isclass(called):
                return Instance(called, self._own.get(getattr(node.func, "id", ""), frozenset()))
            return _returned(called)
        return None

    def _named(self, base: Any, name: str) -> str | None:
        if isinstance(base, Instance):
            owner = _path_of(base.cls)
            return f"{owner}.{name}" if owner and name not in base.own and not name.startswith("__") else None
        owner = _path_of(base)
        return (f"{owner}{':' if isinstance(base, types.ModuleType) else '.'}{name}") if owner else None


@dataclass(frozen=True)
class Instance:
    """``own``: names that an example's subclass of ``cls`` has itself."""

    cls: type
    own: frozenset[str] | set[str] = frozenset()

    def __hash__(self) -> int:
        return hash(self.cls)


def _path_of(found: Any) -> str | None:
    """``module:name`` under the path that drivers import it by."""
    if isinstance(found, types.ModuleType):
        return found.__name__ if found.__name__.partition(".")[0] == "areal" else None
    module, name = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
    if not module or module.partition(".")[0] != "areal" or "<" in name:
        return None
    return f"{'areal.api.cli_args' if hasattr(cli_args, name) else module}:{name}"


def _attribute(base: Any, name: str) -> Any:
    if not isinstance(base, Instance):
        return getattr(base, name, None) if isinstance(base, types.ModuleType) or inspect.isclass(base) else None
    if name in (hints := _hints(base.cls)):
        kinds = [kind for kind in _kinds(hints[name]) if inspect.isclass(kind) and _path_of(kind)]
        return Instance(kinds[0]) if kinds else None
    found = getattr(base.cls, name, None)
    if isinstance(found, property):
        return _returned(found.fget)
    return found if callable(found) else None


def _returned(called: Any) -> Any:
    if not callable(called) or inspect.isclass(called):
        return None
    with contextlib.suppress(Exception):
        kinds = [kind for kind in _kinds(typing.get_type_hints(called).get("return")) if inspect.isclass(kind)]
        return next((Instance(kind) for kind in kinds if _path_of(kind)), None)
    return None


_DOTTED = re.compile(r"areal(?:\.[A-Za-z_]\w*)+(?::\w+)?")
_ALLOCATIONS = re.compile(r"""(?:allocation_mode|backend)\s*[=:]\s*["']?([a-z]+:[^\s"'`\\,]+|\w+\.d[^\s"'`\\,]+)""")
_NOT_CONFIGS = ("environ_ref.yaml", ".sky.yaml")


def examine(checkout: Path) -> list[Row]:
    examples, rows = checkout / "examples", set[Row]()
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(examples.rglob("*.py"))}
    classes, own = _own_classes(trees.values())
    judged: dict[Path, list[Row]] = {}
    for file, tree in trees.items():
        uses = Uses(classes, own)
        uses.visit(tree)
        if not any(kind == "import" for kind, _ in uses.found):
            continue
        judged[file] = [judge(kind, subject) for kind, subject in sorted(uses.found)]
    above = {file: _imported_files(examples, file, trees[file]) & judged.keys() for file in judged}
    for _ in range(4):  # files that import files
        above = {file: files.union(*(above[each] for each in files)) for file, files in above.items()}
    for file, own_rows in judged.items():
        refusals = [each for each in own_rows if each.verdict == REFUSED]
        for other in sorted(above[file] - {file}):
            at_once = {("import", subject) for subject in _imports_at_once(trees[other])}
            refusals += [
                each for each in judged[other] if each.verdict == REFUSED and (each.kind, each.subject) in at_once
            ]
        if refusals:  # it ends at the first, so what is missing beside it is never reached
            why = f"{BESIDE}{refusals[0].subject}"
            own_rows = [
                replace(each, verdict=REFUSED, why=why) if each.verdict == MISSING else each for each in own_rows
            ]
        rows |= set(own_rows)
        names = ", ".join(dict.fromkeys(each.subject.replace(" ", ":") for each in refusals))
        missing = [each.subject for each in own_rows if each.verdict == MISSING]
        verdict = MISSING if missing else REFUSED if refusals else WORKS
        rows.add(Row("file", str(file.relative_to(examples)), verdict, ", ".join(missing) or names))
    for file in sorted(checkout.rglob("*.md")):
        rows |= set(_of_documentation(file))
    for file in sorted(examples.rglob("*.yaml")):
        if not file.name.endswith(_NOT_CONFIGS):
            rows |= set(_of_config(examples, file))
    for file in (*trees, *examples.rglob("*.sh")):
        rows |= {judge("allocation", found) for found in _ALLOCATIONS.findall(file.read_text()) if "{" not in found}
    return sorted(rows)


def _at_once(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _at_once(node)


def _imports_at_once(tree: ast.AST) -> Iterator[str]:
    for node in _at_once(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module} {each.name}" for each in node.names)


def _imported_files(examples: Path, file: Path, tree: ast.Module) -> set[Path]:
    """The examples that a file imports when it is imported."""
    found: set[Path] = set()
    for node in _at_once(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = [part for part in (node.module or "").split(".") if part]
        folder = file.parents[node.level - 1] if node.level else file.parent
        if parts[:1] == ["examples"]:
            folder, parts = examples, parts[1:]
        place = folder.joinpath(*parts)
        found |= {place.with_suffix(".py"), place / "__init__.py", *(place / f"{each.name}.py" for each in node.names)}
    return {each for each in found if each.is_file()}


def _own_classes(trees: Any) -> tuple[dict[str, type], dict[str, set[str]]]:
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes: dict[str, type] = {}
    own: dict[str, set[str]] = {}
    for _ in range(3):  # of classes that extend each other
        for node in nodes:
            for base in node.bases:
                name = getattr(base, "id", "")
                found = classes.get(name) or getattr(cli_args, name, None)
                if inspect.isclass(found):
                    classes[node.name] = found
                    own.setdefault(node.name, set()).update(own.get(name, ()), _names(node))
    return classes, own


def _names(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name


def _of_documentation(file: Path) -> Iterator[Row]:
    text = file.read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        with contextlib.suppress(SyntaxError):
            uses = Uses({}, {})
            uses.visit(ast.parse(block))
            yield from (judge(kind, subject) for kind, subject in uses.found if kind == "import")
    for found in _ALLOCATIONS.findall(text):
        if "<" not in found:
            yield judge("allocation", found)
    if file.name == "cli_reference.md":
        for title, keys in re.findall(r"^## (\w+)(?: \w+)*\n(.*?)(?=^\(section|\Z)", text, re.DOTALL | re.MULTILINE):
            cls = next((name for name in (f"{title}Config", title, f"{title}Spec") if hasattr(cli_args, name)), None)
            cls = _SECTIONS.get(title, cls)
            for key in re.findall(r"^\| `(\w+)`", keys, re.MULTILINE) if cls else ():
                yield judge("key", f"{cls} {key}")


_SECTIONS = {
    "MicroBatch": "MicroBatchSpec",
    "Cluster": "ClusterSpecConfig",
    "DistributedDataParallel": "MegatronDDPConfig",
    "Scheduling": "SchedulingSpec",
    "ArchonEngine": None,  # refused as a whole
    "ArchonFP8": None,
    "FP8Engine": None,
    "MemoryProfiler": None,
    "SessionTracer": None,
    "SGLang": None,  # an engine's own flags
    "vLLM": None,
}


def _of_config(examples: Path, file: Path) -> Iterator[Row]:
    """The row of the file, and those of its keys and names."""
    attempts = []
    for cls in _classes_for(examples, file):
        logging.disable(logging.CRITICAL)
        try:
            load_expr_config(["--config", str(file)], cls)
            attempts.append((0, "", cls))
        except ConfigError as error:
            faults = [f"{'.'.join(map(str, each.path))}: {each.message}" for each in error.faults]
            attempts.append((len(faults), "; ".join(faults), cls))
        finally:
            logging.disable(logging.NOTSET)
    count, why, cls = min(attempts, key=lambda each: each[0])
    name = str(file.relative_to(examples))
    yield Row("config", name, REFUSED if count else WORKS, " ".join(why.split()))
    text = file.read_text(encoding="utf-8")
    yield from (judge("string", each) for each in sorted(set(_DOTTED.findall(text))))
    yield from (judge("allocation", each) for each in _ALLOCATIONS.findall(text))
    ours = next(each for each in cls.__mro__ if each.__module__.startswith("areal."))
    for path in _paths(yaml.safe_load(text)):
        if path[0] in hints_of(ours):
            with contextlib.suppress(LookupError):  # the file's row has it
                yield judge("key", f"{ours.__name__} {'.'.join(path)}")


def _paths(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, (*above, str(key)))
        else:
            yield (*above, str(key))


def _classes_for(examples: Path, file: Path) -> list[type]:
    """The classes that drivers beside it load configurations with, those of the likeliest name first."""
    folders = [file.parent, *file.parents, examples / "math"]
    for folder in folders:
        drivers = [each for each in sorted(folder.glob("*.py")) if "load_expr_config(" in each.read_text()]
        if not drivers and folder == file.parent:
            drivers = [each for each in sorted(folder.rglob("*.py")) if "load_expr_config(" in each.read_text()]
        if drivers:
            break
        if folder == examples:
            drivers = [examples / "math" / "gsm8k_rl.py"]
            break
    found = [cls for driver in drivers for cls in _classes_of(examples, driver)]
    return list(dict.fromkeys(found)) or [cli_args.GRPOConfig]


@cache
def _classes_of(examples: Path, driver: Path) -> tuple[type, ...]:
    names = re.findall(r"load_expr_config\(\s*\w+,\s*(\w+)\s*,?\s*\)", driver.read_text())
    found = []
    for name in dict.fromkeys(names):
        cls = _class_in(examples, driver, name) or getattr(cli_args, name, None)
        if cls is not None:
            found.append(cls)
    return tuple(found)


def _class_in(examples: Path, driver: Path, name: str) -> type | None:
    """An example's own class, by executing the definitions of dataclasses in its folder."""
    for file in (driver, *sorted(driver.parent.glob("*.py"))):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body):
            kept = [node for node in tree.body if _is_definition(node)]
            module = types.ModuleType(f"areal_example_{file.stem}")
            with mock.patch.dict(sys.modules, {module.__name__: module}):
                vars(module).update(_siblings(examples, tree))
                exec(compile(ast.Module(kept, []), str(file), "exec", dont_inherit=True), vars(module))
                cls: type = getattr(module, name)
                hints_of(cls)
            sys.modules[module.__name__] = module  # annotations are read again
            return cls
    return None


def _siblings(examples: Path, tree: ast.Module) -> dict[str, type]:
    """The classes that a file imports from other examples."""
    found: dict[str, type] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("examples."):
            file = examples.parent / f"{str(node.module).replace('.', '/')}.py"
            for each in node.names:
                if file.is_file() and (cls := _class_in(examples, file, each.name)) is not None:
                    found[each.name] = cls
    return found


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return any(getattr(getattr(each, "func", each), "id", "") == "dataclass" for each in node.decorator_list)
    if isinstance(node, ast.ImportFrom):
        return node.module in ("areal.api.cli_args", "dataclasses", "typing", "__future__")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    given = parser.parse_args()
    rows = examine(given.checkout)
    if given.write:
        TABLE.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == kind]
        works = sum(row.verdict == WORKS for row in of_kind)
        sys.stdout.write(f"{kind}: {works} of {len(of_kind)} work, the others are refused\n")
        sys.stdout.writelines(
            f"    {row.verdict} {row.subject}: {row.why}\n" for row in of_kind if row.verdict != WORKS
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
