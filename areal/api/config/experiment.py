"""A whole experiment, one class a trainer. What is common to the parts (names, ``fileroot``, the tokenizer) need be
said only once, at the top."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from areal.api.config.generation import GenerationHyperparameters
from areal.api.config.marks import PLACEMENT, RANKS, Absent, Inert
from areal.api.config.placement import ClusterSpecConfig, SchedulerConfig, check_training, parsed
from areal.api.config.rollout import InferenceEngineConfig, SGLangConfig, vLLMConfig
from areal.api.config.running import (
    CheckpointerConfig,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal.api.config.training import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TrainEngineConfig,
    update_mode,
)

TrainerType = Literal["grpo", "ppo", "sft", "rw", "dpo", "null"]


@dataclass
class TrainerConfig:
    """Which built-in trainer runs where no driver is named. ``null``: rollouts and evaluation only; YAML's own null
    means the same. ``async_training`` false: each batch is sampled from the newest weights."""

    type: TrainerType | None = "null"
    async_training: bool = True

    def __post_init__(self) -> None:
        self.type = self.type or "null"


@dataclass
class BaseExperimentConfig:
    required: ClassVar[tuple[str, ...]] = ("experiment_name", "trial_name")

    experiment_name: str = ""
    trial_name: str = ""
    driver: str | None = None
    trainer: TrainerConfig | None = None
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    allocation_mode: Annotated[str, RANKS] = ""
    mode: Annotated[str, PLACEMENT] = ""
    seed: int = 1
    enable_offload: Annotated[bool, Absent("weights stay on their devices")] = False
    total_train_epochs: int = 1
    total_train_steps: int | None = None
    total_train_n_seqs: Annotated[int | None, Absent("say total_train_steps")] = None
    tokenizer_path: str = ""
    weight_update_mode: str = ""
    min_required_servers: int | None = None
    shutdown_server_on_exit: bool | None = None
    train_dataset: TrainDatasetConfig = field(default_factory=TrainDatasetConfig)
    valid_dataset: ValidDatasetConfig | None = None
    saver: SaverConfig = field(default_factory=SaverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    checkpointer: CheckpointerConfig | None = None
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    perf_tracer: Annotated[PerfTracerConfig | None, Inert("timings are in metrics.jsonl")] = None
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    vllm: vLLMConfig = field(default_factory=vLLMConfig)
    scheduler: Annotated[SchedulerConfig, PLACEMENT] = field(default_factory=SchedulerConfig)
    launcher: Annotated[dict[str, Any], PLACEMENT] = field(default_factory=dict)
    post_exit_hook: Annotated[str, Absent("what follows a run is said by the manifest")] = ""

    def __post_init__(self) -> None:
        if self.total_train_epochs < 1:
            raise ValueError(f"total_train_epochs must be at least 1, not {self.total_train_epochs}")
        if self.total_train_steps is not None and self.total_train_steps < 1:
            raise ValueError(f"total_train_steps must be at least 1, not {self.total_train_steps}")
        training = parsed(self.allocation_mode, "allocation_mode").training if self.allocation_mode else None
        if training is not None:
            check_training(training, "allocation_mode")
        if self.weight_update_mode:
            self.weight_update_mode = update_mode(self.weight_update_mode)
        if self.checkpointer is not None:
            self._adopt_checkpointer(self.checkpointer)
        self._hand_down()

    def _adopt_checkpointer(self, older: CheckpointerConfig) -> None:
        """``recover`` has the frequencies that it does not say itself."""
        said = {name: getattr(older, name) for name in ("freq_epochs", "freq_steps", "freq_secs")}
        unsaid = {name: value for name, value in said.items() if getattr(self.recover, name) is None}
        self.recover = replace(self.recover, **unsaid)

    def _hand_down(self) -> None:
        """The parts have what the top says, where they say nothing themselves: copies of them, for a part may be in
        several configurations."""
        common = {
            "experiment_name": self.experiment_name,
            "trial_name": self.trial_name,
            "fileroot": self.cluster.fileroot,
        }
        copies: dict[int, Any] = {}  # one part may have two names here: it stays one
        for place, given in self._parts():
            part = copies.setdefault(id(given), copy.copy(given))
            setattr(self, place, part)
            for name, value in common.items():
                said = getattr(part, name, None)
                if value and said == "":
                    setattr(part, name, value)
                elif said and said != value:
                    top = f"cluster.{name}" if name == "fileroot" else name
                    raise ValueError(f"{place}.{name} is {said!r} and {top} {value!r}: a run has one")

    def _parts(self) -> list[tuple[str, Any]]:
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return [(name, value) for name, value in values if is_dataclass(value) and not isinstance(value, type)]

    def _tokenizer_of(self, engine: TrainEngineConfig) -> None:
        self.tokenizer_path = self.tokenizer_path or engine.path


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning. ``actor`` is AReaL's newer name for ``model``."""

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    actor: TrainEngineConfig | None = None

    def __post_init__(self) -> None:
        if self.actor is not None:
            if self.model != TrainEngineConfig():
                raise ValueError("model and actor are one thing: give one of them")
            self.model = self.actor
        self.actor = self.model
        super().__post_init__()
        self._tokenizer_of(self.model)


