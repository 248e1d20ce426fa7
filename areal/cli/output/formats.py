"""The value of ``-o``."""

from __future__ import annotations

from typing import NamedTuple

from areal.errors import UsageFault

FORMATS = ("table", "wide", "json", "yaml", "name", "jsonl")
_JSONPATH = "jsonpath="


class Format(NamedTuple):
    kind: str  # one of FORMATS, "jsonpath", or a verb's own
    expression: str = ""  # of a jsonpath

    @property
    def is_table(self) -> bool:
        return self.kind in ("table", "wide")


def parse_format(text: str, extra: tuple[str, ...] = ()) -> Format:
    if text.startswith(_JSONPATH):
        from areal.resources.jsonpath import compile_template

        compile_template(text[len(_JSONPATH) :])
        return Format("jsonpath", text[len(_JSONPATH) :])
    if text in (*FORMATS, *extra):
        return Format(text)
    from areal.resources.suggest import did_you_mean

    choices = (*FORMATS, *extra, "jsonpath=EXPR")
    raise UsageFault(f'no output format "{text}"{did_you_mean(text, choices)}', hint=f"one of {', '.join(choices)}")
