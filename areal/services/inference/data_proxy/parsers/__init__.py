"""Parses a response's text into content, reasoning and tool calls, in the format of each model family.

Parsers are pure and incremental: text is pushed as it is decoded, pieces are returned as soon as they are certain, and
text that may be part of a marker is held back. The content of the pieces does not depend on how the text was split.
"""
