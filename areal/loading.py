"""User code by name: ``package.module:attribute``, ``package.module.attribute``, ``path/to/file.py:attribute``, or a
registered name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from areal.errors import ArealError, UsageFault, did_you_mean, where_raised
from areal.installation import install_command

_IMPORT_S = 120.0
_OF_AGENTS = ("agents", "mcp", "openai")  # packages of the extra
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
T = TypeVar("T")


def add_import_folder(folder: Path) -> None:
    """Add a folder of user code to the import path, before installed packages and after the standard library, so that
    its ``random.py`` does not replace ``random`` for all libraries in the process."""
    if str(folder) in sys.path:
        return
    library = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    ends = [number for number, place in enumerate(sys.path) if place.removesuffix("/lib-dynload") in library]
    sys.path.insert(max(ends, default=-1) + 1, str(folder))


class _ImportInterrupted(BaseException):
    """Not an Exception, which a module that is imported may catch."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _ImportInterrupted in the block after ``seconds``. There is no deadline on other threads than the main
    thread, which cannot be interrupted."""
    if threading.current_thread() is not threading.main_thread() or seconds == math.inf:
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise _ImportInterrupted

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-6), interval)


def load_attr(
    path: str, kind: str = "object", *, broken: type[ArealError] = UsageFault, within_s: float = _IMPORT_S
) -> Any:
    """Import an attribute. ``kind`` is its name in errors. Raises UsageFault for an invalid name, and for a module,
    file or attribute that does not exist; ``broken`` for an exception of the module, or for an import on the main
    thread that takes longer than ``within_s``."""
    place, _, attribute = path.rpartition(":" if ":" in path or path.endswith(".py") else ".")
    if not place or not attribute:
        raise UsageFault(f"{kind} {path!r}: write module:attr", hint="module:attr or path/to/file.py:attr")
    try:
        with _deadline(within_s):
            found: Any = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        raise UsageFault(f"{kind} {path!r}: there is no file {error}") from error
    except ModuleNotFoundError as error:
        lacking = error.name or place
        why, hint = f"there is no module {lacking}", "is its folder on PYTHONPATH?"
        if not place.startswith(lacking):
            why = f"its import of {lacking} failed"
            missing = lacking.partition(".")[0]
            hint = install_command("agents") if missing in _OF_AGENTS else f"is {missing} installed, or on PYTHONPATH?"
        raise UsageFault(f"{kind} {path!r}: {why}", hint=hint) from error
    except ArealError:
        raise
    except _ImportInterrupted as error:
        raise broken(f"{kind} {path!r}: its import did not end within {within_s:g} s{where_raised(error)}") from error
    except SystemExit as error:
        ended = f"ends the process when it is imported: SystemExit({error.code})"
        raise broken(f"{kind} {path!r} {ended}{where_raised(error)}", hint="put what runs into a function") from error
    except Exception as error:  # the boundary to user code: whatever its import raises is its failure
        last = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise broken(
            f"{kind} {path!r} cannot be imported: {last.filename}:{last.lineno}: {type(error).__name__}: {problem}",
            detail=traceback.format_exc(),
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise UsageFault(f"{kind} {path!r}: no {part!r} there{did_you_mean(part, known)}")
        found = getattr(found, part)
    return found


import_from_string = load_attr  # AReaL's name


def load_function(path: str, kind: str) -> Any:
    """Load a function; see ``load_attr``. Raises UsageFault also for an object that cannot be called."""
    found = load_attr(path, kind)
    if not callable(found):
        raise UsageFault(f"{kind}: {path} is {type(found).__name__}, and cannot be called")
    return found


def load_callable(path: str, flag: str) -> Any:
    """Load the function that a flag names. The working folder is on the import path, as for ``python script.py``.
    Raises UsageFault if the name is invalid, does not exist, cannot be imported or is not callable."""
    add_import_folder(Path.cwd())
    try:
        return load_function(path, flag)
    except UsageFault as error:
        error.detail = None  # a command has a traceback with --debug alone
        raise


def _module_of_file(place: str) -> Any:
    """Return the module in the file, whose folder stays on the import path. Raises FileNotFoundError."""
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(file)
    name = f"areal_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    add_import_folder(file.parent)
    spec.loader.exec_module(module)
    return module


def call_with(function: Callable[..., Any], *positional: Any, given: Mapping[str, object]) -> Any:
    """Call a function with those of ``given`` that it accepts. Raises TypeError if it needs an argument that ``given``
    lacks."""
    return function(*positional, **_taken(function, len(positional), given))


def check_call(function: Callable[..., Any], *positional: Any, given: Mapping[str, object]) -> None:
    """Raise UsageFault if ``call_with`` would raise TypeError for the arguments."""
    try:
        signature = inspect.signature(function)
        signature.bind(*positional, **_taken(function, len(positional), given))
    except ValueError:  # a builtin
        return
    except TypeError as error:
        raise UsageFault(
            f"{getattr(function, '__qualname__', function)}{signature} cannot be called: {error}"
        ) from error


def _taken(function: Callable[..., Any], count: int, given: Mapping[str, object]) -> dict[str, object]:
    """Return those of ``given`` that the function accepts after ``count`` positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return {}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        first = [each.name for each in parameters][:count]
        return {name: value for name, value in given.items() if name not in first}
    named = {each.name for each in parameters[count:] if each.kind not in _UNNAMED}
    return {name: value for name, value in given.items() if name in named}


class Registry(Generic[T]):
    """Names that a configuration can use: registered ones, else ``module:attr`` of anything that can be imported.
    ``kind`` is the name of an entry in errors: workflow, reward, dataset."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a name. Raises if the name is registered for something else."""

        def keep(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            return entry

        return keep

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def resolve(self, name: str) -> T:
        """Return the entry of a name. Raises UsageFault with the name."""
        if name in self._entries:
            return self._entries[name]
        if ":" not in name and "." not in name:
            raise UsageFault(
                f"there is no {self.kind} {name!r}{did_you_mean(name, self._entries)}",
                hint=f"register it, or write module:attr; there is {', '.join(self._entries) or 'none'}",
            )
        return load_attr(name, self.kind)
