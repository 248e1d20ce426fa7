"""Whether ``module:attr`` can be imported, without importing it: a command says so before anything starts.

A module is looked for as a process would. Its attribute is looked for among what its text binds; a module that makes
names in another way (``import *``, ``__getattr__``, an extension) is given the benefit of the doubt.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from areal.resources.suggest import did_you_mean


def import_fault(name: str, places: Sequence[str]) -> str | None:
    """What is wrong with ``package.module:attr.attr``, or the same with dots; None: nothing that can be known.
    ``places`` are folders, as in ``sys.path``."""
    module, colon, attributes = name.partition(":")
    if not colon:
        module, _, attributes = name.rpartition(".")
    found = module_of(module, places)
    if isinstance(found, str):
        return f"there is no module {found}"
    file, rest, folders = found
    attribute = [*rest, *attributes.split(".")][0]
    if not rest and _find(f"{module}.{attribute}", folders) is not None:
        return None  # a module of the package
    return file_fault(file, attribute)


def module_of(module: str, places: Sequence[str]) -> tuple[Path, list[str], list[str]] | str:
    """The file of ``package.module``, the parts of the name that are no modules but names in that, and the package's
    folders; or the module that there is not."""
    folders, parts = list(places), module.split(".")
    file = Path()
    for count in range(1, len(parts) + 1):
        here = ".".join(parts[:count])
        spec = _find(here, folders) or (_installed(here) if count == 1 else None)
        if spec is None:
            return here
        file = Path(spec.origin or "")
        if spec.submodule_search_locations is None:
            return file, parts[count:], []
        folders = list(spec.submodule_search_locations)
    return file, [], folders


def _find(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """As ``PathFinder`` does, which however wants the parents of a namespace package to be imported."""
    portions: list[str] = []
    for folder in folders:
        importer = pkgutil.get_importer(folder or os.getcwd())  # noqa: PTH109 - a string is wanted
        spec = importer.find_spec(name) if importer is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or ()) if spec is not None else ()
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _installed(name: str) -> ModuleSpec | None:
    """By whatever finds modules in this interpreter: built-in ones, and those of editable installations."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def file_fault(file: Path, attribute: str) -> str | None:
    """The same of a file's text: a syntax error, or no such name in it."""
    if file.suffix != ".py" or not file.is_file():
        return None
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"{file}{f':{line}' if line else ''}: {getattr(error, 'msg', error)}"
    bound = set(_bound(tree.body))
    bound |= {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    first = attribute.partition(".")[0]
    if not first or first in bound or bound & {"*", "__getattr__"}:
        return None
    return f"no {first!r} in {file}{did_you_mean(first, sorted(bound))}"


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module bind; those within functions and classes are not its own."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            pending += node.decorator_list
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name).partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("globals", "setattr", "exec", "vars"):
            yield "*"
        pending += ast.iter_child_nodes(node)
