"""The configuration of each service process: its starter writes it as JSON, the process reads it (``--config``).

A field is also a flag of the process, for a start by hand: ``router_url`` is ``--router-url``, its ``help`` the flag's.
Durations are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from areal.dataclasses import dataclass, field
from areal.wire.fields import Count, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from areal.wire.routing import DEFAULT_READINESS, GatewayLimits, Readiness, Strategy

LogLevel = Literal["debug", "info", "warning", "error"]


def option(default: Any, help: str | None = None, pattern: str | None = None) -> Any:
    """Return a field with a default. Without ``help`` its flag is not shown. Manifests check ``pattern``."""
    return field(default=default, metadata={"help": help, "pattern": pattern})


def required(help: str) -> Any:
    return field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The address and key of a service."""

    host: str = option("127.0.0.1", "address to listen on (default: loopback)")
    port: NonNegativeInt = option(0, "0 takes a free one")
    admin_key_file: str | None = option(None, "file (0600) with the admin key")
    log_level: LogLevel = option("info", "debug, info, warning or error")
    drain_timeout: NonNegativeFloat = option(600.0, "seconds running requests get at SIGTERM")


@dataclass(frozen=True, kw_only=True)
class FollowerConfig(ServeConfig):
    """A gateway, which follows a router. The limits hold until the router's table says otherwise."""

    router_url: str = required("address of the router")
    max_body_bytes: NonNegativeInt = option(GatewayLimits.max_body_bytes, "longest request body, or WebSocket frame")
    request_timeout: NonNegativeFloat = option(GatewayLimits.request_timeout_seconds, "seconds without progress")
    max_queued_requests: NonNegativeInt = option(
        GatewayLimits.max_queued_requests, "requests that may wait for a worker, in each process"
    )

    @property
    def limits(self) -> GatewayLimits:
        return GatewayLimits(self.max_body_bytes, self.request_timeout, self.max_queued_requests)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(FollowerConfig):
    port: NonNegativeInt = option(8080, "0 takes a free one")
    relays: Count = option(1, "relay processes on the one port")
    relay_index: int | None = option(None)  # set by the supervisor on its children


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServeConfig):
    port: NonNegativeInt = option(8081, "0 takes a free one")
    drain_timeout: NonNegativeFloat = option(30.0, "seconds running requests get at SIGTERM")
    strategy: Strategy = option("auto", "how a worker is picked: auto, round_robin, least_loaded or prefix")
    health_period: PositiveFloat = option(1.0, "seconds between two probes of a worker, where its model does not say")
    state_file: str | None = option(None, "where what was declared is kept, and data proxies find the router")


WEIGHT_UPDATE_FILE = "weight_update.json"
"""The file in the folder of a job that has the address of its weight-update gateway."""
WEIGHT_HISTORY_FILE = "weight_updates.jsonl"
"""Beside it: the updates of that gateway and of those before it, a line each."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdateConfig(ServeConfig):
    port: NonNegativeInt = option(7080, "0 takes a free one")
    drain_timeout: NonNegativeFloat = option(60.0, "seconds running requests get at SIGTERM")
    discovery_file: str | None = option(None, "written with the address once the service listens, removed at exit")
    writer: str | None = option(None, "the job, or the folder of the run, whose weights these are")


@dataclass(frozen=True, kw_only=True)
class EmbeddedEngineConfig(ServeConfig):
    """``None`` and ``auto`` are resolved once the model and the machine are known."""

    port: NonNegativeInt = option(8083, "0 takes a free one")
    model_path: str = required("folder with config.json and safetensors, or a hub's id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "of weights and KV cache (auto: the model's, or float32 on a CPU that computes that faster)"
    )
    device: str = option(
        "auto", "cpu, cuda, cuda:1 (auto: cuda when there is one)", pattern="auto|cpu|cuda(?::[0-9]{1,3})?"
    )
    max_batch_size: PositiveInt = option(64, "sequences computed together")
    max_model_len: PositiveInt | None = option(None, "tokens of prompt and answer together (the model's)")
    prefill_tokens: PositiveInt = option(2048, "prompt tokens of one step")
    kv_memory_gib: PositiveFloat | None = option(None, "bound of the KV cache (a share of free memory)")
    threads: PositiveInt | None = option(None, "CPU threads of one operation (OMP_NUM_THREADS, or half the CPUs)")
    lora: tuple[str, ...] = option((), "LoRA adapters in PEFT's format, NAME=FOLDER each")


@dataclass(frozen=True, kw_only=True)
class RegistrationConfig:
    """Registration of a data proxy at its router. ``router_file``: where the router writes its address. ``expected``
    replicas make the model's pool, probed as ``readiness`` says. ``held``: no calls before the command routes them in.
    """

    router_file: str
    worker_id: str
    expected: int = 1
    readiness: Readiness = DEFAULT_READINESS
    held: bool = False


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Retention times of a model's journals."""

    reward_finish_timeout: NonNegativeFloat = option(0.0, "seconds from the last reward to the end of its trajectory")
    export_retention: NonNegativeFloat = option(600.0, "seconds that an export stays repeatable")
    visibility_timeout: NonNegativeFloat = option(60.0, "seconds until a lease that is not acknowledged is given again")
    session_ttl: NonNegativeFloat = option(3600.0, "seconds until an idle, unrewarded session ends")
    ready_ttl: NonNegativeFloat = option(86400.0, "seconds until a ready trajectory that is not fetched is dropped")
    hitl_turns: Count = option(256)  # unrewarded turns of the human in the loop before a new trajectory opens


