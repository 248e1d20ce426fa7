"""The ``backend`` string: which engine, and how its devices are laid out.

``allocation = part ("+" part)*``, ``part = engine [":" dims]``, ``dims = (letter number)+`` with each letter at most
once: d data parallel (replicas), t tensor, p pipeline, c context, e expert. ``sglang:d4t2+fsdp:d8`` is an inference
and a training part. The older ``sglang.d16p1m1+d32p2m1`` (m = tensor, the second part's engine implied: fsdp, or
megatron when it needs tensor or pipeline parallelism) is read as well.

World size is d*t*p*c; e folds experts onto devices that are already counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from areal.resources.suggest import did_you_mean

INFERENCE_ENGINES = ("embedded", "sglang", "vllm", "external")
TRAIN_ENGINES = ("fsdp", "megatron")
ENGINES = (*INFERENCE_ENGINES, *TRAIN_ENGINES)

_NAMES = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_DIM = re.compile(r"([a-z])(\d*)")
_MAX_DEVICES = 1_000_000


_NUMBER = "(?!0+(?![0-9]))[0-9]{1,6}(?![0-9])"
_ONE = "0{0,5}1(?![0-9])"
_ONCE = "".join(f"(?!.*[{letter}].*[{letter}])" for letter in ("d", "tm", "p", "c", "e"))
# Of one inference engine, for JSON Schemas; only its size is not bounded.
BACKEND_PATTERN = (
    rf"(?:embedded|external)(?::{_ONCE}(?:[de]{_NUMBER}|[tpc]{_ONE})+|\.{_ONCE}(?:[de]{_NUMBER}|[tmpc]{_ONE})+)?"
    rf"|(?:sglang|vllm)(?::{_ONCE}(?:[dtpce]{_NUMBER})+|\.{_ONCE}(?:[dtmpce]{_NUMBER})+)?"
)


class BackendError(ValueError):
    """``column`` is the 1-based place of the trouble inside the string."""

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

    @property
    def devices_per_replica(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def world_size(self) -> int:
        return self.data * self.devices_per_replica

    def __str__(self) -> str:
        sizes = {letter: getattr(self, name) for letter, name in _NAMES.items()}
        dims = "".join(f"{letter}{size}" for letter, size in sizes.items() if size != 1 or letter == "d")
        return f"{self.engine}:{dims}"


@dataclass(frozen=True)
class Allocation:
    """The parts as written; ``str`` gives the one canonical spelling."""

    parts: tuple[Part, ...]

    @property
    def inference(self) -> Part | None:
        return next((part for part in self.parts if part.engine in INFERENCE_ENGINES), None)

    @property
    def training(self) -> Part | None:
        return next((part for part in self.parts if part.engine in TRAIN_ENGINES), None)

    @property
    def world_size(self) -> int:
        return sum(part.world_size for part in self.parts)

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)


def parse_backend(text: str, *, engines: Collection[str] = ENGINES, single: bool = False) -> Allocation:
    """Read ``text``; ``engines`` are those allowed here, ``single`` forbids ``+``. Raises BackendError."""
    parts: list[Part] = []
    column = 1
    for index, piece in enumerate(text.split("+")):
        if index == 1 and single:
            raise BackendError('one engine only: "+" joins inference with training, in a training config', column - 1)
        parts.append(_parse_part(piece, column, parts, engines))
        column += len(piece) + 1
    _check_roles(parts, text)
    return Allocation(tuple(parts))


def _parse_part(piece: str, column: int, before: list[Part], engines: Collection[str]) -> Part:
    if not piece:
        raise BackendError("an engine is missing, for example sglang:d4t2", column)
    match = re.match(r"[A-Za-z_]+(?![A-Za-z_0-9])", piece)
    old = match is None and bool(before)
    if match is None and not old:
        raise BackendError(f'"{piece}" does not begin with an engine, for example sglang:{piece}', column)
    engine = match[0] if match is not None else ""
    if engine and engine not in engines:
        allowed = f"; one of {', '.join(engines)}"
        raise BackendError(f'unknown engine "{engine}"{did_you_mean(engine, engines)}{allowed}', column)
    rest = piece[len(engine) :]
    if rest and not old and rest[0] not in ":.":
        raise BackendError(f'expected ":" after {engine}, found "{rest[0]}"', column + len(engine))
    dotted = old or rest[:1] == "."
    skip = len(engine) + (0 if old else min(1, len(rest)))
    dims = _parse_dims(piece[skip:], column + skip, dotted) if rest else {}
    part = Part(engine or "fsdp", **dims)
    if not engine and part.devices_per_replica > 1:
        part = Part("megatron", **dims)
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
    if part.engine in ("embedded", "external") and part.devices_per_replica > 1:
        raise BackendError(f"{part.engine} runs in one process: only d can be above 1", column)
    if part.world_size > _MAX_DEVICES:
        raise BackendError(f"{part.world_size} devices are more than anyone has", column)


def _check_roles(parts: list[Part], text: str) -> None:
    if len(parts) > 2:
        raise BackendError("at most two parts: one for inference, one for training", len(text))
    roles = [part.engine in TRAIN_ENGINES for part in parts]
    if len(parts) == 2 and roles[0] == roles[1]:
        role = "training" if roles[0] else "inference"
        raise BackendError(f"both parts are {role} engines: one for inference, one for training", text.index("+") + 2)
