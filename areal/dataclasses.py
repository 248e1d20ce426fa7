"""``dataclasses`` of the standard library, with a ``dataclass`` that costs a tenth at import.

The standard library compiles up to eight methods for each class, half a millisecond a class; a command imports a
hundred and more of them. Here all methods but ``__init__`` are closures over the names of the fields, and ``__init__``
is compiled when the first object is made. The fields are the standard library's, so its functions work on these
classes. Options that are not below and ``InitVar`` are refused. Not for classes that user code inherits from: a frozen
dataclass of the standard library cannot extend one of these, nor the reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from operator import attrgetter
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, cast

__all__ = ["asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, *, frozen=False, eq=True, slots=False, kw_only=False):
        def make(cls):
            return _make(cls, frozen, eq, slots, kw_only)

        return make if cls is None else make(cls)


def _make(cls: type, frozen: bool, eq: bool, slots: bool, kw_only: bool) -> type:
    for base in cls.__mro__[1:]:
        if "__dataclass_fields__" in base.__dict__ and (base.__dict__.get("__setattr__") is _set) != frozen:
            raise TypeError(f"{cls.__name__} and {base.__name__}: both are frozen dataclasses, or none is")
    has_doc, cls.__doc__ = bool(cls.__doc__), cls.__doc__ or cls.__name__  # not the signature, which is slow
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
    if not has_doc:
        made.__doc__ = _Signature(as_text=True)
    made.__signature__ = _Signature(as_text=False)
    members: tuple[dataclasses.Field[Any], ...] = fields(made)
    for name in made.__dataclass_fields__.keys() - {each.name for each in members}:
        if "InitVar" in str(made.__dataclass_fields__[name].type):
            raise TypeError(f"{cls.__name__}.{name}: InitVar is not supported")
    own = cls.__dict__
    methods: dict[str, object] = {"__repr__": _repr_of(members), "__init__": _init_at_first_use(made, frozen)}
    if eq:
        methods["__eq__"] = _eq_of(_values_of([each.name for each in members if each.compare]))
    if frozen:
        methods |= {"__setattr__": _set, "__delattr__": _delete}
        if slots:
            methods |= {"__getstate__": _get_state, "__setstate__": _set_state}
    written = {name for name in methods if name in own}
    if eq and ("__hash__" not in own or (own["__hash__"] is None and "__eq__" in own)):
        methods["__hash__"] = _hash_of(members) if frozen else None
    for name, method in methods.items():
        if name not in written:
            setattr(made, name, method)
    return cast(type, made)


class _Signature:
    """The signature of a class: that of its ``__init__``, which may not be compiled yet. ``as_text``: for ``help``."""

    def __init__(self, *, as_text: bool) -> None:
        self._as_text = as_text

    def __get__(self, instance: object, cls: Any) -> Any:
        if instance is not None and not self._as_text:
            raise AttributeError("__signature__")
        import inspect

        init = cls.__init__
        found = inspect.signature(getattr(init, "compiled", lambda: init)())
        found = found.replace(parameters=list(found.parameters.values())[1:])
        return f"{cls.__name__}{found}".replace(" -> None", "") if self._as_text else found


def _values_of(names: list[str]) -> Callable[[Any], Any]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple([getattr(self, name) for name in names])  # tuples: NaN equals itself in them


def _repr_of(members: tuple[dataclasses.Field[Any], ...]) -> Callable[[Any], str]:
    names = [each.name for each in members if each.repr]

    def __repr__(self: Any) -> str:
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({values})"

    return __repr__


def _eq_of(values: Callable[[Any], Any]) -> Callable[[Any, Any], bool]:
    def __eq__(self: Any, other: Any) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(values(self) == values(other))

    return __eq__


def _hash_of(members: tuple[dataclasses.Field[Any], ...]) -> Callable[[Any], int]:
    values = _values_of([each.name for each in members if (each.compare if each.hash is None else each.hash)])

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _is_field(self: Any, name: str) -> bool:
    """Also any name, unless a subclass that is not a dataclass has its own attributes."""
    return "__dataclass_fields__" in type(self).__dict__ or name in type(self).__dataclass_fields__


def _set(self: Any, name: str, value: Any) -> None:
    if _is_field(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    if _is_field(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


class _Factory:
    """The default, in a signature, of a field with a default factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _init_at_first_use(cls: Any, frozen: bool) -> Callable[..., None]:
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        init = cls.__init__ = _init_of(cls, frozen)
        init(self, *given, **named)

    def compiled() -> Callable[..., None]:
        cls.__init__ = _init_of(cls, frozen)
        return cls.__init__

    __init__.compiled = compiled  # type: ignore[attr-defined]
    return __init__


def _init_of(cls: Any, frozen: bool) -> Callable[..., None]:
    names: dict[str, Any] = {"__name__": cls.__module__, "_FACTORY": _FACTORY, "_set": object.__setattr__}
    given: list[str] = ["self"]
    named: list[str] = []
    body: list[str] = []
    for each in fields(cls):
        name, value = each.name, each.name
        names |= {f"_default_{name}": each.default, f"_new_{name}": each.default_factory}
        if each.init:
            made, optional = each.default_factory is not MISSING, each.default is not MISSING
            parameter = f"{name}=_FACTORY" if made else f"{name}=_default_{name}" if optional else name
            (named if each.kw_only else given).append(parameter)
            value = f"_new_{name}() if {name} is _FACTORY else {name}" if made else name
        elif each.default_factory is not MISSING:
            value = f"_new_{name}()"
        elif each.default is not MISSING:
            value = f"_default_{name}"
        else:
            continue  # the class's own code sets it
        place = getattr(cls, name, None)
        if frozen and isinstance(place, MemberDescriptorType):
            names[f"_slot_{name}"] = place.__set__
            body.append(f"_slot_{name}(self, {value})")
        else:
            body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join([*given, *(["*", *named] if named else [])])
    lines = "\n ".join(body or ["pass"])
    exec(f"def __init__({parameters}):\n {lines}", names)
    init: Callable[..., None] = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in fields(cls) if each.init} | {"return": None}
    return init
