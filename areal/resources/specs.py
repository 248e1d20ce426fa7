"""The specs of InferenceService and Model. Those of the other kinds have a module each, which a command that does not
need them does not import.

Sections that several kinds share are in ``fields``. Rules between fields exist twice, as ``problems`` for manifests and
as ``schema_rules`` for editors; tests keep the two consistent.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, JsonValue, WithJsonSchema
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function

from areal.errors import UsageFault
from areal.resources.addresses import UrlError, parse_external_url
from areal.resources.backend import (
    BACKEND_PATTERN,
    DATA_PROXY,
    INFERENCE_ENGINES,
    BackendError,
    engine_arg_faults,
    engine_args_schema,
    parse_backend,
)
from areal.resources.fields import (
    EXPRESSION,
    Auth,
    Bytes,
    Count,
    Fault,
    Gateway,
    LogLevel,
    Name,
    Port,
    PositiveSeconds,
    Probes,
    Replicas,
    Resources,
    Restart,
    Schema,
    SecretFrom,
    SpecModel,
    Strategy,
    Text,
    Variable,
    checked,
    fields_of,
    given,
    text,
    when,
    without,
    worded,
    written,
)
from areal.resources.scheduling import Scheduler
from areal.resources.tree import FieldPath, UpdateClass
from areal.wire.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, WHOLE, ParserNames, parser_conflict

SERVED_NAME = worded(  # without ":", which separates an adapter from its model
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", 'be letters, digits, ".", "_", "/" and "-", and begin with a letter or digit'
)
_ENGINE_URL = re.compile(r"http://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}/?")

_BASE_URL = r"[Hh][Tt][Tt][Pp][Ss]?://[^\s\\/?#@]+(?:/[^\s\\?#]*)?"


def _check_backend(text: str) -> str:
    try:
        parse_backend(text, engines=INFERENCE_ENGINES, single=True)
    except BackendError as error:
        raise PydanticCustomError(
            "areal_backend", "{problem}", {"problem": error.message, "column": error.column}
        ) from error
    return text


def _parser_problem(names: ParserNames, name: str) -> str | None:
    try:
        names.resolve(name)
    except UsageFault as error:
        return f"{error.message}; {error.hint}"
    return None


def _parser_schema(names: ParserNames) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": names.spellings}, text(_spelled(names, names.spellings))]})


def _spelled(names: ParserNames, wanted: Iterable[str]) -> str:
    """Return a regular expression for every spelling of these parsers, which ``names.resolve`` accepts."""
    spellings = [each for each in names.spellings if each in wanted or names.canonical.get(each, each) in wanted]
    return "|".join(
        "".join("[-_]" if char == "_" else f"[{char}{char.upper()}]" if char.isalpha() else char for char in each)
        for each in spellings
    )


ToolCallParser: TypeAlias = Annotated[
    str, checked("areal_parser", partial(_parser_problem, TOOL_CALL_PARSERS)), _parser_schema(TOOL_CALL_PARSERS)
]
ReasoningParser: TypeAlias = Annotated[
    str, checked("areal_parser", partial(_parser_problem, REASONING_PARSERS)), _parser_schema(REASONING_PARSERS)
]


def _parser_rules() -> Iterator[Schema]:
    """Yield ``parser_conflict`` as rules."""
    for name in WHOLE:
        same: list[Schema] = [{"type": "null"}, EXPRESSION, text(_spelled(TOOL_CALL_PARSERS, (name,)))]
        yield when(
            written("reasoningParser", text(_spelled(REASONING_PARSERS, (name,)))),
            {"properties": {"toolCallParser": {"anyOf": same}}},
        )
        thoughts = text(f"{_spelled(REASONING_PARSERS, (name,))}|[nN][oO][nN][eE]")
        yield when(
            written("toolCallParser", text(_spelled(TOOL_CALL_PARSERS, (name,)))),
            {"properties": {"reasoningParser": {"anyOf": [{"type": "null"}, EXPRESSION, thoughts]}}},
        )


class External(SpecModel):
    """A model behind an HTTP endpoint: no token ids, no weight updates."""

    url: Annotated[Text, WithJsonSchema(text(_BASE_URL)), UpdateClass.ROLL]
    """Base URL, for example `https://api.openai.com/v1`. Link-local and metadata addresses are always refused."""
    api: Annotated[Literal["openai", "anthropic"], UpdateClass.ROLL] = "openai"
    """Protocol of the endpoint. `openai` (or compatible) serves all APIs of the gateway, `anthropic` only
    `/v1/messages`."""
    allow_private: Annotated[bool, UpdateClass.ROLL] = False
    """True: the URL may lead to a private address. Loopback is allowed without it if the URL itself names it
    (`localhost`, `127.0.0.1`, `[::1]`)."""
    model: Annotated[Text | None, UpdateClass.ROLL] = None
    """The model's name at the endpoint. Absent: the object's name."""
    api_key_from: Annotated[SecretFrom | None, UpdateClass.ROLL] = None
    """Source of the endpoint's API key."""


