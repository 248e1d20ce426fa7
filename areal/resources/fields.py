"""The base class of spec models, scalar types, ``metadata``, sections that several kinds share, and the description of
fields (``fields_of``).

Besides its type, every field of a spec declares the cost of a change (``UpdateClass``), a docstring (read by
``schema``), a default unless it is required, and for a number its ``Unit``. YAML names are camelCase, attributes
snake_case. Validation is strict: YAML already determines which scalars are numbers, and ``"8080"`` is text.
"""

import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from areal.dataclasses import dataclass
from areal.errors import ArealError
from areal.numbers import QUANTITY
from areal.resources.kinds import MAX_NAME_LENGTH, NAME_PATTERN, name_problem, parse_ref, ref_pattern
from areal.resources.tree import ABSENT, FieldPath, UpdateClass

Schema = dict[str, Any]

EXPRESSION_PATTERN = r"[\s\S]*\$\{\{[\s\S]*\}\}[\s\S]*"  # of a text that contains an expression
EXPRESSION: Schema = {"$ref": "#/definitions/Expression"}
EMPTY: Schema = {"anyOf": [{"enum": [None, 0, "", [], {}]}, EXPRESSION]}  # values that count as absent


PATTERN_WORDS: dict[str, str] = {}
"""Error words (``must WORDS``) for a text that does not match, by the pattern of ``Field(pattern=...)``."""


def worded(pattern: str, words: str) -> str:
    """Register ``words`` for the errors of ``pattern``. Returns ``pattern``."""
    PATTERN_WORDS[pattern] = words
    return pattern


