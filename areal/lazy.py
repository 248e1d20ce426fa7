"""Names of a package that are imported when they are first asked for: importing the package costs nothing."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the package's ``__getattr__``. ``homes``: the module of each name, or the module that it names."""

    def find(name: str) -> Any:
        if (home := homes.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        module = importlib.import_module(home)
        return module if home.endswith(f".{name}") else getattr(module, name)

    return find
