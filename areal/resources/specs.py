"""The specs of the kinds: InferenceService, Model, AgentService and TrainJob.

Sections that several kinds share are in ``fields``. Rules between fields exist twice, as ``problems`` for manifests and
as ``schema_rules`` for editors; tests keep the two consistent.
"""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from areal.resources.addresses import UrlError, check_server_url, parse_external_url
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
    Backoff,
    Bytes,
    Cores,
    Count,
    Fault,
    Gateway,
    LogLevel,
    ModelRef,
    Name,
    Port,
    PositiveCount,
    PositiveSeconds,
    Probes,
    Quantity,
    Replicas,
    Resources,
    Restart,
    RolloutRef,
    RolloutStrategy,
    Schema,
    Seconds,
    SecretFrom,
    SpecModel,
    Strategy,
    Text,
    Variable,
    fields_of,
    given,
    text,
    when,
    without,
    worded,
    written,
)
from areal.resources.parsers import ReasoningParser, ToolCallParser, parser_rules
from areal.resources.scheduling import Scheduler
from areal.resources.tree import TRAINERS, FieldPath, UpdateClass
from areal.wire.parsers import parser_conflict

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
            *parser_rules(),
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
    models: Annotated[list[InlineModel], UpdateClass.HOT] = []
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


ENTRY_POINT = worded(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", 'look like "module:Name"')
"""``package.module:Name``."""


_EXAMPLE_AGENT = '''"""An agent that answers with its session's model."""

from areal.client.inference import AsyncInferenceClient


async def agent(message, *, history, emitter, base_url, api_key, model):
    messages = [*history, {"role": "user", "content": message}]
    client = AsyncInferenceClient(base_url, api_key, model=model)
    async with client, client.stream_chat(messages) as chunks:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                await emitter.emit_delta(choice["delta"].get("content") or "")
'''
_TOOL_URL = worded(r"^https?://[^\s/?#@]+[^\s#]*$", 'be the URL of a server, "http://..." or "https://..."')
_COMMAND_GIVEN: Schema = {"required": ["command"], "properties": {"command": {"not": {"enum": [[], None]}}}}


class McpServer(SpecModel):
    """A tool server that speaks the Model Context Protocol."""

    command: Annotated[list[Text], UpdateClass.ROLL] = []
    """A program that speaks MCP on stdin and stdout, with its arguments. Each worker runs one."""
    url: Annotated[str | None, Field(pattern=_TOOL_URL), UpdateClass.ROLL] = None
    """URL of a running MCP server."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        both: Schema = {"allOf": [written("command", {"minItems": 1}), written("url")]}
        return [{"anyOf": [_COMMAND_GIVEN, given("url")]}, {"not": both}]

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise PydanticCustomError("areal_one_of", 'needs exactly one of "command" and "url"')
        return self


class AgentTool(SpecModel):
    """A source of tools."""

    mcp: Annotated[McpServer, UpdateClass.ROLL]
    """An MCP server."""


class SessionSettings(SpecModel):
    """One conversation with the agent."""

    idle_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 1800.0
    """Time without a turn after which a session is closed."""
    turn_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 600.0
    """Time without text, a tool call or a result from the agent after which a turn fails."""
    max_concurrent_per_pair: Annotated[PositiveCount, UpdateClass.HOT] = 64
    """Maximum number of turns that a pair runs at once; further turns wait."""


class AgentGateway(SpecModel):
    """The address that clients of the agent connect to."""

    host: Annotated[Text, UpdateClass.RECREATE] = "127.0.0.1"
    """Address to bind. Other addresses than loopback are reachable from other machines and require the admin key."""
    port: Annotated[Port, UpdateClass.RECREATE] = 8090
    """TCP port. areal never picks it, because clients have it in their configuration."""


class AgentServiceSpec(SpecModel):  # type: ignore[no-redef]  # mypy confuses the field with __init__'s **kwargs
    """Runs `agent` in `pairs` worker processes and keeps each session on its pair."""

    REFERENCES: ClassVar = ((("inference",), "service", "InferenceService"), (("inference",), "model", "Model"))
    FILES: ClassVar = (("auth", "adminKeyFrom", "file"), ("workingDir",), ("envFrom", "*", "file"))
    EXAMPLE: ClassVar = ("my-agent", {"agent": "my_agent:agent", "pairs": 1, "inference": {"service": "default"}})
    EXAMPLE_FILES: ClassVar = {"my_agent.py": _EXAMPLE_AGENT}
    EXAMPLE_NEEDS: ClassVar = ("InferenceService/default",)

    agent: Annotated[str | None, Field(pattern=ENTRY_POINT), UpdateClass.ROLL] = None
    """The agent, as `module:Name`: a class with `async run(request, *, emitter)` (`areal.api.agent`); an object with
    `async run(data, **extra)`, as for workflows; a function of the message; or an `Agent` of the OpenAI Agents SDK."""
    kwargs: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Keyword arguments of the agent's class."""
    command: Annotated[list[Text], UpdateClass.ROLL] = []
    """Instead of `agent`: a program that answers one message, with its arguments."""
    tools: Annotated[list[AgentTool], UpdateClass.ROLL] = []
    """Sources of tools. An agent with a parameter `tools` gets the tools, a command gets the servers in
    `$AREAL_MCP_SERVERS`."""
    pairs: Annotated[Replicas, UpdateClass.HOT] = 1
    """Number of worker and data proxy pairs."""
    inference: Annotated[ModelRef | None, UpdateClass.ROLL] = None
    """The model that the agent calls and that records its sessions. Absent: the agent uses its own model, whose calls
    are not recorded."""
    session: Annotated[SessionSettings, UpdateClass.HOT] = SessionSettings.model_construct()
    """Lifetime and number of sessions."""
    setup_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 120.0
    """Time after which a process of a pair that is not ready has failed to start."""
    drain_timeout_seconds: Annotated[Seconds, UpdateClass.META] = 600.0
    """Maximum time for the running turns of a stopping pair to finish."""
    health_poll_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 5.0
    """Time between two health checks of a pair."""
    env: Annotated[dict[Variable, str], UpdateClass.ROLL] = {}
    """Environment variables of the workers, which run the agent. The gateway, the router and the data proxies have
    those of the command that starts them. Quote numbers, because every value is a string."""
    env_from: Annotated[dict[Variable, SecretFrom], UpdateClass.ROLL] = {}
    """Environment variables of the workers with secret values, which areal does not record: `SEARCH_KEY: {env:
    SEARCH_KEY}`."""
    working_dir: Annotated[Text | None, UpdateClass.ROLL] = None
    """Folder in which the workers start; it is also on their import path. Absent: the folder where the service was
    first applied."""
    gateway: Annotated[AgentGateway, UpdateClass.ROLL] = AgentGateway.model_construct()
    """The address that clients connect to."""
    auth: Annotated[Auth, UpdateClass.RECREATE] = Auth.model_construct()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, UpdateClass.RECREATE] = Scheduler.model_construct()
    """Backend of the processes."""
    strategy: Annotated[RolloutStrategy, UpdateClass.META] = RolloutStrategy.model_construct()
    """Rollout of changes: a pair is a replica."""
    restart: Annotated[Restart, UpdateClass.META] = Restart.model_construct()
    """Restart of a process that exits by itself."""
    log_level: Annotated[LogLevel, UpdateClass.ROLL] = "info"
    """Lowest level that the processes log."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the object is kept."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        by_command = written("command", {"minItems": 1})
        return [{"anyOf": [given("agent"), _COMMAND_GIVEN]}, when(by_command, without("agent", "kwargs"))]

    def problems(self) -> Iterator[tuple[FieldPath, str]]:
        if self.agent is None and not self.command:
            yield (), 'one of "agent" and "command" is needed'
        if self.command:
            for name, value in (("agent", self.agent), ("kwargs", self.kwargs)):
                if value:
                    yield (name,), 'does not go with "command"'
        for number, tool in enumerate(self.tools):
            if tool.mcp.url is not None:
                try:
                    check_server_url(tool.mcp.url)
                except UrlError as error:
                    yield ("tools", number, "mcp", "url"), f'"{tool.mcp.url}" {error}'


_FUNCTION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
DRIVER = worded(
    rf"^(?:[^\s:]+\.py(?::{_FUNCTION})?|{_FUNCTION}[:.]{_FUNCTION})$", 'look like "module:function" or "path/driver.py"'
)
DRIVERS = {kind: (f"areal.training.drivers:{kind}", f"{kind.upper()}Config") for kind in TRAINERS}
DRIVERS["null"] = ("areal.training.drivers:evaluate", "PPOConfig")
"""The built-in drivers by ``trainer.type``, each with the class of its configuration."""


class JobResources(SpecModel):
    """Resources of the job's training processes."""

    gpus: Annotated[Count | None, UpdateClass.IMMUTABLE] = None
    """GPUs of each process. Absent: 1 where the machine has GPUs, else 0."""
    cpus: Annotated[Cores | None, UpdateClass.IMMUTABLE] = None
    """CPU cores that a cluster scheduler reserves for each process; `local` reserves none. Absent: the scheduler's
    default."""
    memory: Annotated[Quantity | None, UpdateClass.IMMUTABLE] = None
    """Main memory that a cluster scheduler reserves for each process, for example `64Gi`. Absent: the scheduler's
    default."""
    nodes: Annotated[PositiveCount, UpdateClass.IMMUTABLE] = 1
    """Number of machines."""
    processes_per_node: Annotated[PositiveCount, UpdateClass.IMMUTABLE] = 1
    """Training processes on each machine."""


