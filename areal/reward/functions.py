"""Reward functions: their transfer to another process, and the arguments that they take."""

from __future__ import annotations

import ast
import functools
import inspect
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal.dataclasses import dataclass
from areal.errors import ArealError, UsageFault, did_you_mean
from areal.loading import load_callable
from areal.reward.frames import Call, FunctionTarget

OWN_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
_TOKENS = OWN_ARGUMENTS[2:]
_SHAPES = 64  # of calls whose arguments are known to fit a function
_LISTS = frozenset(("list", "List", "Sequence", "Iterable", "Iterator", "Collection", "tuple", "Tuple", "set", "Set"))
_OTHER = frozenset(("dict", "Dict", "Mapping", "bytes", "int", "float", "bool"))
_NOTHING: Mapping[str, object] = MappingProxyType({})
_NO_NUMBER = _LISTS | {"dict", "Dict", "Mapping", "bytes", "Callable"}


def name_of(function: Any) -> str:
    """Return the function's name, for error messages."""
    if isinstance(function, str):
        return function
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    return getattr(function, "__qualname__", type(function).__qualname__)


def is_async(function: Any) -> bool:
    """Return whether a call returns a coroutine. Of partial functions and objects with ``__call__``, too."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def target_of(function: Callable[..., Any] | str) -> FunctionTarget:
    """Return the function as a target for worker processes: by module and name, else as a pickle of the object. Raises
    ValueError for objects that can be neither imported nor pickled: lambdas, closures, objects with a lock."""
    if isinstance(function, str):
        module, _, name = function.partition(":") if ":" in function else function.rpartition(".")
        return FunctionTarget(module, name)
    name, module = name_of(function), getattr(function, "__module__", None) or ""
    file = getattr(sys.modules["__main__"], "__file__", None)
    file = file if file and Path(file).is_file() else None  # of a notebook, of ``python -c`` and ``-``
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is function or (inspect.ismethod(function) and found == function):  # a class method is bound each time
        if module == "__main__" and file is None:
            raise ValueError(f"{name} is defined in a notebook or an interactive session, which no process can import")
        return FunctionTarget(module, name, file if module == "__main__" else None)
    try:
        copy = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} cannot go to another process: {error}") from error
    if b"__main__" in copy and file is None:
        raise ValueError(f"{name} refers to a notebook or an interactive session, which no process can import")
    return FunctionTarget(module, name, file if b"__main__" in copy else None, copy=copy)


@dataclass(frozen=True)
class Parameters:
    """A function's signature. It is None if Python cannot determine it; then nothing is checked. ``reads``: the columns
    that each call reads from the ``**`` parameter."""

    name: str
    signature: inspect.Signature | None
    reads: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Any) -> Parameters:
        """Return the parameters of a function. A wrapper has the names, but not the annotations, of what it wraps: it
        may call a function of a batch with lists of one."""
        try:
            signature = None if isinstance(function, str) else inspect.signature(function)
        except (TypeError, ValueError):
            signature = None
        if signature is not None and _is_wrapper(function):
            plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
            return cls(name_of(function), inspect.Signature(plain))
        return cls(name_of(function), signature, _columns_read(function))

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:
        """Raise UsageFault if the function cannot be called with these arguments."""
        try:
            if self.signature is not None:
                self._bind(len(args), tuple(kwargs))
        except TypeError as error:
            raise UsageFault(f"the reward {self.name}{self.signature} cannot be called: {error}") from error

    def check_types(self) -> None:
        """Raise UsageFault for annotations by which the function rewards a list of responses, or makes a reward, and
        does not reward one response."""
        if self.signature is None:
            return
        parameters = [each for each in self.signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]
        named = dict(zip(OWN_ARGUMENTS, parameters, strict=False)) if self._in_order else self.signature.parameters
        if not self._named_first.isdisjoint(each.name for name, each in named.items() if name in _TOKENS):
            named = {name: each for name, each in named.items() if name not in _TOKENS}  # they may be columns
        why = [
            f"{each.name} is one {'text' if name not in _TOKENS else 'list of token ids'}"
            for name in OWN_ARGUMENTS
            if (each := named.get(name)) is not None
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            and _is_other(each.annotation, ids=name in _TOKENS)
        ]
        returned = [outer for outer, _ in _alternatives(self.signature.return_annotation)]
        if returned and _NO_NUMBER.issuperset(returned):
            why.append("a reward is one number")
        if why:
            raise UsageFault(
                f"the reward {self.name}{self.signature} cannot be called: {', '.join(why)}",
                hint="write a function of one response that calls it, or correct its annotations",
            )

    @property
    def takes_tokens(self) -> bool:
        """Whether the function has a parameter for token ids."""
        return self.signature is not None and (self._in_order or not (self._names or frozenset()).isdisjoint(_TOKENS))

    def call(
        self, own: tuple[Any, ...], row: Mapping[str, Any], also: Mapping[str, Any] = _NOTHING
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` for the values of ``OWN_ARGUMENTS``, without token ids where those are None, and a row,
        whose columns are passed as far as the function has parameters for them. ``also``: further arguments by name,
        which hide a row's. Raises UsageFault naming a column that the row lacks."""
        own = own if own[-1] is not None else own[: -len(_TOKENS)]
        columns = {name: value for name, value in row.items() if name not in OWN_ARGUMENTS} | dict(also)
        if self.signature is None:
            return own, columns
        named = dict(zip(OWN_ARGUMENTS, own, strict=False))
        by_place = self._in_order and self._named_first.isdisjoint(columns)
        args, kwargs = (own, columns) if by_place else ((), {**named, **columns})
        if self._names is not None:
            kwargs = {name: value for name, value in kwargs.items() if name in self._names}
        try:
            self._bind(len(args), tuple(kwargs))
            if absent := [name for name in self.reads if name not in kwargs]:
                raise TypeError(f"it reads {absent[0]!r} from its ** parameter")
            if self.signature.parameters and not args and not kwargs:
                raise TypeError("it has a parameter for none of what it gets")
        except TypeError as error:
            lacking = (
                name
                for name in (*needed(self.signature), *self.reads)
                if name not in kwargs and name not in OWN_ARGUMENTS
            )
            near = "".join(did_you_mean(name, row) for name in lacking)
            raise UsageFault(
                f"the reward {self.name}{self.signature} cannot be called: {error}{near}",
                hint=f"a row has {', '.join(row)}; the reward gets {', '.join([*named, *also])} and those of these "
                "columns that it takes",
            ) from error
        return args, kwargs

    def calls(self, owns: Sequence[tuple[Any, ...]], row: Mapping[str, Any]) -> list[Call]:
        """As ``call``, for each of several responses to one prompt. They share the row's columns, which are chosen, and
        sent to another process, once."""
        args, kwargs = self.call(owns[0], row)
        named = [(place, name) for place, name in enumerate(OWN_ARGUMENTS) if name in kwargs]
        if not named:
            return [(own[: len(args)], kwargs) for own in owns]
        return [(args, kwargs | {name: own[place] for place, name in named}) for own in owns]

    @cached_property
    def _bind(self) -> Callable[[int, tuple[str, ...]], object]:
        """Raises TypeError if the function cannot be called with so many arguments by position and these by name. The
        responses of a job all have the same ones, and binding takes longer than many a reward."""
        assert self.signature is not None
        bind = self.signature.bind
        return functools.lru_cache(_SHAPES)(lambda count, names: bind(*[None] * count, **dict.fromkeys(names)))

    @cached_property
    def _names(self) -> frozenset[str] | None:
        """The arguments that the function takes by name. None: any."""
        assert self.signature is not None
        parameters = self.signature.parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return None
        return frozenset(
            each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        )

    @cached_property
    def _named_first(self) -> frozenset[str]:
        """The names of the first parameters by position that may be those of columns, and are then passed by name."""
        assert self.signature is not None
        first = list(self.signature.parameters.values())[: len(OWN_ARGUMENTS)]
        return frozenset(each.name for each in first if each.kind is each.POSITIONAL_OR_KEYWORD) - set(OWN_ARGUMENTS)

    @cached_property
    def _in_order(self) -> bool:
        """Whether ``OWN_ARGUMENTS`` are passed by position, as the first four parameters of any name, unless a row has
        a column of such a name; else by name."""
        assert self.signature is not None
        places = [each for each in self.signature.parameters.values() if each.kind is not each.KEYWORD_ONLY]
        for place, each in enumerate(places):
            if each.kind is each.VAR_POSITIONAL:
                return True
            if each.kind is each.VAR_KEYWORD:
                break
            if each.name in OWN_ARGUMENTS and (place >= 4 or OWN_ARGUMENTS[place] != each.name):
                return False
        fixed = [each for each in places if each.kind is not each.VAR_KEYWORD]
        return len(fixed) >= len(OWN_ARGUMENTS)


