"""Parses the ``backend`` string of a model (engine and device layout), and checks ``engineArgs``.

``allocation = part ("+" part)*``, ``part = engine [":" dims]``, ``dims = (letter number)+`` with each letter at most
once: d data parallel (replicas), t tensor, p pipeline, c context, e expert. ``sglang:d4t2+fsdp:d8`` is an inference
and a training part. The older ``sglang.d16p1m1+d32p2m1`` (m = tensor, the second part's engine implied: fsdp, or
megatron when it needs tensor, pipeline or context parallelism) is accepted too,
and the second part alone.

World size is d*t*p*c. e distributes experts over the same devices and does not add to it; each expert uses t tensor
ranks. ``megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)`` gives attention and experts separate layouts on the same devices.

The flags of the embedded engine and of the data proxy (``proxyArgs``) are the fields of their configurations, so that
manifests can be checked where no engine is installed. The flags of other engines come from the ``--help`` of an
installed engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from areal.dataclasses import dataclass
from areal.errors import did_you_mean
from areal.resources import kinds

if TYPE_CHECKING:
    from areal.resources.fields import Schema

INFERENCE_ENGINES = ("embedded", "sglang", "vllm", "external")
TRAIN_ENGINES = ("fsdp", "megatron")
ENGINES = (*INFERENCE_ENGINES, *TRAIN_ENGINES)

_NAMES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_DIM = re.compile(r"([a-z])([0-9]*)")
_HYBRID = re.compile(r"[a-z]+:\(attn:([a-z0-9]+)\|ffn:([a-z0-9]+)\)")
_MAX_DEVICES = 1_000_000


_NUMBER = "(?!0+(?![0-9]))[0-9]{1,6}(?![0-9])"
_SIZE_ONE = "0{0,5}1(?![0-9])"
_ONCE = "".join(f"(?!.*[{letter}].*[{letter}])" for letter in ("d", "tm", "p", "c", "e"))
# Pattern of one inference engine, for JSON Schemas; it does not bound the number of devices.
BACKEND_PATTERN = (
    rf"(?:embedded|external)(?::{_ONCE}(?:[de]{_NUMBER}|[tpc]{_SIZE_ONE})+|\.{_ONCE}(?:[de]{_NUMBER}|[tmpc]{_SIZE_ONE})+)?"
    rf"|(?:sglang|vllm)(?::{_ONCE}(?:[dtpce]{_NUMBER})+|\.{_ONCE}(?:[dtmpce]{_NUMBER})+)?"
)


class BackendError(ValueError):
    """An invalid ``backend`` string; ``column`` is the 1-based position of the fault."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(f"column {column}: {message}")
        self.message = message
        self.column = column


@dataclass(frozen=True)
class Part:
    """One engine with its layout."""

    engine: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    ffn_tensor: int | None = None  # tensor-parallel ranks of experts; None: ``tensor``

    @property
    def expert_tensor(self) -> int:
        """Tensor-parallel ranks of each expert."""
        return self.tensor if self.ffn_tensor is None else self.ffn_tensor

    @property
    def devices_per_replica(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        return self.data * self.devices_per_replica

    def __str__(self) -> str:
        sizes = {letter: getattr(self, name) for letter, name in _NAMES.items()}
        if self.expert_tensor == self.tensor:
            return f"{self.engine}:{_dims(sizes)}"
        data = self.world_size // (self.expert_tensor * self.pipeline * self.expert)
        ffn = {"d": data, "t": self.expert_tensor, "p": self.pipeline, "e": self.expert}
        return f"{self.engine}:(attn:{_dims({**sizes, 'e': 1})}|ffn:{_dims(ffn)})"


def _dims(sizes: Mapping[str, int]) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size != 1 or letter == "d")


@dataclass(frozen=True)
class Allocation:
    """The parts in the order written; ``str`` returns the canonical spelling."""

    parts: tuple[Part, ...]

    @property
    def inference(self) -> Part | None:
        return next((part for part in self.parts if part.engine in INFERENCE_ENGINES), None)

    @property
    def training(self) -> Part | None:
        return next((part for part in self.parts if is_train_engine(part.engine)), None)

    @property
    def world_size(self) -> int:
        return sum(part.world_size for part in self.parts)

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


def is_train_engine(engine: str) -> bool:
    """Return whether ``engine`` is a train engine, built in or registered by another package."""
    return engine in TRAIN_ENGINES or (engine not in ENGINES and engine in kinds.TRAIN_ENGINES)


