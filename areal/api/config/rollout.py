"""The configuration of rollouts: sampling parameters, the inference service, concurrency of episodes and staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self

from areal.api.config.fields import (
    ADAPTER,
    COUNT,
    NOT_NEGATIVE,
    PLACEMENT,
    POSITIVE,
    SHARE,
    NoEffect,
    NotSupported,
    check_numbers,
)
from areal.errors import FieldError
from areal.installation import module_argv
from areal.resources.backend import INFERENCE_ENGINES, Allocation, Part, parse_backend
from areal.resources.kinds import TRAIN_ENGINES
from areal.wire.fields import Range
from areal.wire.sampling import GREEDY_BELOW, MAX_STOPS, REAL_RANGES, WHOLE_RANGES, SamplingParams

# Placement of processes in AReaL's drivers. These fields are accepted without effect: manifests place processes.


def parsed(text: str, name: str, **how: Any) -> Allocation:
    """Parse the allocation in the field ``name``. Raises FieldError with the column."""
    try:
        return parse_backend(text, **how)
    except ValueError as error:
        raise FieldError(name, str(error)) from error


def check_training(part: Part, name: str) -> None:
    """Raise FieldError for a training layout that is not supported."""
    if part.engine not in TRAIN_ENGINES:
        raise FieldError(name, f"names the engine {part.engine}, which is not supported yet: use fsdp")
    if part.engine == "fsdp" and (part.context > 1 or part.expert > 1):
        raise FieldError(name, f"is {part}, and fsdp has data and tensor parallelism only, as in fsdp:d4 or fsdp:d2t2")


@dataclass
class SchedulingSpec:
    cpu: int = 8
    gpu: int = 0
    mem: int = 32
    port_count: int = 2
    task_type: str = "worker"
    image: str | None = None
    type: str = ""
    cmd: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)
    additional_bash_cmds: list[str] | None = None
    container_type: str = ""
    mount: str | None = None
    srun_additional_args: str = ""
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    ray_placement_strategy: str = ""


@dataclass
class SchedulingStrategy:
    type: Literal["separation", "colocation"] = "separation"
    target: str | None = None
    fork: bool = True


@dataclass
class SchedulerConfig:
    type: Literal["local", "ray", "slurm"] | None = None
    endpoint: str = ""
    deploy_mode: str = ""
    functioncall_service_domain: str = ""
    reward_functioncall_config: dict[str, Any] = field(default_factory=dict)
    reward_model_path: str = ""
    reward_model_service_url: str = ""


@dataclass
class NameResolveConfig:
    type: Literal["nfs", "etcd3", "ray"] = "nfs"
    nfs_record_root: str = "/tmp/areal/name_resolve"
    etcd3_addr: str = "localhost:2379"
    ray_actor_name: str = ""


@dataclass
class ClusterSpecConfig:
    """AReaL's section for the cluster. ``fileroot``: the folder in which runs write. Empty: the job's own folder."""

    fileroot: str = ""
    n_nodes: Annotated[int, PLACEMENT] = 32
    n_gpus_per_node: Annotated[int, PLACEMENT] = 8
    cluster_name: Annotated[str, PLACEMENT] = "local"
    name_resolve: Annotated[
        NameResolveConfig, NoEffect("services are found in recorded state, not by a name store")
    ] = field(default_factory=NameResolveConfig)


_PROXY = NoEffect("tool calls and reasoning are read by the model's own data proxy: toolCallParser, reasoningParser")


class EngineArgs(dict[str, Any]):
    """Flags of an engine, passed to it unchanged. Items can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class SGLangConfig(EngineArgs):
    @staticmethod
    def build_args(
        sglang_config: Mapping[str, object], tp_size: int = 1, base_gpu_id: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Return the arguments of SGLang's server: the section's, its layout, and ``more`` (``host``, ``port``)."""
        return _set({**sglang_config, "tp_size": tp_size, "base_gpu_id": base_gpu_id, **more})

    @classmethod
    def build_cmd(cls, sglang_config: Mapping[str, object], **layout: Any) -> list[str]:
        """Return the command that starts SGLang's server. ``layout``: as for ``build_args``."""
        return cls.build_cmd_from_args(cls.build_args(sglang_config, **layout))

    @staticmethod
    def build_cmd_from_args(args: Mapping[str, object]) -> list[str]:
        return module_argv("sglang.launch_server", *_flags(args))


class vLLMConfig(EngineArgs):
    @staticmethod
    def build_args(
        vllm_config: Mapping[str, object], tp_size: int = 1, pp_size: int = 1, **more: Any
    ) -> dict[str, Any]:
        """Return the arguments of vLLM's server: the section's, its layout, and ``more`` (``host``, ``port``)."""
        layout = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
        return _set({**vllm_config, **layout, **more})

    @classmethod
    def build_cmd(cls, vllm_config: Mapping[str, object], **layout: Any) -> list[str]:
        """Return the command that starts vLLM's server. ``layout``: as for ``build_args``."""
        return cls.build_cmd_from_args(cls.build_args(vllm_config, **layout))

    @staticmethod
    def build_cmd_from_args(args: Mapping[str, object]) -> list[str]:
        return module_argv("vllm.entrypoints.openai.api_server", *_flags(args))


def _set(args: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value is not None and value != ""}


def _flags(args: Mapping[str, object]) -> list[str]:
    """Return command line flags. True is a flag without a value; False is left out: the servers' switches are off."""
    words: list[str] = []
    for name, value in args.items():
        values = value if isinstance(value, list | tuple) else () if value is True else (value,)
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


@dataclass
class AgentServiceConfig:
    """An agent service for an ``AgentController``. The controller starts one that runs ``agent_cls_path`` in
    ``num_pairs`` worker processes with ``env`` in their environment. Or it uses the running service at
    ``gateway_addr``, with the key in ``admin_api_key_file`` (or ``admin_api_key``), and does not stop it.

    ``inference`` names the InferenceService that records its sessions, ``model`` the model to call there.
    ``turn_discount``: the factor by which a turn's reward counts for the previous turn. Timeouts are in seconds.
    """

    agent_cls_path: str = ""
    service: str = ""  # the name of the service; "": a generated one
    gateway_addr: str = ""
    admin_api_key: str = field(default="", repr=False)
    admin_api_key_file: str = ""
    inference: str = ""
    model: str = ""
    num_pairs: Annotated[int, COUNT] = 1
    setup_timeout: Annotated[float, POSITIVE] = 120.0
    health_poll_interval: Annotated[float, POSITIVE] = 5.0
    drain_timeout: Annotated[float, NOT_NEGATIVE] = 30.0
    session_timeout: Annotated[float, POSITIVE] = 1800.0
    request_timeout: Annotated[float, POSITIVE] = 600.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    env: dict[str, str] = field(default_factory=dict)
    turn_discount: Annotated[float, SHARE] = 1.0
    export_style: Literal["individual", "concat"] = "individual"

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class AgentConfig(AgentServiceConfig):
    """Agents that call an OpenAI or Anthropic base URL, in a rollout (they run inline) or in an agent service. With
    ``mode`` online, episodes are conversations of real users and need no data set."""

    mode: Literal["inline", "online"] = "inline"
    set_reward_finish_timeout: Annotated[float, NoEffect("the service's rewardFinishTimeout applies")] = 0.0
    session_timeout_seconds: Annotated[int, NoEffect("the service expires sessions")] = 3600
    tool_call_parser: Annotated[str, _PROXY] = "qwen"
    reasoning_parser: Annotated[str, _PROXY] = "qwen3"
    chat_template_type: Annotated[str, NoEffect("earlier turns are never tokenised again")] = "hf"
    engine_max_tokens: Annotated[int | None, NoEffect("the engine's max-model-len bounds a call")] = None
    message_preprocessors: Annotated[list[str], NotSupported("messages are recorded as they are")] = field(
        default_factory=list
    )
    prefix_matcher: Annotated[str | None, NotSupported("the conversation tree is that of the messages")] = None
    subproc_max_workers: Annotated[int, NoEffect("agents run inline, as tasks")] = 4
    drop_retry_orphans: Annotated[bool, NoEffect("retries are never recorded twice")] = False
    scheduling_spec: Annotated[list[SchedulingSpec], PLACEMENT] = field(default_factory=list)

    def check_inline(self) -> None:
        """Raise FieldError for a setting that inline agents do not have, because they are tasks and not processes."""
        plain = AgentServiceConfig()
        for each in fields(AgentServiceConfig):
            if each.name not in _OF_ROLLOUTS and getattr(self, each.name) != getattr(plain, each.name):
                raise FieldError(f"agent.{each.name}", "applies to agent services only: agents of a rollout run inline")


_OF_ROLLOUTS = ("agent_cls_path", "admin_api_key", "turn_discount", "export_style")

OpenAIProxyConfig = AgentConfig


@dataclass
class InferenceEngineConfig:
    """The service that rollouts are sampled from, and their concurrency. Counts are of episodes, one for each prompt
    (group), not of samples. ``max_head_offpolicyness`` is eta: the maximum number of versions by which the oldest token
    of a trajectory may be older than the weights that are trained on it.

    The service is ``gateway_addr`` with the key in ``admin_api_key_file`` (or ``admin_api_key``), otherwise the one in
    the environment (``AREAL_INFERENCE_ADDR``, ``AREAL_INFERENCE_KEY_FILE``). ``model``: the model to sample from. If
    seeds cost the engine nothing, the experiment's ``seed`` and the order of the data determine the samples of each
    version of the weights; with ``deterministic_sampling`` they do so on slower engines too. Timeouts are in seconds.
    """

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    backend: str = ""  # engines of a run without a given service
    model: str = ""
    gateway_addr: str = ""
    admin_api_key: str = field(default="", repr=False)
    admin_api_key_file: str = ""
    tokenizer_path: str = ""
    max_concurrent_rollouts: Annotated[int | None, COUNT] = None  # None: consumer_batch_size
    queue_size: Annotated[int | None, COUNT] = None  # None: 16 times the concurrency
    consumer_batch_size: Annotated[int, COUNT] = 1
    max_head_offpolicyness: Annotated[int, NOT_NEGATIVE] = 0
    deterministic_sampling: bool = False
    check_trajectory_format: bool = True
    dump_to_file: bool = False
    setup_timeout: Annotated[float, POSITIVE] = 300.0
    request_timeout: Annotated[float, POSITIVE] = 3600.0
    request_retries: Annotated[int, NOT_NEGATIVE] = 3
    episode_timeout: Annotated[float, POSITIVE] = 7200.0
    pause_grace_period: Annotated[float, NoEffect("a pause returns when no token of the old weights can come")] = 0.0
    min_required_servers: Annotated[int, NOT_NEGATIVE] = 1
    shutdown_server_on_exit: bool = True  # only a service that the run started
    agent: AgentConfig | None = None
    openai: AgentConfig | None = None  # AReaL's older name of ``agent``
    lora_name: Annotated[str, ADAPTER] = ""
    use_lora: Annotated[bool, NoEffect("the weight update carries the adapter")] = False
    api_url: Annotated[str | None, NotSupported("make a Model with backend external")] = None
    provider_api_key: Annotated[str | None, NotSupported("make a Model with backend external")] = None
    routing_strategy: Annotated[str, NoEffect("the service's routing applies")] = "round_robin"
    schedule_policy: Annotated[str, NoEffect("the service's routing applies")] = "round_robin"
    poll_interval: Annotated[float, NoEffect("the router watches health")] = 5.0
    workers_ready_timeout: Annotated[float, NoEffect("setup_timeout bounds the whole start")] = 30.0
    enable_rollout_tracing: Annotated[bool, NoEffect("every interaction is recorded")] = False
    return_routed_experts: Annotated[bool, NotSupported("no engine reports them")] = False
    serialize_group_samples: Annotated[bool, NotSupported("samples of a group run at once")] = False
    scheduling_spec: Annotated[list[SchedulingSpec], PLACEMENT] = field(default_factory=list)
    scheduling_strategy: Annotated[SchedulingStrategy, PLACEMENT] = field(default_factory=SchedulingStrategy)
    reward_workers: Annotated[int, COUNT] = 2
    _version: Annotated[Literal["v1", "v2"], NoEffect("there is one implementation")] = "v1"
    log_level: Annotated[str, NoEffect("the service's processes have their own")] = "warning"

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.backend:
            parsed(self.backend, "backend", engines=INFERENCE_ENGINES, single=True)
        agent = self.agent or self.openai
        if self.agent is not None and self.openai is not None:
            raise FieldError("openai", "is the same as agent: give one of them")
        if agent is not None:
            agent.check_inline()
        self.admin_api_key = self.admin_api_key or (agent.admin_api_key if agent is not None else "")

    @property
    def concurrency(self) -> int:
        return self.max_concurrent_rollouts or self.consumer_batch_size


NO_TOP_K = 100_000_000
_OPENAI_FIELDS = {
    "completions": (
        {"temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "seed", "n", "max_completion_tokens"},
        "max_completion_tokens",
    ),
    "responses": ({"temperature", "top_p", "max_output_tokens"}, "max_output_tokens"),
}
"""By API: the fields that its ``create`` takes, and its limit of tokens."""


@dataclass
class GenerationHyperparameters:
    """Sampling parameters of rollouts. ``max_new_tokens`` limits the answer, ``max_tokens`` prompt and answer together.
    ``n_samples`` is the size of a group: the number of episodes for each prompt. ``greedy`` takes the most likely
    token, whatever the temperature."""

    n_samples: Annotated[int, COUNT] = 1
    max_new_tokens: Annotated[int, COUNT] = 16384
    min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0
    max_tokens: Annotated[int, COUNT] = 32768
    greedy: bool = False
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    top_k: Annotated[int, Range(*WHOLE_RANGES["top_k"])] = NO_TOP_K  # 0 and -1: no filter
    min_p: Annotated[float, SHARE] = 0.0
    temperature: Annotated[float, Range(*REAL_RANGES["temperature"])] = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Range(*REAL_RANGES["repetition_penalty"])] = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: Annotated[int | None, Range(*WHOLE_RANGES["seed"])] = (
        None  # each sample of a group has its own seed, derived from this one
    )
    lora_name: Annotated[str, ADAPTER] = ""
    use_beam_search: Annotated[bool, NotSupported("policies are sampled")] = False
    drop_incomplete_group: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise FieldError(
                "min_new_tokens", f"must be from 0 to max_new_tokens, {self.max_new_tokens}", "max_new_tokens"
            )
        if self.stop and ("" in self.stop or len(self.stop) > MAX_STOPS):
            raise FieldError("stop", f"must have at most {MAX_STOPS} strings, not empty ones")
        if any(token < 0 for token in self.stop_token_ids):
            raise FieldError("stop_token_ids", "must not be negative")

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy: ``greedy`` is set, or the service treats the temperature as 0."""
        return self.greedy or self.temperature < GREEDY_BELOW

    def request_fields(self, seed: int | None = None) -> dict[str, Any]:
        """Return the fields of a request that differ from the gateway's defaults, without the limit of tokens."""
        fields: dict[str, Any] = {"temperature": 0.0 if self.is_greedy else self.temperature}
        default = SamplingParams()
        optional = {
            "top_p": (self.top_p, default.top_p),
            "min_p": (self.min_p, default.min_p),
            "top_k": (self.top_k if 0 < self.top_k < NO_TOP_K else 0, default.top_k),
            "min_tokens": (self.min_new_tokens, default.min_new_tokens),
            "frequency_penalty": (self.frequency_penalty, default.frequency_penalty),
            "presence_penalty": (self.presence_penalty, default.presence_penalty),
            "repetition_penalty": (self.repetition_penalty, default.repetition_penalty),
            "ignore_eos": (self.ignore_eos, default.ignore_eos),
            "skip_special_tokens": (self.skip_special_tokens, True),
            "stop": (self.stop or None, None),
            "stop_token_ids": (self.stop_token_ids or None, None),
            "seed": (seed, None),
        }
        return fields | {name: value for name, (value, default) in optional.items() if value != default}

    def to_openai_args_dict(
        self, exclude_args: Sequence[str] = (), api_format: Literal["completions", "responses"] = "completions"
    ) -> dict[str, Any]:
        """Return keyword arguments for ``create`` of OpenAI's client, for chat completions or for responses. Fields
        beyond OpenAI's are in ``extra_body``. ``exclude_args``: fields to leave out. Raises ValueError."""
        known = {each.name: each for each in fields(self)}
        if unknown := [name for name in exclude_args if name not in known]:
            raise ValueError(f"there is no field {', '.join(unknown)}")
        plain = GenerationHyperparameters()
        kept = replace(self, **{name: getattr(plain, name) for name in exclude_args})
        given = kept.request_fields(None if "seed" in exclude_args else self.seed)
        given = {name: value for name, value in given.items() if name not in exclude_args}
        own, limit = _OPENAI_FIELDS[api_format]
        if "max_new_tokens" not in exclude_args:
            given[limit] = self.max_new_tokens
        if api_format == "completions" and kept.n_samples > 1:
            given["n"] = kept.n_samples
        extra = {name: given.pop(name) for name in list(given) if name not in own}
        return given | ({"extra_body": extra} if extra else {})

    def new(self, **changes: Any) -> Self:
        """Return a copy with these fields changed."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """Return a copy that also stops at the tokenizer's end and padding tokens, unless ``ignore_eos`` is set."""
        if self.ignore_eos:
            return self.new()
        ends = [token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None]
        return replace(self, stop_token_ids=sorted({*self.stop_token_ids, *ends}))
