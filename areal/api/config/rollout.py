"""The rollout side: the inference service that is sampled from, how many episodes run, how stale they may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from areal.api.config.marks import ADAPTER, PLACEMENT, Absent, Inert
from areal.api.config.numbers import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, check_numbers
from areal.api.config.placement import SchedulingSpec, SchedulingStrategy, parsed
from areal.resources.backend_grammar import INFERENCE_ENGINES

_PROXY = Inert("tool calls and reasoning are read by the model's own data proxy: toolCallParser, reasoningParser")


class EngineArgs(dict[str, Any]):
    """An engine's own flags, passed through; attributes are items."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class SGLangConfig(EngineArgs):
    pass


class vLLMConfig(EngineArgs):
    pass


@dataclass
class AgentConfig:
    """Agents that talk to an OpenAI or Anthropic base URL. ``turn_discount``: how much a turn's reward counts for the
    turn before it. ``mode`` online: episodes are conversations of real users, not of a data set."""

    mode: Literal["inline", "online"] = "inline"
    turn_discount: Annotated[float, SHARE] = 1.0
    export_style: Literal["individual", "concat"] = "individual"
    agent_cls_path: str = ""
    admin_api_key: str = field(default="", repr=False)
    set_reward_finish_timeout: Annotated[float, Inert("the service's rewardFinishTimeout says it")] = 0.0
    session_timeout_seconds: Annotated[int, Inert("the service expires sessions")] = 3600
    tool_call_parser: Annotated[str, _PROXY] = "qwen"
    reasoning_parser: Annotated[str, _PROXY] = "qwen3"
    chat_template_type: Annotated[str, Inert("earlier turns are never tokenised again")] = "hf"
    engine_max_tokens: Annotated[int | None, Inert("the engine's max-model-len bounds a call")] = None
    message_preprocessors: Annotated[list[str], Absent("messages are recorded as they are")] = field(
        default_factory=list
    )
    prefix_matcher: Annotated[str | None, Absent("the conversation tree is that of the messages")] = None
    subproc_max_workers: Annotated[int, Inert("agents run inline, as tasks")] = 4
    drop_retry_orphans: Annotated[bool, Inert("retries are never recorded twice")] = False
    scheduling_spec: Annotated[list[SchedulingSpec], PLACEMENT] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_numbers(self)


OpenAIProxyConfig = AgentConfig


@dataclass
class InferenceEngineConfig:
    """Counts are of episodes that a prompt starts (groups), not of samples. ``max_head_offpolicyness`` is eta: how
    many versions the oldest token of a trajectory may lag behind the weights it trains.

    The service is ``gateway_addr`` with the key in ``admin_api_key_file`` (or ``admin_api_key``), else what the
    environment says (``AREAL_INFERENCE_ADDR``, ``AREAL_INFERENCE_KEY_FILE``); ``model`` is the one to sample from.
    Timeouts are in seconds.
    """

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    backend: str = ""  # of the engines of a run that is given no service
    model: str = ""
    gateway_addr: str = ""
    admin_api_key: str = field(default="", repr=False)
    admin_api_key_file: str = ""
    tokenizer_path: str = ""
    max_concurrent_rollouts: Annotated[int | None, COUNT] = None  # None: consumer_batch_size
    queue_size: Annotated[int | None, COUNT] = None  # None: 16 times as many as run at once
    consumer_batch_size: Annotated[int, COUNT] = 1
    max_head_offpolicyness: Annotated[int, NOT_NEGATIVE] = 0
    deterministic_sampling: bool = False
    check_trajectory_format: bool = True
    dump_to_file: bool = False
    setup_timeout: Annotated[float, POSITIVE] = 300.0
    request_timeout: Annotated[float, POSITIVE] = 3600.0
    request_retries: Annotated[int, NOT_NEGATIVE] = 3
    episode_timeout: Annotated[float, POSITIVE] = 7200.0
    pause_grace_period: Annotated[float, Inert("a pause returns when no token of the old weights can come")] = 0.0
    min_required_servers: Annotated[int, NOT_NEGATIVE] = 1
    shutdown_server_on_exit: bool = True  # of a service that is the run's own; any other goes on
    agent: AgentConfig | None = None
    openai: AgentConfig | None = None  # AReaL's older name of ``agent``
    lora_name: Annotated[str, ADAPTER] = ""
    use_lora: Annotated[bool, Inert("the weight update carries the adapter")] = False
    api_url: Annotated[str | None, Absent("make a Model with backend external")] = None
    provider_api_key: Annotated[str | None, Absent("make a Model with backend external")] = None
    routing_strategy: Annotated[str, Inert("the service's routing says it")] = "round_robin"
    schedule_policy: Annotated[str, Inert("the service's routing says it")] = "round_robin"
    poll_interval: Annotated[float, Inert("the router watches health")] = 5.0
    workers_ready_timeout: Annotated[float, Inert("setup_timeout bounds the whole start")] = 30.0
    enable_rollout_tracing: Annotated[bool, Inert("every interaction is recorded")] = False
    return_routed_experts: Annotated[bool, Absent("no engine tells them")] = False
    serialize_group_samples: Annotated[bool, Absent("samples of a group run at once")] = False
    scheduling_spec: Annotated[list[SchedulingSpec], PLACEMENT] = field(default_factory=list)
    scheduling_strategy: Annotated[SchedulingStrategy, PLACEMENT] = field(default_factory=SchedulingStrategy)
    reward_workers: Annotated[int, COUNT] = 2
    _version: Annotated[Literal["v1", "v2"], Inert("there is one implementation")] = "v1"
    log_level: Annotated[str, Inert("the service's processes have their own")] = "warning"

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.backend:
            parsed(self.backend, "backend", engines=INFERENCE_ENGINES, single=True)
        agent = self.agent or self.openai
        if self.agent is not None and self.openai is not None:
            raise ValueError("agent and openai are one thing: give one of them")
        self.admin_api_key = self.admin_api_key or (agent.admin_api_key if agent is not None else "")

    @property
    def concurrency(self) -> int:
        return self.max_concurrent_rollouts or self.consumer_batch_size
