"""Where the keys of a YAML file stand."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from areal.api.config.building import Path

Mark = tuple[int, int]
"""Line and column, from 1."""


def key_marks(text: str) -> dict[Path, Mark]:
    """Of every key and list item. Raises yaml.YAMLError."""
    marks: dict[Path, Mark] = {}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _walk(root, (), marks)
    return marks


def _walk(node: yaml.Node, path: Path, marks: dict[Path, Mark]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, str(key.value))
            marks[at] = key.start_mark.line + 1, key.start_mark.column + 1
            _walk(value, at, marks)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            marks[(*path, number)] = item.start_mark.line + 1, item.start_mark.column + 1
            _walk(item, (*path, number), marks)


def mark_of(path: Path, marks: Mapping[Path, Mark]) -> Mark | None:
    """Of ``path``, or of the nearest key around it."""
    for length in range(len(path), 0, -1):
        if (mark := marks.get(path[:length])) is not None:
            return mark
    return None