def text(pattern: str) -> Schema:
    """Return the schema of a text that matches ``pattern`` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def given(*names: str) -> Schema:
    """Return a schema that is true if all of ``names`` are set, or may be after expressions are evaluated."""
    return {"required": list(names), "properties": {name: {"not": {"type": "null"}} for name in names}}


def written(name: str, shape: Schema | None = None) -> Schema:
    """Return a schema that is true if the field ``name`` is set to a value of ``shape``, not to an expression."""
    value: Schema = {"not": {"anyOf": [{"type": "null"}, EXPRESSION]}}
    return {"required": [name], "properties": {name: {**value, **(shape or {})}}}


def when(condition: Schema, then: Schema | bool) -> Schema:
    return {"if": condition, "then": then}


def without(*names: str) -> Schema:
    return {"properties": dict.fromkeys(names, EMPTY)}


class Fault(NamedTuple):
    """A fault at ``path`` inside the spec. ``absent``: the field whose absence is the fault. ``at_key``: the key is at
    fault, not its value; ``column``: 1-based position in the value's text, 0 for the value as a whole. ``expected``:
    the type that the value should have, if that is the fault."""

    path: FieldPath
    message: str
    absent: FieldPath = ()
    at_key: bool = False
    column: int = 0
    expected: str = ""

    def below(self, base: FieldPath) -> Self:
        """Return the fault of an item at ``base``."""
        return self._replace(path=(*base, *self.path), absent=(*base, *self.absent) if self.absent else ())


class SpecModel(BaseModel):
    """A map in a manifest: unknown fields are errors, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, defer_build=True, allow_inf_nan=False
    )

    # Set by the spec models of kinds:
    REFERENCES: ClassVar[tuple[tuple[FieldPath, str, str], ...]] = ()
    """References to other objects: (path of a map, field in it, kind). The field's default counts if the map is set."""
    INSTEAD: ClassVar[Mapping[FieldPath, str]] = {}
    """Path of a reference -> field of the same map: if that field is set, the reference's default does not count."""
    REPLACEABLE: ClassVar[bool] = False
    """Whether ``apply --replace`` may delete and recreate an object to change an immutable field."""
    INLINE: ClassVar[tuple[str, str, str] | None] = None
    """(field that declares owned objects, their kind, their field that refers to the owner)."""
    FILES: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Paths of fields that name a file or a folder; ``*`` stands for any key."""
    FILES_FROM: ClassVar[Mapping[str, str]] = {}
    """Field of ``FILES`` -> field that names the folder in which a relative path is looked up first."""
    EXAMPLE: ClassVar[tuple[str, Mapping[str, JsonValue]]] = ("my-object", {})
    """The name and the spec of the manifest that ``areal init`` writes."""
    EXAMPLE_FILES: ClassVar[Mapping[str, str]] = {}
    EXAMPLE_NEEDS: ClassVar[tuple[str, ...]] = ()
    """References of the objects that the example refers to."""
    """The texts of the files that the example needs beside its manifest, by name."""

    def problems(self) -> Iterator[tuple[FieldPath, str] | Fault]:
        """Yield the faults of fields that are each valid alone: (path with YAML names, message), or a ``Fault``."""
        return iter(())

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        """Return ``problems`` as JSON Schema rules, as far as JSON Schema can express them."""
        return []


@dataclass(frozen=True)
class Unit:
    """The unit of a number. Names of durations and sizes include the unit as well."""

    name: str


def checked(kind: str, problem: Callable[[str], str | None]) -> AfterValidator:
    """Return a validator that rejects a text for which ``problem`` returns a message."""

    def check(value: str) -> str:
        if (found := problem(value)) is not None:
            raise PydanticCustomError(kind, "{problem}", {"problem": found})
        return value

    return AfterValidator(check)


def _quantity_problem(size: str) -> str | None:
    return None if QUANTITY.fullmatch(size) else f'must be a size like "64Gi" or "500M", got "{size}"'


NAME_SCHEMA: Schema = {**text(NAME_PATTERN), "maxLength": MAX_NAME_LENGTH}
Name: TypeAlias = Annotated[str, checked("areal_name", name_problem), WithJsonSchema(NAME_SCHEMA)]
Quantity: TypeAlias = Annotated[
    str, checked("areal_quantity", _quantity_problem), WithJsonSchema(text(QUANTITY.pattern)), Unit("bytes")
]
Text: TypeAlias = Annotated[str, Field(min_length=1)]


def _variable_problem(name: str) -> str | None:
    # Kubernetes' rule; the operating system refuses "" and "=" only when the process starts.
    return None if _VARIABLE.fullmatch(name) else f"{json.dumps(name)} is not a valid name of an environment variable"


_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
Variable: TypeAlias = Annotated[
    str, checked("areal_variable", _variable_problem), WithJsonSchema(text(_VARIABLE.pattern))
]

_LONGEST_S = 1e9  # 31 years

Port: TypeAlias = Annotated[int, Field(ge=1, le=65535), Unit("port")]
Count: TypeAlias = Annotated[int, Field(ge=0, le=1_000_000), Unit("count")]
PositiveCount: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000), Unit("count")]
Replicas: TypeAlias = Annotated[int, Field(ge=0, le=65536), Unit("replicas")]
Cores: TypeAlias = Annotated[float, Field(gt=0, le=1_000_000), Unit("cores")]
Ratio: TypeAlias = Annotated[float, Field(ge=0, le=1), Unit("ratio")]
Factor: TypeAlias = Annotated[float, Field(ge=1, le=100), Unit("factor")]
Bytes: TypeAlias = Annotated[int, Field(ge=1, le=2**60), Unit("bytes")]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=_LONGEST_S), Unit("seconds")]
PositiveSeconds: TypeAlias = Annotated[float, Field(gt=0, le=_LONGEST_S), Unit("seconds")]


_KEY = re.compile(r"[A-Za-z0-9](?:[-._/A-Za-z0-9]{0,251}[A-Za-z0-9])?")
_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in _check_keys(labels).items():
        if not _VALUE.fullmatch(value):
            raise PydanticCustomError(
                "areal_label",
                '"{value}" is no label value: at most 63 letters, digits and "-_.", no sign first or last',
                {"key": key, "value": value},
            )
    return labels


def _check_keys(entries: dict[str, str]) -> dict[str, str]:
    for key in entries:
        if not _KEY.fullmatch(key):
            raise PydanticCustomError("areal_label", '"{key}" is not a key for labels or annotations', {"key": key})
    return entries


def _check_ref(text: str) -> str:
    try:
        return str(parse_ref(text))
    except ArealError as error:
        raise PydanticCustomError("areal_ref", "{problem}", {"problem": error.message}) from error


_ANNOTATIONS: Schema = {
    "type": "object",
    "propertyNames": text(_KEY.pattern),
    "additionalProperties": {"type": "string"},
}
_LABELS: Schema = {**_ANNOTATIONS, "additionalProperties": text(f"{_VALUE.pattern}|{EXPRESSION_PATTERN}")}
_REF = text(f"{ref_pattern()}|{EXPRESSION_PATTERN}")


class Metadata(SpecModel):
    """Name, labels and annotations of the object."""

    name: Annotated[Name, UpdateClass.META]
    """Unique within its kind: lower case letters, digits and `-`, at most 63."""
    labels: Annotated[dict[str, str], AfterValidator(_check_labels), WithJsonSchema(_LABELS), UpdateClass.META] = {}
    """Short values by which commands select objects (`-l team=rl`)."""
    annotations: Annotated[
        dict[str, str], AfterValidator(_check_keys), WithJsonSchema(_ANNOTATIONS), UpdateClass.META
    ] = {}
    """Any other information. With `areal.dev/protect: "true"`, areal refuses to delete the object."""
    depends_on: Annotated[list[Annotated[str, AfterValidator(_check_ref), WithJsonSchema(_REF)]], UpdateClass.META] = []
    """Further objects, as KIND/NAME, that must be ready before this object starts, besides those that the spec refers
    to. A TrainJob must have succeeded."""


LogLevel = Literal["debug", "info", "warning", "error"]


class SecretFrom(SpecModel):
    """Source of a secret, read when a process starts. It is never written to state, argv or a plan."""

    file: Annotated[Text | None, UpdateClass.ROLL] = None
    """File that contains the secret. Whitespace around it is ignored."""
    env: Annotated[Text | None, UpdateClass.ROLL] = None
    """Environment variable of the command that starts the process."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        some = {"anyOf": [given("file"), given("env")]}
        return [some, {"not": {"allOf": [written("file"), written("env")]}}]

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise PydanticCustomError("areal_one_of", 'needs exactly one of "file" and "env"')
        return self


