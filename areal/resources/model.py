"""``Model``: weights served by engine processes, or a model behind an external HTTP endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import PydanticCustomError

from areal.resources.addresses import UrlError, parse_external_url
from areal.resources.backend import (
    BACKEND_PATTERN,
    INFERENCE_ENGINES,
    BackendError,
    engine_arg_faults,
    engine_args_schema,
    parse_backend,
)
from areal.resources.fields import (
    EXPRESSION,
    Name,
    Probes,
    Replicas,
    Resources,
    Restart,
    Schema,
    SecretFrom,
    SpecModel,
    Strategy,
    Text,
    given,
    text,
    when,
    without,
    written,
)
from areal.resources.tree import FieldPath, UpdateClass

SERVED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"  # without ":", which tells an adapter from its model
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


class External(SpecModel):
    """A model behind an HTTP endpoint: no token ids, no weight updates."""

    url: Annotated[Text, WithJsonSchema(text(_BASE_URL)), UpdateClass.ROLL]
    """Base URL, for example `https://api.openai.com/v1`. Link-local and metadata addresses are refused always."""
    api: Annotated[Literal["openai", "anthropic"], UpdateClass.ROLL] = "openai"
    """Protocol of the endpoint. `openai` (compatible): serves every API of the gateway; `anthropic`: `/v1/messages`."""
    allow_private: Annotated[bool, UpdateClass.ROLL] = False
    """True: the URL may lead to a private address. This machine's own needs it only where the URL does not say so
    itself (`localhost`, `127.0.0.1`, `[::1]`)."""
    model: Annotated[Text | None, UpdateClass.ROLL] = None
    """The model's name at the endpoint. Absent: the object's name."""
    api_key_from: Annotated[SecretFrom | None, UpdateClass.ROLL] = None
    """Source of the endpoint's API key."""