_NOT_OF_EXTERNAL = (
    *("backend", "path", "lora", "replicas", "revision", "engineUrl", "engineApiKeyFrom", "tokenizerPath"),
    *("engineArgs", "env", "envFrom", "toolCallParser", "reasoningParser", "chatTemplate"),
)


class ServedModel(SpecModel):
    """The fields of a Model, whether it is a separate object or inline in its service."""

    backend: Annotated[
        Annotated[str, AfterValidator(_check_backend), WithJsonSchema(text(BACKEND_PATTERN))] | None, UpdateClass.ROLL
    ] = None
    """Engine and allocation, `engine:dims`: `sglang:d2t2` is two replicas of two GPUs each, `embedded` runs on CPU."""
    path: Annotated[Text | None, UpdateClass.ROLL] = None
    """Weights: a Hugging Face id, or a folder (relative to the working directory, else to the folder of the
    manifest)."""
    revision: Annotated[Text | None, UpdateClass.ROLL] = None
    """Branch, tag or commit of a Hugging Face id in `path`. Absent: `main`. The first start records the commit
    (`status.commits`), and later starts use the same one."""
    tokenizer_path: Annotated[Text | None, UpdateClass.ROLL] = None
    """Tokenizer: a Hugging Face id or a folder, as for `path`. Absent: the one in `path`."""
    engine_args: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Arguments of the engine by name, passed unchanged: `max-model-len: 8192`. areal checks them against the flags of
    the embedded engine, or of the vLLM or SGLang that is installed on this machine."""
    proxy_args: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Arguments of the data proxies by name: `session-ttl: 600`. areal checks names and values."""
    env: Annotated[dict[Variable, str], UpdateClass.ROLL] = {}
    """Environment variables of the engine. Quote numbers, because every value is a string."""
    env_from: Annotated[dict[Variable, SecretFrom], UpdateClass.ROLL] = {}
    """Environment variables of the engine with secret values, which areal does not record: `HF_TOKEN: {env:
    HF_TOKEN}`."""
    tool_call_parser: Annotated[ToolCallParser | None, UpdateClass.ROLL] = None
    """Name of the tool-call parser (`qwen`, `hermes`, ...). Absent: detected from the chat template. `none`: calls stay
    text."""
    reasoning_parser: Annotated[ReasoningParser | None, UpdateClass.ROLL] = None
    """Name of the parser that separates reasoning from the answer (`qwen3`, `deepseek_r1`, ...). Absent, or `none`:
    reasoning stays in the answer."""
    chat_template: Annotated[Text | None, UpdateClass.ROLL] = None
    """File with a Jinja chat template. Absent: the template of the tokenizer."""
    lora: Annotated[dict[str, str], UpdateClass.ROLL] = {}
    """LoRA adapters that are served with the model: name to folder (vLLM and SGLang also accept Hugging Face ids). A
    call selects one as its model: `adapter`, or `model:adapter`."""
    served_model_name: Annotated[str | None, Field(pattern=SERVED_NAME, max_length=255), UpdateClass.IMMUTABLE] = None
    """The name that clients send as `model` and that `/v1/models` lists: `Qwen/Qwen3-8B`. It is unique within a
    service. Absent: the object's name."""
    replicas: Annotated[Replicas | None, UpdateClass.HOT] = None
    """Number of replicas; overrides `d` of the backend. Absent: `d`."""
    resources: Annotated[Resources, UpdateClass.ROLL] = Resources.model_construct()
    """Resources of one replica."""
    probes: Annotated[Probes, UpdateClass.META] = Probes.model_construct()
    """Health probes of a replica."""
    restart: Annotated[Restart, UpdateClass.META] = Restart.model_construct()
    """Restart of a replica that exits by itself."""
    external: Annotated[External | None, UpdateClass.ROLL] = None
    """An external endpoint that calls are forwarded to, instead of `backend` and `path`."""
    engine_url: Annotated[Annotated[Text, WithJsonSchema(text(_ENGINE_URL.pattern))] | None, UpdateClass.ROLL] = None
    """URL of a running SGLang or vLLM server, `http://host:port`. areal records its calls, and never starts, changes or
    stops it. `backend` names the engine, `path` its model (for the tokenizer)."""
    engine_api_key_from: Annotated[SecretFrom | None, UpdateClass.ROLL] = None
    """Source of the key of the engine at `engineUrl`: the `--api-key` that it was started with."""
    strategy: Annotated[Strategy | None, UpdateClass.META] = None
    """Rollout of changes to this model. Absent: as the service does."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the object is kept."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        """Return ``problems`` as rules, except those for engine-specific arguments of SGLang and vLLM, and for the
        addresses in ``external.url``."""
        ours: Schema = {"not": given("external")}
        attached: Schema = {"allOf": [written("engineUrl"), ours]}
        by_hand: Schema = {"properties": {"resources": {"additionalProperties": {"type": "null"}}}}
        one: Schema = {"anyOf": [text(r"(?:sglang|vllm)(?!.*d0*(?:[2-9]|1[0-9])).*"), {"type": "null"}, EXPRESSION]}
        return [
            when(written("external"), {"allOf": [without(*_NOT_OF_EXTERNAL), by_hand]}),
            {"properties": {"proxyArgs": {"anyOf": [engine_args_schema(DATA_PROXY), EXPRESSION]}}},
            *_parser_rules(),
            when(ours, given("backend", "path")),
            when(attached, without("engineArgs", "lora", "replicas", "envFrom", "env")),
            when(attached, {"allOf": [{"properties": {"backend": one}}, by_hand]}),
            {"not": {"allOf": [written("engineApiKeyFrom"), ours, {"not": given("engineUrl")}]}},
            *(
                when(
                    {"allOf": [ours, written("backend", {"pattern": f"^{engine}(?:[:.]|$)"})]},
                    {"properties": {"engineArgs": {"anyOf": [engine_args_schema(engine), EXPRESSION]}}},
                )
                for engine in ("embedded", "sglang", "vllm")
            ),
        ]

    def problems(self) -> Iterator[tuple[FieldPath, str] | Fault]:
        if self.external is not None:
            try:
                parse_external_url(self.external.url, allow_private=self.external.allow_private)
            except UrlError as error:
                yield ("external", "url"), f'"{self.external.url}" {error}'
        for argument, fault in engine_arg_faults(DATA_PROXY, self.proxy_args):
            yield ("proxyArgs", argument), fault
        if conflict := parser_conflict(self.tool_call_parser, self.reasoning_parser):
            yield ("reasoningParser",), conflict
        if self.external is not None:
            for name in _NOT_OF_EXTERNAL:
                if getattr(self, fields_of(type(self))[name].attribute):
                    yield (name,), 'does not go with "external", which has no engine of ours'
            if self.resources != Resources():
                yield ("resources",), 'does not go with "external", which has no engine of ours'
            return
        if self.engine_url is not None:
            yield from self._attachment_problems(self.engine_url)
        elif self.engine_api_key_from is not None:
            message = 'is the key of an engine at "engineUrl", and there is none'
            yield Fault(("engineApiKeyFrom",), message, absent=("engineUrl",))
        for argument, fault in engine_arg_faults(self._engine(), self.engine_args):
            yield ("engineArgs", argument), fault
        for name in ("backend", "path"):
            if getattr(self, name) is None:
                message = f'required field "{name}" is missing (or "external", for a model behind a URL)'
                yield Fault((), message, absent=(name,))

    @property
    def starts_engine(self) -> bool:
        """Whether areal starts engine processes for this model."""
        return self.external is None and self.engine_url is None

    def _attachment_problems(self, url: str) -> Iterator[tuple[FieldPath, str]]:
        if not _ENGINE_URL.fullmatch(url):
            yield ("engineUrl",), f'"{url}" must be http://host:port, nothing else'
        if self.backend is not None and self._engine() not in ("sglang", "vllm"):
            yield ("backend",), "must be sglang or vllm, the one that runs at engineUrl"
        given = {"engineArgs": self.engine_args, "lora": self.lora, "replicas": self.replicas}
        given |= {"resources": self.resources != Resources(), "envFrom": self.env_from, "env": self.env}
        for name in (name for name, value in given.items() if value):
            yield (name,), 'does not go with "engineUrl": the engine runs already, as whoever started it wanted'
        if self.backend and parse_backend(self.backend, engines=INFERENCE_ENGINES, single=True).parts[0].data > 1:
            yield ("backend",), "says several replicas; at engineUrl there is one engine"

    def _engine(self) -> str:
        """Return the engine's name; empty if ``backend`` is absent."""
        return (
            parse_backend(self.backend, engines=INFERENCE_ENGINES, single=True).parts[0].engine if self.backend else ""
        )


