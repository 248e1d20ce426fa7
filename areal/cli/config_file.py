"""``config.yaml`` of the home.

::

    currentContext: cluster
    defaults: {output: wide, service: rl, timeout: 20m, lockTimeout: 30s}
    contexts:
      cluster: {gateway: "http://10.0.0.5:8080", apiKeyFile: ~/.keys/cluster}
"""

from __future__ import annotations

from typing import Any

from areal.errors import ArealError, did_you_mean

Config = dict[str, Any]

_SECTIONS = ("currentContext", "defaults", "contexts")
DEFAULTS = {
    "output": "format of every command that prints data",
    "service": "inference service of `areal inf` verbs",
    "timeout": "how long mutating commands wait",
    "lockTimeout": "how long to wait for an object that another command holds",
}


def read_config(path: str) -> Config:
    """The file as a map; an absent file is an empty one. Raises ArealError for one that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ArealError(f"cannot read {path}: {error}", hint="move it away, or choose another --home") from error
    import yaml

    try:
        return _checked(path, yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise ArealError(f"{path} is not YAML: {' '.join(str(error).split())}", hint=f"correct {path}") from error


def _checked(path: str, config: Any) -> Config:
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
