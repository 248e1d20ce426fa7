"""The registry of kinds, references to objects, and the registries of plugins. Standard library only.

A kind is a spec class, a controller and one line in the registry. Both classes are imported on first use.

A reference is written ``kind/name`` with any spelling of the kind (``model/qwen``, ``mdl/qwen``); its canonical form is
``Model/qwen``. A valid name is a single path segment, so that it cannot leave its folder.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from areal.dataclasses import dataclass
from areal.errors import NotFound, UsageFault, did_you_mean

SERVED = "servedModelName"
API_VERSION = "areal.dev/v1alpha1"
MAX_NAME_LENGTH = 63

NAME_PATTERN = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True)
class KindInfo:
    """A registered kind. ``order``: position of the kind in an apply, after the kinds that it refers to. ``spec`` and
    ``controller``: the pydantic model of the spec and the ``KindController``, as ``module:Class``. ``components``: the
    names of its processes."""

    kind: str
    plural: str
    short: tuple[str, ...]
    order: int
    spec: str
    controller: str
    components: tuple[str, ...] = ()

    @property
    def singular(self) -> str:
        return self.kind.lower()

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.singular, self.plural, *self.short)


KINDS: dict[str, KindInfo] = {}
_BY_SPELLING: dict[str, str] = {}


def register(info: KindInfo) -> None:
    """Add a kind. Raises ValueError if another kind has one of its spellings."""
    taken = sorted(_BY_SPELLING.keys() & set(info.spellings))
    if taken:
        raise ValueError(f"{info.kind}: {', '.join(taken)} is {_BY_SPELLING[taken[0]]}")
    KINDS[info.kind] = info
    _BY_SPELLING.update(dict.fromkeys(info.spellings, info.kind))


def unregister(kind: str) -> None:
    for spelling in KINDS.pop(kind).spellings:
        del _BY_SPELLING[spelling]


def load(path: str) -> Any:
    """Import the object at ``module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _register(
    kind: str,
    plural: str,
    short: tuple[str, ...],
    order: int,
    module: str,
    components: tuple[str, ...],
    specs: str = "specs",
) -> None:
    spec, controller = f"areal.resources.{specs}:{kind}Spec", f"areal.reconcilers.kinds.{module}:{kind}Controller"
    register(KindInfo(kind, plural, short, order, spec, controller, components))


INFERENCE_SERVICE, MODEL, AGENT_SERVICE, TRAIN_JOB = "InferenceService", "Model", "AgentService", "TrainJob"

_register(INFERENCE_SERVICE, "inferenceservices", ("inf", "isvc"), 0, "inference_service", ("gateway", "router"))
_register(MODEL, "models", ("mdl",), 1, "model", ("engine", "data-proxy"))
_register(
    AGENT_SERVICE,
    "agentservices",
    ("agent", "agents"),
    2,
    "agent_service",
    ("gateway", "router", "worker", "data-proxy"),
    "agent_spec",
)
_register(TRAIN_JOB, "trainjobs", ("job", "jobs"), 3, "train_job", ("driver",), "job_spec")


_OF_KUBERNETES = {
    **dict.fromkeys(("po", "pod", "pods"), "areal get processes"),
    **dict.fromkeys(("ev", "event", "events"), "areal events"),
    **dict.fromkeys(("no", "node", "nodes"), "areal get processes -o wide shows the node of each process"),
    **dict.fromkeys(("ns", "namespace", "namespaces"), "--home DIR, or AREAL_HOME, separates objects"),
}
"""Kinds that this system does not have, and what to use instead."""


def components_of(kinds: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for kind in kinds for name in KINDS[kind].components))