@dataclass(frozen=True, kw_only=True)
class DataProxyConfig(ServeConfig, Retention):
    """``state_dir``: the store of the model's journals."""

    port: NonNegativeInt = option(8082, "0 takes a free one")
    model: str = required("the name under which callers know the model")
    engine: Literal["embedded", "sglang", "vllm", "external"] = required("the kind of engine")
    engine_url: str = required("for external: the API's base URL, with its /v1")
    attached: bool = option(False, "the engine is not ours: it is sent no key of ours")
    engine_key_file: str | None = option(None, "--attached: file with its key (else $AREAL_ENGINE_API_KEY)")
    provider_model: str | None = option(None, "external: the provider's name of the model (default: --model)")
    provider_key_file: str | None = option(None, "external: file with its key (else $AREAL_PROVIDER_API_KEY)")
    provider_api: Literal["openai", "anthropic"] = option("openai", "external: whose API it is")
    allow_private: bool = option(False, "external: the URL may lead to a private address")
    model_path: str | None = option(None, "the engine's own model: weights published for another are ignored")
    tokenizer_path: str | None = option(None, "folder with tokenizer.json, or an id of the hub")
    chat_template: str | None = option(None, "file with a chat template, instead of the tokenizer folder's")
    tool_call_parser: str | None = option(None, "format of tool calls (default: as the template shows; none)")
    reasoning_parser: str | None = option(None, "format of reasoning (default: it stays content)")
    max_model_len: Count | None = option(None, "context in tokens, where the engine does not report it")
    max_body_bytes: NonNegativeInt = option(GatewayLimits.max_body_bytes, "longest request body")
    request_timeout: PositiveFloat = option(GatewayLimits.request_timeout_seconds, "seconds without progress")
    tokenizer_threads: Count = option(2, "threads that render and encode long prompts")
    registration: RegistrationConfig | None = option(None, "JSON: how it registers at its router (default: not at all)")
    state_dir: str | None = option(None, "folder of this model's journals; without it no sessions")
    adopt_after: NonNegativeFloat = option(5.0, "take over a journal free for so long")


# Agent services. Their router is the inference service's: the agent service is the one "model" that it knows.


@dataclass(frozen=True, kw_only=True)
class InferenceAccess:
    """The inference service that an agent service's sessions are recorded at. ``addr``: its gateway, without ``/v1``.
    ``model`` None: its only one."""

    addr: str
    admin_key_file: str | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class AgentGatewayConfig(FollowerConfig):
    port: NonNegativeInt = option(8090, "0 takes a free one")
    service: str = option("default", "name of the agent service, as its data proxies register it")
    inference: tuple[InferenceAccess, ...] = option((), "JSON: inference services whose sessions callers may bring")


@dataclass(frozen=True, kw_only=True)
class AgentDataProxyConfig(ServeConfig):
    """One pair's keeper of sessions. ``inference`` None: the agent brings its own model."""

    port: NonNegativeInt = option(9100, "0 takes a free one")
    service: str = option("default", "name of the agent service")
    worker_url: str = required("address of the pair's worker")
    state_dir: str = required("folder of the service's journals")
    registration: RegistrationConfig | None = option(None, "JSON: how it registers at its router (default: not at all)")
    adopt_after: NonNegativeFloat = option(5.0, "take over a journal free for so long")
    idle_timeout: PositiveFloat = option(1800.0, "seconds until a session without a turn is closed")
    max_concurrent: Count = option(64, "turns that run at once; further ones wait")
    health_period: PositiveFloat = option(5.0, "seconds between two probes of the worker")
    turn_timeout: PositiveFloat = option(GatewayLimits.request_timeout_seconds, "seconds without an event of a turn")
    max_body_bytes: NonNegativeInt = option(GatewayLimits.max_body_bytes, "longest request body")
    inference: InferenceAccess | None = option(None, "JSON: where sessions are recorded (default: nowhere)")


@dataclass(frozen=True, kw_only=True)
class AgentWorkerConfig(ServeConfig):
    """Has one of ``agent`` and ``command``. ``tools``: MCP servers, each ``{"mcp": {"command": [...]}}`` or ``{"mcp":
    {"url": "http..."}}``."""

    port: NonNegativeInt = option(9000, "0 takes a free one")
    agent: str | None = option(None, "the agent, module:Name")
    kwargs: Mapping[str, Any] | None = option(None, "JSON: keyword arguments of the agent's class")
    command: tuple[str, ...] = option((), "JSON: a program that answers a turn, and its arguments")
    tools: tuple[Mapping[str, Any], ...] = option((), "JSON: MCP servers whose tools the agent gets")
    import_path: tuple[str, ...] = option((), "JSON: folders of the agent's modules")
    connect_timeout: PositiveFloat = option(60.0, "seconds to connect each MCP server and list its tools")
    max_body_bytes: NonNegativeInt = option(GatewayLimits.max_body_bytes, "longest request body")