class Auth(SpecModel):
    """Keys of a service's HTTP surface."""

    admin_key_from: Annotated[SecretFrom | None, UpdateClass.RECREATE] = None
    """Source of the admin key. Absent: areal generates a key and stores it in a file with mode 0600."""


class RolloutStrategy(SpecModel):
    """Rollout of a change that needs new processes. Only the next rollout reads it."""

    type: Annotated[Literal["Rolling", "Recreate", "BlueGreen"], UpdateClass.META] = "Rolling"
    """`Rolling`: starts new replicas beside the old ones, then drains the old ones. `Recreate`: stops all, then starts.
    `BlueGreen`: starts a full second set, then switches once."""
    max_surge: Annotated[PositiveCount | Literal["auto"], UpdateClass.META] = "auto"
    """Additional replicas during a rollout; `auto`: as many as free GPUs allow, 1 without GPUs."""
    min_ready_seconds: Annotated[Seconds, UpdateClass.META] = 0.0
    """Time that a new replica must stay ready before an old one is drained."""
    keep_old_seconds: Annotated[Seconds, UpdateClass.META] = 0.0
    """`BlueGreen` only: time that the old set is kept after the switch."""


class Strategy(RolloutStrategy):
    """Rollout of a change that needs new processes. Only the next rollout reads it."""

    max_unavailable: Annotated[Count, UpdateClass.META] = 0
    """Replicas that may be missing during a rollout."""
    progress_deadline_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 1800.0
    """Time without progress after which a rollout has failed; the old replicas continue to serve."""
    drain_timeout_seconds: Annotated[Seconds, UpdateClass.META] = 600.0
    """Maximum time for the running requests of an old replica to finish."""


