"""Settings that have no effect in combination with others, as (key, why), for a warning. The caller ignores keys that
are not set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from areal.api.alloc_mode import train_backend
from areal.api.config.training import NormConfig, PPOActorConfig, TrainEngineConfig

Ineffective = Iterator[tuple[tuple[str, ...], str]]


def run_ineffective(config: Any) -> Ineffective:
    """Yield the settings of a run that have no effect. ``config``: a BaseExperimentConfig, whose module imports this
    one."""
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
        yield from _at("recover", _all(f"recover.mode is {config.recover.mode}", *_PERIODS))
    if config.valid_dataset is None:
        why = "there is no valid_dataset, unless the driver gives one"
        yield from _at("evaluator", _all(why, *_PERIODS, "eval_before_train"))
    trackers: Any = config.stats_logger
    for name in ("wandb", "swanlab", "trackio"):
        tracker = getattr(trackers, name)
        if tracker.mode == "disabled":
            others = (each.name for each in fields(tracker) if each.name != "mode" and getattr(tracker, each.name))
            yield from ((("stats_logger", name, other), "mode is disabled") for other in others)


def _at(place: str, found: Ineffective) -> Ineffective:
    return (((place, *key), why) for key, why in found)


def objective_ineffective(actor: PPOActorConfig) -> Ineffective:
    objective = "use_sapo_loss" if actor.use_sapo_loss else "use_cispo_loss" if actor.use_cispo_loss else ""
    if actor.use_sapo_loss:
        yield from _all("use_sapo_loss gates softly, and does not clip", "eps_clip", "eps_clip_higher")
        if not actor.recompute_logprob:
            yield from _all("use_sapo_loss gates softly, and has no proximal policy", "rejection_sampling")
    else:
        yield from _all("it is of use_sapo_loss", "sapo_tau_pos", "sapo_tau_neg")
    if objective:
        yield from _all(f"{objective} has no dual clip", "c_clip")
    if not actor.overlong_reward_penalty:
        yield from _all("it is of overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor")
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield from _all("it is of loss_agg_mode seq-mean-token-sum-norm", "loss_scale_factor")
    if not actor.kl_loss_coef:
        yield from _all("kl_loss_coef is 0", "kl_loss_type")
    elif actor.kl_loss_type == "k1":
        yield from _all("the mean gradient of k1 in a loss is 0; k2 and k3 have one", "kl_loss_type")
    if actor.kl_target is None:
        yield from _all("there is no kl_target", "kl_horizon")
    if actor.mask_truncated_completions:
        yield from _all("mask_truncated_completions leaves truncated answers out", "mask_no_eos_with_zero")
    if not (actor.behave_imp_weight_cap or actor.behav_imp_weight_cap):
        yield from _all("there is no cap beside it", "behave_imp_weight_mode", "behav_imp_weight_mode")
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
    yield from _all(f"the backend is {name}", *({"fsdp", "megatron"} - {name}))
    if not engine.use_lora:
        yield from _all("use_lora is false", "lora_rank", "lora_alpha", "target_modules", "peft_type")
    optimizer = engine.optimizer
    if optimizer is None:
        yield from _all("there is no optimizer", "gradient_checkpointing", "disable_dropout")
        return
    if optimizer.type == "sgd":
        yield from ((("optimizer", name), "it is of type adam") for name in ("beta1", "beta2", "eps"))
    if optimizer.lr_scheduler_type == "constant":
        yield ("optimizer", "min_lr_ratio"), "lr_scheduler_type is constant"


_RECOMPUTE = ("recompute_method", "recompute_num_layers")
_LEVELS = ("mean_level", "std_level")
_PERIODS = ("freq_epochs", "freq_steps", "freq_secs")


def _all(why: str, *names: str) -> Ineffective:
    return (((name,), why) for name in names)
