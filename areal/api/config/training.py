"""The configuration of a model in training: engine, optimizer, PPO settings, presets of algorithms, and checks for
settings that contradict each other or have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from areal.api.alloc_mode import train_backend
from areal.api.config.engines import FSDPEngineConfig, MegatronEngineConfig
from areal.api.config.fields import (
    COUNT,
    NOT_NEGATIVE,
    PLACEMENT,
    POSITIVE,
    SHARE,
    NoEffect,
    NotSupported,
    check_numbers,
)
from areal.api.config.rollout import SchedulingSpec, SchedulingStrategy, check_training, parsed
from areal.errors import FieldError, did_you_mean
from areal.resources.backend import TRAIN_ENGINES
from areal.wire.fields import Range


def objective_faults(actor: PPOActorConfig) -> Iterator[FieldError]:
    """Yield contradictory settings of the objective."""
    if actor.use_sapo_loss and actor.use_cispo_loss:
        yield FieldError("use_sapo_loss", "is another objective than use_cispo_loss: choose one", "use_cispo_loss")
    if actor.loss_fn and (actor.use_sapo_loss or actor.use_cispo_loss or actor.importance_sampling_level != "token"):
        others = ("use_sapo_loss", "use_cispo_loss", "importance_sampling_level")
        yield FieldError("loss_fn", f"is the whole objective: leave {', '.join(others)} out", *others)
    if actor.use_sapo_loss and actor.use_decoupled_loss:
        yield FieldError("use_sapo_loss", "gates the ratio itself: leave use_decoupled_loss out", "use_decoupled_loss")
    for name in ("use_sapo_loss", "use_cispo_loss"):
        if getattr(actor, name) and actor.importance_sampling_level == "sequence":
            yield FieldError(
                "importance_sampling_level", f"sequence needs a clipped ratio, which {name} does not have", name
            )


def proximal_faults(actor: PPOActorConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield settings that need a proximal policy other than the behaviour policy, if there is none, as (key, why)."""
    needs = "needs a proximal policy beside the one that sampled: use_decoupled_loss, or recompute_logprob"
    proximal = actor.use_decoupled_loss or actor.recompute_logprob
    if (rejection := actor.rejection_sampling) is not None and (proximal or not actor.use_sapo_loss):
        if not proximal:
            yield ("rejection_sampling",), needs
        elif rejection.action == "clamp" and not actor.use_decoupled_loss:
            yield ("rejection_sampling", "action"), "clamp bounds the weight of use_decoupled_loss, and there is none"
    if actor.m2_threshold is not None:
        if not proximal:
            yield ("m2_threshold",), needs
        elif actor.use_decoupled_loss and actor.prox_logp_method == "loglinear":
            yield ("m2_threshold",), "needs prox_logp_method recompute: its mask is of the batch before the update"
    if actor.prox_logp_method != "recompute" and not actor.use_decoupled_loss:
        yield ("prox_logp_method",), f"{actor.prox_logp_method} is a proximal policy of use_decoupled_loss"


