"""What a few commands print, and the value of an arithmetic expression: those that need nothing but their input."""

from __future__ import annotations

import ast
import operator
import os
import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

_MOST_NUMBERS = 1000


class NotKnown(Exception):
    """The output of a command that is not run."""


def printed(name: str, arguments: Sequence[str], given: str | None, folder: str = "") -> str | None:
    """Return what a command prints, with the standard input ``given``; None if that is not known."""
    if any("$" in each for each in arguments) and name not in ("echo", "cat"):
        return None
    printing = _PRINTING.get(name)
    try:
        return None if printing is None else printing(list(arguments), given, folder)
    except (ValueError, IndexError, TypeError):
        return None


def _echo(arguments: list[str], given: str | None, folder: str) -> str:
    flags = 0
    while flags < len(arguments) and re.fullmatch(r"-[neE]+", arguments[flags]):
        flags += 1
    return " ".join(arguments[flags:]) + ("" if "n" in "".join(arguments[:flags]) else "\n")


def _printf(arguments: list[str], given: str | None, folder: str) -> str:
    form, values = arguments[0].replace("\\n", "\n"), arguments[1:]
    count = len(re.findall(r"%[sd]", form))
    if re.search(r"%[^sd]|\\", form) or not count:
        if re.search(r"[%\\]", form):
            raise ValueError(form)
        return form
    values = values or [""]
    groups = [values[at : at + count] for at in range(0, len(values), count)]
    return "".join(form.replace("%d", "%s") % tuple([*group, *[""] * count][:count]) for group in groups)


def _dirname(arguments: list[str], given: str | None, folder: str) -> str:
    return f"{PurePath(arguments[-1]).parent}\n"


def _basename(arguments: list[str], given: str | None, folder: str) -> str:
    name, *suffix = [each for each in arguments if each != "--"]
    return PurePath(name).name.removesuffix("".join(suffix)) + "\n"


def _seq(arguments: list[str], given: str | None, folder: str) -> str:
    numbers = [int(each) for each in arguments]
    first, step, last = (
        (1, 1, *numbers) if len(numbers) == 1 else (numbers[0], numbers[1] if numbers[2:] else 1, numbers[-1])
    )
    if abs(last - first) > _MOST_NUMBERS:
        raise ValueError(last)
    return "".join(f"{each}\n" for each in range(first, last + (1 if step > 0 else -1), step))


def _tr(arguments: list[str], given: str | None, folder: str) -> str | None:
    """Replace the characters of one set by those of another of the same size, or delete them (``-d``)."""
    classes = {"[:upper:]": string.ascii_uppercase, "A-Z": string.ascii_uppercase}
    classes |= {"[:lower:]": string.ascii_lowercase, "a-z": string.ascii_lowercase, "\\n": "\n", "[:space:]": " \t\n"}
    first, second = (classes.get(each, each) for each in arguments)
    if given is None or re.search(r"\[:|.-.|\\", first + second):
        return None
    if first == "-d":
        return given.translate(dict.fromkeys(map(ord, second)))
    return given.translate(str.maketrans(first, second)) if len(first) == len(second) else None


def _wc(arguments: list[str], given: str | None, folder: str) -> str | None:
    if given is None or arguments not in (["-l"], ["-w"]):
        return None
    return f"{given.count(chr(10)) if arguments == ['-l'] else len(given.split())}\n"


def _path(arguments: list[str], given: str | None, folder: str) -> str:
    return f"{os.path.normpath(Path(folder, arguments[-1]))}\n"


def _sum(arguments: list[str], given: str | None, folder: str) -> str | None:
    found = calculated(" ".join(arguments), {})
    return f"{found}\n" if re.fullmatch(r"-?\d+", found) else None


_PRINTING: Mapping[str, Callable[[list[str], str | None, str], str | None]] = {
    "echo": _echo,
    "printf": _printf,
    "pwd": lambda arguments, given, folder: f"{folder}\n",
    "cd": lambda arguments, given, folder: "",
    "cat": lambda arguments, given, folder: given if not arguments else None,
    "dirname": _dirname,
    "basename": _basename,
    "seq": _seq,
    "tr": _tr,
    "wc": _wc,
    "realpath": _path,
    "readlink": _path,
    "expr": _sum,
}

_UNKNOWN = re.compile(r"\$\{?\w+\}?")
_NAME = re.compile(r"(?<![\w$#{])([A-Za-z_]\w*)")
_ASSIGNS = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))\s*$", re.DOTALL)
_BEFORE = re.compile(r"\s*(\+\+|--)\s*([A-Za-z_]\w*)\s*$")
_TERNARY = re.compile(r"(.*?)\?([^:]*):(.*)", re.DOTALL)
_MOST_POWER = 64
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda first, second: int(first / second) if abs(first) < 1 << 50 else first // second,
    ast.Mod: lambda first, second: first - second * int(first / second),
    ast.Pow: lambda first, second: first**second if 0 <= second <= _MOST_POWER and abs(first) < 1 << 32 else _wrong(),
    ast.LShift: lambda first, second: first << second if 0 <= second <= _MOST_POWER else _wrong(),
    ast.RShift: operator.rshift,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def _wrong() -> int:
    raise ValueError("not a number here")


def calculated(text: str, variables: Mapping[str, str]) -> str:
    """Return the value of an arithmetic expression of bash; the first variable in it that is not known; or the
    expression itself. ``variables`` change if they are assigned in it."""
    if (assigned := _ASSIGNS.match(text) or _BEFORE.match(text)) is not None and isinstance(variables, dict):
        before = assigned.re is _BEFORE
        name, sign, by = (assigned[2], assigned[1], None) if before else (assigned[1], assigned[2] or "", assigned[4])
        old = calculated(name, variables) if by is None or assigned[3] else "0"
        new = calculated(
            f"({old}) {sign[0]} 1" if by is None else f"({old}) {assigned[3]} ({by})" if assigned[3] else by, variables
        )
        variables[name] = new if re.fullmatch(r"-?\d+", new) else f"${{{name}}}"
        return variables[name] if before or by is not None else old
    names = text
    for _ in range(8):  # the value of a variable may be an expression
        replaced = _NAME.sub(lambda each: variables.get(each[1], f"${{{each[1]}}}"), names)
        if replaced == names or "$" in replaced:
            names = replaced
            break
        names = replaced
    try:
        return str(_of(names))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, MemoryError, RecursionError, TypeError):
        unknown = _UNKNOWN.search(names)
        return "$(...)" if "$(" in names else "$((" + "".join(text.split()) + "))" if unknown is None else unknown[0]


def _of(text: str) -> int:
    if "$" in text:
        raise ValueError(text)
    if (chosen := _TERNARY.fullmatch(text)) is not None:
        return _of(chosen[2] if _of(chosen[1]) else chosen[3])
    python = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    python = re.sub(r"\b0+(?=\d)", "", python)
    return _number(ast.parse(python.strip(), mode="eval").body)


def _number(node: ast.expr) -> int:
    """Return the value of an integer expression. Raises ValueError for any other."""
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return -_number(node.operand) if isinstance(node.op, ast.USub) else _number(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return int(not _number(node.operand))
        case ast.BoolOp():
            found = [_number(each) != 0 for each in node.values]
            return int(all(found) if isinstance(node.op, ast.And) else any(found))
        case ast.Compare(ops=[only]) if type(only) in _COMPARISONS:
            return int(_COMPARISONS[type(only)](_number(node.left), _number(node.comparators[0])))
    raise ValueError(ast.dump(node))
