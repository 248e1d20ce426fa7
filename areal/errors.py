"""All errors that a user can get, by the exit status of the command.

ArealError                 exit 1   unexpected failure
|- UsageFault                   2   wrong flags or arguments
|- InvalidManifest              3   one or more positioned diagnostics (areal.resources.nodes)
|- NotFound                     4   no such object, field, process
|- Conflict                     5   field owner, immutable field, stale plan, protected object
|- Locked                       6   another command holds the object; the holder is named
|- TimedOut                     7   the deadline passed
|- TargetFailed                 8   the target reached a terminal failure
|- Partial                      9   some objects converged, some did not
`- NoCapacity                  10   GPUs or ports; nothing was started

The message says what happened and why; ``hint`` is the next command to run. ``did_you_mean`` suggests a spelling. Every
package imports this module, so it uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def where_raised(error: BaseException, *without: str) -> str:
    """Return `` (file:line, in name)`` of the innermost frame of the user's code, else of the innermost frame; "" if
    there is none. Frames in the files and folders ``without`` are ignored."""
    import sysconfig
    import traceback

    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(without)]
    libraries = (*sysconfig.get_paths().values(), __file__.removesuffix("errors.py"), "<frozen ")
    own = [each for each in frames if not each.filename.startswith(libraries)]
    return "".join(f" ({each.filename}:{each.lineno}, in {each.name})" for each in (own or frames)[-1:])


class FieldName(str):
    """The path of a field of a spec, ``spec.gateway.port``, as part of a ``Wording``."""


class Wording(str):
    """A text with ``parts``, each a ``FieldName`` or plain text. A part that is a ``Wording`` contributes its own
    parts."""

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Wording:
        made = super().__new__(cls, "".join(parts))
        made.parts = tuple(each for part in parts for each in (part.parts if isinstance(part, Wording) else (part,)))
        return made


def with_names(text: str, name: Callable[[str], str]) -> str:
    """Return ``text`` with each field in a ``Wording`` replaced by ``name(path)``."""
    parts = text.parts if isinstance(text, Wording) else (text,)
    return "".join(name(part) if isinstance(part, FieldName) else part for part in parts)


class FieldError(ValueError):
    """An invalid value of a record. ``field``: the path of the field, "" for the record itself. ``others``: further
    fields that contradict it, any of which may be changed."""

    def __init__(self, field: str, problem: str, *others: str, is_missing: bool = False) -> None:
        super().__init__(f"{field} {problem}".lstrip())
        self.field = field
        self.problem = problem
        self.others = others
        self.is_missing = is_missing


class ArealError(Exception):
    """An error for a user: what happened and why. ``exit_code`` is the process exit status."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail


class UsageFault(ArealError):
    exit_code = 2


class InvalidManifest(ArealError):
    exit_code = 3


class NotFound(ArealError):
    exit_code = 4


class Conflict(ArealError):
    exit_code = 5


class Locked(ArealError):
    exit_code = 6


class TimedOut(ArealError):
    exit_code = 7


class TargetFailed(ArealError):
    exit_code = 8


class Partial(ArealError):
    exit_code = 9


class NoCapacity(ArealError):
    exit_code = 10


_PRECEDENCE = (3, 5, 10, 8, 9, 7)


def worst_exit(codes: list[int]) -> int:
    """Return the most severe of several exit statuses (3 > 5 > 10 > 8 > 9 > 7, then any other failure)."""
    failures = [code for code in codes if code]
    for code in _PRECEDENCE:
        if code in failures:
            return code
    return max(failures, default=0)


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the most similar option; None if none is similar. Case and ``_-`` are ignored."""
    import difflib

    folded = {_fold(option): option for option in options}
    exact = folded.get(_fold(word))
    if exact is not None:
        return exact
    near = difflib.get_close_matches(_fold(word), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `` (did you mean "x"?)``, or "" without a similar option."""
    near = closest(word, options)
    return f' (did you mean "{near}"?)' if near is not None else ""


def _fold(text: str) -> str:
    return text.lower().replace("_", "").replace("-", "")
