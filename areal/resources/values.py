"""``values.*``: files given by ``--values``, over what overlays set, under ``--set values.x=...``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.resources.diagnostics import Problems
from areal.resources.loader import load_documents
from areal.resources.nodes import Mapping, plain
from areal.resources.sources import read_text
from areal.resources.tree import merge


def read_values(files: tuple[str, ...], problems: Problems) -> dict[str, Any]:
    """The files merged, a later one over an earlier; each holds one map."""
    values: dict[str, Any] = {}
    for file in files:
        source = read_text(Path(file), problems)
        if source is None:
            continue
        for node in load_documents(source.text, source.file, problems):
            if isinstance(node, Mapping):
                values = merge(values, plain(node))
            else:
                problems.add(node.pos, "", "a values file is a map")
    return values