class ModelSpec(ServedModel):
    """A model attached to an inference service."""

    REPLACEABLE: ClassVar = True
    REFERENCES: ClassVar = (((), "service", "InferenceService"),)
    FILES: ClassVar = (
        *(("path",), ("tokenizerPath",), ("chatTemplate",), ("lora", "*"), ("envFrom", "*", "file")),
        *(("external", "apiKeyFrom", "file"), ("engineApiKeyFrom", "file")),
    )
    EXAMPLE_NEEDS: ClassVar = ("InferenceService/default",)
    EXAMPLE: ClassVar = (
        "my-model",
        {"service": "default", "backend": "embedded", "path": "Qwen/Qwen3-0.6B", "replicas": 1},
    )

    service: Annotated[Name, UpdateClass.IMMUTABLE] = "default"
    """Name of the InferenceService that serves it."""


class InlineModel(ServedModel):
    """A Model written inside its service. It becomes a separate object that the service owns."""

    name: Annotated[Name, UpdateClass.IMMUTABLE]
    """Name of the Model. Clients use this name, or its `servedModelName`."""


class _BuiltWhenUsed:
    """Builds the validator of a model when the first value arrives: most services have no model inside."""

    def __get_pydantic_core_schema__(self, model: type[SpecModel], handler: object) -> CoreSchema:
        return no_info_plain_validator_function(model.model_validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, JsonValue]:
        InlineModel.model_rebuild()
        return handler(InlineModel.__pydantic_core_schema__)


