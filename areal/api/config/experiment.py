"""The configuration of an experiment: one class per trainer, with saving, recovery, evaluation, logs and data sets.

Settings that the sections share (names, ``fileroot``, the tokenizer) are given once, at the top level.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from areal.api.config.fields import COUNT, NOT_NEGATIVE, PLACEMENT, NoEffect, NotSupported, check_numbers
from areal.api.config.rollout import (
    ClusterSpecConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    SchedulerConfig,
    SGLangConfig,
    check_training,
    parsed,
    vLLMConfig,
)
from areal.api.config.trackers import StatsLoggerConfig
from areal.api.config.training import (
    DPOEngineConfig,
    Ineffective,
    PPOActorConfig,
    PPOCriticConfig,
    TrainEngineConfig,
    check_pairs,
    check_policy,
    check_untempered,
    engine_ineffective,
    image_faults,
    objective_ineffective,
    proximal_faults,
    update_mode,
    without_effect,
)
from areal.errors import FieldError, did_you_mean
from areal.resources.backend import Allocation
from areal.resources.tree import ABSENT, FieldPath, get_path
from areal.wire.fields import Range
from areal.wire.sampling import GREEDY_BELOW, WHOLE_RANGES

ROW_TYPES = ("rl", "sft", "rw", "dpo")
_FILES = (".jsonl", ".json", ".parquet", ".arrow")


@dataclass
class PeriodicConfig:
    """The periods of an action. It is due when any of them has passed. None disables a period."""

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    freq_epochs: Annotated[int | None, COUNT] = None
    freq_steps: Annotated[int | None, COUNT] = None
    freq_secs: Annotated[int | None, COUNT] = None

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class SaverConfig(PeriodicConfig):
    mode: Annotated[Literal["auto", "sync", "async"], NoEffect("a model is saved before the next step begins")] = "auto"


@dataclass
class EvaluatorConfig(PeriodicConfig):
    """The schedule of evaluations. A sample passes with at least ``pass_threshold``. ``confidence``: of intervals."""

    eval_before_train: bool = False
    pass_threshold: float = 1.0
    confidence: Annotated[float, Range(0.5, below=1)] = 0.95


@dataclass
class RecoverConfig(PeriodicConfig):
    """Checkpoints for recovery. With ``auto``, ``on``, ``fault`` and ``resume``, a run continues from its newest
    checkpoint if there is one, and otherwise starts anew. ``off`` means ``disabled``."""

    mode: Literal["disabled", "off", "on", "auto", "fault", "resume"] = "disabled"
    retries: Annotated[int, NoEffect("the job's restart policy applies")] = 3
    no_save_optim: Annotated[bool, NotSupported("a checkpoint has the optimizer's state")] = False
    no_load_optim: Annotated[bool, NotSupported("a checkpoint has the optimizer's state")] = False

    @property
    def enabled(self) -> bool:
        return self.mode not in ("disabled", "off")


@dataclass
class CheckpointerConfig(PeriodicConfig):
    """AReaL's older section for the period of ``recover``."""


@dataclass
class PerfTracerConfig:
    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    enabled: bool = False
    save_interval: int = 1
    profile_steps: list[int] | None = None
    session_tracer: dict[str, Any] | None = None


@dataclass
class TrainDatasetConfig:
    """A data set. ``path``: a local folder or file, or a name on the Hugging Face hub; a list is read in order.
    ``type``: ``rl`` (prompts), ``sft`` (prompts with answers), ``rw`` (chosen and rejected). ``max_length`` in tokens:
    longer rows are left out. ``train_on``: the part of a conversation that ``sft`` trains on, its last message or all
    messages of the assistant. ``chat_template_kwargs``: variables of the chat template for all rows, such as
    ``enable_thinking: false``. A row's own column ``chat_template_kwargs`` overrides them."""

    path: str | list[str] = ""
    type: str = ""
    batch_size: Annotated[int, COUNT] = 1
    shuffle: bool = True
    drop_last: bool = True
    max_length: Annotated[int | None, COUNT] = None
    train_on: Literal["last", "assistant"] = "last"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    split: str | None = None
    pin_memory: Annotated[bool, NoEffect("rows are prompts, not tensors")] = False
    num_workers: Annotated[int, NoEffect("rows are read where they are used")] = 0
    num_dataset_workers: Annotated[int, NoEffect("rows are read where they are used")] = 1
    setup_timeout: Annotated[float, NoEffect("rows are read where they are used")] = 3600.0
    dataset_kwargs: Annotated[dict[str, Any], NotSupported("the path names a configuration: org/name:config:split")] = (
        field(default_factory=dict)
    )
    scheduling_spec: Annotated[Any, NoEffect("rows are read where they are used")] = None

    def __post_init__(self) -> None:
        check_numbers(self)
        paths = [self.path] if isinstance(self.path, str) else self.path
        # Else a loader of the user's, with its own types.
        ours = any(path.endswith(_FILES) or "/" in path for path in paths)
        if ours and self.type not in ("", *ROW_TYPES):
            raise FieldError(
                "type", f"{self.type!r} is not one of {', '.join(ROW_TYPES)}{did_you_mean(self.type, ROW_TYPES)}"
            )