class Backoff(SpecModel):
    """Pause before a restart. The first restart is immediate, then pauses grow by `factor`; after a quiet time they
    start anew."""

    initial_seconds: Annotated[Seconds, UpdateClass.META] = 10.0
    """Pause before the second restart. The first restart is immediate."""
    factor: Annotated[Factor, UpdateClass.META] = 2.0
    """Factor between a pause and the previous one."""
    max_seconds: Annotated[Seconds, UpdateClass.META] = 300.0
    """Maximum pause."""
    jitter: Annotated[Ratio, UpdateClass.META] = 0.25
    """Random part of a pause, so that replicas do not restart at the same moment."""


class Budget(SpecModel):
    """The number of restarts before areal gives up."""

    count: Annotated[Count, UpdateClass.META] = 6
    """Number of restarts within the window, or of consecutive restarts none of which became healthy. One more failure
    ends the process (`CrashLoop`). With the default pauses (0, 10, 20, 40, 80 and 160 s), that is after five minutes of
    fast failures."""
    window_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 1800.0
    """Length of the window."""


class Restart(SpecModel):
    """Restart of a process that exits by itself. Its supervisor reads it at the start: a change takes effect when the
    process is next started, and restarts nothing."""

    policy: Annotated[Literal["Always", "OnFailure", "Never"], UpdateClass.META] = "Always"
    """The exits after which the process is started again."""
    backoff: Annotated[Backoff, UpdateClass.META] = Backoff.model_construct()
    """Pauses between restarts."""
    budget: Annotated[Budget, UpdateClass.META] = Budget.model_construct()
    """Limit of restarts."""


class Resources(SpecModel):
    """Resources of one replica."""

    gpus: Annotated[Count | None, UpdateClass.ROLL] = None
    """GPUs. Absent: tensor x pipeline of the backend, 0 for `embedded`."""
    cpus: Annotated[Cores | None, UpdateClass.ROLL] = None
    """CPU cores, which limit the threads of the process. Absent: no limit."""
    memory: Annotated[Quantity | None, UpdateClass.ROLL] = None
    """Main memory that a cluster scheduler reserves, for example `64Gi`; `local` reserves none. Absent: the scheduler's
    default."""


class StartupProbe(SpecModel):
    """Longest time for a process to become ready. An exit during start fails at once."""

    deadline_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 1800.0
    """Time after which a process that is not ready has failed to start."""
    period_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 0.5
    """Time between two probes."""
    timeout_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 2.0
    """Timeout of one probe."""


class ReadinessProbe(SpecModel):
    """Whether a replica receives new requests: the router probes its data proxy."""

    period_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 1.0
    """Time between two probes."""
    timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 2.0
    """Timeout of one probe."""
    failure_threshold: Annotated[PositiveCount, UpdateClass.HOT] = 3
    """Consecutive failures after which the replica receives no new requests."""
    success_threshold: Annotated[PositiveCount, UpdateClass.HOT] = 2
    """Consecutive successes after which it receives requests again."""


class LivenessProbe(SpecModel):
    """Whether a process is restarted although it has not exited. A change takes effect when the process is next
    started."""

    period_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 10.0
    """Time between two probes."""
    timeout_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 5.0
    """Timeout of one probe."""
    failure_threshold: Annotated[PositiveCount, UpdateClass.META] = 6
    """Consecutive failures after which the process is restarted."""


class Probes(SpecModel):
    """Health probes of a replica."""

    startup: Annotated[StartupProbe, UpdateClass.META] = StartupProbe.model_construct()
    """Probe of a process that starts."""
    readiness: Annotated[ReadinessProbe, UpdateClass.HOT] = ReadinessProbe.model_construct()
    """Probe that decides whether a replica receives requests."""
    liveness: Annotated[LivenessProbe, UpdateClass.META] = LivenessProbe.model_construct()
    """Probe that detects a process that is stuck, which is then restarted."""