class JobRestart(SpecModel):
    """Restart after the driver fails. A restarted job resumes from its newest checkpoint."""

    policy: Annotated[Literal["OnFailure", "Never"], UpdateClass.RECREATE] = "OnFailure"
    """`OnFailure`: start again. `Never`: the first failure is final."""
    max_restarts: Annotated[Count, UpdateClass.RECREATE] = 3
    """Restarts before the job is `Failed`."""
    backoff: Annotated[Backoff, UpdateClass.RECREATE] = Backoff.model_construct()
    """Pauses between restarts."""


_EXAMPLE_CONFIG = """\
# Answers are sampled, scored by my_reward.py, and learned from: GRPO. Paths are relative to the job's working folder.
experiment_name: my-job
trial_name: first
total_train_steps: 100
tokenizer_path: ${actor.path}
trainer: {type: grpo}
train_dataset: {path: questions.jsonl, batch_size: 4}
reward_fn: my_reward:reward
gconfig: {n_samples: 4, max_new_tokens: 64}
rollout:
  backend: embedded:d1  # of a service of the job's own, gone at its end; on a GPU: sglang:d1 or vllm:d1
actor:
  path: Qwen/Qwen3-0.6B
  backend: fsdp:d1
  optimizer: {lr: 1.0e-6}
  kl_ctl: 0.0
"""
_EXAMPLE_REWARD = '''"""What an answer is worth."""


def reward(prompt, completions, prompt_ids, completion_ids, **data):
    """1 for an answer that ends with the right number. ``data``: the row of the data set."""
    return float(completions.strip().rstrip(".").endswith(data["answer"]))
'''
_EXAMPLE_QUESTIONS = "".join(
    f'{{"messages": [{{"role": "user", "content": "{a} + {b} = ?"}}], "answer": "{a + b}"}}\n'
    for a in range(2, 6)
    for b in range(11, 15)
)


