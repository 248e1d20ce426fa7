"""Where the keys of a YAML file stand."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from areal.api.config.building import Path


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of every key and list item. Raises yaml.YAMLError."""
    lines: dict[Path, int] = {}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _walk(root, (), lines)
    return lines


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, str(key.value))
            lines[at] = key.start_mark.line + 1
            _walk(value, at, lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[(*path, number)] = item.start_mark.line + 1
            _walk(item, (*path, number), lines)


def line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    """Of ``path``, or of the nearest key around it."""
    for length in range(len(path), 0, -1):
        if (line := lines.get(path[:length])) is not None:
            return line
    return None
