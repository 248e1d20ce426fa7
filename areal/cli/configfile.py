"""``config.yaml``: defaults and contexts.

::

    currentContext: cluster
    defaults: {output: wide, service: rl, timeout: 20m, lockTimeout: 30s}
    contexts:
      cluster: {gateway: "http://10.0.0.5:8080", apiKeyFile: ~/.keys/cluster}

Every command reads it, also those that must not pay for a YAML library, so the block form that ``areal config``
writes is read here: nested maps of text by indentation. Anything else goes to the real parser. The two agree
wherever this one answers (``tests/cli/test_configfile.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal.errors import ArealError, UsageFault

Config = dict[str, Any]

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9_-]*):(?: +(?P<value>\S.*?))? *")
_PLAIN = re.compile(r"[A-Za-z~/][A-Za-z0-9_./~-]*(?::[A-Za-z0-9_./~-]+)*")
_QUOTED = re.compile(r'"[^"\\]*"')
_ASCII = re.compile(r"[\x20-\x7e\n]*")
_UNSAFE = re.compile("[^\x20-\x7e\xa1-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]|[\u2028\u2029]")
_NOT_TEXT = frozenset(["true", "false", "yes", "no", "on", "off", "null", "y", "n", "~"])
_SECTIONS = ("currentContext", "defaults", "contexts")

DEFAULTS = {
    "output": "format of every command that prints data",
    "service": "inference service of `areal inf` verbs",
    "timeout": "how long mutating commands wait",
    "lockTimeout": "how long to wait for an object that another command holds",
}
CONTEXT_FIELDS = ("gateway", "apiKeyFile")


def read_config(path: str) -> Config:
    """The file as a map; an absent file is an empty one. Raises ArealError for one that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ArealError(f"cannot read {path}: {error}", hint="move it away, or choose another --home") from error
    config = parse_blocks(text)
    return _checked(path, config if config is not None else _parse_yaml(path, text))


def write_config(path: str, config: Mapping[str, Any]) -> None:
    from pathlib import Path

    from areal.state.files import write_atomic

    write_atomic(Path(path), config_text(config))


def config_text(config: Mapping[str, Any]) -> str:
    """YAML in block form; maps and text only, which is all that a configuration holds."""
    return "".join(_blocks(config, 0))


def parse_blocks(text: str) -> Config | None:
    """Nested maps of text in block form, or None when the text is anything else (then ask a YAML parser)."""
    if not _ASCII.fullmatch(text):
        return None
    root: Config = {}
    stack: list[tuple[int, Config]] = [(0, root)]
    opened: Config | None = None
    for line in text.split("\n"):
        if not line.strip() or line.lstrip(" ").startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        indent = len(match["indent"])
        if opened is not None and indent > stack[-1][0]:
            stack.append((indent, opened))
        elif opened is not None:
            return None
        while indent < stack[-1][0]:
            stack.pop()
        level, here = stack[-1]
        key = match["key"]
        if indent != level or key in here or key.lower() in _NOT_TEXT:
            return None
        opened = None
        if match["value"] is None:
            opened = here[key] = {}
        else:
            value = _scalar(match["value"])
            if value is None:
                return None
            here[key] = value
    return root if opened is None else None


def _scalar(text: str) -> str | None:
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return None


def _blocks(tree: Mapping[str, Any], indent: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if value:
                lines += [f"{' ' * indent}{key}:\n", *_blocks(value, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{key}: {_written(str(value))}\n")
    return lines


def _written(text: str) -> str:
    if _scalar(text) == text:
        return text
    import json

    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _parse_yaml(path: str, text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ArealError(f"{path} is not YAML: {' '.join(str(error).split())}", hint=f"correct {path}") from error


def _checked(path: str, config: Any) -> Config:
    from areal.resources.suggest import did_you_mean

    if not isinstance(config, dict):
        raise ArealError(f"{path} does not hold a map", hint=f"correct {path}")
    for section, known in (("", _SECTIONS), ("defaults", tuple(DEFAULTS))):
        part = config.get(section) or {} if section else config
        where = f"{section}." if section else ""
        if not isinstance(part, dict):
            raise ArealError(f"{path}: {section} does not hold a map", hint=f"correct {path}")
        for key in part:
            if key not in known:
                raise ArealError(f"{path}: unknown field {where}{key}{did_you_mean(str(key), known)}")
    contexts = config.get("contexts") or {}
    if not isinstance(contexts, dict) or not all(isinstance(item, dict) for item in contexts.values()):
        raise ArealError(f"{path}: contexts does not hold a map of maps", hint=f"correct {path}")
    return config


def check_default(name: str, value: str) -> str:
    """``value`` when it is one that ``defaults.<name>`` can hold; UsageFault otherwise."""
    from areal.resources.suggest import did_you_mean

    if name not in DEFAULTS:
        raise UsageFault(f'no default "{name}"{did_you_mean(name, DEFAULTS)}', hint=f"defaults: {', '.join(DEFAULTS)}")
    if name == "output":
        from areal.cli.output.formats import parse_format

        parse_format(value)
    elif name == "service":
        from areal.resources.kinds import check_name

        check_name(value)
    else:
        from areal.cli.options import parse_seconds

        try:
            parse_seconds(value)
        except ValueError:
            raise UsageFault(f'"{value}" is not a duration', hint="write 90, 90s, 5m, 2h or 1d") from None
    return value
