"""Did-you-mean, shared by kinds, fields, names and expressions."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option a reader most likely meant, None when nothing is near. Case and ``_-`` are not held against them."""
    import difflib

    folded = {_fold(option): option for option in options}
    exact = folded.get(_fold(word))
    if exact is not None:
        return exact
    near = difflib.get_close_matches(_fold(word), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """`` (did you mean "x"?)``, or nothing."""
    near = closest(word, options)
    return f' (did you mean "{near}"?)' if near is not None else ""


def _fold(text: str) -> str:
    return text.lower().replace("_", "").replace("-", "")
