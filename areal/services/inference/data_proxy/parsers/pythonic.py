"""Calls as a Python list: ``[get_weather(city="Rome", days=3), now()]``, as the whole answer or between Llama 4's tags.

An answer that begins like a list but not with a tool's name is content.
"""

from __future__ import annotations

from areal.services.inference.data_proxy.parsers.arguments import ArgumentsWriter
from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.source import Source, Steps, read_run
from areal.services.inference.data_proxy.parsers.tools import Tools, is_name_char, json_of_python

_START, _END = "<|python_start|>", "<|python_end|>"


class _Literal:
    """The extent of a Python literal that is an argument: up to the comma or bracket that ends it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str) -> int | None:
        for position, char in enumerate(text):
            if self._quote:
                self._in_quotes(char)
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif self._depth == 0 and char in ",)]}":
                return position
            elif char in ")]}":
                self._depth -= 1
        return None

    def _in_quotes(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""


def parse_pythonic(source: Source, output: Output, tools: Tools) -> Steps[None]:
    source.mark()
    yield from source.space()
    yield from source.accept(_START)
    yield from source.space()
    if (yield from source.accept("[")) and (yield from _call(source, output, tools)):
        while True:
            yield from source.space()
            source.mark()
            if not (yield from source.accept(",")) or not (yield from _call(source, output, tools)):
                break
        if not (yield from source.accept("]")):
            output.text(source.since_mark())
        source.forget_mark()
        yield from source.space()
        yield from source.accept(_END)
    else:
        output.text(source.since_mark())
    yield from source.until((), output.text)


def _call(source: Source, output: Output, tools: Tools) -> Steps[bool]:
    """One call. False: what comes is none."""
    yield from source.space()
    name = yield from read_run(source, is_name_char)
    if not tools.knows(name) or not (yield from source.accept("(")):
        return False
    output.start(name)
    source.forget_mark()
    writer = ArgumentsWriter(output, framed=False)
    while (yield from _argument(source, writer)):
        pass
    if (yield from source.accept(")")) or (yield from source.peek()):  # cut short, it is what there is of it
        writer.close()
        output.end()
    return True


def _argument(source: Source, writer: ArgumentsWriter) -> Steps[bool]:
    """One ``name=value`` and the comma behind it. False: there is none."""
    yield from source.space()
    key = yield from read_run(source, is_name_char)
    yield from source.space()
    if not key or not (yield from source.accept("=")):
        return False
    parts: list[str] = []
    if not (yield from source.span(_Literal(), parts.append)):
        return False
    writer.written(key, json_of_python("".join(parts)))
    yield from source.accept(",")
    return True