class Router(SpecModel):
    """Choice of the replica for a request."""

    strategy: Annotated[Literal["auto", "round_robin", "least_loaded", "prefix"], UpdateClass.HOT] = "auto"
    """`auto`: the replica that holds the session, else one with the same prompt prefix, else the less loaded of two.
    The other values use a single rule."""
    port: Annotated[Port | None, UpdateClass.RECREATE] = None
    """TCP port of the router, which listens on loopback. Absent: a free port, which stays the same across restarts."""


class Limits(SpecModel):
    """Limits of the gateway."""

    max_body_bytes: Annotated[Bytes, UpdateClass.HOT] = 64 * 2**20
    """Maximum size of a request body; a larger one gets status 413."""
    request_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 3600.0
    """Maximum time of a request, including its stream."""
    max_queued_requests: Annotated[Count, UpdateClass.HOT] = 4096
    """Maximum number of requests that wait for a replica; further ones get status 503."""


class InferenceServiceSpec(SpecModel):
    """One address for several models, with an OpenAI-compatible and an Anthropic-compatible HTTP API in front of the
    engines."""

    INLINE: ClassVar = ("models", "Model", "service")
    FILES: ClassVar = (("auth", "adminKeyFrom", "file"),)
    EXAMPLE: ClassVar = ("default", {"gateway": {"host": "127.0.0.1", "port": 8080}})

    gateway: Annotated[Gateway, UpdateClass.ROLL] = Gateway.model_construct()
    """The address that clients connect to."""
    router: Annotated[Router, UpdateClass.HOT] = Router.model_construct()
    """Choice of the replica for a request."""
    auth: Annotated[Auth, UpdateClass.RECREATE] = Auth.model_construct()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, UpdateClass.RECREATE] = Scheduler.model_construct()
    """Backend of the processes of the service and its models."""
    strategy: Annotated[Strategy, UpdateClass.META] = Strategy.model_construct()
    """Rollout of changes."""
    limits: Annotated[Limits, UpdateClass.HOT] = Limits.model_construct()
    """Limits of the gateway."""
    models: Annotated[list[Annotated[InlineModel, _BuiltWhenUsed()]], UpdateClass.HOT] = []
    """Models of this service, written inline. Each becomes a Model object that the service owns."""
    env: Annotated[dict[Variable, str], UpdateClass.ROLL] = {}
    """Environment variables of the gateway, the router and the data proxies of its models. Quote numbers, because every
    value is a string."""
    log_level: Annotated[LogLevel, UpdateClass.ROLL] = "info"
    """Lowest level that the gateway and the router log."""
    restart: Annotated[Restart, UpdateClass.META] = Restart.model_construct()
    """Restart of a gateway or router that exits by itself."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process of the service or its models runs; the objects are kept."""
