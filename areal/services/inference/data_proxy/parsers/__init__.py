"""From an answer's text to content, reasoning and tool calls, for each family of models.

Pure and incremental: text comes as it is decoded, pieces leave as soon as they are certain, half a marker never does.
How the text was cut makes no difference to what the pieces say.
"""

from __future__ import annotations

from areal.services.inference.data_proxy.parsers.pieces import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
    ToolCall,
    Tools,
    joined,
)
from areal.services.inference.data_proxy.parsers.reader import PLAIN, ReasoningFormat, ResponseReader
from areal.services.inference.data_proxy.parsers.registry import (
    NO_PARSER,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ToolFormat,
    detect_tool_format,
    reasoning_format,
    tool_format,
    whole_format,
)

__all__ = [
    "NO_PARSER",
    "PLAIN",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Piece",
    "Reasoning",
    "ReasoningFormat",
    "Reply",
    "ResponseReader",
    "ToolCall",
    "ToolFormat",
    "Tools",
    "detect_tool_format",
    "joined",
    "reasoning_format",
    "tool_format",
    "whole_format",
]
