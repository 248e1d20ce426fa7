"""Calls in sections of special tokens: DeepSeek's V3 and V3.1, Kimi-K2's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from areal.services.inference.data_proxy.parsers.json_text import read_arguments
from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.source import Source, Steps, discard, read_run
from areal.services.inference.data_proxy.parsers.tools import Tools, is_name_char


@dataclass(frozen=True)
class SectionCalls:
    """``name`` makes of a call's header its tool's name and, where the model gives one, its id."""

    begin: str
    call: str
    separator: str
    call_end: str
    end: str
    name: Callable[[str], tuple[str, str | None]]

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.call, self.separator, self.call_end, self.end

    def parse(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        marker = yield from self._next(source, output)
        while marker is not None:
            if marker != self.call:
                marker = yield from self._next(source, output)
                continue
            source.mark()
            if (yield from self._call(source, output)):
                marker = yield from source.until((self.call_end, self.call, self.end), discard)
                output.end()
            else:
                output.text(self.call + source.since_mark())
                marker = yield from self._next(source, output)

    def _next(self, source: Source, output: Output) -> Steps[str | None]:
        """The section's own marks say nothing: only those of the calls do."""
        return (yield from source.until((self.begin, self.call, self.end), output.text))

    def _call(self, source: Source, output: Output) -> Steps[bool]:
        header: list[str] = []
        marker = yield from source.until((self.separator, self.call_end), header.append)
        if marker != self.separator:
            return False
        yield from source.space()
        name, call_id = self.name("".join(header).strip())
        if (yield from source.peek()) != "{":  # V3: the header is the kind of tool, its name and a fence follow
            name = yield from read_run(source, is_name_char)
            yield from source.space()
            yield from source.accept("```json")
            yield from source.space()
        if not name or (yield from source.peek()) != "{":
            return False
        output.start(name, call_id)
        source.forget_mark()
        yield from read_arguments(source, output)
        return True


def bare_name(header: str) -> tuple[str, str | None]:
    return header, None


def kimi_name(header: str) -> tuple[str, str | None]:
    """``functions.get_weather:0``: the whole of it is the id that the model expects to see again."""
    name, _, _ = header.rpartition(":")
    return (name or header).removeprefix("functions."), header


DEEPSEEK = SectionCalls(
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    name=bare_name,
)
KIMI = SectionCalls(
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    name=kimi_name,
)
