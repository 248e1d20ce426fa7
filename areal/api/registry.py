"""Names for what a configuration chooses: registered ones, else ``module:attr`` (or ``module.attr``) of anything that
can be imported."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from areal.errors import ArealError, UsageFault
from areal.resources.suggest import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """``kind`` is what its entries are called in errors: workflow, reward, dataset."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Registering another thing under a taken name is a mistake."""

        def keep(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            return entry

        return keep

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def resolve(self, name: str) -> T:
        """Raises UsageFault naming what was looked for."""
        if name in self._entries:
            return self._entries[name]
        if ":" not in name and "." not in name:
            raise UsageFault(
                f"there is no {self.kind} {name!r}{did_you_mean(name, self._entries)}",
                hint=f"register it, or write module:attr; there is {', '.join(self._entries) or 'none'}",
            )
        found: T = load_attr(name, self.kind)
        return found


def load_attr(path: str, kind: str = "object") -> Any:
    """``package.module:attr.attr``, or all with dots. Raises UsageFault: no such module, no such attribute, or an
    import error of the module's own."""
    if ":" in path:
        module, _, attribute = path.partition(":")
        return _attribute(_module(module, path, kind), attribute, path, kind)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise UsageFault(f"{kind} {path!r}: write module:attr")
    return _attribute(_module(module, path, kind), attribute, path, kind)


def _module(name: str, path: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        why = f"there is no module {missing}" if name.startswith(missing) else f"its import of {missing} failed"
        raise UsageFault(f"{kind} {path!r}: {why}", hint="is its folder on PYTHONPATH?") from error
    except ArealError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        raise UsageFault(f"{kind} {path!r} cannot be imported: {where}: {type(error).__name__}: {error}") from error


def _attribute(found: Any, attribute: str, path: str, kind: str) -> Any:
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise UsageFault(f"{kind} {path!r}: no {part!r} there{did_you_mean(part, known)}")
        found = getattr(found, part)
    return found
