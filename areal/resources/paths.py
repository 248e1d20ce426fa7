"""Resolves the files and folders that specs name, and checks whether ``module:attr`` can be imported.

A module is located as a process would locate it, without importing it. The attribute must be among the names that the
module's source binds; a module that binds names in other ways (``import *``, ``__getattr__``, an extension) passes.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from areal.errors import did_you_mean
from areal.resources.nodes import STDIN


def looks_local(path: str) -> bool:
    """Return whether ``path`` can only be a folder; ``org/name`` can also be a Hugging Face id."""
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or path.count("/") > 1


def find_path(path: str, source_file: str | None, first: str | None = None) -> Path | None:
    """Return where ``path`` exists: relative to ``first``, by default the working directory, else to the folder of its
    manifest, else to the folder above that."""
    here = os.getcwd()  # noqa: PTH109 - a large apply looks for thousands of paths
    bases = [first or here, *(_above(here, source_file) if source_file else ())]
    places = (os.path.join(base, os.path.expanduser(path)) for base in bases)  # noqa: PTH111, PTH118
    return next((Path(place) for place in places if os.path.exists(place)), None)  # noqa: PTH110


def resolve_model_path(path: str, source_file: str | None = None) -> str | None:
    """Return the absolute folder that ``path`` names, relative to the working directory, else to the folder of its
    manifest, else to the folder above that.

    Returns None if there is no such folder: ``path`` is then a Hugging Face id, or a mistake if ``looks_local``.
    """
    found = find_path(path, source_file)
    return str(found.resolve()) if found is not None and found.is_dir() else None


def same_content(one: str, other: str) -> bool:
    """Return whether two files hold the same bytes, or two folders the same files. Files of one size and one time of
    change are the same unless the time is in whole seconds, as an archive has it."""
    import filecmp

    try:
        if os.path.isdir(one) != os.path.isdir(other):  # noqa: PTH112
            return False
        if os.path.isdir(one):  # noqa: PTH112
            names = os.listdir(one)  # noqa: PTH208
            return sorted(names) == sorted(os.listdir(other)) and all(  # noqa: PTH208
                same_content(f"{one}/{name}", f"{other}/{name}") for name in names
            )
        exact = os.stat(one).st_mtime_ns % 1_000_000_000 == 0  # noqa: PTH116
        return filecmp.cmp(one, other, shallow=not exact)
    except OSError:
        return False


def is_there(path: str, source_file: str | None = None) -> bool:
    """Return whether ``path`` exists, relative to the working directory, else to the folders of its manifest."""
    return find_path(path, source_file) is not None


def with_absolute_paths(
    kind: str,
    spec: Mapping[str, Any],
    source_file: str | None = None,
    find: Callable[[str, str | None, str | None], Path | None] = find_path,
) -> dict[str, object]:
    """Return ``spec`` with the paths of files and folders made absolute, so that the working directories of later
    commands do not matter. A path that does not exist on this machine is not changed. ``find``: ``find_path``, or a
    cache of it for many specs.

    Paths are relative to the working directory (``config`` of a job: to the job's ``workingDir``, if set), else to the
    folder of the manifest, else to the folder above that.
    """

    def absolute(value: Any, first: str | None) -> Any:
        found = find(value, source_file, first) if isinstance(value, str) and value else None
        return os.path.abspath(found) if found is not None else value  # noqa: PTH100 - links stay links

    def made(value: Any, fields: tuple[str, ...], first: str | None) -> Any:
        if not fields:
            return absolute(value, first)
        if not isinstance(value, Mapping):
            return value
        name, rest = fields[0], fields[1:]
        keys = list(value) if name == "*" else [name]
        return {**value, **{key: made(value[key], rest, first) for key in keys if key in value}}

    from areal.resources.validation import spec_model  # imports pydantic

    model, result = spec_model(kind), dict(spec)
    for fields in model.FILES:
        if fields[0] not in spec:
            continue
        folder = model.FILES_FROM.get(fields[0])
        result = made(result, fields, result.get(folder) if folder else None)
    return result


def looked_in(folder: str, source_file: str | None) -> str:
    """Return in words where a relative path was looked up. What flags set, and stdin, is beside no manifest."""
    return f"looked in {folder}{'' if source_file in (None, STDIN) else ' and beside the manifest'}"


@lru_cache(64)
def _above(here: str, source_file: str) -> tuple[str, ...]:
    """Return the folder of a manifest and the one above that."""
    return tuple(str(folder) for folder in Path(here, source_file).parents[:2])


def import_path(folder: Path, env: Mapping[str, object]) -> list[str]:
    """Return the import path of a process that areal starts in ``folder`` with ``env``."""
    given = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    return [str(folder), *(str(folder / each) for each in str(given).split(os.pathsep)), *sys.path]


def import_fault(name: str, places: Sequence[str]) -> str | None:
    """Return why ``package.module:attr.attr`` (or the same with dots), or ``path/to/file.py:attr``, cannot be imported;
    None if no fault is found. ``places``: folders, as in ``sys.path``; the path of a file is relative to the first."""
    module, colon, attributes = name.partition(":")
    if not colon and not name.endswith(".py"):
        module, _, attributes = name.rpartition(".")
    if not module:
        return "it is not module:name or path/to/file.py:name"
    found = module_of(module, places)
    if isinstance(found, str):
        if found.endswith(".py"):
            return f"there is no file {Path(places[0], found).absolute()}"
        near = did_you_mean(found, (file.stem for place in places[:1] for file in Path(place).glob("*.py")))
        return f"there is no module {found}{near}"
    file, rest, folders = found
    attribute = [*rest, *attributes.split(".")][0]
    if not rest and _find(f"{module}.{attribute}", folders) is not None:
        return None  # a module of the package
    return file_fault(file, attribute)


def module_of(module: str, places: Sequence[str]) -> tuple[Path, list[str], list[str]] | str:
    """Return (file of ``package.module``, trailing parts of the name that are names in that file, folders of the
    package). Returns the name of the first module that does not exist if there is one. ``module`` may be a file's path,
    which is relative to the first of ``places``."""
    if module.endswith(".py"):
        script = Path(places[0]) / Path(module).expanduser()
        return (script, [], []) if script.is_file() else module
    folders, parts = list(places), module.split(".")
    file = Path()
    for count in range(1, len(parts) + 1):
        here = ".".join(parts[:count])
        spec = None if here == _OWN else _find(here, folders)  # a folder `areal` is no part of this package
        spec = spec or (_installed(here) if count == 1 else None)
        if spec is None:
            return here
        file = Path(spec.origin or "")
        if spec.submodule_search_locations is None:
            return file, parts[count:], []
        folders = list(spec.submodule_search_locations)
    return file, [], folders


_OWN = __name__.partition(".")[0]


def _find(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return the spec that ``PathFinder`` would find, without importing the parents of a namespace package."""
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
    """Return a spec from any other finder of this interpreter: built-in modules, editable installations."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def file_fault(file: Path, attribute: str) -> str | None:
    """Return the fault of a module's file (a syntax error, or no such name in it); None if no fault is found."""
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
    """Yield the names that a module's statements bind, outside functions and classes; ``*`` for names that are bound
    dynamically."""
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
