"""Parses calls in other markup than JSON: a tag for each parameter, Python literals, gpt-oss's channels.

Values between tags are text; the tool's schema gives their type. All text between a parameter's tags is its value, even
other tags.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable

from areal.dataclasses import dataclass
from areal.services.inference.data_proxy.parsers.reader import (
    OnText,
    Output,
    Quotes,
    Steps,
    TextSource,
    Tools,
    discard,
    is_name_char,
    json_type,
    read_run,
)

_DEEPEST = 100  # objects and lists in a value
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def json_of_text(text: str, types: frozenset[str] = frozenset()) -> str:
    """Return a parameter's value as JSON: valid JSON and Python's constants keep their value, unless the parameter may
    be a string and not of that type; other text becomes a string."""
    found = json.dumps(text, ensure_ascii=False)
    if text.strip() in _PYTHON_WORDS:
        value = json.dumps(_PYTHON_WORDS[text.strip()])
    else:
        try:
            value = _compact(json.loads(text))
        except (ValueError, RecursionError):
            return json_of_python(text) if types and "string" not in types else found
    return found if "string" in types and json_type(value) not in types - {"string"} else value


def json_of_python(text: str) -> str:
    """Return a Python literal as JSON; other text is converted by ``json_of_text``."""
    try:
        return _compact(ast.literal_eval(text.strip()))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json_of_text(text)


def _compact(value: object) -> str:
    """Raise ValueError for values that JSON cannot represent."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