class TrainJobSpec(SpecModel):
    """A training run: a driver, its configuration, and the models it samples from."""

    REPLACEABLE: ClassVar = True
    REFERENCES: ClassVar = (
        (("rollout",), "service", "InferenceService"),
        (("rollout",), "model", "Model"),
        (("rollout",), "agents", "AgentService"),
    )
    INSTEAD: ClassVar = {("rollout", "service"): "agents"}
    FILES: ClassVar = (("workingDir",), ("envFrom", "*", "file"), ("config",))
    FILES_FROM: ClassVar = {"config": "workingDir"}
    EXAMPLE: ClassVar = ("my-job", {"config": "config.yaml"})
    EXAMPLE_FILES: ClassVar = {
        "config.yaml": _EXAMPLE_CONFIG,
        "my_reward.py": _EXAMPLE_REWARD,
        "questions.jsonl": _EXAMPLE_QUESTIONS,
    }

    driver: Annotated[str | None, Field(pattern=DRIVER), UpdateClass.IMMUTABLE] = None
    """The driver, as `module:function` or as a script, `path/driver.py`. Absent: `driver:` of the configuration, else
    the built-in driver of its trainer type."""
    config: Annotated[Text | dict[str, JsonValue] | None, UpdateClass.IMMUTABLE] = None
    """The driver's configuration: a file, or an inline map."""
    overrides: Annotated[list[Text], UpdateClass.IMMUTABLE] = []
    """Overrides of the configuration, as `key=value`, passed to the driver unchanged."""
    rollout: Annotated[RolloutRef | None, UpdateClass.IMMUTABLE] = None
    """The model that the job samples from and updates, or the agents that use it. Absent: the job starts and owns its
    own service if its configuration describes an inference engine (`rollout.backend`, `allocation_mode`)."""
    scheduler: Annotated[Scheduler, UpdateClass.IMMUTABLE] = Scheduler.model_construct()
    """Backend of the processes."""
    resources: Annotated[JobResources, UpdateClass.IMMUTABLE] = JobResources.model_construct()
    """Resources of the training processes."""
    env: Annotated[dict[Variable, str], UpdateClass.IMMUTABLE] = {}
    """Environment variables of the driver. Quote numbers, because every value is a string."""
    env_from: Annotated[dict[Variable, SecretFrom], UpdateClass.IMMUTABLE] = {}
    """Environment variables of the driver with secret values, which areal does not record: `WANDB_API_KEY: {env:
    WANDB_API_KEY}`."""
    working_dir: Annotated[Text | None, UpdateClass.IMMUTABLE] = None
    """Folder in which the driver starts; it is also on its import path. Absent: the folder where the job was first
    applied."""
    restart: Annotated[JobRestart, UpdateClass.RECREATE] = JobRestart.model_construct()
    """Restart after the driver fails."""
    ttl_seconds_after_finished: Annotated[Seconds | None, UpdateClass.HOT] = None
    """Time after which the next `areal reconcile` deletes a finished job. Absent: it stays until you delete it."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the job resumes from its newest checkpoint."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        overrides: Schema = {"required": ["overrides"], "properties": {"overrides": {"not": {"enum": [[]]}}}}
        return [{"anyOf": [given("driver"), given("config"), overrides]}]

    def problems(self) -> Iterator[tuple[FieldPath, str]]:
        if self.driver is None and self.config is None and not self.overrides:
            yield (), 'one of "driver", "config" and "overrides" is needed'