@lru_cache(1024)
def parse_backend(text: str, *, engines: Collection[str] = ENGINES, single: bool = False) -> Allocation:
    """Parse ``text``. ``engines``: the engines allowed here; if ``fsdp`` is among them, so are train engines of other
    packages. ``single`` forbids ``+``. Raises BackendError."""
    parts: list[Part] = []
    column = 1
    for index, piece in enumerate(text.split("+")):
        if index == 1 and single:
            raise BackendError('one engine only: "+" joins inference with training, in a training config', column - 1)
        parts.append(_parse_part(piece, column, parts, engines))
        column += len(piece) + 1
    if len(parts) > 2:
        raise BackendError("at most two parts: one for inference, one for training", len(text))
    roles = [is_train_engine(part.engine) for part in parts]
    if len(parts) == 2 and roles[0] == roles[1]:
        role = "training" if roles[0] else "inference"
        raise BackendError(f"both parts are {role} engines: one for inference, one for training", text.index("+") + 2)
    return Allocation(tuple(parts))


def inference_part(backend: str) -> Part:
    """Return the inference engine of a backend that has been validated."""
    part = parse_backend(backend).inference
    assert part is not None, f"validated backends name an inference engine: {backend}"
    return part


def _parse_part(piece: str, column: int, before: list[Part], engines: Collection[str]) -> Part:
    if not piece:
        raise BackendError("an engine is missing, for example sglang:d4t2", column)
    match = re.match(r"[A-Za-z_]+(?![A-Za-z_0-9])", piece)
    old = match is None and (bool(before) or engines is ENGINES)
    if match is None and not old:
        example = "sglang" if "sglang" in engines else "fsdp"
        raise BackendError(f'"{piece}" does not begin with an engine, for example {example}:{piece}', column)
    engine = match[0] if match is not None else ""
    if engine and engine not in engines and not ("fsdp" in engines and is_train_engine(engine)):
        allowed = f"; one of {', '.join(engines)}"
        raise BackendError(f'unknown engine "{engine}"{did_you_mean(engine, engines)}{allowed}', column)
    rest = piece[len(engine) :]
    if rest and not old and rest[0] not in ":.":
        raise BackendError(f'expected ":" after {engine}, found "{rest[0]}"', column + len(engine))
    dotted = old or rest[:1] == "."
    skip = len(engine) + (0 if old else min(1, len(rest)))
    if rest[1:2] == "(":
        return _parse_hybrid(engine, piece, column)
    dims = _parse_dims(piece[skip:], column + skip, dotted) if rest else {}
    part = Part(engine or "fsdp", **dims)
    if not engine and part.devices_per_replica > 1:
        part = Part("megatron", **dims)
    _check_part(part, column)
    return part


def _parse_hybrid(engine: str, piece: str, column: int) -> Part:
    """Parse ``megatron:(attn:DIMS|ffn:DIMS)``."""
    match = _HYBRID.fullmatch(piece)
    at = column + len(engine) + 1
    if engine != "megatron":
        raise BackendError(f"{engine} has one layout for all layers: only megatron has one for experts", at)
    if match is None:
        raise BackendError("a layout of its own for experts is written (attn:d4t2|ffn:d2t1e4)", at)
    attn = _parse_dims(match[1], column + match.start(1), dotted=False)
    ffn = _parse_dims(match[2], column + match.start(2), dotted=False)
    if "expert" in attn:
        raise BackendError("e is of ffn: attention has no experts", column + match.start(1))
    if "context" in ffn:
        raise BackendError("c is of attn: experts take tokens one by one", column + match.start(2))
    experts, tensor = ffn.pop("expert", 1), ffn.get("tensor", 1)
    own = tensor if tensor != attn.get("tensor", 1) else None
    part, other = Part(engine, **attn, expert=experts, ffn_tensor=own), Part(engine, **ffn)
    if part.pipeline != other.pipeline:
        raise BackendError(f"attn has p{part.pipeline} and ffn p{other.pipeline}: a layer is on one stage", at)
    if part.world_size != (size := other.world_size * experts):
        message = f"attn is on {part.world_size} devices and ffn (d*t*p*e) on {size}: they share them"
        raise BackendError(message, at)
    _check_part(part, column)
    return part


def _parse_dims(text: str, column: int, dotted: bool) -> dict[str, int]:
    dims: dict[str, int] = {}
    at = 0
    while at < len(text):
        match = _DIM.match(text, at)
        if match is None:
            raise BackendError(f'expected a dimension like d2, found "{text[at]}"', column + at)
        letter = "t" if dotted and match[1] == "m" else match[1]
        name = _NAMES.get(letter)
        if name is None:
            raise BackendError(
                f'unknown dimension "{match[1]}": d data, t tensor, p pipeline, c context, e expert', column + at
            )
        if name in dims:
            raise BackendError(f'dimension "{match[1]}" ({name}) is given twice', column + at)
        if not match[2] or not 1 <= len(match[2]) <= 6 or int(match[2]) == 0:
            raise BackendError(f'"{match[1]}" needs a number from 1 up, for example {match[1]}2', column + at + 1)
        dims[name] = int(match[2])
        at = match.end()
    if not dims:
        raise BackendError("dimensions are missing, for example d4t2", column)
    return dims


