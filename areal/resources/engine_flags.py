"""``engineArgs`` against the flags that an engine has; pure.

The embedded engine's are written down here (a test compares them with the engine's own parser), so that a manifest is
checked where no engine is installed. Other engines' come from whoever asked an installed one for its ``--help``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal.resources.rules import Schema
from areal.resources.suggest import did_you_mean


@dataclass(frozen=True)
class Flag:
    """What a flag takes: one of ``choices``, or a ``type``."""

    type: type = str
    choices: tuple[str, ...] = ()


EMBEDDED: Mapping[str, Flag] = {
    "dtype": Flag(choices=("auto", "float32", "bfloat16", "float16")),
    "device": Flag(),
    "max-batch-size": Flag(int),
    "max-model-len": Flag(int),
    "prefill-tokens": Flag(int),
    "kv-memory-gib": Flag(float),
    "threads": Flag(int),
    "drain-timeout": Flag(float),
}
_OURS: Mapping[str, Mapping[str, str]] = {  # flags that come from elsewhere in a manifest, or are nobody's choice
    "embedded": {
        "model-path": "path",
        "lora": "lora",
        "log-level": "logLevel of the service",
        **dict.fromkeys(("host", "port", "admin-key-file"), ""),
    },
    "vllm": {
        "model": "path",
        "tensor-parallel-size": "backend",
        "pipeline-parallel-size": "backend",
        "lora-modules": "lora",
        "enable-lora": "lora",
        **dict.fromkeys(("host", "port", "worker-extension-cls"), ""),
    },
    "sglang": {
        "model-path": "path",
        "tp-size": "backend",
        "pp-size": "backend",
        "lora-paths": "lora",
        "enable-lora": "lora",
        **dict.fromkeys(("host", "port"), ""),
    },
}
_ONE = "must be 1: with more, tokens sampled before a weight update may come after it, and get the new weights' version"
_ONE_ONLY: Mapping[str, Mapping[str, str]] = {  # flags whose one good value is 1, and why
    "vllm": {"stream-interval": _ONE},
    "sglang": {"stream-interval": _ONE},
}


def flag_name(name: str) -> str:
    """``maxBatchSize``, ``max_batch_size`` -> ``max-batch-size``."""
    spaced = "".join(f"-{char.lower()}" if char.isupper() else char for char in name)
    return spaced.replace("_", "-").strip("-")


def areal_sets(engine: str, name: str) -> bool:
    """Whether an argument is areal's own business."""
    return flag_name(name).partition(".")[0] in _OURS.get(engine, {})


def engine_arg_faults(
    engine: str, arguments: Mapping[str, Any], known: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """(argument, what is wrong with it). ``known``: the engine's flags without dashes; None: nobody could be asked.

    An argument of a flag that takes a map may be written with its key after a dot.
    """
    if engine == "embedded":
        known = EMBEDDED
    for name, value in arguments.items():
        flag = flag_name(name).partition(".")[0]
        if flag in _OURS.get(engine, {}):
            where = _OURS[engine][flag]
            yield name, f"is set by areal itself{f', from {where}' if where else ''}"
        elif str(value) not in ("1", "None") and (why := _ONE_ONLY.get(engine, {}).get(flag)):
            yield name, why
        elif known is not None and flag not in known:
            yield name, f"the {engine} engine has no such argument{did_you_mean(flag, known)}"
        elif engine == "embedded" and (fault := _value_fault(EMBEDDED[flag], value)):
            yield name, fault


def arguments_schema(engine: str) -> Schema:
    """JSON Schema of ``engineArgs``: the embedded engine's flags with their values; of others, what is areal's own."""
    refused: Schema = {f"^{_spellings(flag)}$": False for flag in _OURS[engine]}
    if engine != "embedded":
        return {"patternProperties": refused}
    allowed = {f"^{_spellings(name)}$": _value_schema(flag) for name, flag in EMBEDDED.items()}
    return {"patternProperties": allowed | refused, "additionalProperties": False}


def _spellings(flag: str) -> str:
    """A regular expression of the names that ``flag_name`` takes for this flag, also with a key after a dot."""
    first, *words = flag.split("-")
    head = f"[{first[0]}{first[0].upper()}]{first[1:]}"
    tail = "".join(f"(?:[-_]{word[0]}|{word[0].upper()}){word[1:]}" for word in words)
    return rf"[-_]*{head}{tail}(?:[-_]*|\..*)"


def _value_schema(flag: Flag) -> Schema:
    if flag.choices:
        return {"enum": [None, *flag.choices]}
    if flag.type is str:
        return {"type": ["string", "null"]}
    if flag.type is int:
        return {"type": ["integer", "null"], "exclusiveMinimum": 0, "maximum": 2**63}
    return {"type": ["number", "null"], "minimum": 0}


def _value_fault(flag: Flag, value: Any) -> str | None:
    """Values of the embedded engine's flags. Null leaves a flag out."""
    if value is None:
        return None
    if flag.choices:
        if value in flag.choices:
            return None
        return f"{value!r} is not one of {', '.join(flag.choices)}{did_you_mean(str(value), flag.choices)}"
    if flag.type is str:
        return None if isinstance(value, str) else f"must be a text, not {value!r}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (flag.type is int and not isinstance(value, int)):
        return f"must be {'a whole number' if flag.type is int else 'a number'}, not {value!r}"
    return None if value > 0 or (flag.type is float and value == 0) else f"must be above 0, not {value!r}"
