"""gpt-oss's answers: messages in channels, each with a header. https://cookbook.openai.com/articles/openai-harmony

``analysis`` is reasoning, a message to a function is a call, everything else is content. The whole answer is markup, so
this is read with tools and without.
"""

from __future__ import annotations

import re

from areal.services.inference.data_proxy.parsers.output import Output
from areal.services.inference.data_proxy.parsers.source import Source, Steps
from areal.services.inference.data_proxy.parsers.tools import Tools

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
MARKERS = (_CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")


def parse_harmony(source: Source, output: Output, tools: Tools) -> Steps[None]:
    marker: str | None = _START
    while marker is not None:
        parts: list[str] = []
        marker = yield from source.until((_MESSAGE,), parts.append)
        header = "".join(parts)
        if marker is None:
            if _CHANNEL not in header:
                output.text(header)  # a model that has left its format
            return
        if recipient := _RECIPIENT.search(header):
            output.start(recipient[1])
            marker = yield from source.until(_ENDS, output.arguments)
            output.end()
        else:
            on_text = output.reasoning if _ANALYSIS.search(header) else output.text
            marker = yield from source.until(_ENDS, on_text)