def _check_part(part: Part, column: int) -> None:
    if part.engine == "fsdp" and part.pipeline > 1:
        raise BackendError("fsdp has no pipeline parallelism: use megatron, or p1", column)
    if part.engine == "megatron" and (part.world_size // part.pipeline) % (part.expert * part.expert_tensor):
        ranks, each = part.world_size // part.pipeline, f"e{part.expert} of t{part.expert_tensor}"
        raise BackendError(f"experts cannot share the {ranks} devices of a stage evenly over {each}", column)
    if part.engine in ("embedded", "external") and part.devices_per_replica > 1:
        raise BackendError(f"{part.engine} runs in one process: only d can be above 1", column)
    if part.world_size > _MAX_DEVICES:
        raise BackendError(f"{part.world_size} devices are more than anyone has", column)


@dataclass(frozen=True)
class Flag:
    """The values that a flag takes: one of ``choices``, a text like ``pattern``, or a number of ``type`` from
    ``least`` up and above ``above``."""

    type: type = str
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    least: float | None = None
    above: float | None = None


DATA_PROXY = "data proxy"

# Flags that areal sets, by program: the field that they come from, "" if fixed.
_RESERVED_FLAGS: Mapping[str, Mapping[str, str]] = {
    "embedded": {
        "model-path": "path",
        "lora": "lora",
        "log-level": "logLevel of the service",
        **dict.fromkeys(("host", "port", "admin-key-file"), ""),
    },
    DATA_PROXY: {
        "model": "servedModelName",
        "engine": "backend",
        "engine-url": "engineUrl",
        "engine-key-file": "engineApiKeyFrom",
        "model-path": "path",
        "log-level": "logLevel of the service",
        "drain-timeout": "strategy.drainTimeoutSeconds",
        "tokenizer-path": "tokenizerPath",
        "chat-template": "chatTemplate",
        "tool-call-parser": "toolCallParser",
        "reasoning-parser": "reasoningParser",
        "allow-private": "external.allowPrivate",
        "provider-model": "external.model",
        "provider-api": "external.api",
        "provider-key-file": "external.apiKeyFrom",
        **dict.fromkeys(("host", "port", "admin-key-file", "attached", "registration"), ""),
    },
    "vllm": {
        "model": "path",
        "tensor-parallel-size": "backend",
        "pipeline-parallel-size": "backend",
        "lora-modules": "lora",
        "enable-lora": "lora",
        **dict.fromkeys(("host", "port", "api-key", "worker-extension-cls"), ""),
    },
    "sglang": {
        **dict.fromkeys(("model-path", "model"), "path"),
        **dict.fromkeys(
            ("tp-size", "tensor-parallel-size", "tp", "pp-size", "pipeline-parallel-size", "pp"), "backend"
        ),
        "lora-paths": "lora",
        "enable-lora": "lora",
        **dict.fromkeys(("host", "port", "api-key", "admin-api-key"), ""),
    },
}
_OWN = ("embedded", DATA_PROXY)
_ONE = "must be 1: with more, tokens sampled before a weight update may come after it, and get the new weights' version"
_ONE_ONLY = {"stream-interval"}  # flags of vLLM and SGLang that must be 1


@cache
def own_flags(program: str) -> dict[str, Flag]:
    """Return the flags of the embedded engine that ``engineArgs`` may set, or those of the data proxy that
    ``proxyArgs`` may set, from its configuration class."""
    from areal.wire.fields import Range, hints_of, marks_of
    from areal.wire.processes import DataProxyConfig, EmbeddedEngineConfig

    config = DataProxyConfig if program == DATA_PROXY else EmbeddedEngineConfig
    flags = {}
    for name, kind in get_type_hints(config).items():
        flag, pattern = name.replace("_", "-"), config.__dataclass_fields__[name].metadata.get("pattern")
        allowed = next((mark for mark in marks_of(hints_of(config)[name]) if isinstance(mark, Range)), Range())
        if flag in _RESERVED_FLAGS[program]:
            continue
        if get_origin(kind) is Literal:
            flags[flag] = Flag(choices=get_args(kind))
        else:
            scalar = next(each for each in (kind, *get_args(kind)) if each in (int, float, str))
            flags[flag] = Flag(scalar, pattern=pattern, least=allowed.least, above=allowed.above)
    return flags


@lru_cache(4096)
def flag_name(name: str) -> str:
    """Return ``max-batch-size`` for ``maxBatchSize`` and ``max_batch_size``. The key in ``flag.key`` is not changed."""
    flag, dot, key = name.partition(".")
    spaced = "".join(f"-{char.lower()}" if char.isupper() else char for char in flag)
    return spaced.replace("_", "-").strip("-") + dot + key


def engine_arguments(engine: str, section: Mapping[str, object], trainer_dtype: str = "") -> dict[str, object]:
    """Return ``engineArgs`` from the engine's section of a job's configuration, without empty values and without
    arguments that areal sets. The ``dtype`` of the embedded engine defaults to the trainer's."""
    defaults = {"dtype": trainer_dtype} if engine == "embedded" and trainer_dtype else {}
    ours = _RESERVED_FLAGS.get(engine, {})
    return defaults | {
        str(name): value
        for name, value in section.items()
        if value not in (None, "", [], {}) and flag_name(str(name)).partition(".")[0] not in ours
    }


def engine_arg_faults(
    engine: str, arguments: Mapping[str, object], known: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (argument, fault) for invalid arguments. ``known``: the engine's flags without leading dashes; None if no
    installed engine can list them. A flag of vLLM or SGLang that takes a map may be written as ``flag.key``."""
    own = own_flags(engine) if arguments and engine in _OWN else {}
    known = own or known
    for name, value in arguments.items():
        flag = flag_name(name) if own else flag_name(name).partition(".")[0]
        if flag in _RESERVED_FLAGS.get(engine, {}):
            where = _RESERVED_FLAGS[engine][flag]
            yield name, f"is set by areal itself{f', from {where}' if where else ''}"
        elif flag in _ONE_ONLY and engine in ("vllm", "sglang") and str(value) not in ("1", "None"):
            yield name, _ONE
        elif known is not None and flag not in known:
            program = engine if engine == DATA_PROXY else f"{engine} engine"
            yield name, f"the {program} has no such argument{did_you_mean(flag, known)}"
        elif flag in own and (fault := _value_fault(own[flag], value)):
            yield name, fault


def engine_args_schema(engine: str) -> Schema:
    """Return the JSON Schema of ``engineArgs``, or of ``proxyArgs``. It lists the flags and values of the embedded
    engine and of the data proxy; for other engines, it only rejects the flags that areal sets."""
    refused: Schema = {f"^{_spellings(flag)}$": False for flag in _RESERVED_FLAGS[engine]}
    if engine not in _OWN:
        return {"patternProperties": refused}
    allowed = {f"^{_spellings(name, dotted=False)}$": _value_schema(flag) for name, flag in own_flags(engine).items()}
    return {"patternProperties": allowed | refused, "additionalProperties": False}


def _spellings(flag: str, *, dotted: bool = True) -> str:
    """Return a regular expression for the spellings that ``flag_name`` maps to this flag. ``dotted``: also with
    ``.key``."""
    first, *words = flag.split("-")
    head = f"[{first[0]}{first[0].upper()}]{first[1:]}"
    tail = "".join(f"(?:[-_]{word[0]}|{word[0].upper()}){word[1:]}" for word in words)
    return rf"[-_]*{head}{tail}(?:[-_]*|\..*)" if dotted else f"[-_]*{head}{tail}[-_]*"


def _value_schema(flag: Flag) -> Schema:
    if flag.choices:
        return {"enum": [None, *flag.choices]}
    if flag.type is str:
        return {"type": ["string", "null"], **({"pattern": f"^(?:{flag.pattern})$"} if flag.pattern else {})}
    bounds: Schema = {"minimum": flag.least} if flag.least is not None else {}
    bounds |= {"exclusiveMinimum": flag.above} if flag.above is not None else {}
    if flag.type is int:
        return {"type": ["integer", "null"], **bounds, "maximum": 2**63}
    return {"type": ["number", "null"], **bounds}


def _value_fault(flag: Flag, value: Any) -> str | None:
    """Return the fault of a value for a flag of our own programs. Null is valid: it leaves the flag out."""
    if value is None:
        return None
    if flag.choices:
        if value in flag.choices:
            return None
        return f"{value!r} is not one of {', '.join(flag.choices)}{did_you_mean(str(value), flag.choices)}"
    if flag.type is str:
        if not isinstance(value, str):
            return f"must be a text, not {value!r}"
        fits = flag.pattern is None or re.fullmatch(flag.pattern, value)
        return None if fits else f"must match {flag.pattern}, not {value!r}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (flag.type is int and not isinstance(value, int)):
        return f"must be {'a whole number' if flag.type is int else 'a number'}, not {value!r}"
    if flag.above is not None and not value > flag.above:
        return f"must be above {flag.above}, not {value!r}"
    return f"must be at least {flag.least}, not {value!r}" if flag.least is not None and value < flag.least else None
