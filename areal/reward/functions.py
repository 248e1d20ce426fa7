"""What a reward function is to its callers: where another process finds it, and which arguments it takes."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from areal.errors import UsageFault
from areal.reward.frames import Target

OWN_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")


def name_of(function: Any) -> str:
    """For errors."""
    if isinstance(function, str):
        return function
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def is_async(function: Any) -> bool:
    """Of a coroutine function, also one that is bound, partial or the ``__call__`` of an object."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def target_of(function: Callable[..., Any] | str) -> Target:
    """Where a worker finds the function: by its name in a module, else as a copy (a pickle) of the object that it is.
    Raises ValueError for what can be neither found nor copied: lambdas, closures, objects that hold a lock or a client.
    """
    if isinstance(function, str):
        module, _, name = function.partition(":") if ":" in function else function.rpartition(".")
        return Target(module, name)
    name, module = name_of(function), getattr(function, "__module__", None) or ""
    file = getattr(sys.modules["__main__"], "__file__", None)
    found = _found(module, name)
    if found is function or (inspect.ismethod(function) and found == function):  # a class method is bound each time
        return Target(module, name, file if module == "__main__" else None)
    try:
        copy = pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} cannot go to another process: {error}") from error
    return Target(module, name, file if b"__main__" in copy else None, copy=copy)


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@dataclass(frozen=True)
class Parameters:
    """A function's signature; None where Python knows none, and nothing is checked."""

    name: str
    signature: inspect.Signature | None

    @classmethod
    def of(cls, function: Any) -> Parameters:
        try:
            return cls(name_of(function), None if isinstance(function, str) else inspect.signature(function))
        except (TypeError, ValueError):
            return cls(name_of(function), None)

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises UsageFault where the function cannot be called like this."""
        try:
            if self.signature is not None:
                self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageFault(f"the reward {self.name}{self.signature} cannot be called: {error}") from error

    def call(self, own: tuple[Any, ...], row: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` for an answer (``OWN_ARGUMENTS``) and its row, of whose columns the function gets those
        that it takes. Raises UsageFault naming what the row lacks."""
        columns = {name: value for name, value in row.items() if name not in OWN_ARGUMENTS}
        if self.signature is None:
            return own, columns
        named = dict(zip(OWN_ARGUMENTS, own, strict=True))
        args, kwargs = (own, columns) if self._in_order else ((), {**named, **columns})
        parameters = self.signature.parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            kwargs = {name: value for name, value in kwargs.items() if _by_name(parameters.get(name))}
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageFault(
                f"the reward {self.name}{self.signature} cannot be called: {error}",
                hint=f"a row has {', '.join(row)}; the reward gets {', '.join(OWN_ARGUMENTS)} and those of these "
                "columns that it takes",
            ) from error
        return args, kwargs

    @cached_property
    def _in_order(self) -> bool:
        """Whether the first four parameters are ``OWN_ARGUMENTS``, whatever they are called; else they go by name."""
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


def _by_name(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
