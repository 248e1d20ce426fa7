"""The table of what AReaL's examples use: ``python -m tests.drivers.areal_examples CHECKOUT [--run] [--write]``.

``areal_examples.tsv`` has names and keys only, a line each: kind, subject, verdict, why.

=========== ==============================================================================================
import      ``module name`` that an example or the documentation imports
member      ``module:Class.name`` that an example uses of what it imports; ``name(keyword)`` of a call
string      a dotted name in a configuration, or in a text of an example
key         ``Class key`` of a configuration class, from configurations and from the documentation's reference
allocation  an allocation of devices
file        an example; it works where all that it uses does
config      a configuration of an example, loaded with the class that its driver loads it with
run         a family of examples: its driver trains for two steps (``areal_runs``), with ``--run`` only
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
import tempfile
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_origin
from unittest import mock

import yaml

from areal.api import cli_args
from areal.api.cli_args import ConfigError, load_expr_config
from areal.api.config.fields import NoEffect, NotSupported
from areal.api.config.rollout import check_training
from areal.resources.backend import parse_backend
from areal.resources.kinds import TRAIN_ENGINES
from areal.wire.fields import hints_of
from tests.drivers.areal_runs import FAMILIES, REFUSED_FAMILIES, run, write_data, write_model
from tests.drivers.areal_uses import DOTTED, Refused, Uses, hints_by_name, imported, kinds_of

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
    except Refused as refusal:
        return Row(kind, subject, REFUSED, " ".join(str(refusal).split()))
    except (LookupError, ImportError, AttributeError) as error:
        return Row(kind, subject, MISSING, " ".join(str(error).split()))
    return Row(kind, subject)


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
    if name in (hints := hints_by_name(found)):
        return hints[name]
    if not hasattr(found, name):
        _check_constructed(found)
        raise LookupError(f"{found!r} has no {name}")
    return getattr(found, name)


def _check_constructed(found: Any) -> None:
    """Raises Refused for a class that cannot be constructed."""
    if inspect.isclass(found) and found.__init__.__annotations__.get("return") == "NoReturn":
        raise Refused(found.__doc__ or "")


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
        _check_constructed(found)
        return
    raise LookupError(f"there is no {subject}")


def _judge_key(subject: str) -> None:
    """Without a mark, or with ``NoEffect`` (a warning), it is accepted. ``NotSupported``: only its default is."""
    name, _, path = subject.partition(" ")
    hint: Any = getattr(cli_args, name)
    for part in path.split("."):
        kinds = [kind for kind in kinds_of(hint) if dataclasses.is_dataclass(kind)]
        if not kinds:
            return  # any key, as of an engine's own flags
        hint = hints_by_name(kinds[0]).get(part)
        if hint is None:
            raise LookupError(f"{name} has no key {path}")
        for mark in hint.__metadata__ if get_origin(hint) is Annotated else ():
            if isinstance(mark, NotSupported):
                raise Refused(mark.why)
            if isinstance(mark, NoEffect):
                return


def _judge_allocation(subject: str) -> None:
    try:
        for part in parse_backend(subject).parts:
            if part.engine in TRAIN_ENGINES:
                check_training(part, "backend")
    except ValueError as error:
        raise Refused(str(error)) from error


_JUDGES = {
    "import": _judge_import,
    "member": _judge_member,
    "string": _judge_string,
    "key": _judge_key,
    "allocation": _judge_allocation,
}


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
    yield from (judge("string", each) for each in sorted(set(DOTTED.findall(text))))
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


def run_families(checkout: Path, chosen: Collection[str]) -> list[Row]:
    """Raises ExceptionGroup of what families fail with. The others have the rows of the table."""
    failures: list[Exception] = []
    rows = [Row("run", name, REFUSED, why) for name, why in REFUSED_FAMILIES.items()]
    rows += [each for each in read_table() if each.kind == "run" and each.subject in FAMILIES.keys() - chosen]
    with tempfile.TemporaryDirectory(prefix="areal-examples-") as folder:
        root = Path(folder)
        model = write_model(root / "model")
        write_data(root / "data")
        for number, name in enumerate(chosen):
            try:
                lines = run(checkout, FAMILIES[name], model, root / "data", root / str(number))
                assert [line["step"] for line in lines] == [1, 2]
            except AssertionError as error:
                failures.append(error)
                sys.stdout.write(f"{name}: {error}\n")
                continue
            sys.stdout.write(f"{name}: 2 steps\n")
            sys.stdout.flush()
            rows.append(Row("run", name))
    if failures:
        raise ExceptionGroup("families that do not run", failures)
    return sorted(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--run", nargs="*", choices=FAMILIES, help="run these families too, or each: some 20 minutes")
    given = parser.parse_args()
    chosen = FAMILIES if given.run == [] else given.run or ()
    rows = examine(given.checkout) + run_families(given.checkout, chosen)
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
