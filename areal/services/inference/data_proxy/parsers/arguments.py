"""Arguments that come one by one in other markup, written as the JSON object they stand for while they come."""

from __future__ import annotations

import json

from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.tools import json_of_text


class ArgumentsWriter:
    """Writes into the open call. Text is passed on as it comes; other values once they are whole.

    ``framed``: a value's first and last line break are the markup's.
    """

    def __init__(self, output: Output, *, framed: bool) -> None:
        self._output = output
        self._framed = framed
        self._empty = True
        self._as_text = False
        self._begun = False
        self._held = ""

    def key(self, name: str, *, as_text: bool) -> None:
        self._output.arguments(("{" if self._empty else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._empty = False
        self._as_text = as_text
        self._begun = not self._framed
        self._held = ""
        if as_text:
            self._output.arguments('"')

    def text(self, text: str) -> None:
        """More of the value."""
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
        self._output.arguments('"' if self._as_text else json_of_text(text))

    def written(self, name: str, value: str) -> None:
        """A whole argument, its value JSON already."""
        self.key(name, as_text=False)
        self._output.arguments(value)

    def close(self) -> None:
        self._output.arguments("{}" if self._empty else "}")