@dataclass
class ValidDatasetConfig(TrainDatasetConfig):
    shuffle: Annotated[bool, NoEffect("all rows are evaluated")] = False
    drop_last: Annotated[bool, NoEffect("all rows are evaluated")] = False
    split: str | None = "test"


DatasetConfig = TrainDatasetConfig


TrainerType = Literal["grpo", "ppo", "sft", "rw", "dpo", "null"]


@dataclass
class TrainerConfig:
    """The built-in trainer that runs if no driver is named. ``null`` (also YAML's null): only rollouts and evaluation.
    ``async_training`` false: each batch is sampled from the newest weights."""

    type: TrainerType | None = "null"
    async_training: bool = True

    def __post_init__(self) -> None:
        self.type = self.type or "null"


@dataclass
class BaseExperimentConfig:
    required: ClassVar[tuple[str, ...]] = ("experiment_name", "trial_name")

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``given`` with the values that one section takes from another. A reference computes as the actor does;
        otherwise their log-probabilities would differ before the first step."""
        actor, ref = given.get("actor"), given.get("ref")
        if not isinstance(actor, Mapping) or not isinstance(ref, Mapping):
            return given
        shared = {name: actor[name] for name in ("dtype", "attn_impl") if name in actor}
        return {**given, "ref": {**shared, **ref}}

    experiment_name: str = ""
    trial_name: str = ""
    driver: str | None = None
    trainer: TrainerConfig | None = None
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    allocation_mode: str = ""
    mode: Annotated[str, PLACEMENT] = ""
    seed: Annotated[int, Range(*WHOLE_RANGES["seed"])] = 1
    enable_offload: Annotated[bool, NoEffect("weights stay on their devices, which takes more of their memory")] = False
    total_train_epochs: Annotated[int, COUNT] = 1
    total_train_steps: Annotated[int | None, COUNT] = None
    total_train_n_seqs: Annotated[int | None, NotSupported("set total_train_steps")] = None
    tokenizer_path: str = ""
    weight_update_mode: str = ""
    min_required_servers: Annotated[int | None, NOT_NEGATIVE] = None
    shutdown_server_on_exit: bool | None = None
    train_dataset: TrainDatasetConfig = field(default_factory=TrainDatasetConfig)
    valid_dataset: ValidDatasetConfig | None = None
    saver: SaverConfig = field(default_factory=SaverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    checkpointer: CheckpointerConfig | None = None
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    perf_tracer: Annotated[PerfTracerConfig | None, NoEffect("timings are in metrics.jsonl")] = None
    memory_profiler: Annotated[dict[str, Any] | None, NotSupported("torch.profiler records memory in a driver")] = None
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    vllm: vLLMConfig = field(default_factory=vLLMConfig)
    scheduler: Annotated[SchedulerConfig, PLACEMENT] = field(default_factory=SchedulerConfig)
    launcher: Annotated[dict[str, Any], PLACEMENT] = field(default_factory=dict)
    post_exit_hook: Annotated[str, NotSupported("another job can depend on this one (metadata.dependsOn)")] = ""

    def __post_init__(self) -> None:
        check_numbers(self)
        training = parsed(self.allocation_mode, "allocation_mode").training if self.allocation_mode else None
        if training is not None:
            check_training(training, "allocation_mode")
            for each in fields(self):
                stated = getattr(getattr(self, each.name), "backend", None)
                if training.world_size > 1 and stated == training.engine:
                    why = f"{stated} alone is one device, and allocation_mode says {training}: leave it out"
                    raise FieldError(f"{each.name}.backend", why)
        if self.weight_update_mode:
            self.weight_update_mode = update_mode(self.weight_update_mode)
        if self.checkpointer is not None:
            older = {name: getattr(self.checkpointer, name) for name in ("freq_epochs", "freq_steps", "freq_secs")}
            missing = {name: value for name, value in older.items() if getattr(self.recover, name) is None}
            self.recover = replace(self.recover, **missing)
        # Sections inherit unset names from the top level. They are copied: several configurations may share a section.
        common = {
            "experiment_name": self.experiment_name,
            "trial_name": self.trial_name,
            "fileroot": self.cluster.fileroot,
        }
        # A driver's own sections may have other names: an engine beside the run, say.
        shared = {each.name for cls in type(self).__mro__ if cls.__module__ == __name__ for each in fields(cls)}
        copies: dict[int, Any] = {}  # a section with two names stays one object
        for place, given in [(each.name, getattr(self, each.name)) for each in fields(self)]:
            if not is_dataclass(given) or isinstance(given, type):
                continue
            part = copies.setdefault(id(given), copy.copy(given))
            setattr(self, place, part)
            for name, value in common.items():
                own = getattr(part, name, None)
                if value and own == "":
                    setattr(part, name, value)
                elif own and own != value and place in shared:
                    top = f"cluster.{name}" if name == "fileroot" else name
                    raise FieldError(f"{place}.{name}", f"is {own!r}, but {top} is {value!r}: set only one of them")

    def ineffective(self, given: Mapping[str, Any]) -> list[tuple[FieldPath, str]]:
        """Return the keys of ``given`` that have no effect beside the others, as (key, why), for a warning."""
        found: list[tuple[FieldPath, str]] = list(_run_ineffective(self))
        allocation = parsed(self.allocation_mode, "allocation_mode") if self.allocation_mode else Allocation(())
        for place, of_mode in (("actor", allocation.training), ("rollout", allocation.inference)):
            stated = getattr(getattr(self, place, None), "backend", "")
            if of_mode is not None and stated and parsed(stated, f"{place}.backend").parts != (of_mode,):
                found.append((("allocation_mode",), f"{place}.backend says {stated} instead of {of_mode}"))
        return [(key, why) for key, why in found if get_path(given, tuple(key)) is not ABSENT]

    def _tokenizer_of(self, engine: TrainEngineConfig) -> None:
        self.tokenizer_path = self.tokenizer_path or engine.path


def _run_ineffective(config: BaseExperimentConfig) -> Ineffective:
    """Yield the settings of a run that have no effect, as (key, why)."""
    for place, part in ((each.name, getattr(config, each.name)) for each in fields(config)):
        if isinstance(part, TrainEngineConfig):
            yield from _at(place, engine_ineffective(part, config.allocation_mode))
            if not isinstance(part, PPOActorConfig):
                yield (place, "weight_update_mode"), "only the weights of a policy that samples are served"
            if place == "ref" and part.optimizer is not None:
                yield (place, "optimizer"), "a reference is not trained"
            if place == "ref" and part.use_lora:
                yield (place, "use_lora"), "a reference is not trained"
        if isinstance(part, PPOActorConfig):
            yield from _at(place, objective_ineffective(part))
    if config.total_train_steps is not None:
        yield ("total_train_epochs",), f"total_train_steps is {config.total_train_steps}"
    if config.recover.mode in ("disabled", "off"):
        yield from _at("recover", without_effect(f"recover.mode is {config.recover.mode}", *_PERIODS))
    if config.valid_dataset is None:
        why = "there is no valid_dataset, unless the driver gives one"
        yield from _at("evaluator", without_effect(why, *_PERIODS, "eval_before_train"))
    trackers: Any = config.stats_logger
    for name in ("wandb", "swanlab", "trackio"):
        tracker = getattr(trackers, name)
        if tracker.mode == "disabled":
            others = (each.name for each in fields(tracker) if each.name != "mode" and getattr(tracker, each.name))
            yield from ((("stats_logger", name, other), "mode is disabled") for other in others)


def _at(place: str, found: Ineffective) -> Ineffective:
    return (((place, *key), why) for key, why in found)


_PERIODS = ("freq_epochs", "freq_steps", "freq_secs")


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning. ``actor`` is AReaL's newer name for ``model``."""

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    actor: TrainEngineConfig | None = None

    def __post_init__(self) -> None:
        name = "model" if self.actor is None else "actor"
        if self.actor is not None:
            if self.model != TrainEngineConfig():
                raise FieldError("actor", "is the same as model: give one of them")
            self.model = self.actor
        self.actor = self.model
        super().__post_init__()
        self._tokenizer_of(self.model)
        self._check_head(f"{name}.")
        check_untempered(**{name: self.model})

    def _check_head(self, place: str) -> None:
        check_policy(self.model, place)


