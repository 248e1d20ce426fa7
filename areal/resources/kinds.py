"""The four kinds, their spellings, and references to objects. Standard library only.

A reference is written ``kind/name`` with any spelling of the kind (``model/qwen``, ``mdl/qwen``); its one canonical
form is ``Model/qwen``. A name is one path segment by construction: it can never leave the folder it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.errors import NotFound, UsageFault
from areal.resources.suggest import did_you_mean

SERVED = "servedModelName"
API_VERSION = "areal.dev/v1alpha1"
MAX_NAME_LENGTH = 63

NAME_PATTERN = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True)
class KindInfo:
    """``order``: where the kind stands in a converging apply; what it refers to comes before it."""

    kind: str
    plural: str
    singular: str
    short: tuple[str, ...]
    order: int

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.singular, self.plural, *self.short)


KINDS: dict[str, KindInfo] = {
    info.kind: info
    for info in (
        KindInfo("InferenceService", "inferenceservices", "inferenceservice", ("inf", "isvc"), 0),
        KindInfo("Model", "models", "model", ("mdl",), 1),
        KindInfo("AgentService", "agentservices", "agentservice", ("agent",), 2),
        KindInfo("TrainJob", "trainjobs", "trainjob", ("job",), 3),
    )
}

_BY_SPELLING = {spelling: info.kind for info in KINDS.values() for spelling in info.spellings}


@dataclass(frozen=True, order=True)
class Ref:
    """One object, by kind and name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def sort_key(self) -> tuple[int, str]:
        """By the kind's order, then by name."""
        return KINDS[self.kind].order, self.name


def resolve_kind(text: str) -> str:
    """The canonical kind of any spelling, case-insensitive. Raises NotFound with a suggestion."""
    kind = _BY_SPELLING.get(text.lower())
    if kind is None:
        raise NotFound(
            f'unknown kind "{text}"{did_you_mean(text, _BY_SPELLING)}',
            hint=f"kinds: {', '.join(KINDS)}",
        )
    return kind


def parse_ref(text: str) -> Ref:
    """``kind/name`` to a Ref. Raises UsageFault for another shape or a bad name, NotFound for an unknown kind."""
    kind, slash, name = text.partition("/")
    if not slash:
        raise UsageFault(f'"{text}" is not a reference', hint="write KIND/NAME, for example model/qwen")
    return Ref(resolve_kind(kind), check_name(name))


def ref_pattern() -> str:
    """A regular expression of what ``parse_ref`` reads, but for the length of the name."""
    spellings = ("".join(f"[{char.upper()}{char}]" for char in word) for word in _BY_SPELLING)
    return f"(?:{'|'.join(spellings)})/{NAME_PATTERN}"


def name_problem(name: str) -> str | None:
    """Why ``name`` cannot name an object; None when it can."""
    if not name:
        return "a name is needed"
    if len(name) > MAX_NAME_LENGTH:
        return f"the name is {len(name)} characters long, at most {MAX_NAME_LENGTH} are allowed"
    if not _NAME.fullmatch(name):
        return f'"{name}" is not a name: lower case letters, digits and "-", which is neither first nor last'
    return None


def check_name(name: str) -> str:
    """``name``, or UsageFault saying what is wrong with it."""
    problem = name_problem(name)
    if problem is not None:
        raise UsageFault(problem)
    return name


def served_name(name: str, spec: Mapping[str, Any]) -> str:
    """What clients, the gateway and the router call the Model ``name``."""
    return str(spec.get(SERVED) or name)
