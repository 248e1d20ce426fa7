"""Calls that are JSON objects between two tags, or behind one, or at the very beginning of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from areal.services.inference.data_proxy.parsers.json_text import read_arguments, read_calls
from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.source import Source, Steps, discard, read_run
from areal.services.inference.data_proxy.parsers.tools import Tools, is_name_char

_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"


@dataclass(frozen=True)
class BetweenTags:
    """``<tool_call>{...}</tool_call>`` and its like; what is between the tags and no call stays content."""

    open: str
    close: str

    def parse(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        marker = yield from source.until((self.open,), output.text)
        while marker is not None:
            source.mark()
            if (yield from read_calls(source, output)):
                marker = yield from source.until((self.close, self.open), discard)
                output.end()
                if marker == self.open:
                    continue
            else:
                yield from source.until((self.close,), discard)
                output.text(self.open + source.since_mark())
            marker = yield from source.until((self.open,), output.text)


@dataclass(frozen=True)
class AfterTag:
    """``functools[{...}]`` and its like: a tag, then calls; nothing says where they end but they themselves."""

    open: str

    def parse(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        while (yield from source.until((self.open,), output.text)) is not None:
            source.mark()
            if (yield from read_calls(source, output)):
                yield from source.accept("]")
                output.end()
            else:
                output.text(self.open + source.since_mark())


def parse_llama(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """``{"name": ..., "parameters": ...}`` as the whole answer, ``;`` between several; or behind the python tag."""
    source.mark()
    if (yield from read_calls(source, output, tools.knows)):
        yield from source.accept("]")
        output.end()
    else:
        output.text(source.since_mark())
    yield from AfterTag(_PYTHON_TAG).parse(source, output, tools)


def parse_mistral(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """``[TOOL_CALLS]`` and a list of objects; since their eleventh tokenizer a name, ``[ARGS]`` and the arguments."""
    while (yield from source.until((_TOOL_CALLS,), output.text)) is not None:
        source.mark()
        yield from source.space()
        if (yield from source.peek()) in ("[", "{"):
            called = yield from read_calls(source, output)
            yield from source.accept("]")
        else:
            called = yield from _named(source, output)
        if called:
            output.end()
        else:
            output.text(_TOOL_CALLS + source.since_mark())


def _named(source: Source, output: Output) -> Steps[bool]:
    name = yield from read_run(source, is_name_char)
    call_id = None
    if (yield from source.accept("[CALL_ID]")):
        call_id = yield from read_run(source, str.isalnum)
    yield from source.accept("[ARGS]")
    yield from source.space()
    if not name or (yield from source.peek()) != "{":
        return False
    output.start(name, call_id)
    source.forget_mark()
    yield from read_arguments(source, output)
    return True