class ArgumentsWriter:
    """Writes arguments into the open call as a JSON object: strings as they arrive, other values once complete.

    ``framed``: the first and last line break of a value belong to the markup.
    """

    def __init__(self, output: Output, *, framed: bool) -> None:
        self._output = output
        self._framed = framed
        self._empty = True
        self._as_text = False
        self._types = frozenset[str]()
        self._begun = False
        self._held = ""

    def key(self, name: str, types: frozenset[str] = frozenset()) -> None:
        """Begin an argument of these JSON types."""
        self._output.arguments(("{" if self._empty else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._empty = False
        self._types, self._as_text = types, types == {"string"}
        self._begun = not self._framed
        self._held = ""
        if self._as_text:
            self._output.arguments('"')

    def text(self, text: str) -> None:
        """Append to the value."""
        self._held += text
        if not self._begun:
            self._begun = True
            self._held = self._held.removeprefix("\n")
        if self._as_text:
            kept = len(self._held) - 1 if self._framed and self._held.endswith("\n") else len(self._held)
            self._output.arguments(json.dumps(self._held[:kept], ensure_ascii=False)[1:-1])
            self._held = self._held[kept:]

    def end_value(self) -> None:
        text = self._held.removesuffix("\n") if self._framed else self._held
        self._output.arguments('"' if self._as_text else json_of_text(text, self._types))

    def written(self, name: str, value: str) -> None:
        """Write a whole argument whose value is JSON already."""
        self.key(name)
        self._output.arguments(value)

    def close(self) -> None:
        self._output.arguments("{}" if self._empty else "}")


@dataclass(frozen=True)
class XmlCalls:
    """Calls with a tag for each parameter (Qwen3-Coder, Seed-OSS, MiniMax-M2, DeepSeek-V3.2 and V4, Muse). ``open`` and
    ``close`` enclose one or more calls, and may be missing. ``function`` and ``parameter`` are followed by the name.
    ``framed``: the first and last line break of a value belong to the markup. ``cdata``: a value may be in a CDATA
    section (MiniCPM5)."""

    open: str
    close: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    framed: bool = False
    cdata: bool = False

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
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

    def _more_calls(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        """Read the other calls within the same tags, and the closing tag."""
        while True:
            yield from source.space()
            if (yield from source.accept(self.close)):
                output.end()
                return
            source.mark()
            if not (yield from source.accept(self.function)) or not (yield from self._call(source, output, tools)):
                output.text(source.since_mark())
                return

    def _call(self, source: TextSource, output: Output, tools: Tools) -> Steps[bool]:
        """Read one call after the start of its tag. Return False if it has no name."""
        name, _ = yield from _header(source)
        if not name:
            return False
        output.start(name)
        source.forget_mark()
        writer = ArgumentsWriter(output, framed=self.framed)
        ends = (self.parameter, self.function_end, self.close)
        while (marker := (yield from source.until(ends, discard))) == self.parameter:
            key, attributes = yield from _header(source)
            types = frozenset({"string"} if 'string="true"' in attributes else ())
            writer.key(key, types if attributes else tools.types(name, key))
            if self.cdata and (yield from source.accept("<![CDATA[")):
                if (yield from source.until(("]]>",), writer.text)) is None:
                    return True
                yield from source.until((self.parameter_end,), discard)
            elif (yield from source.until((self.parameter_end,), writer.text)) is None:
                return True  # cut short: the arguments stay incomplete
            writer.end_value()
        if marker is not None:
            writer.close()
            output.end()
        return True


def _header(source: TextSource) -> Steps[tuple[str, str]]:
    """Read a tag to its end. Return its name, bare or in quotes, and the attributes after the name."""
    parts: list[str] = []
    yield from source.until((">",), parts.append)
    text = "".join(parts).strip()
    if not text.startswith('"'):
        return (text, "") if all(map(is_name_char, text)) else ("", "")
    name, _, attributes = text[1:].partition('"')
    return name, attributes.strip()


@dataclass(frozen=True)
class PairCalls:
    """GLM-4.5's and Hy3's calls: the name, then keys and values, each in its own tags. ``suffixes``: the possible ends
    of the tags' names. ``around``: whether a tag encloses all calls, and one ends the name."""

    suffixes: tuple[str, ...] = ("",)
    around: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        names = ("tool_call", "arg_key", "arg_value", *(("tool_calls",) if self.around else ()))
        both = tuple(f"<{end}{name}{suffix}>" for suffix in self.suffixes for name in names for end in ("", "/"))
        return both + self._separators

    @property
    def _separators(self) -> tuple[str, ...]:
        return tuple(f"<tool_sep{suffix}>" for suffix in self.suffixes) if self.around else ()

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        opens = {f"<tool_call{suffix}>": suffix for suffix in self.suffixes}
        enclosing = [f"<{end}tool_calls{suffix}>" for suffix in self.suffixes for end in ("", "/") if self.around]
        called = False
        while (begun := (yield from source.until((*opens, *enclosing), output.text))) is not None:
            source.mark()
            opened = begun if begun in opens else (yield from _one_of(source, opens))
            if opened is None:
                skipped = begun + source.since_mark()
                if not (called and begun.startswith("</")):
                    output.text(skipped)
                continue
            suffix = opens[opened]
            parts: list[str] = []
            key, close = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
            marker = yield from source.until((key, close, *self._separators), parts.append)
            name = "".join(parts).strip()
            if not name or not all(map(is_name_char, name)):
                if marker != close:
                    yield from source.until((close,), discard)
                output.text(begun + source.since_mark())
                continue
            called = True
            output.start(name)
            source.forget_mark()
            if marker in self._separators:
                marker = yield from source.until((key, close), discard)
            yield from self._pairs(source, output, tools, name, marker, suffix)

    def _pairs(
        self, source: TextSource, output: Output, tools: Tools, name: str, marker: str | None, suffix: str
    ) -> Steps[None]:
        writer = ArgumentsWriter(output, framed=False)
        begin, close = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
        while marker == begin:
            parts: list[str] = []
            yield from source.until((f"</arg_key{suffix}>",), parts.append)
            yield from source.until((f"<arg_value{suffix}>",), discard)
            key = "".join(parts).strip()
            writer.key(key, tools.types(name, key))
            if (yield from source.until((f"</arg_value{suffix}>",), writer.text)) is None:
                return
            writer.end_value()
            marker = yield from source.until((begin, close), discard)
        if marker is not None:
            writer.close()
            output.end()


def _one_of(source: TextSource, texts: Iterable[str]) -> Steps[str | None]:
    """Skip white space, then read one of ``texts`` and return it; None if another text follows."""
    yield from source.space()
    for text in texts:
        if (yield from source.accept(text)):
            return text
    return None


@dataclass(frozen=True)
class TreeCalls:
    """MiniMax-M3's calls. Each tag follows ``mark``. The tag of a parameter is its name; an object or a list (of
    ``item``) is tags within it."""

    mark: str

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        block, call = f"{self.mark}<tool_call>", f'{self.mark}<invoke name="'
        while (begun := (yield from source.until((block, call), output.text))) is not None:
            source.mark()
            if begun == block:
                yield from source.space()
            if (begun == block and not (yield from source.accept(call))) or not (
                yield from self._call(source, output, tools)
            ):
                output.text(begun + source.since_mark())

    def _call(self, source: TextSource, output: Output, tools: Tools) -> Steps[bool]:
        """Read one call after the start of its tag. Return False if it has no name."""
        name = yield from read_run(source, is_name_char)
        if not name or not (yield from source.accept('">')):
            return False
        output.start(name)
        source.forget_mark()
        writer = ArgumentsWriter(output, framed=False)
        while (key := (yield from self._tag(source, discard))) is not None:
            if key.startswith(("/", "invoke ")):
                writer.close()
                output.end()
                if not key.startswith("/"):
                    output.text(f"{self.mark}<{key}>")
                yield from source.space()
                yield from source.accept(f"{self.mark}</tool_call>")
                return True
            if (types := tools.types(name, key)) == {"string"}:
                writer.key(key, types)
                if (yield from source.until((f"{self.mark}</{key}>",), writer.text)) is None:
                    break
                writer.end_value()
            else:
                writer.key(key)
                if (value := (yield from self._value(source, tools, name, (key,)))) is None:
                    break
                output.arguments(value)
        return True  # cut short: the arguments stay incomplete

    def _tag(self, source: TextSource, on_text: OnText) -> Steps[str | None]:
        """Return the next tag without its brackets; None if the text ends first."""
        parts: list[str] = []
        if (yield from source.until((f"{self.mark}<",), on_text)) is None:
            return None
        return None if (yield from source.until((">",), parts.append)) is None else "".join(parts)

    def _value(self, source: TextSource, tools: Tools, name: str, path: tuple[str, ...]) -> Steps[str | None]:
        """Read a value up to its closing tag, and return it as JSON; None if the text ends first."""
        types = tools.types(name, *path)
        parts: list[str] = []
        inner: list[tuple[str, str]] = []
        while (tag := (yield from self._tag(source, parts.append))) is not None:
            if tag.startswith("/"):
                break
            value = None if len(path) > _DEEPEST else (yield from self._value(source, tools, name, (*path, tag)))
            if value is None:
                return None
            inner.append((tag, value))
        else:
            return None
        text = "".join(parts)
        if not inner:
            empty = {"object": "{}", "array": "[]"}.get("".join(types), "") if not text.strip() else ""
            return empty or json_of_text(text, types)
        if all(tag == "item" for tag, _ in inner) and types != {"object"}:
            return f"[{', '.join(value for _, value in inner)}]"
        return "{" + ", ".join(f"{json.dumps(tag, ensure_ascii=False)}: {value}" for tag, value in inner) + "}"


@dataclass(frozen=True)
class GemmaCalls:
    """Gemma 4's and FunctionGemma's calls: ``call:name{key:value,...}`` between two tags. Keys are bare; texts are
    between marks of their own, without escapes."""

    open: str
    close: str
    mark: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.open, self.close, self.mark

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        while (yield from source.until((self.open,), output.text)) is not None:
            source.mark()
            yield from source.space()
            is_call = yield from source.accept("call:")
            name = (yield from read_run(source, is_name_char)) if is_call else ""
            if not name or (yield from source.peek()) != "{":
                output.text(self.open + source.since_mark())
                continue
            output.start(name)
            source.forget_mark()
            if (yield from self._value(source, output)):
                output.end()
                yield from source.until((self.close,), discard)

    def _value(self, source: TextSource, output: Output) -> Steps[bool]:
        """Read a value and write it as JSON. Return False if it is incomplete or malformed."""
        if (yield from source.accept(self.mark)):
            return (yield from self._text(source, output))
        for start, end in (("{", "}"), ("[", "]")):
            if (yield from source.accept(start)):
                return (yield from self._items(source, output, start, end))
        text = yield from read_run(source, lambda char: char not in ",]}<")
        if not text or not (yield from source.peek()):
            return False
        output.arguments(json_of_text(text.strip()))
        return True

    def _text(self, source: TextSource, output: Output) -> Steps[bool]:
        output.arguments('"')
        found = yield from source.until(
            (self.mark,), lambda text: output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        )
        output.arguments("" if found is None else '"')
        return found is not None

    def _items(self, source: TextSource, output: Output, start: str, end: str) -> Steps[bool]:
        output.arguments(start)
        between = ""
        while True:
            yield from source.space()
            if (yield from source.accept(end)):
                output.arguments(end)
                return True
            if between and not (yield from source.accept(",")):
                return False
            output.arguments(between)
            between = ", "
            yield from source.space()
            if start == "{":
                if (yield from source.accept(self.mark)):
                    if not (yield from self._text(source, output)) or not (yield from source.accept(":")):
                        return False
                else:
                    key: list[str] = []
                    if (yield from source.until((":",), key.append)) is None:
                        return False
                    output.arguments(json.dumps("".join(key), ensure_ascii=False))
                output.arguments(": ")
                yield from source.space()
            if not (yield from self._value(source, output)):
                return False


_START, _END = "<|python_start|>", "<|python_end|>"


class _Literal:
    """The extent of an argument that is a Python literal: up to the comma or bracket that ends it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quotes = Quotes("\"'")

    def feed(self, text: str) -> int | None:
        for position, char in enumerate(text):
            if self._quotes.covers(char):
                continue
            if self._depth == 0 and char in ",)]}":
                return position
            self._depth += (char in "([{") - (char in ")]}")
        return None


def parse_pythonic(source: TextSource, output: Output, tools: Tools) -> Steps[None]:
    """Read calls as a Python list: ``[get_weather(city="Rome", days=3), now()]``, as the whole response or between
    Llama 4's tags. A response that begins like a list but not with a tool's name is content."""
    source.mark()
    yield from source.space()
    yield from source.accept(_START)
    yield from source.space()
    if (yield from _list(source, output, tools)):
        yield from source.space()
        yield from source.accept(_END)
    else:
        output.text(source.since_mark())
    yield from source.until((), output.text)


@dataclass(frozen=True)
class PythonCalls:
    """Python calls between two tags, before or after other text: a list (LFM2), or one call in each line (OLMo 3)."""

    open: str
    close: str
    in_list: bool = True

    def parse(self, source: TextSource, output: Output, tools: Tools) -> Steps[None]:
        while (yield from source.until((self.open,), output.text)) is not None:
            source.mark()
            yield from source.space()
            if (yield from _list(source, output, tools, self.in_list)):
                yield from source.until((self.close,), discard)
            else:
                output.text(self.open + source.since_mark())


def _list(source: TextSource, output: Output, tools: Tools, in_list: bool = True) -> Steps[bool]:
    """Read a list of calls, or calls without brackets and commas. Return False if the next text is not one."""
    if in_list and not (yield from source.accept("[")):
        return False
    if not (yield from _call(source, output, tools)):
        return False
    while True:
        yield from source.space()
        source.mark()
        if in_list and not (yield from source.accept(",")):
            break
        if not (yield from _call(source, output, tools)):
            break
    if not in_list or not (yield from source.accept("]")):
        output.text(source.since_mark())
    source.forget_mark()
    return True


def _call(source: TextSource, output: Output, tools: Tools) -> Steps[bool]:
    """Read one call. Return False if the next text is not a call."""
    yield from source.space()
    name = yield from read_run(source, is_name_char)
    if not tools.knows(name) or not (yield from source.accept("(")):
        return False
    output.start(name)
    source.forget_mark()
    writer = ArgumentsWriter(output, framed=False)
    while (yield from _argument(source, writer)):
        pass
    if (yield from source.accept(")")) or (yield from source.peek()):  # a call that is cut short stays incomplete
        writer.close()
        output.end()
    return True


def _argument(source: TextSource, writer: ArgumentsWriter) -> Steps[bool]:
    """Read one ``name=value`` and the comma after it. Return False if there is none."""
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


_HARMONY_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _HARMONY_START)
HARMONY_MARKERS = (_CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")


def _message_header(source: TextSource, output: Output, mark: str) -> Steps[str | None]:
    """Yield the header of the next message; None at the end. A header without ``mark`` there is text of a model that
    did not follow the format."""
    parts: list[str] = []
    found = yield from source.until((_MESSAGE,), parts.append)
    header = "".join(parts)
    if found is None and mark not in header:
        output.text(header)
    return header if found is not None else None


def parse_harmony(source: TextSource, output: Output, tools: Tools) -> Steps[None]:
    """gpt-oss's responses: messages in channels, each with a header. The channel ``analysis`` is reasoning, a message
    to a function is a call, all else is content. The whole response is markup, so it is parsed without tools too.
    https://cookbook.openai.com/articles/openai-harmony"""
    marker: str | None = _HARMONY_START
    while marker is not None:
        if (header := (yield from _message_header(source, output, _CHANNEL))) is None:
            return
        if recipient := _RECIPIENT.search(header):
            output.start(recipient[1])
            marker = yield from source.until(_ENDS, output.arguments)
            output.end()
        else:
            on_text = output.reasoning if _ANALYSIS.search(header) else output.text
            marker = yield from source.until(_ENDS, on_text)


_TO = re.compile(r"\bto=(\S+)")
MUSE_MARKERS = (_HARMONY_START, _MESSAGE, "<|eom|>", "<|eot|>")
_ATEM = XmlCalls(
    "<atem:function_calls>", "</atem:function_calls>", "<atem:invoke name=", "</atem:invoke>",
    "<atem:parameter name=", "</atem:parameter>",
)  # fmt: skip


def parse_muse(source: TextSource, output: Output, tools: Tools) -> Steps[None]:
    """Muse Glimmer's responses: messages with a recipient, each with a header. A message to ``self`` is reasoning, one
    to ``user`` content, any other one has calls."""
    marker: str | None = _HARMONY_START
    while marker is not None:
        if (header := (yield from _message_header(source, output, "to="))) is None:
            return
        found = _TO.search(header)
        recipient = found[1] if found else "user"
        ends = (_HARMONY_START, "<|eom|>", "<|eot|>")
        if recipient in ("self", "user"):
            marker = yield from source.until(ends, output.reasoning if recipient == "self" else output.text)
        else:
            calls = TextSource()
            steps = _ATEM.parse(calls, output, tools)

            def read(text: str, calls: TextSource = calls, steps: Steps[None] = steps) -> None:
                calls.feed(text)
                next(steps, None)

            marker = yield from source.until(ends, read)
            calls.end()
            next(steps, None)
        if marker is not None and marker != _HARMONY_START:
            marker = yield from source.until((_HARMONY_START,), discard)