def scorer(spec: str) -> Callable[[tuple[Any, ...], Mapping[str, object], Mapping[str, object]], Any]:
    """Return a function of the arguments of ``Parameters.call``, which calls ``module:function`` or
    ``path/to/file.py:function``. It is run in a reward process. Raises ArealError."""
    function = load_callable(spec, "--reward")
    parameters = Parameters.of(function)

    def score(own: tuple[Any, ...], row: Mapping[str, object], also: Mapping[str, object]) -> Any:
        args, kwargs = parameters.call(own, row, also)
        return function(*args, **kwargs)

    return score


def parameters_of(spec: str) -> dict[str, object]:
    """Return the function's ``parameters``, for another process, or ``error`` and ``hint`` if it cannot be loaded."""
    try:
        function = load_callable(spec, "--reward")
        if inspect.isclass(function):
            raise UsageFault(f"--reward {spec}: a reward is a function, not a class")
    except ArealError as error:
        return {"error": error.message, "hint": error.hint}
    found = Parameters.of(function)
    return {"parameters": Parameters(found.name, found.signature and as_text(found.signature), found.reads)}


class SignatureText(str):
    """Source text in a signature: of an annotation or a default."""

    __slots__ = ()
    __repr__ = str.__str__


def as_text(signature: inspect.Signature) -> inspect.Signature:
    """Return a copy that has text in place of annotations and defaults."""

    def text(value: Any) -> Any:
        if value is signature.empty:
            return value
        return SignatureText(value if isinstance(value, str) else inspect.formatannotation(value))

    return inspect.Signature(
        [
            each.replace(
                annotation=text(each.annotation),
                default=each.default if each.default is each.empty else SignatureText(repr(each.default)),
            )
            for each in signature.parameters.values()
        ],
        return_annotation=text(signature.return_annotation),
    )


