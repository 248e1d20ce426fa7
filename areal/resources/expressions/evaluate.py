"""Syntax tree to value. No value is ever an object of Python's that could lead elsewhere: only JSON's types.

A name that is not set evaluates to Unset, which any use turns into an error, except by ``default(x, y)``: the second
argument when the first is unset, anywhere along its path, or null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from areal.resources.expressions import functions
from areal.resources.expressions.functions import FUNCTIONS, Refused, type_name
from areal.resources.expressions.syntax import (
    Binary,
    Call,
    Choice,
    Expr,
    ExpressionError,
    Items,
    Literal,
    Lookup,
    Name,
    Unary,
)
from areal.resources.suggest import did_you_mean
from areal.resources.tree import ABSENT

_SECRET_ENDINGS = {"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS"}


@dataclass
class Environment:
    """The environment variables that expressions may read; ``read`` keeps what was, so that a rendering can say
    what it depended on."""

    variables: Mapping[str, str]
    read: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str | None:
        value = self.variables.get(name)
        if value is not None:
            self.read[name] = value
        return value


@dataclass(frozen=True)
class Scope:
    """What names mean. ``item`` and ``index`` exist inside a generated template alone."""

    values: Mapping[str, Any]
    env: Environment
    profile: str | None = None
    item: Any = ABSENT
    index: Any = ABSENT

    @property
    def names(self) -> dict[str, Any]:
        known = {"values": self.values, "env": self.env, "profile": self.profile}
        inner = {"item": self.item, "index": self.index}
        return {**known, **{name: value for name, value in inner.items() if value is not ABSENT}}


@dataclass(frozen=True)
class Unset:
    """Why a name has no value, for the error when somebody needs it."""

    message: str
    column: int


def evaluate(tree: Expr, scope: Scope) -> Any:
    """The value of an expression. Raises ExpressionError; never anything else."""
    try:
        value = _force(_evaluate(tree, scope), tree.column)
        functions.count_nodes(value)
    except Refused as error:
        raise ExpressionError(str(error), tree.column)
    return value


def _evaluate(tree: Expr, scope: Scope) -> Any:
    match tree:
        case Literal():
            return tree.value
        case Name():
            return _name(tree, scope)
        case Lookup():
            return _lookup(tree, scope)
        case Call():
            return _call(tree, scope)
        case Unary():
            return _unary(tree, scope)
        case Binary():
            return _binary(tree, scope)
        case Choice():
            return _evaluate(tree.then if _needed(tree.condition, scope) else tree.otherwise, scope)
        case Items():
            return [_needed(item, scope) for item in tree.items]
        case _:
            assert_never(tree)


def _needed(tree: Expr, scope: Scope) -> Any:
    return _force(_evaluate(tree, scope), tree.column)


def _force(value: Any, column: int) -> Any:
    if isinstance(value, Unset):
        raise ExpressionError(value.message, value.column)
    if isinstance(value, Environment):
        raise ExpressionError("name a variable: env.NAME", column)
    return value


def _name(tree: Name, scope: Scope) -> Any:
    names = scope.names
    if tree.name in names:
        return names[tree.name]
    if tree.name in ("item", "index"):
        raise ExpressionError(f'"{tree.name}" exists only inside the template of a "generate"', tree.column)
    near = did_you_mean(tree.name, (*names, "item"))
    raise ExpressionError(f'unknown name "{tree.name}"{near}: values, env, item or profile', tree.column)


def _lookup(tree: Lookup, scope: Scope) -> Any:
    holder = _evaluate(tree.holder, scope)
    if isinstance(holder, Unset):
        return holder
    key = _needed(tree.key, scope)
    path = _path_text(tree)
    if isinstance(holder, Environment):
        return _variable(holder, key, tree.column)
    if isinstance(holder, Mapping):
        if not isinstance(key, str):
            raise ExpressionError(f"a map is looked up by text, not by {type_name(key)}", tree.column)
        return holder[key] if key in holder else Unset(f"{path} is not set{did_you_mean(key, holder)}", tree.column)
    if isinstance(holder, list):
        if type(key) is not int:
            raise ExpressionError(f"a list is looked up by an integer, not by {type_name(key)}", tree.column)
        within = -len(holder) <= key < len(holder)
        return holder[key] if within else Unset(f"{path} is not set: the list has {len(holder)} items", tree.column)
    raise ExpressionError(f"{_path_text(tree.holder)} is {type_name(holder)}, which has nothing inside", tree.column)


def _variable(env: Environment, name: Any, column: int) -> Any:
    if not isinstance(name, str):
        raise ExpressionError("an environment variable is looked up by its name", column)
    if name.upper().rsplit("_", 1)[-1] in _SECRET_ENDINGS:
        message = (
            f"env.{name} looks like a secret, and what a manifest says is stored in clear: use envFrom or apiKeyFrom"
        )
        raise ExpressionError(message, column)
    value = env.get(name)
    return value if value is not None else Unset(f"the environment variable {name} is not set", column)


def _call(tree: Call, scope: Scope) -> Any:
    if tree.name == "default":
        if len(tree.arguments) != 2:
            raise ExpressionError("usage: default(value, fallback)", tree.column)
        value = _evaluate(tree.arguments[0], scope)
        return _needed(tree.arguments[1], scope) if value is None or isinstance(value, Unset) else value
    function = FUNCTIONS.get(tree.name)
    if function is None:
        near = did_you_mean(tree.name, (*FUNCTIONS, "default"))
        raise ExpressionError(f'unknown function "{tree.name}"{near}', tree.column)
    least, most = function.arity
    if not least <= len(tree.arguments) <= most:
        raise ExpressionError(f"usage: {function.usage}", tree.column)
    arguments = [_needed(argument, scope) for argument in tree.arguments]
    try:
        return function.call(*arguments)
    except Refused as error:
        raise ExpressionError(f"{tree.name}: {error}", tree.column)


def _unary(tree: Unary, scope: Scope) -> Any:
    value = _needed(tree.operand, scope)
    if tree.operator == "not":
        return not value
    try:
        return functions.checked_number(-functions.number(value))
    except Refused as error:
        raise ExpressionError(f'"-" {error}', tree.column)


def _binary(tree: Binary, scope: Scope) -> Any:
    left = _needed(tree.left, scope)
    if tree.operator in ("and", "or"):
        return left if bool(left) is (tree.operator == "or") else _needed(tree.right, scope)
    right = _needed(tree.right, scope)
    try:
        return _operate(tree.operator, left, right)
    except Refused as error:
        raise ExpressionError(f'"{tree.operator}": {error}', tree.column)


def _operate(operator: str, left: Any, right: Any) -> Any:
    match operator:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "in":
            return functions.contains(right, left)
        case "+":
            return functions.concatenate(left, right)
        case "-":
            return functions.checked_number(functions.number(left) - functions.number(right))
        case "*":
            return functions.checked_number(functions.number(left) * functions.number(right))
        case "/":
            return functions.divide(left, right)
        case "//":
            return functions.floor_divide(left, right)
        case "%":
            return functions.modulo(left, right)
        case _:
            order = functions.compare(left, right)
            return {"<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0}[operator]


def _path_text(tree: Expr) -> str:
    """A lookup as it was written, as far as it is names and literals."""
    if isinstance(tree, Name):
        return tree.name
    if isinstance(tree, Lookup):
        key = tree.key.value if isinstance(tree.key, Literal) else "..."
        holder = _path_text(tree.holder)
        return f"{holder}.{key}" if isinstance(key, str) and key.isidentifier() else f"{holder}[{key}]"
    return "this"
