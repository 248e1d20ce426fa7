"""Parses tool calls that are JSON objects, as they arrive.

Arguments are passed on as the model writes them, valid or not: they are not parsed and serialized again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from areal.dataclasses import dataclass
from areal.services.inference.data_proxy.parsers.reader import (
    Output,
    Quotes,
    Steps,
    TextSource,
    Tools,
    discard,
    is_name_char,
    read_run,
)

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "input", "args")
_BESIDE_KEYS = ("id", "type", "call_id", "tool_call_id", "index")  # other keys of a call, which are ignored
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")  # its templates refuse any other
_SCALAR_ENDS = frozenset(",]} \t\r\n<")


class JsonValue:
    """The extent of one JSON value: brackets are counted, except in quoted text."""

    def __init__(self) -> None:
        self._depth = 0
        self._quotes = Quotes('"')
        self._scalar: bool | None = None  # unknown before the first character

    def feed(self, text: str) -> int | None:
        for position, char in enumerate(text):
            if self._scalar is None:
                self._scalar = char not in '{["'
            if self._scalar:
                if char in _SCALAR_ENDS:
                    return position
                continue
            if not self._quotes.covers(char):
                self._depth += (char in "{[") - (char in "}]")
            if not self._depth and not self._quotes.open:
                return position + 1
        return None


def read_value(source: TextSource) -> Steps[str]:
    """Read one JSON value and return its text; if the response ends first, the text so far."""
    parts: list[str] = []
    yield from source.span(JsonValue(), parts.append)
    return "".join(parts)


def read_string(source: TextSource) -> Steps[str | None]:
    """Read and decode one JSON string. None if the next value is not a string, or is incomplete."""
    if (yield from source.peek()) != '"':
        return None
    return decoded_string((yield from read_value(source)))


def decoded_string(text: str) -> str | None:
    """Decode a JSON string; None for other values and for invalid text (half a surrogate pair)."""
    if not text.startswith('"'):
        return None
    try:
        value = json.loads(text, strict=False)
        value.encode()
    except ValueError:
        return None
    return str(value)


def read_arguments(source: TextSource, output: Output) -> Steps[None]:
    """Read the arguments of the open call. A string contains the JSON text; null means no arguments."""
    ahead = yield from source.peek()
    if ahead in ("{", "["):
        yield from source.span(JsonValue(), output.arguments)
        return
    output.arguments(plain_arguments((yield from read_value(source))))


def plain_arguments(text: str) -> str:
    if text == "null":
        return "{}"
    decoded = decoded_string(text)
    return text if decoded is None else decoded


class JsonCallReader:
    """Reads one ``{"name": ..., "arguments": ...}``, in either order; also inside ``{"function": ...}``.

    ``known``: whether a name is a tool's, for formats without tags. There an object with another name or other keys is
    content. ``with_id``: the object has the call's id, which may come last, so that the call starts once it is known.
    """

    def __init__(
        self, source: TextSource, output: Output, known: Callable[[str], bool] | None = None, *, with_id: bool = False
    ) -> None:
        self._source = source
        self._output = output
        self._known = known
        self._with_id = with_id
        self._id: str | None = None
        self._name: str | None = None
        self._held: str | None = None  # arguments that came before the name
        self._started = False

    def read(self) -> Steps[bool]:
        """Return whether the object is a call, which stays open. The source is then after the object, or where reading
        it failed."""
        whole = yield from self._object()
        cut = self._with_id and self._held is not None  # arguments that wait for an id are the call's without it too
        if (whole or cut) and not self._started and self._name is not None:
            self._start()
            self._output.arguments("{}" if self._held is None else plain_arguments(self._held))
        return self._started

    def _object(self) -> Steps[bool]:
        """Return whether an object was read to its end."""
        source = self._source
        if not (yield from source.accept("{")):
            return False
        while True:
            yield from source.space()
            if (yield from source.accept("}")):
                return True
            key = yield from read_string(source)
            yield from source.space()
            if key is None or not (yield from source.accept(":")):
                return False
            yield from source.space()
            if not (yield from self._value(key)):
                return False
            yield from source.space()
            yield from source.accept(",")

    def _value(self, key: str) -> Steps[bool]:
        source = self._source
        if key == "function" and (yield from source.peek()) == "{":
            return (yield from self._object())
        if key in _NAME_KEYS or key == "function":
            self._name = yield from read_string(source)
            return self._name is not None and self._name != "" and (self._known is None or self._known(self._name))
        if key == "id" and self._with_id and (yield from source.peek()) == '"':
            self._id = yield from read_string(source)
            return self._id is not None
        waits = self._with_id and self._id is None
        if key in _ARGUMENT_KEYS and self._name is not None and not self._started and not waits:
            self._start()
            yield from read_arguments(source, self._output)
            return True
        value = yield from read_value(source)
        if key in _ARGUMENT_KEYS and not self._started:
            self._held = value
        elif self._known is not None and key not in _BESIDE_KEYS:
            return False
        return value != ""

    def _start(self) -> None:
        assert self._name is not None
        self._output.start(self._name, self._id if self._id and _MISTRAL_ID.fullmatch(self._id) else None)
        self._source.forget_mark()
        self._started = True


def read_calls(
    source: TextSource, output: Output, known: Callable[[str], bool] | None = None, *, with_id: bool = False
) -> Steps[bool]:
    """Read call objects in a row or in a list, separated by commas or semicolons. Return whether there was any; the
    last one stays open."""
    called = False
    yield from source.space()
    yield from source.accept("[")
    while True:
        yield from source.space()
        if (yield from source.peek()) != "{" or not (
            yield from JsonCallReader(source, output, known, with_id=with_id).read()
        ):
            return called
        called = True
        yield from source.space()
        if not (yield from source.accept(",")):
            yield from source.accept(";")


def read_keyed_calls(source: TextSource, output: Output) -> Steps[bool]:
    """Read ``[{"get_weather": {...}}, ...]``, in which a call's key is its name. Return whether there was any."""
    called = False
    yield from source.space()
    yield from source.accept("[")
    while True:
        yield from source.space()
        if not (yield from source.accept("{")):
            return called
        yield from source.space()
        name = yield from read_string(source)
        yield from source.space()
        yield from source.accept(":")
        yield from source.space()
        if not (yield from _begun(source, output, name or "", None)):
            return called
        called = True
        yield from source.space()
        yield from source.accept("}")
        yield from source.space()
        yield from source.accept(",")