class ServedModel(SpecModel):
    """The fields of a Model, whether it stands alone or inline in its service."""

    backend: Annotated[
        Annotated[str, AfterValidator(_check_backend), WithJsonSchema(text(BACKEND_PATTERN))] | None, UpdateClass.ROLL
    ] = None
    """Engine and allocation, `engine:dims`: `sglang:d2t2` is two replicas of two GPUs each, `embedded` runs on CPU."""
    path: Annotated[Text | None, UpdateClass.ROLL] = None
    """Weights: a Hugging Face id, or a folder (relative to the working directory, else to the manifest)."""
    revision: Annotated[Text | None, UpdateClass.ROLL] = None
    """Branch, tag or commit of a Hugging Face id in `path`. Absent: `main`. The commit that it stood for when the model
    was first started is recorded (`status.commits`), and every later start takes that one."""
    tokenizer_path: Annotated[Text | None, UpdateClass.ROLL] = None
    """Tokenizer, spelled like `path`. Absent: beside the weights."""
    engine_args: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Arguments of the engine by name, passed as they are: `max-model-len: 8192`. Checked against the embedded engine's
    own, and against those of the vLLM or SGLang that is installed here."""
    proxy_args: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Arguments of the data proxies by name, passed as they are."""
    env: Annotated[dict[str, str], UpdateClass.ROLL] = {}
    """Environment of the engine. Quote numbers: every value is text."""
    env_from: Annotated[dict[str, SecretFrom], UpdateClass.ROLL] = {}
    """Environment of the engine that must not be written down: `HF_TOKEN: {env: HF_TOKEN}`."""
    tool_call_parser: Annotated[Text | None, UpdateClass.ROLL] = None
    """Parser of tool calls, by name (`qwen`, `hermes`, ...)."""
    reasoning_parser: Annotated[Text | None, UpdateClass.ROLL] = None
    """Parser that separates reasoning from the answer, by name (`qwen3`, `deepseek_r1`, ...)."""
    chat_template: Annotated[Text | None, UpdateClass.ROLL] = None
    """File with a Jinja chat template. Absent: the tokenizer's."""
    lora: Annotated[dict[str, str], UpdateClass.ROLL] = {}
    """LoRA adapters served beside the model: name to folder (vllm and sglang take Hugging Face ids too). A call names
    one as its model: `adapter`, or `model:adapter`."""
    served_model_name: Annotated[str | None, Field(pattern=SERVED_NAME, max_length=255), UpdateClass.IMMUTABLE] = None
    """The name that clients send as `model` and `/v1/models` lists: `Qwen/Qwen3-8B`. It is unique within a service.
    Absent: the object's name."""
    replicas: Annotated[Replicas | None, UpdateClass.HOT] = None
    """Number of replicas; wins over `d` of the backend. Absent: `d`."""
    resources: Annotated[Resources, UpdateClass.ROLL] = Resources()
    """Resources of one replica."""
    probes: Annotated[Probes, UpdateClass.META] = Probes()
    """Health probes of a replica."""
    restart: Annotated[Restart, UpdateClass.META] = Restart()
    """Restart of a replica that exits by itself."""
    external: Annotated[External | None, UpdateClass.ROLL] = None
    """An endpoint to forward to, instead of `backend` and `path`."""
    engine_url: Annotated[Annotated[Text, WithJsonSchema(text(_ENGINE_URL.pattern))] | None, UpdateClass.ROLL] = None
    """An SGLang or vLLM that runs already, `http://host:port`: attached with full recording, never started, changed or
    stopped. `backend` says which of the two it is, `path` what it serves (for the tokenizer)."""
    engine_api_key_from: Annotated[SecretFrom | None, UpdateClass.ROLL] = None
    """Source of the key of the engine at `engineUrl`, the one that it was started with as `--api-key`."""
    strategy: Annotated[Strategy | None, UpdateClass.META] = None
    """Rollout of changes of this model. Absent: the service's."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs, nothing else is forgotten."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        """But for ``engineArgs`` of an engine that is not ours, and the addresses that ``external.url`` may lead to."""
        ours: Schema = {"not": given("external")}
        attached: Schema = {"allOf": [written("engineUrl"), ours]}
        by_hand: Schema = {"properties": {"resources": {"additionalProperties": {"type": "null"}}}}
        one: Schema = {"anyOf": [text(r"(?:sglang|vllm)(?!.*d0*(?:[2-9]|1[0-9])).*"), {"type": "null"}, EXPRESSION]}
        return [
            when(
                written("external"),
                without("backend", "path", "lora", "replicas", "revision", "engineUrl", "engineApiKeyFrom"),
            ),
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

    def problems(self) -> Iterator[tuple[FieldPath, str]]:
        if self.external is not None:
            try:
                parse_external_url(self.external.url, allow_private=self.external.allow_private)
            except UrlError as error:
                yield ("external", "url"), f'"{self.external.url}" {error}'
        served: dict[str, object] = {"backend": self.backend, "path": self.path, "lora": self.lora}
        served["replicas"] = self.replicas
        served["revision"] = self.revision
        if self.external is not None:
            served |= {"engineUrl": self.engine_url, "engineApiKeyFrom": self.engine_api_key_from}
            for name in (name for name, value in served.items() if value):
                yield (name,), 'does not go with "external", which has no engine of ours'
            return
        if self.engine_url is not None:
            yield from self._attachment_problems(self.engine_url)
        elif self.engine_api_key_from is not None:
            yield ("engineApiKeyFrom",), 'is the key of an engine at "engineUrl", and there is none'
        for argument, fault in engine_arg_faults(self._engine(), self.engine_args):
            yield ("engineArgs", argument), fault
        for name in ("backend", "path"):
            if served[name] is None:
                yield (), f'required field "{name}" is missing (or "external", for a model behind a URL)'

    @property
    def starts_engine(self) -> bool:
        """Whether areal starts engine processes for it."""
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
        """Its name; empty where none is named."""
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
    EXAMPLE: ClassVar = (
        "my-model",
        {"service": "default", "backend": "embedded", "path": "Qwen/Qwen3-0.6B", "replicas": 1},
    )

    service: Annotated[Name, UpdateClass.IMMUTABLE] = "default"
    """Name of the InferenceService that serves it."""


class InlineModel(ServedModel):
    """A Model written inside its service. It becomes an object of its own, owned by the service."""

    name: Annotated[Name, UpdateClass.IMMUTABLE]
    """Name of the Model; clients ask for it by this name, or by its `servedModelName`."""