def _is_wrapper(function: Any) -> bool:
    """Return whether ``functools.wraps`` gave a function, or an object's ``__call__``, another's signature."""
    if isinstance(function, functools.partial):
        return _is_wrapper(function.func)
    return hasattr(function, "__wrapped__") or hasattr(type(function).__call__, "__wrapped__")


def _is_other(annotation: Any, *, ids: bool) -> bool:
    """Return whether no value of the annotation is a text, or a list of token ids with ``ids``. Unknown types pass."""
    found = list(_alternatives(annotation))
    if ids:
        return bool(found) and all(outer in _OTHER | {"str"} or inner in _LISTS for outer, inner in found)
    return bool(found) and all(outer in _LISTS | _OTHER for outer, _ in found)


def _alternatives(annotation: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of the types, without modules and None, that an annotation allows, and of items; "": unknown."""
    if annotation is inspect.Signature.empty:
        return
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    try:
        yield from _types(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        yield "", ""


def _types(node: ast.expr) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Constant(value=None):
            return
        case ast.Constant(value=str(text)):
            yield from _alternatives(text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _types(left)
            yield from _types(right)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name, ""
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inside):
            items = inside.elts if isinstance(inside, ast.Tuple) else [inside]
            if name in ("Optional", "Union", "Annotated"):
                for item in items[: 1 if name == "Annotated" else None]:
                    yield from _types(item)
            else:
                yield name, next((outer for item in items for outer, _ in _types(item)), "")
        case _:
            yield "", ""


def needed(signature: inspect.Signature) -> list[str]:
    """Return the parameters without a default that can be passed by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in signature.parameters.values() if each.kind in named and each.default is each.empty]


def check_columns(
    rewards: Iterable[Parameters],
    rows: Iterable[Mapping[str, object]],
    place: Callable[[int], str],
    *,
    also: Sequence[str] = (),
    tokens: bool = True,
) -> None:
    """Raise UsageFault, with its place, for the first row that lacks a column which one of ``rewards`` requires. Rows
    of the same columns are checked once. ``also``: further arguments; ``tokens``: whether token ids are given."""
    functions, checked = list(rewards), set[tuple[str, ...]]()
    own: tuple[Any, ...] = ("", "", [], []) if tokens else ("", "", None, None)
    further = dict.fromkeys(also)
    for number, row in enumerate(rows):
        if (columns := tuple(row)) in checked:
            continue
        checked.add(columns)
        for function in functions:
            try:
                function.call(own, row, further)
            except UsageFault as error:
                raise UsageFault(f"{place(number)}: {error.message}", hint=error.hint) from error


def columns_read(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Return the columns that every call of the function reads from its ``**`` parameter: answer for
    ``data["answer"]``. What follows a statement that branches, or uses it in another way, is left out."""
    found: list[str] = []
    given = function.args.kwarg.arg if function.args.kwarg is not None else None
    for statement in function.body if given is not None else ():
        nodes = list(ast.walk(statement))
        read = {
            id(node.value): str(node.slice.value)
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        }
        if any(isinstance(node, ast.Name) and node.id == given and id(node) not in read for node in nodes):
            break
        evaluated = [node for node in _evaluated(statement) if isinstance(node, ast.Name) and node.id == given]
        found += [read[id(node)] for node in evaluated]
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
            break
    return tuple(found)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that are evaluated whatever the values are."""
    inside: Iterable[ast.AST] = ()
    match node:
        case ast.If() | ast.IfExp() | ast.While():
            inside = (node.test,)
        case ast.For():
            inside = (node.iter,)
        case ast.BoolOp():
            inside = node.values[:1]
        case ast.Compare():
            inside = (node.left, node.comparators[0])
        case ast.Return() | ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr():
            inside = ast.iter_child_nodes(node)
        case ast.expr() if not isinstance(
            node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            inside = ast.iter_child_nodes(node)
        case ast.keyword() | ast.FormattedValue():
            inside = (node.value,)
    yield node
    for each in inside:
        yield from _evaluated(each)


def _columns_read(function: Any) -> tuple[str, ...]:
    """Return ``columns_read`` of a function whose source is known."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ()
    return columns_read(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ()


def float_of(value: Any) -> float:
    """Return a number of any library as a float. Raises OverflowError, ValueError, and TypeError also for text: a
    reward that returns the answer "4" is not a reward of 4."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{value!r} is text")
    return float(value)
