"""Plain values to YAML that every reader takes alike: ours (1.2), and those that still read 1.1.

``load(dump(value)) == value``: text that any of them would take for something else is quoted, and a literal ``${{``
is escaped, so that what ``get -o manifest`` prints can be applied again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from areal.resources.scalars import BadScalar, resolve_plain

_BREAKS = "\x85\u2028\u2029"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text = text.replace("${{", "$${{")
    style = None
    if _misread(text):
        style = '"'
    elif "\n" in text and all(line == line.rstrip() and line.isprintable() for line in text.split("\n")):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _misread(text: str) -> bool:
    """Whether our loader would not read the bare text as text; PyYAML quotes what 1.1 would misread by itself, but for
    line breaks that are none in 1.2."""
    if text == "<<" or any(each in text for each in _BREAKS):
        return True
    try:
        return not isinstance(resolve_plain(text), str)
    except BadScalar:
        return True


_Dumper.add_representer(str, _text)


def dump_documents(documents: Iterable[Any]) -> str:
    """The documents as a YAML stream, keys in their order."""
    return str(
        yaml.dump_all(
            documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120
        )
    )
