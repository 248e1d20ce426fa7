"""Calls with a tag for each parameter: Qwen3-Coder's, MiniMax-M2's, DeepSeek-V3.2's, GLM-4.5's.

Values are text; the tool's schema says what they are. What is between a parameter's tags is its value, other tags too.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.services.inference.data_proxy.parsers.arguments import ArgumentsWriter
from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.source import Source, Steps, discard
from areal.services.inference.data_proxy.parsers.tools import Tools, is_name_char


@dataclass(frozen=True)
class XmlCalls:
    """``open`` is around one or more calls, and may be missing. ``function`` and ``parameter`` go on with the name."""

    open: str
    close: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str

    def parse(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        marker = yield from source.until((self.open, self.function), output.text)
        while marker is not None:
            source.mark()
            if marker == self.open:
                yield from source.space()
            if (marker == self.open and not (yield from source.accept(self.function))) or not (
                yield from self._call(source, output, tools)
            ):
                output.text(marker + source.since_mark())
            else:
                yield from self._more_calls(source, output, tools)
            marker = yield from source.until((self.open, self.function), output.text)

    def _more_calls(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """The other calls within the same tags, and their end."""
        while True:
            yield from source.space()
            if (yield from source.accept(self.close)):
                output.end()
                return
            source.mark()
            if not (yield from source.accept(self.function)) or not (yield from self._call(source, output, tools)):
                output.text(source.since_mark())
                return

    def _call(self, source: Source, output: Output, tools: Tools) -> Steps[bool]:
        """One call, after the beginning of its tag. False: it has no name."""
        name, _ = yield from _header(source)
        if not name:
            return False
        output.start(name)
        source.forget_mark()
        writer = ArgumentsWriter(output, framed=True)
        ends = (self.parameter, self.function_end, self.close)
        while (marker := (yield from source.until(ends, discard))) == self.parameter:
            key, attributes = yield from _header(source)
            as_text = 'string="true"' in attributes or (not attributes and tools.is_text(name, key))
            writer.key(key, as_text=as_text)
            if (yield from source.until((self.parameter_end,), writer.text)) is None:
                return True  # cut short: the arguments are what there is of them
            writer.end_value()
        if marker is not None:
            writer.close()
            output.end()
        return True


def _header(source: Source) -> Steps[tuple[str, str]]:
    """The name in a tag, bare or in quotes, and the attributes behind it. Passes the tag's end."""
    parts: list[str] = []
    yield from source.until((">",), parts.append)
    text = "".join(parts).strip()
    if not text.startswith('"'):
        return (text, "") if all(map(is_name_char, text)) else ("", "")
    name, _, attributes = text[1:].partition('"')
    return name, attributes.strip()


@dataclass(frozen=True)
class PairCalls:
    """GLM-4.5's: the name, then keys and values, each in its own tags."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"

    def parse(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        while (yield from source.until((self.open,), output.text)) is not None:
            source.mark()
            parts: list[str] = []
            marker = yield from source.until(("<arg_key>", self.close), parts.append)
            name = "".join(parts).strip()
            if not name or not all(map(is_name_char, name)):
                if marker == "<arg_key>":
                    yield from source.until((self.close,), discard)
                output.text(self.open + source.since_mark())
                continue
            output.start(name)
            source.forget_mark()
            yield from self._pairs(source, output, tools, name, marker)

    def _pairs(self, source: Source, output: Output, tools: Tools, name: str, marker: str | None) -> Steps[None]:
        writer = ArgumentsWriter(output, framed=False)
        while marker == "<arg_key>":
            parts: list[str] = []
            yield from source.until(("</arg_key>",), parts.append)
            yield from source.until(("<arg_value>",), discard)
            key = "".join(parts).strip()
            writer.key(key, as_text=tools.is_text(name, key))
            if (yield from source.until(("</arg_value>",), writer.text)) is None:
                return
            writer.end_value()
            marker = yield from source.until(("<arg_key>", self.close), discard)
        if marker is not None:
            writer.close()
            output.end()