@dataclass
class RWConfig(SFTConfig):
    """A reward model."""


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Direct preference optimisation against ``ref``; None: the actor's own weights at the start."""

    actor: DPOEngineConfig = field(default_factory=DPOEngineConfig)
    ref: TrainEngineConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer_of(self.actor)


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO and its relatives. ``critic`` None: group baselines (GRPO). ``ref`` is needed for a KL penalty."""

    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters | None = None
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: TrainEngineConfig | None = None
    critic: PPOCriticConfig | None = None
    teacher: Annotated[TrainEngineConfig | None, Absent("there is no distillation")] = None
    dynamic_bs: bool = False
    async_training: bool = True
    workflow: str = "areal.workflow.rlvr:RLVRWorkflow"  # of the built-in driver; one of one's own says it in code
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_fn: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer_of(self.actor)
        if self.eval_gconfig is None:
            self.eval_gconfig = copy.deepcopy(self.gconfig)
        if self.actor.group_size not in (1, self.gconfig.n_samples):
            raise ValueError(
                f"actor.group_size is {self.actor.group_size} and gconfig.n_samples {self.gconfig.n_samples}: a group "
                "is the samples of one prompt"
            )
        self._link_max_new_tokens()
        self._check_temperatures()
        rollout = self.rollout
        rollout.tokenizer_path = rollout.tokenizer_path or self.tokenizer_path
        if self.min_required_servers is not None:
            rollout.min_required_servers = self.min_required_servers
        if self.shutdown_server_on_exit is not None:
            rollout.shutdown_server_on_exit = self.shutdown_server_on_exit

    def _link_max_new_tokens(self) -> None:
        actor, most = self.actor, self.gconfig.max_new_tokens
        actor.max_new_tokens = actor.max_new_tokens or most
        if actor.overlong_reward_penalty and actor.max_new_tokens > most:
            raise ValueError(
                f"actor.max_new_tokens is {actor.max_new_tokens} and gconfig.max_new_tokens {most}: no answer is so "
                "long that it has the whole overlong penalty; leave actor.max_new_tokens out"
            )

    def _check_temperatures(self) -> None:
        """Log-probabilities are computed with the temperature that each row was sampled at: no other can be chosen."""
        for place in ("actor", "ref", "critic"):
            stated = getattr(getattr(self, place), "temperature", None)
            if stated is not None and stated != self.gconfig.temperature:
                raise ValueError(
                    f"{place}.temperature: {stated:g} is not the temperature of the samples, gconfig.temperature is "
                    f"{self.gconfig.temperature:g}; leave it out, it follows the samples"
                )

    def contradictions(self, given: Mapping[str, Any]) -> list[tuple[tuple[str | int, ...], str]]:
        """What was said (``given``) and could have no effect, as (key, why). A default is not meant by anybody: that of
        ``kl_ctl`` is AReaL's, whose configurations leave it out where they have no ``ref``."""
        stated = "kl_ctl" in (given.get("actor") or {})
        if not stated or not self.actor.kl_ctl or self.ref is not None:
            return []
        why = (
            f"{self.actor.kl_ctl:g} charges for the distance from a reference model, and there is no ref: say ref.path "
            "(ref: {} is the actor as it begins), or kl_ctl: 0"
        )
        return [(("actor", "kl_ctl"), why)]


@dataclass
class GRPOConfig(PPOConfig):
    """PPO without a critic, under its own name."""