def image_faults(
    workflow: str, actor: PPOActorConfig, critic: PPOCriticConfig | None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield settings that are not supported if the workflow uses images, as (key, why)."""
    if workflow.replace(":", ".") != "areal.workflow.vision_rlvr.VisionRLVRWorkflow":
        return
    part = parsed(actor.backend, "actor.backend").parts[0] if actor.backend else None
    if part is not None and (part.engine != "fsdp" or part.world_size > 1):
        yield ("actor", "backend"), f"{part}: a policy that sees images is trained by fsdp on one rank, fsdp:d1"
    if actor.use_lora:
        yield ("actor", "use_lora"), "adapters of a policy that sees images are not supported"
    if critic is not None:
        yield ("critic",), "there is no critic that sees images: leave it out"


# Presets of algorithms: values that ``actor.preset`` sets for unset fields. Each follows its paper in the normalization
# of rewards, the clipping of the ratio, and the aggregation of the loss.

_GROUP = {"mean_level": "group", "std_level": "group"}
_MEAN_ONLY = {"mean_level": "group", "std_level": None}
_POLICY_GRADIENT = {
    "recompute_logprob": True,  # with one minibatch the ratio is 1, and is not clipped
    "ppo_n_minibatches": 1,
    "loss_agg_mode": "seq-mean-token-sum",
    "kl_ctl": 0.0,
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    # arXiv 2402.03300: with a ref, its KL term in the loss
    "grpo": {
        "reward_norm": _GROUP,
        "loss_agg_mode": "seq-mean-token-mean",
        "eps_clip": 0.2,
        "kl_ctl": 0.0,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "k3",
    },
    # arXiv 2503.20783
    "dr_grpo": {"reward_norm": _MEAN_ONLY, "loss_agg_mode": "seq-mean-token-sum-norm", "eps_clip": 0.2, "kl_ctl": 0.0},
    # arXiv 2402.14740
    "rloo": {**_POLICY_GRADIENT, "reward_norm": {**_MEAN_ONLY, "mean_leave1out": True}},
    # Williams, 1992, with the mean reward as its baseline
    "reinforce": {**_POLICY_GRADIENT, "reward_norm": {"mean_level": "batch", "std_level": None}},
    # arXiv 2503.14476
    "dapo": {
        "reward_norm": _GROUP,
        "loss_agg_mode": "token-mean",
        "eps_clip": 0.2,
        "eps_clip_higher": 0.28,
        "dynamic_sampling": True,
        "overlong_reward_penalty": True,
        "kl_ctl": 0.0,
    },
    # arXiv 2507.18071
    "gspo": {
        "reward_norm": _GROUP,
        "importance_sampling_level": "sequence",
        "loss_agg_mode": "seq-mean-token-mean",
        "eps_clip": 3e-4,
        "eps_clip_higher": 4e-4,
        "kl_ctl": 0.0,
    },
    # arXiv 2506.13585: the ratio is bounded only above; the bound is ScaleRL's (arXiv 2510.13786)
    "cispo": {
        "use_cispo_loss": True,
        "reward_norm": _GROUP,
        "loss_agg_mode": "token-mean",
        "eps_clip": 1.0,
        "eps_clip_higher": 4.0,
        "kl_ctl": 0.0,
    },
    # arXiv 2511.20347
    "sapo": {
        "use_sapo_loss": True,
        "sapo_tau_pos": 1.0,
        "sapo_tau_neg": 1.05,
        "reward_norm": _GROUP,
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_ctl": 0.0,
    },
}


ONE_PROGRAM = NoEffect("a trainer and its ranks are one program: no service is between them")
Dtype = Literal["float32", "bfloat16", "float16"]
Level = Literal["batch", "group"]


@dataclass
class MicroBatchSpec:
    """Micro-batches: at least ``n_mbs``, of ``granularity`` sequences or a multiple, at most ``max_tokens_per_mb``."""

    n_mbs: Annotated[int | None, COUNT] = 1
    granularity: Annotated[int, COUNT] = 1
    max_tokens_per_mb: Annotated[int | None, COUNT] = None
    n_mbs_divisor: Annotated[int | None, COUNT] = 1
    packing_algorithm: Literal["ffd", "kk"] = "ffd"

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class NormConfig:
    """Normalization. ``mean_level``: the rows whose mean is subtracted; ``std_level``: the rows by whose standard
    deviation values are divided; None: off. ``mean_leave1out``: a sample's mean is that of the others (RLOO)."""

    mean_level: Level | None = "batch"
    mean_leave1out: bool = False
    std_level: Level | None = "batch"
    std_unbiased: bool = True
    eps: Annotated[float, POSITIVE] = 1e-5
    group_size: Annotated[int, NoEffect("a group is what was sampled for one prompt, short ones too")] = 1

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.mean_leave1out and self.mean_level is None:
            raise FieldError("mean_leave1out", "needs mean_level")


@dataclass
class RejectionSamplingConfig:
    """Handling of tokens whose probability changed too much since they were sampled. Where the ``metric`` of the
    proximal against the behaviour policy is above ``upper`` or below ``lower``, the token is masked out or its weight
    is clamped. ``agg`` aggregates the metric over the tokens of a sequence."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    agg: Literal["mean", "sum", "max"] = "mean"
    upper: float | None = 5.0
    lower: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.agg == "max":
            raise FieldError("agg", "max weighs all tokens by the largest ratio of the sequence: use mean, or sum")
        if self.upper is None and self.lower is None:
            raise FieldError("", "one of upper and lower is needed")
        unmoved = 1 if self.metric == "ratio" else 0  # the metric of a token with unchanged probability
        if self.upper is not None and self.upper < unmoved:
            least = "below 1" if unmoved else "negative"
            raise FieldError(
                "upper",
                f"must not be {least}, not {self.upper}: a token whose probability has not changed has {unmoved}",
            )
        if self.lower is not None and self.lower > unmoved:
            raise FieldError(
                "lower",
                f"must be at most {unmoved}, the value of a token whose probability has not changed, not {self.lower}",
            )
        if self.upper is not None and self.lower is not None and self.lower >= self.upper:
            raise FieldError("lower", f"must be below upper ({self.upper}), not {self.lower}", "upper")
        if self.action == "clamp" and self.metric != "ratio":
            raise FieldError("action", "clamp needs metric ratio: a divergence has nothing to clamp", "metric")


@dataclass
class OptimizerConfig:
    """The optimizer and its schedule. ``warmup_steps_proportion``: of all steps; ``min_lr_ratio``: of ``lr``."""

    type: Literal["adam", "sgd", "adam_bf16"] = "adam"
    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    beta2: Annotated[float, Range(0, below=1)] = 0.999
    eps: Annotated[float, POSITIVE] = 1e-8
    min_lr_ratio: Annotated[float, SHARE] = 0.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: Annotated[float, SHARE] = 0.001
    gradient_clipping: Annotated[float, NOT_NEGATIVE] = 1.0
    offload: Annotated[bool, NotSupported("optimizer states stay on the device")] = False
    initial_loss_scale: Annotated[float, NoEffect("there is no loss scaling: bf16 and float32 need none")] = 2**32
    min_loss_scale: Annotated[float, NoEffect("there is no loss scaling")] = 1.0
    loss_scale_window: Annotated[float, NoEffect("there is no loss scaling")] = 5
    hysteresis: Annotated[int, NoEffect("there is no loss scaling")] = 2

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.type == "adam_bf16":
            raise FieldError("type", "adam_bf16 is not supported: the optimizer's states are float32, use adam")


def megatron_faults(engine: TrainEngineConfig) -> Iterator[FieldError]:
    """Yield settings that the Megatron engine does not support."""
    if engine.use_lora:
        yield FieldError(
            "use_lora", "is not supported by the megatron engine, which trains all weights: use fsdp for adapters"
        )
    if engine.is_critic:
        yield FieldError("is_critic", "is not supported by the megatron engine, which has no critics: use fsdp")
    if engine.freeze_vision_tower:
        yield FieldError(
            "freeze_vision_tower", "is not supported by the megatron engine, which has no vision-language models"
        )
    if engine.attn_impl not in ("", "sdpa", "flash_attention_2"):
        yield FieldError("attn_impl", f"{engine.attn_impl}: the megatron engine attends by torch's kernels, sdpa")
    if engine.optimizer is not None and engine.optimizer_dtype != "float32":
        yield FieldError("optimizer_dtype", f"{engine.optimizer_dtype}: Megatron's master weights are float32")
    if engine.optimizer is not None and engine.optimizer.type == "sgd" and engine.dtype != "float32":
        yield FieldError("optimizer.type", "sgd needs dtype float32 with Megatron")
    if engine.dtype == "float16":
        yield FieldError("dtype", "float16: the megatron engine computes in bfloat16 or float32")
    if engine.megatron.recompute_granularity and not engine.gradient_checkpointing:
        yield FieldError("megatron.recompute_granularity", "needs gradient_checkpointing: true")


ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
UPDATE_MODES = ("disk", "shm", "xccl")


def update_mode(mode: str) -> str:
    """Return the current name of a weight transport: ``nccl`` is now ``xccl``. Raises FieldError for an unknown one."""
    mode = "xccl" if mode == "nccl" else mode
    if mode not in UPDATE_MODES:
        raise FieldError("weight_update_mode", f"{mode} is not supported: it is one of {', '.join(UPDATE_MODES)}")
    return mode


@dataclass
class TrainEngineConfig:
    """One model on its ranks. ``backend`` is an allocation such as ``fsdp:d4``; of its parts only the training engine
    is used. ``optimizer`` None: the model is not trained (a reference)."""

    experiment_name: str = ""
    trial_name: str = ""
    path: str = ""
    backend: str = ""
    attn_impl: str = ""  # empty: the model's default
    init_from_scratch: bool = False
    freeze_vision_tower: bool = False  # of a vision-language model: its connector and its decoder are trained
    is_critic: bool = False
    temperature: float | None = None  # each row has its own; if set, it must equal gconfig's
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    pad_to_maximum: Annotated[bool, NoEffect("rows are padded to the longest of a micro-batch")] = False
    disable_dropout: bool = False
    gradient_checkpointing: bool = False
    dtype: Dtype = "bfloat16"
    optimizer_dtype: Dtype = "float32"
    grad_reduce_dtype: Dtype = "float32"
    optimizer: OptimizerConfig | None = None
    weight_update_mode: Literal["disk", "shm", "xccl", "nccl", "awex"] = "xccl"
    use_lora: bool = False
    lora_rank: Annotated[int, COUNT] = 32
    lora_alpha: Annotated[int, COUNT] = 16
    target_modules: list[str] = field(default_factory=list)
    peft_type: Literal["lora"] = "lora"
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    megatron: MegatronEngineConfig = field(default_factory=MegatronEngineConfig)
    archon: Annotated[dict[str, Any], NoEffect("there is no archon engine, and a backend archon is refused")] = field(
        default_factory=dict
    )
    scheduling_spec: Annotated[list[SchedulingSpec], PLACEMENT] = field(default_factory=list)
    scheduling_strategy: Annotated[SchedulingStrategy, PLACEMENT] = field(default_factory=SchedulingStrategy)
    enable_tree_training: Annotated[bool, NoEffect("samples of a prompt share its tokens wherever that saves some")] = (
        False
    )
    offload: Annotated[bool, NotSupported("weights and the optimizer's states stay on the device")] = False
    use_kernels: Annotated[bool, NotSupported("models run as transformers has them")] = False
    _version: Annotated[Literal["v1", "v2"], ONE_PROGRAM] = "v1"
    admin_api_key: Annotated[str, ONE_PROGRAM] = field(default="", repr=False)
    log_level: Annotated[str, ONE_PROGRAM] = "warning"
    request_timeout: Annotated[float, ONE_PROGRAM] = 3600.0
    setup_timeout: Annotated[float, ONE_PROGRAM] = 3600.0
    workers_ready_timeout: Annotated[float, ONE_PROGRAM] = 30.0

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.attn_impl not in ("", *ATTENTION) and "/" not in self.attn_impl:  # a slash: a kernel of the hub
            near = did_you_mean(self.attn_impl, ATTENTION)
            raise FieldError("attn_impl", f"{self.attn_impl!r} is not one of {', '.join(ATTENTION)}{near}")
        if self.backend:
            part = parsed(self.backend, "backend", engines=TRAIN_ENGINES, single=True).parts[0]
            check_training(part, "backend")
            if self.use_lora and part.engine == "fsdp" and part.tensor > 1:
                raise FieldError(
                    "use_lora", f"does not work with backend {part}: adapters cannot be sharded", "backend"
                )
            if part.engine == "megatron" and (fault := next(megatron_faults(self), None)):
                raise fault
        self.weight_update_mode = update_mode(self.weight_update_mode)  # type: ignore[assignment]
        if self.optimizer is not None:
            for name in ("dtype", "optimizer_dtype", "grad_reduce_dtype"):
                if getattr(self, name) == "float16":
                    raise FieldError(name, "float16 loses small gradients, there is no loss scaling: use bfloat16")


def check_policy(engine: TrainEngineConfig | None, place: str = "") -> None:
    """Raise FieldError for a policy with a value head, whose log-probabilities would be 0. ``place`` prefixes keys."""
    if engine is not None and engine.is_critic:
        raise FieldError(f"{place}is_critic", "must be false: a policy has log-probabilities, only critics have values")


def check_pairs(engine: TrainEngineConfig, place: str = "") -> None:
    if (size := engine.mb_spec.granularity) not in (1, 2):
        raise FieldError(f"{place}mb_spec.granularity", f"must be 2, not {size}: two answers stay together")


def check_untempered(**engines: TrainEngineConfig | None) -> None:
    """Raise FieldError for a temperature other than 1, because the rows of a data set were not sampled."""
    for place, engine in engines.items():
        if engine is not None and engine.temperature not in (None, 1.0):
            raise FieldError(
                f"{place}.temperature", f"must be 1, not {engine.temperature:g}: the rows of a data set are not sampled"
            )


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy. ``preset`` names an algorithm that sets the fields that are not given.

    Rewards are ``clip(scaling * (reward + bias), +-reward_clip)``. They are normalized, and assigned to tokens with a
    KL penalty of ``kl_ctl`` against the reference. ``kl_loss_coef`` adds a KL term to the loss.

    ``value_bootstrap``: GAE adds the critic's value of the state after a truncated answer to the answer's reward, as
    AReaL does; false: the end of a truncated answer is terminal, as in TRL, verl and OpenRLHF. The value stands for
    what the rest of the answer would earn. It belongs there where ``max_new_tokens`` only cuts training short, not
    where the truncated answer is what is judged: then the limit is part of the task, and a policy that is paid for
    going on does not end its answers (Pardo et al. 2018, Time Limits in Reinforcement Learning, arXiv 1712.00378).
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = PRESETS

    disable_dropout: bool = True
    preset: str = field(default="", init=False)  # only in files; in code: PPOActorConfig(**PRESETS["gspo"])
    group_size: Annotated[int, COUNT] = 1
    ppo_n_minibatches: Annotated[int, COUNT] = 4
    ppo_epochs: Annotated[int, COUNT] = 1
    eps_clip: Annotated[float, NOT_NEGATIVE] = 0.2
    eps_clip_higher: Annotated[float | None, NOT_NEGATIVE] = None  # None: eps_clip
    c_clip: Annotated[float | None, Range(above=1)] = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    loss_fn: str = ""  # module:function, an areal.api.algorithm_api.LossFn
    advantage_fn: str = ""  # module:function, an areal.api.algorithm_api.AdvantageFn
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    loss_scale_factor: Annotated[int | None, COUNT] = (
        None  # the divisor of seq-mean-token-sum-norm; None: max_new_tokens
    )
    m2_threshold: Annotated[float | None, POSITIVE] = None
    use_sapo_loss: bool = False
    sapo_tau_pos: Annotated[float, POSITIVE] = 1.0
    sapo_tau_neg: Annotated[float, POSITIVE] = 1.05
    use_cispo_loss: bool = False
    reward_norm: NormConfig | None = None
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: Annotated[float, POSITIVE] = 20.0
    overlong_reward_penalty: bool = False
    overlong_tokens: Annotated[int | None, COUNT] = None  # None: a fifth of max_new_tokens, as in DAPO
    overlong_penalty_factor: Annotated[float | None, NOT_NEGATIVE] = None
    max_new_tokens: Annotated[int | None, COUNT] = (
        None  # for the overlong penalty and loss_scale_factor; None: gconfig's
    )
    mask_no_eos_with_zero: bool = False  # sets the reward of truncated answers to 0 after reward_norm
    mask_truncated_completions: bool = False  # excludes truncated answers from the loss
    discount: Annotated[float, SHARE] = 1.0
    gae_lambda: Annotated[float | str, SHARE] = 1.0  # or module:function of answer lengths
    gae_timestep_unit: Literal["token", "turn"] = "token"
    value_bootstrap: bool = True  # with a critic: GAE continues truncated answers with its value
    group_reward_norm: bool = False  # AReaL's older name of reward_norm by group
    adv_norm: NormConfig | bool | None = None  # true: over the batch
    group_adv_norm: bool | None = None  # of AReaL before adv_norm was a section: the level of adv_norm, which was on
    kl_ctl: Annotated[float, NOT_NEGATIVE] = 0.1
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_loss_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    kl_target: Annotated[float | None, POSITIVE] = None  # adaptive: kl_ctl and kl_loss_coef follow the divergence
    kl_horizon: Annotated[int, COUNT] = 10_000
    entropy_coeff: float = 0.0
    recompute_logprob: bool = False
    use_decoupled_loss: bool = False
    rejection_sampling: RejectionSamplingConfig | None = None
    behave_imp_weight_cap: Annotated[float | None, POSITIVE] = (
        None  # AReaL's older names for rejection_sampling with a ratio
    )
    behave_imp_weight_mode: str = ""
    behav_imp_weight_cap: Annotated[float | None, POSITIVE] = None
    behav_imp_weight_mode: str = ""
    prox_logp_method: Literal["recompute", "loglinear", "metrics", "reuse_train_logp"] = "recompute"
    dynamic_sampling: bool = False
    log_agent_stats: Annotated[bool, NoEffect("agents' metrics are logged as they come")] = False
    log_agent_stats_keys: Annotated[list[str], NoEffect("agents' metrics are logged as they come")] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self)
        if self.mb_spec.granularity != 1:
            raise FieldError("mb_spec.granularity", "must be 1 for a policy, whose rows are independent; leave it out")
        if not self.disable_dropout:
            raise FieldError(
                "disable_dropout", "false is not supported: dropout would make the ratio of two policies random"
            )
        if not self.reward_scaling:
            raise FieldError("reward_scaling", "0 makes all rewards the same")
        self._adopt_importance_weight_cap()
        # Older forms: boolean flags instead of a NormConfig.
        if self.group_reward_norm and self.reward_norm is not None:
            raise FieldError("group_reward_norm", "is the old name of reward_norm: give one of them", "reward_norm")
        if self.group_adv_norm and isinstance(self.adv_norm, NormConfig):
            raise FieldError("group_adv_norm", "is the old name of adv_norm: give one of them")
        if self.group_reward_norm:
            self.reward_norm = NormConfig("group", std_level="group")
        if isinstance(self.adv_norm, bool) or (self.adv_norm is None and self.group_adv_norm is not None):
            level: Level = "group" if self.group_adv_norm else "batch"
            is_on = self.group_adv_norm or self.adv_norm is not False
            self.adv_norm = NormConfig(level, std_level=level) if is_on else None
        if (fault := next(objective_faults(self), None)) is not None:
            raise fault

    def _adopt_importance_weight_cap(self) -> None:
        given = [each for each in (self.behave_imp_weight_cap, self.behav_imp_weight_cap) if each is not None]
        mode = self.behave_imp_weight_mode or self.behav_imp_weight_mode
        if self.behav_imp_weight_mode not in ("", mode):
            raise FieldError("behav_imp_weight_mode", f"is not behave_imp_weight_mode, {mode}: give one")
        if mode not in _CAP_MODES:
            raise FieldError("behave_imp_weight_mode", f"must be one of {', '.join(_CAP_MODES[1:])}, not {mode!r}")
        if not given or mode == "disabled":
            return
        if self.rejection_sampling is not None or len(given) > 1:
            raise FieldError("behave_imp_weight_cap", "is the old name of rejection_sampling: give one of them")
        level: Literal["token", "sequence"] = "sequence" if mode.startswith("sequence") else "token"
        action: Literal["mask", "clamp"] = "clamp" if mode.endswith("truncate") else "mask"
        self.rejection_sampling = RejectionSamplingConfig(level, action, upper=given[0])


_CAP_MODES = ("", "token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    is_critic: bool = True
    ppo_n_minibatches: Annotated[int, COUNT] = 4
    ppo_epochs: Annotated[int | None, COUNT] = None  # None: the actor's
    eps_clip: Annotated[float, NOT_NEGATIVE] = 0.5
    mask_no_eos_with_zero: Annotated[bool, NoEffect("the actor's setting applies: both use the same returns")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_critic:
            raise FieldError("is_critic", "must be true: a critic has values")


@dataclass
class DPOEngineConfig(TrainEngineConfig):
    """The policy of DPO. ``label_smoothing``: the assumed share of pairs with wrong labels (conservative DPO)."""

    disable_dropout: bool = True
    beta: Annotated[float, POSITIVE] = 0.1
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self)
        check_pairs(self)
        if self.label_smoothing and self.loss_type == "ipo":
            raise FieldError("label_smoothing", "has no effect on loss_type ipo: leave it out", "loss_type")


# Settings that have no effect in combination with others, as (key, why), for a warning. The caller ignores keys that
# are not set.

Ineffective = Iterator[tuple[tuple[str, ...], str]]
_RECOMPUTE = ("recompute_method", "recompute_num_layers")
_LEVELS = ("mean_level", "std_level")


def objective_ineffective(actor: PPOActorConfig) -> Ineffective:
    objective = "use_sapo_loss" if actor.use_sapo_loss else "use_cispo_loss" if actor.use_cispo_loss else ""
    if actor.use_sapo_loss:
        yield from without_effect("use_sapo_loss gates softly, and does not clip", "eps_clip", "eps_clip_higher")
        if not actor.recompute_logprob:
            yield from without_effect("use_sapo_loss gates softly, and has no proximal policy", "rejection_sampling")
    else:
        yield from without_effect("it is of use_sapo_loss", "sapo_tau_pos", "sapo_tau_neg")
    if objective:
        yield from without_effect(f"{objective} has no dual clip", "c_clip")
    if not actor.overlong_reward_penalty:
        yield from without_effect("it is of overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor")
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield from without_effect("it is of loss_agg_mode seq-mean-token-sum-norm", "loss_scale_factor")
    if not actor.kl_loss_coef:
        yield from without_effect("kl_loss_coef is 0", "kl_loss_type")
    elif actor.kl_loss_type == "k1":
        yield from without_effect("the mean gradient of k1 in a loss is 0; k2 and k3 have one", "kl_loss_type")
    if actor.kl_target is None:
        yield from without_effect("there is no kl_target", "kl_horizon")
    if actor.mask_truncated_completions:
        why = "mask_truncated_completions leaves truncated answers out"
        yield from without_effect(why, "mask_no_eos_with_zero", "value_bootstrap")
    elif actor.advantage_fn:
        yield from without_effect("advantage_fn replaces GAE", "value_bootstrap")
    if not (actor.behave_imp_weight_cap or actor.behav_imp_weight_cap):
        yield from without_effect("there is no cap beside it", "behave_imp_weight_mode", "behav_imp_weight_mode")
    if (rejection := actor.rejection_sampling) is not None:
        if rejection.level == "token":
            yield ("rejection_sampling", "agg"), "it is of level sequence"
        if rejection.metric != "kl_k1" and rejection.lower is not None and rejection.lower <= 0:
            yield ("rejection_sampling", "lower"), f"no {rejection.metric} is below 0"
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(actor, name)
        if isinstance(norm, NormConfig) and norm.std_level is None:
            why = "std_level is null" if norm.mean_level else "mean_level and std_level are null"
            yield from (((name, key), why) for key in ("std_unbiased", "eps", *(() if norm.mean_level else _LEVELS)))


def engine_ineffective(engine: TrainEngineConfig, allocation_mode: str) -> Ineffective:
    if not engine.gradient_checkpointing:
        yield from ((("megatron", name), "gradient_checkpointing is false") for name in _RECOMPUTE)
    name = train_backend(engine.backend, allocation_mode).engine
    yield from without_effect(f"the backend is {name}", *({"fsdp", "megatron"} - {name}))
    if not engine.use_lora:
        yield from without_effect("use_lora is false", "lora_rank", "lora_alpha", "target_modules", "peft_type")
    optimizer = engine.optimizer
    if optimizer is None:
        yield from without_effect("there is no optimizer", "gradient_checkpointing", "disable_dropout")
        return
    if optimizer.type == "sgd":
        yield from ((("optimizer", name), "it is of type adam") for name in ("beta1", "beta2", "eps"))
    if optimizer.lr_scheduler_type == "constant":
        yield ("optimizer", "min_lr_ratio"), "lr_scheduler_type is constant"


def without_effect(why: str, *names: str) -> Ineffective:
    return (((name,), why) for name in names)
