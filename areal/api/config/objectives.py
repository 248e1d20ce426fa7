"""Settings of a policy's objective that contradict each other, or that leave another one without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.api.config.training import PPOActorConfig, TrainEngineConfig


def objective_faults(actor: PPOActorConfig) -> Iterator[str]:
    """What is refused; each names the key to blame."""
    if actor.use_sapo_loss and actor.use_cispo_loss:
        yield "use_sapo_loss and use_cispo_loss are two objectives: choose one"
    if actor.loss_fn and (actor.use_sapo_loss or actor.use_cispo_loss or actor.importance_sampling_level != "token"):
        others = "use_sapo_loss, use_cispo_loss and importance_sampling_level"
        yield f"loss_fn is the whole objective: leave {others} out"
    if actor.use_sapo_loss and actor.use_decoupled_loss:
        yield "use_sapo_loss gates the ratio itself: it has no decoupled form, leave use_decoupled_loss out"
    for name in ("use_sapo_loss", "use_cispo_loss"):
        if getattr(actor, name) and actor.importance_sampling_level == "sequence":
            yield f"importance_sampling_level sequence is that of a clipped ratio: {name} has one for each token"


def proximal_faults(actor: PPOActorConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key, why) of settings about a proximal policy that is not there."""
    needs = "needs a proximal policy beside the one that sampled: use_decoupled_loss, or recompute_logprob"
    proximal = actor.use_decoupled_loss or actor.recompute_logprob
    if (rejection := actor.rejection_sampling) is not None:
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


def objective_ineffective(actor: PPOActorConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key, why) of settings that have no effect beside the others, where they are said."""
    objective = "use_sapo_loss" if actor.use_sapo_loss else "use_cispo_loss" if actor.use_cispo_loss else ""
    if actor.use_sapo_loss:
        yield from _all("use_sapo_loss gates softly, and does not clip", "eps_clip", "eps_clip_higher")
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
    if actor.rejection_sampling is not None and actor.rejection_sampling.level == "token":
        yield ("rejection_sampling", "agg"), "it is of level sequence"


def engine_ineffective(engine: TrainEngineConfig) -> Iterator[tuple[tuple[str, ...], str]]:
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


def _all(why: str, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
    return (((name,), why) for name in names)
