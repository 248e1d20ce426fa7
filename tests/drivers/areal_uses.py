"""What a Python file uses of ``areal``: imports, members of what it imports, dotted names in its texts."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from areal.api import cli_args
from areal.wire.fields import hints_of


class Refused(Exception):
    pass


def imported(module: str, name: str = "") -> Any:
    """``from module import name``. Raises Refused."""
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
        raise Refused(str(error).partition(": ")[2]) from error


def hints_by_name(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; of one whose types are imported for type checkers only, the names."""
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        return hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    except NameError:
        return {each.name: Any for each in dataclasses.fields(cls)}


def kinds_of(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from kinds_of(hint.__origin__)
    elif get_args(hint) and get_origin(hint) not in (dict, typing.Literal):
        for each in get_args(hint):
            yield from kinds_of(each)
    else:
        yield hint


DOTTED = re.compile(r"areal(?:\.[A-Za-z_]\w*)+(?::\w+)?")


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
            with contextlib.suppress(Refused, ImportError):
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
        if isinstance(node.value, str) and DOTTED.fullmatch(node.value):
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
    if name in (hints := hints_by_name(base.cls)):
        kinds = [kind for kind in kinds_of(hints[name]) if inspect.isclass(kind) and _path_of(kind)]
        return Instance(kinds[0]) if kinds else None
    found = getattr(base.cls, name, None)
    if isinstance(found, property):
        return _returned(found.fget)
    return found if callable(found) else None


def _returned(called: Any) -> Any:
    if not callable(called) or inspect.isclass(called):
        return None
    with contextlib.suppress(Exception):
        kinds = [kind for kind in kinds_of(typing.get_type_hints(called).get("return")) if inspect.isclass(kind)]
        return next((Instance(kind) for kind in kinds if _path_of(kind)), None)
    return None