class Gateway(SpecModel):
    """The address that clients connect to."""

    host: Annotated[Text, UpdateClass.RECREATE] = "127.0.0.1"
    """Address to bind. Other addresses than loopback are reachable from other machines and require the admin key."""
    port: Annotated[Port, UpdateClass.RECREATE] = 8080
    """TCP port. areal never picks it, because clients have it in their configuration."""
    relays: Annotated[int, Field(ge=1, le=64), Unit("count"), UpdateClass.ROLL] = 1
    """Processes that share the port. Use more than one if one CPU core cannot handle the traffic."""


class ModelRef(SpecModel):
    """A model of an inference service."""

    service: Annotated[Name, UpdateClass.ROLL] = "default"
    """Name of the InferenceService."""
    model: Annotated[Name | None, UpdateClass.ROLL] = None
    """Name of the Model. Absent: the service's only model."""


class RolloutRef(ModelRef):
    """The source of a training job's samples."""

    agents: Annotated[Name | None, UpdateClass.ROLL] = None
    """Name of an AgentService that runs the episodes. The job trains the model of that service, so `service` and
    `model` may be left out."""


# The fields of a model, read from its annotations. Paths use YAML names; an item is a step like ``"[qwen]"``.


@dataclass(frozen=True)
class FieldInfo:
    """One field of a spec model. ``nested`` is the model of its value, or of its items when ``repeated``, or of its
    map values when ``mapped``."""

    name: str
    attribute: str
    owner: type[SpecModel]
    annotation: Any
    update: UpdateClass | None
    unit: Unit | None
    required: bool
    default: Any
    nested: type[SpecModel] | None
    repeated: bool
    mapped: bool


def resolve(model: type[SpecModel], path: FieldPath) -> Iterator[FieldInfo]:
    """Yield the fields along ``path``, down to the last one that a model declares."""
    current: type[SpecModel] | None = model
    steps = iter(path)
    for step in steps:
        info = fields_of(current).get(str(step)) if current is not None else None
        if info is None:
            return
        yield info
        current = info.nested
        if info.repeated or info.mapped:
            next(steps, None)


@cache
def fields_of(model: type[SpecModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by YAML name, in declaration order."""
    return {info.name: info for info in (_field(model, name) for name in model.model_fields)}


def all_fields(model: type[SpecModel], prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo]]:
    """Yield every field below ``model``, depth first, with its path (``[]`` stands for an item, ``*`` for a map
    key)."""
    for info in fields_of(model).values():
        path = (*prefix, info.name)
        yield path, info
        if info.nested is not None:
            inner: FieldPath = (*path, "[]") if info.repeated else (*path, "*") if info.mapped else path
            yield from all_fields(info.nested, inner)


def _field(model: type[SpecModel], attribute: str) -> FieldInfo:
    info = model.model_fields[attribute]
    nested, repeated, mapped = _nested(info.annotation)
    marks = [*info.metadata, *_marks(info.annotation)]
    return FieldInfo(
        name=info.alias or attribute,
        attribute=attribute,
        owner=model,
        annotation=info.annotation,
        update=next((mark for mark in marks if isinstance(mark, UpdateClass)), None),
        unit=next((mark for mark in marks if isinstance(mark, Unit)), None),
        required=info.is_required(),
        default=ABSENT if info.is_required() else info.default,
        nested=nested,
        repeated=repeated,
        mapped=mapped,
    )


def _nested(annotation: Any) -> tuple[type[SpecModel] | None, bool, bool]:
    """Return (model inside an annotation, whether it is in a list, whether it is in a map)."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return (annotation, False, False) if issubclass(annotation, SpecModel) else (None, False, False)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _nested(args[0])
    if origin is list:
        nested = _nested(args[0])[0]
        return nested, nested is not None, False
    if origin is dict:
        nested = _nested(args[1])[0]
        return nested, False, nested is not None
    if origin in (Union, types.UnionType):
        return next((found for found in map(_nested, args) if found[0] is not None), (None, False, False))
    return None, False, False


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield metadata nested in an annotation, as in ``Seconds | None``."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _marks(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from _marks(arm)