# Calls that are JSON objects between two tags, after one tag, or at the beginning of a response.

_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"


@dataclass(frozen=True)
class BetweenTags:
    """``<tool_call>{...}</tool_call>`` and the like. Text between the tags that is not a call stays content."""

    open: str
    close: str
    read: Callable[[TextSource, Output], Steps[bool]] = read_calls

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        marker = yield from source.until((self.open,), output.text)
        while marker is not None:
            source.mark()
            if (yield from self.read(source, output)):
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
    """``functools[{...}]`` and the like: a tag, then calls without an end tag."""

    open: str

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        while (yield from source.until((self.open,), output.text)) is not None:
            source.mark()
            if (yield from read_calls(source, output)):
                yield from source.accept("]")
                output.end()
            else:
                output.text(self.open + source.since_mark())


def parse_llama(source: TextSource, output: Output, tools: Tools) -> Steps[None]:
    """Parse ``{"name": ..., "parameters": ...}`` as the whole response, ``;`` between several; or after a python
    tag."""
    source.mark()
    if (yield from read_calls(source, output, tools.knows)):
        yield from source.accept("]")
        output.end()
    else:
        output.text(source.since_mark())
    yield from AfterTag(_PYTHON_TAG).parse(source, output, tools)


def parse_mistral(source: TextSource, output: Output, tools: Tools) -> Steps[None]:
    """Parse ``[TOOL_CALLS]`` and a list of objects with ids; since tokenizer v11, name, ``[ARGS]`` and arguments."""
    while (yield from source.until((_TOOL_CALLS,), output.text)) is not None:
        source.mark()
        yield from source.space()
        if (yield from source.peek()) in ("[", "{"):
            called = yield from read_calls(source, output, with_id=True)
            yield from source.accept("]")
        else:
            called = yield from _named(source, output)
        if called:
            output.end()
        else:
            output.text(_TOOL_CALLS + source.since_mark())


def _begun(source: TextSource, output: Output, name: str, call_id: str | None) -> Steps[bool]:
    """Read the arguments of a call whose name was read. Return False, without a call, if there are none."""
    if not name or (yield from source.peek()) != "{":
        return False
    output.start(name, call_id)
    source.forget_mark()
    yield from read_arguments(source, output)
    return True


def _named(source: TextSource, output: Output) -> Steps[bool]:
    name = yield from read_run(source, is_name_char)
    call_id = None
    if (yield from source.accept("[CALL_ID]")):
        call_id = yield from read_run(source, str.isalnum)
    yield from source.accept("[ARGS]")
    yield from source.space()
    return (yield from _begun(source, output, name, call_id))


@dataclass(frozen=True)
class SectionCalls:
    """Calls in sections of special tokens (DeepSeek-V3 and V3.1, Kimi-K2). ``name`` returns the tool's name in a call's
    header and, if the model gives one, the call's id."""

    begin: str
    call: str
    separator: str
    call_end: str
    end: str
    name: Callable[[str], tuple[str, str | None]]

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.call, self.separator, self.call_end, self.end

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
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

    def _next(self, source: TextSource, output: Output) -> Steps[str | None]:
        """Return the next marker of a section or call. The text before it is content."""
        return (yield from source.until((self.begin, self.call, self.end), output.text))

    def _call(self, source: TextSource, output: Output) -> Steps[bool]:
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
        return (yield from _begun(source, output, name, call_id))


def bare_name(header: str) -> tuple[str, str | None]:
    return header, None


def kimi_name(header: str) -> tuple[str, str | None]:
    """Return the name in ``functions.get_weather:0``; later prompts need the whole header as the id."""
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