class Ref(NamedTuple):
    """Reference to an object by kind and name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def sort_key(self) -> tuple[int, str]:
        """Orders by kind, then by name."""
        return KINDS[self.kind].order, self.name


def resolve_kind(text: str) -> str:
    """Return the canonical kind of any spelling, case-insensitive. Raises NotFound with a suggestion."""
    kind = _BY_SPELLING.get(text.lower())
    if kind is None:
        if hint := _OF_KUBERNETES.get(text.lower()):
            raise NotFound(f'unknown kind "{text}"', hint=hint)
        raise NotFound(f'unknown kind "{text}"{did_you_mean(text, _BY_SPELLING)}', hint=f"kinds: {', '.join(KINDS)}")
    return kind


def parse_ref(text: str) -> Ref:
    """Parse ``kind/name``. Raises UsageFault for other forms and invalid names, NotFound for an unknown kind."""
    kind, slash, name = text.partition("/")
    if not slash:
        raise UsageFault(f'"{text}" is not a reference: write KIND/NAME, for example model/qwen')
    return Ref(resolve_kind(kind), check_name(name))


def ref_pattern() -> str:
    """Return a regular expression for the references that ``parse_ref`` accepts, without the limit on name length."""
    spellings = ("".join(f"[{char.upper()}{char}]" for char in word) for word in _BY_SPELLING)
    return f"(?:{'|'.join(spellings)})/{NAME_PATTERN}"


@lru_cache(16384)
def name_problem(name: str) -> str | None:
    """Return why ``name`` is not a valid object name; None if it is valid."""
    if not name:
        return "a name is needed"
    if len(name) > MAX_NAME_LENGTH:
        return f"the name is {len(name)} characters long, at most {MAX_NAME_LENGTH} are allowed"
    if not _NAME.fullmatch(name):
        return f'"{name}" is not a name: lower case letters, digits and "-", which is neither first nor last'
    return None


def check_name(name: str) -> str:
    """Return ``name``. Raises UsageFault if it is not a valid object name."""
    problem = name_problem(name)
    if problem is not None:
        raise UsageFault(problem)
    return name


def served_name(name: str, spec: Mapping[str, object]) -> str:
    """Return the name that clients, the gateway and the router use for the Model ``name``."""
    return str(spec.get(SERVED) or name)


def service_ref(spec: Mapping[str, object]) -> str:
    """Return the reference of the InferenceService that a Model is attached to."""
    return f"InferenceService/{spec.get('service', 'default')}"


# Plugins: backends of ``spec.scheduler.type`` and train engines, by name. Each is a factory, ``"module:function"``,
# imported on first use. A package registers its plugins as entry points of the registry's group, or with ``register``:
#
#     [project.entry-points."areal.backends"]
#     kube = "areal_kube.backend:open_backend"

_PLUGIN_NAME = re.compile(r"[a-z]([-_a-z0-9]*[a-z0-9])?")


class PluginRegistry:
    """Plugin factories by name: built in, registered by this process, or entry points of ``group``."""

    def __init__(self, group: str, built_in: dict[str, str]) -> None:
        self.group = group
        self.factories = dict(built_in)

    def register(self, name: str, factory: str) -> None:
        """``name``: lower-case letters, digits, dashes and underscores. ``factory``: ``"module:function"``. A later
        registration of a name replaces an earlier one. Raises ValueError."""
        module, _, function = factory.partition(":")
        if not _PLUGIN_NAME.fullmatch(name) or not module or not function:
            raise ValueError(f"not the name and the factory of a plugin: {name!r}, {factory!r}")
        self.factories[name] = factory

    def __contains__(self, name: str) -> bool:
        return self._factory(name) is not None

    def names(self) -> list[str]:
        from importlib.metadata import entry_points

        return sorted({*self.factories, *(point.name for point in entry_points(group=self.group))})

    def make(self, name: str, *args: Any) -> Any:
        """Call the factory of ``name`` with ``args``. Raises KeyError for an unknown name."""
        factory = self._factory(name)
        if factory is None:
            raise KeyError(name)
        return load(factory)(*args)

    def _factory(self, name: str) -> str | None:
        if name in self.factories:
            return self.factories[name]
        from importlib.metadata import entry_points  # slow to import: only for a name that is not built in

        return next((point.value for point in entry_points(group=self.group, name=name)), None)


BACKENDS = PluginRegistry(
    "areal.backends",
    {
        "local": "areal.runtime.backends.local:LocalBackend",
        "ray": "areal.runtime.backends.ray:RayBackend",
        "slurm": "areal.runtime.backends.slurm:SlurmBackend",
    },
)
"""``factory(home_root, lease_dir, crash) -> areal.runtime.backends.base.Backend``; see ``areal.runtime.backends``."""

TRAIN_ENGINES = PluginRegistry(
    "areal.train_engines",
    {
        "fsdp": "areal.training.engines.fsdp:FSDPEngine",
        "megatron": "areal.training.engines.megatron.engine:MegatronEngine",
    },
)
"""``factory(config, ranks, total_steps) -> areal.api.engine_api.TrainEngine``; see ``areal.training.engines``."""
