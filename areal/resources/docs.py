"""The docstrings under the fields of the spec models, read from their source when somebody asks.

Only ``schema``, ``explain`` and ``init`` do: reading them with every import would cost each ``apply`` more than
validating its manifests.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.resources.fields import SpecModel


@cache
def field_docs(model: type[SpecModel]) -> dict[str, str]:
    """The docstring of each field by attribute name, inherited ones included; a field without one is absent."""
    docs: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls.__module__.startswith("areal.resources."):
            docs.update(_module_docs(cls.__module__).get(cls.__name__, {}))
    return docs


def model_doc(model: type[SpecModel]) -> str:
    return _unwrapped(inspect.getdoc(model) or "")


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {node.name: _class_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = _unwrapped(inspect.cleandoc(text))
    return docs


def _unwrapped(text: str) -> str:
    return " ".join(text.split())
