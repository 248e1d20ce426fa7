"""JSON as it is being written: where a value ends, and tool calls that are JSON objects.

Arguments are handed on as the model writes them, not parsed and written anew: whoever gets them sees what was sampled,
valid or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.source import Source, Steps

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "input", "args")
_BESIDE_KEYS = ("id", "type", "call_id", "tool_call_id", "index")  # seen beside a call, and of no meaning to it
_SCALAR_ENDS = frozenset(",]} \t\r\n<")


class JsonValue:
    """The extent of one JSON value: brackets are counted, text in quotes is not looked at."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._scalar: bool | None = None  # unknown before the first character

    def feed(self, text: str) -> int | None:
        for position, char in enumerate(text):
            if self._scalar is None:
                self._scalar = char not in '{["'
            if self._scalar:
                if char in _SCALAR_ENDS:
                    return position
            elif self._quoted:
                if self._closes_quote(char) and self._depth == 0:
                    return position + 1
            elif self._bracket(char):
                return position + 1
        return None

    def _closes_quote(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            return True
        return False

    def _bracket(self, char: str) -> bool:
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def read_value(source: Source) -> Steps[str]:
    """One JSON value, as it was written; what there is of it where the text ends."""
    parts: list[str] = []
    yield from source.span(JsonValue(), parts.append)
    return "".join(parts)


def read_string(source: Source) -> Steps[str | None]:
    """One JSON string, decoded. None where there is none, or no whole one."""
    if (yield from source.peek()) != '"':
        return None
    return decoded_string((yield from read_value(source)))


def decoded_string(text: str) -> str | None:
    """None for what is no JSON string, and for one that is no text (half a surrogate pair)."""
    if not text.startswith('"'):
        return None
    try:
        value = json.loads(text, strict=False)
        value.encode()
    except ValueError:
        return None
    return str(value)


def read_arguments(source: Source, output: Output) -> Steps[None]:
    """The arguments of the open call. A string holds the JSON text; null is no arguments."""
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


class CallObject:
    """One ``{"name": ..., "arguments": ...}``, in whichever order; also inside ``{"function": ...}``.

    ``known`` says whether a name is one of the tools', for markup that could be something else: there an object with
    other keys is no call.
    """

    def __init__(self, source: Source, output: Output, known: Callable[[str], bool] | None = None) -> None:
        self._source = source
        self._output = output
        self._known = known
        self._name: str | None = None
        self._held: str | None = None  # arguments that came before the name
        self._started = False

    def read(self) -> Steps[bool]:
        """Whether it is a call; it is left open. The source stands after the object, or where that made no sense."""
        whole = yield from self._object()
        if whole and not self._started and self._name is not None:
            self._start()
            self._output.arguments("{}" if self._held is None else plain_arguments(self._held))
        return self._started

    def _object(self) -> Steps[bool]:
        """Whether there was an object that could be read to its end."""
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
        if key in _ARGUMENT_KEYS and self._name is not None and not self._started:
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
        self._output.start(self._name)
        self._source.forget_mark()
        self._started = True


def read_calls(source: Source, output: Output, known: Callable[[str], bool] | None = None) -> Steps[bool]:
    """Call objects in a row or in a list, commas or semicolons between. Whether there was any; the last one is left
    open."""
    called = False
    yield from source.space()
    yield from source.accept("[")
    while True:
        yield from source.space()
        if (yield from source.peek()) != "{" or not (yield from CallObject(source, output, known).read()):
            return called
        called = True
        yield from source.space()
        if not (yield from source.accept(",")):
            yield from source.accept(";")