@dataclass
class RWConfig(SFTConfig):
    """Training of a reward model."""

    def _check_head(self, place: str) -> None:
        check_pairs(self.model, place)


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Direct preference optimisation against ``ref`` (arXiv 2305.18290). ``ref`` None: the actor's initial weights."""

    actor: DPOEngineConfig = field(default_factory=DPOEngineConfig)
    ref: TrainEngineConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer_of(self.actor)
        check_policy(self.ref, "ref.")
        check_untempered(actor=self.actor, ref=self.ref)


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO and its variants. ``critic`` None: the baseline is the mean of the group (GRPO). A KL penalty needs ``ref``.
    ``eval_gconfig`` None: one answer for each row, sampled with ``gconfig``."""

    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters | None = None
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: TrainEngineConfig | None = None
    critic: PPOCriticConfig | None = None
    teacher: Annotated[dict[str, Any] | None, NotSupported("there is no distillation")] = None
    dynamic_bs: bool = False
    async_training: bool = True
    workflow: str = "areal.workflow.rlvr:RLVRWorkflow"  # of the built-in driver; a custom driver sets it in code
    workflow_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_fn: str | list[str] = ""  # the rewards of several functions are summed, with reward_weights
    reward_weights: list[float] | None = None  # None: 1 each

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer_of(self.actor)
        check_policy(self.ref, "ref.")
        if self.eval_gconfig is None:
            self.eval_gconfig = copy.deepcopy(self.gconfig).new(n_samples=1)
        if self.actor.group_size not in (1, self.gconfig.n_samples):
            raise FieldError(
                "actor.group_size", f"must equal gconfig.n_samples ({self.gconfig.n_samples})", "gconfig.n_samples"
            )
        self._link_max_new_tokens()
        names = [self.reward_fn] if isinstance(self.reward_fn, str) else self.reward_fn
        count = len([name for name in names if name])
        if self.reward_weights is not None and len(self.reward_weights) != count:
            problem = f"must have {count} numbers, one for each function of reward_fn"
            raise FieldError("reward_weights", problem, "reward_fn")
        if self.reward_weights is not None and not all(map(math.isfinite, self.reward_weights)):
            raise FieldError("reward_weights", f"must be finite numbers, not {self.reward_weights}")
        if self.reward_weights and not any(self.reward_weights):
            raise FieldError("reward_weights", "must not all be 0: all rewards would be the same")
        self._check_temperatures()
        self.rollout.tokenizer_path = self.rollout.tokenizer_path or self.tokenizer_path
        if self.min_required_servers is not None:
            self.rollout.min_required_servers = self.min_required_servers
        if self.shutdown_server_on_exit is not None:
            self.rollout.shutdown_server_on_exit = self.shutdown_server_on_exit

    @property
    def is_online(self) -> bool:
        """Whether the episodes are conversations of real users, which need no data set."""
        agent = self.rollout.agent or self.rollout.openai
        return agent is not None and agent.mode == "online"

    def _link_max_new_tokens(self) -> None:
        actor, most = self.actor, self.gconfig.max_new_tokens
        actor.max_new_tokens = actor.max_new_tokens or most
        if actor.overlong_reward_penalty and actor.max_new_tokens > most:
            raise FieldError(
                "actor.max_new_tokens",
                f"is {actor.max_new_tokens} and gconfig.max_new_tokens {most}: no answer is so "
                "long that it has the whole overlong penalty; leave actor.max_new_tokens out",
                "gconfig.max_new_tokens",
            )
        if actor.overlong_reward_penalty and (actor.overlong_tokens or 0) > actor.max_new_tokens:
            raise FieldError(
                "actor.overlong_tokens",
                f"is {actor.overlong_tokens}, the longest answer {actor.max_new_tokens}: empty ones would be overlong",
            )

    def _check_temperatures(self) -> None:
        """Raise FieldError for a temperature other than the samples', at which log-probabilities are computed."""
        for place in ("actor", "ref", "critic"):
            stated = getattr(getattr(self, place), "temperature", None)
            if stated is not None and stated != self.gconfig.temperature:
                raise FieldError(
                    f"{place}.temperature",
                    f"{stated:g} is not the temperature of the samples, gconfig.temperature is "
                    f"{self.gconfig.temperature:g}; leave it out, it follows the samples",
                )

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``given`` completed as in the base class. Fields that ``eval_gconfig`` lacks are taken from
        ``gconfig``, except the number of samples. If the configuration chooses no baseline, the built-in trainer
        ``grpo`` gets that of its paper."""
        given = super().completed(given)
        sampling, evaluated = given.get("gconfig"), given.get("eval_gconfig")
        if _without_baseline(given, "grpo") and isinstance(sampling, Mapping) and sampling.get("n_samples", 1) != 1:
            norm = {"mean_level": "group", "std_level": "group"}
            given = {**given, "actor": {**(given.get("actor") or {}), "reward_norm": norm}}
        if not isinstance(sampling, Mapping) or not isinstance(evaluated, Mapping):
            return given
        shared = {name: value for name, value in sampling.items() if name != "n_samples"}
        return {**given, "eval_gconfig": {**shared, **evaluated}}

    def contradictions(self, given: Mapping[str, Any]) -> list[tuple[FieldPath, str]]:
        """Return contradictory keys of ``given``, as (key, why). Defaults are not checked: AReaL's default of
        ``kl_ctl`` needs a ``ref``, but its configurations without ``ref`` do not change it."""
        trainer = given.get("trainer") or {}
        trains = "type" not in trainer or self.trainer is None or self.trainer.type != "null"
        found: list[tuple[FieldPath, str]] = [*self.training_faults()] if trains else []
        built_in = trainer.get("type")
        if trains and built_in and get_path(given, ("actor", "optimizer")) is None:
            found.append((("actor", "optimizer"), "is needed, such as {lr: 1e-5}: the policy is to be trained"))
        if self.ref is None:
            for name in ("kl_ctl", "kl_loss_coef", "kl_target"):
                if (value := getattr(self.actor, name)) and get_path(given, ("actor", name)) is not ABSENT:
                    why = (
                        f"{value:g} charges for the distance from a reference model, and there is no ref: say ref.path "
                        f"(ref: {{}} is the actor as it begins), or leave {name} out"
                    )
                    found.append((("actor", name), why))
        own = get_path(given, ("actor", "weight_update_mode"))
        if (
            self.weight_update_mode
            and own not in (ABSENT, None)
            and self.actor.weight_update_mode != self.weight_update_mode
        ):
            why = f"{own!r} and weight_update_mode {self.weight_update_mode!r} are two transports of the weights"
            found.append((("actor", "weight_update_mode"), why))
        asked = get_path(given, ("actor", "dynamic_sampling")) is True  # of a preset: a warning
        if asked and self.gconfig.n_samples == 1 and not self.is_online:
            found.append(
                (("actor", "dynamic_sampling"), "gconfig.n_samples is 1: every group of one would be rejected")
            )
        if (
            self.ref is not None
            and self.actor.kl_target is not None
            and not (self.actor.kl_ctl or self.actor.kl_loss_coef)
        ):
            found.append((("actor", "kl_target"), "needs a coefficient to move: kl_ctl, or kl_loss_coef"))
        return found

    def training_faults(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield settings that a policy cannot be trained with, as (key, why)."""
        yield from ((("actor", *key), why) for key, why in proximal_faults(self.actor))
        yield from image_faults(self.workflow, self.actor, self.critic)
        gconfig = self.gconfig
        likeliest = {
            "greedy": gconfig.greedy,
            "top_k": gconfig.top_k == 1,
            "top_p": gconfig.top_p < GREEDY_BELOW,
            "min_p": gconfig.min_p == 1,
        }
        if name := next((each for each, is_set in likeliest.items() if is_set), "temperature" * gconfig.is_greedy):
            why = "a policy is trained on samples: the likeliest answers of a group are all the same"
            yield ("gconfig", name), f"{why} (eval_gconfig may take them)"
        if gconfig.ignore_eos:
            yield ("gconfig", "ignore_eos"), "no answer would end: a policy is trained on answers that do"

    def cautions(self, given: Mapping[str, Any]) -> list[tuple[FieldPath, str]]:
        """Return keys of ``given`` whose effect is rarely wanted, as (key, why), for a warning."""
        plain = GenerationHyperparameters()
        why = "samples are of another distribution: the trained log-probabilities depend on the temperature only"
        trains = self.trainer is None or self.trainer.type != "null" or "trainer" not in given
        shaped = [name for name in _SHAPING if trains and getattr(self.gconfig, name) != getattr(plain, name)]
        found: list[tuple[FieldPath, str]] = [(("gconfig", name), why) for name in shaped]
        if self.actor.ppo_n_minibatches > (samples := self.train_dataset.batch_size * self.gconfig.n_samples):
            found.append((("actor", "ppo_n_minibatches"), f"a step has {samples} samples, each in one minibatch"))
        found = [(key, text) for key, text in found if get_path(given, key) is not ABSENT]
        if _without_baseline(given, "grpo", "ppo") and self.actor.reward_norm is None and not self.is_online:
            why = "rewards have no baseline: set actor.preset, actor.reward_norm or a critic"
            found.append((("trainer", "type"), f"{why}; gconfig.n_samples is {self.gconfig.n_samples}"))
        return found

    def ineffective(self, given: Mapping[str, Any]) -> list[tuple[FieldPath, str]]:
        norm = self.actor.reward_norm
        found = super().ineffective(given)
        without_effect: list[tuple[tuple[str, ...], str]] = []
        if self.ref is None:
            without_effect.append((("actor", "kl_estimator"), "there is no ref"))
        if self.critic is None:
            without_effect.append((("actor", "value_bootstrap"), "there is no critic"))
        without_effect += [
            (("rollout", "queue_size"), "a trainer submits as many episodes as may run"),
            (("eval_gconfig", "drop_incomplete_group"), "gconfig.drop_incomplete_group is that of all groups"),
            (("train_dataset", "train_on"), "no row's own messages are learned: samples are"),
            (("valid_dataset", "train_on"), "no row's own messages are learned: samples are"),
        ]
        for name, trainer in (("async_training", self), ("trainer.async_training", self.trainer)):
            if self.rollout.max_head_offpolicyness and trainer is not None and not trainer.async_training:
                without_effect.append((("rollout", "max_head_offpolicyness"), f"{name} is false"))
        actor = self.actor
        scales = actor.loss_agg_mode == "seq-mean-token-sum-norm" and not actor.loss_scale_factor
        if actor.max_new_tokens != self.gconfig.max_new_tokens and not (scales or actor.overlong_reward_penalty):
            why = "only overlong_reward_penalty and loss_agg_mode seq-mean-token-sum-norm use it"
            without_effect.append((("actor", "max_new_tokens"), f"{why}; gconfig.max_new_tokens bounds answers"))
        found += [(place, why) for place, why in without_effect if get_path(given, place) is not ABSENT]
        if norm is not None and norm.mean_level == "group" and self.gconfig.n_samples == 1:
            key = next((key for key in _GROUPED if get_path(given, key) is not ABSENT), None)
            if key is not None:
                found.append((key, "gconfig.n_samples is 1: an episode of one row is a group of its own"))
        return found


def _without_baseline(given: Mapping[str, Any], *types: str) -> bool:
    """Return whether the configuration names a built-in trainer of these types, and neither a critic nor a baseline."""
    trainer, actor = given.get("trainer"), given.get("actor") or {}
    is_built_in = isinstance(trainer, Mapping) and trainer.get("type") in types
    return is_built_in and not given.get("critic") and isinstance(actor, Mapping) and not set(_BASELINES) & set(actor)


_BASELINES = ("preset", "reward_norm", "group_reward_norm", "adv_norm", "group_adv_norm", "advantage_fn")
_SHAPING = ("top_p", "top_k", "min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")
_GROUPED = (("actor", "reward_norm"), ("actor", "group_reward_norm"), ("actor", "preset"))


@dataclass
class GRPOConfig(PPOConfig):
    """PPO without a critic. Drivers use this name for GRPO."""
