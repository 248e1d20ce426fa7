"""How a model's answers are read: the parsers it is served with, and what one request makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.errors import UsageFault
from areal.services.inference.data_proxy.parsers import (
    NO_PARSER,
    PLAIN,
    Reader,
    ReasoningFormat,
    ToolFormat,
    Tools,
    reasoning_format,
    spoken_by,
    tool_format,
    whole_format,
)

PROMPT_TAIL_TOKENS = 32


@dataclass(frozen=True)
class Parsers:
    """What a model is served with. None: such text stays content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def load_parsers(tool_call_parser: str | None, reasoning_parser: str | None, template: str | None) -> Parsers:
    """By name. Without a name calls are read in the format that the chat template shows, and reasoning is not told
    apart. Raises UsageFault for an unknown name."""
    tools = _tool_format(tool_call_parser, template)
    if reasoning_parser in (None, NO_PARSER):
        return Parsers(tools)
    name = str(reasoning_parser)
    whole = whole_format(name)
    if whole is None:
        reasoning = reasoning_format(name)
        return Parsers(tools, None if tools is not None and tools.whole else reasoning)
    if tool_call_parser is not None and tools is not whole:
        raise UsageFault(
            f"the parser {name!r} reads calls too: it does not go with --tool-call-parser {tool_call_parser}"
        )
    return Parsers(whole)


def _tool_format(name: str | None, template: str | None) -> ToolFormat | None:
    if name is None:
        return spoken_by(template or "")
    return None if name == NO_PARSER else tool_format(name)


@dataclass(frozen=True)
class ToolUse:
    """What a request wants with tools. ``shown`` are those in the prompt.

    ``primer`` ends the prompt where a call is forced: it is the call's beginning. ``response_format`` holds the rest of
    it to the tool's schema, where the engine can do that.
    """

    shown: list[dict[str, Any]] | None = None
    form: ToolFormat | None = None
    primer: str = ""
    one_call: bool = False
    response_format: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reading:
    """How the choices of one answer are read."""

    reasoning: ReasoningFormat | None = None
    tools: ToolUse = ToolUse()

    @property
    def markers(self) -> frozenset[str]:
        """What has to stay in the text although it may be special tokens."""
        markers = [
            *(self.reasoning.markers if self.reasoning else ()),
            *(self.tools.form.markers if self.tools.form else ()),
        ]
        return frozenset(markers)

    @property
    def thinks(self) -> bool:
        """Whether reasoning is told apart from the answer, so that a client may not send it back."""
        return self.reasoning is not None or (self.tools.form is not None and self.tools.form.whole)

    def reader(self, prompt_tail: str, call_ids: Sequence[str] = ()) -> Reader:
        """For one choice of an answer to a prompt that ends like this. ``call_ids``: those that its calls had when it
        was read before."""
        use, reasoning = self.tools, self.reasoning
        if use.form is None and reasoning is None:
            return PLAIN
        fresh, given = use.form.new_id if use.form else str, iter(call_ids)
        if use.primer:
            reasoning = None  # the prompt has closed it
        return Reader(
            reasoning=reasoning,
            inside=reasoning is not None and reasoning.opened_by(prompt_tail),
            parse=use.form.parse if use.form else None,
            tools=Tools(use.shown or ()),
            new_id=lambda: next(given, None) or fresh(),
            primer=use.primer,
            one_call=use.one_call,
        )

    def prompt_end(self, prompt: str) -> str:
        """What follows the rendered prompt: the beginning of a call that is forced, after any reasoning is closed."""
        if not self.tools.primer:
            return ""
        open_reasoning = self.reasoning is not None and self.reasoning.opened_by(prompt)
        closed = f"\n{self.reasoning.end}\n\n" if open_reasoning and self.reasoning else ""
        return closed + self.tools.primer
