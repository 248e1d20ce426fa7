"""verl: Hydra configurations of ``verl.trainer.main_ppo`` and its asynchronous variants, from a YAML file or a command.

Names and defaults are those of verl's configuration of January and August 2026. verl trains and samples on the same
GPUs in turn; areal divides them in halves. verl is synchronous: ``max_head_offpolicyness`` is 0.
"""

from __future__ import annotations

from typing import Any

from areal.convert.drafts import Draft, Fate
from areal.convert.rules import Framework, period
from areal.convert.verl_keys import ACTOR, ALIASES, DEFAULTS, MODEL, ROLLOUT, RULES, SWITCHES, bounds
from areal.convert.verl_sft import begin, megatron_backend


def finish(draft: Draft) -> None:
    """Set what depends on several keys, for each of verl's RL trainers."""
    begin(draft)
    template = "data.apply_chat_template_kwargs."
    if found := {key.removeprefix(template): value for key, value in draft.values.items() if key.startswith(template)}:
        draft.set("train_dataset.chat_template_kwargs", found)
    draft.pick_columns({"prompt": draft.values.get("data.prompt_key")}, "data.prompt_key")
    _batches(draft)
    _objective(draft)
    _advantages(draft)
    _kl(draft)
    _overlong(draft)
    _optimizer(draft)
    draft.keep_rewards()
    if draft.values[f"{MODEL}.lora_rank"]:
        draft.adapt(*(f"{MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")))
    _layout(draft)
    keys = {"actor": f"{ACTOR}.ppo", "critic": "critic.ppo", "ref": "actor_rollout_ref.ref.log_prob"}
    rows = {model: draft.values.get(f"{key}_micro_batch_size_per_gpu") for model, key in keys.items()}
    draft.bound_micro_batches(draft.config["gconfig"]["max_tokens"], rows)
    _reward(draft)
    if "wandb" in str(draft.values.get("trainer.logger")):
        draft.set("stats_logger.wandb.mode", "online")
    if not draft.model:
        draft.mark(f"{MODEL}.path", Fate.REFUSED, "no model is named")
    draft.set("rollout.max_head_offpolicyness", draft.config.get("rollout", {}).get("max_head_offpolicyness", 0))
    draft.set("rollout.dump_to_file", True)
    draft.validate()
    draft.save_and_resume(period(draft.values.get("trainer.save_freq")))


def _overlong(draft: Draft) -> None:
    """Leave out the overlong penalty's settings if it is off."""
    actor = draft.config["actor"]
    if not actor.get("overlong_reward_penalty"):
        names = [name for name in actor if name.startswith("overlong_") and name != "overlong_reward_penalty"]
        draft.config["actor"] = {name: value for name, value in actor.items() if name not in names}
        for each in [each for each in draft.entries if each.target.removeprefix("actor.") in names]:
            draft.mark(each.key, Fate.IGNORED, "the overlong penalty is off")


def _batches(draft: Draft) -> None:
    """Set the sizes of a step, of a minibatch and of a micro-batch. verl's sizes count prompts."""
    key = f"{ACTOR}.ppo_mini_batch_size"
    batch, mini = int(draft.config["train_dataset"]["batch_size"]), int(draft.values[key])
    batch = _generated(draft, batch)
    draft.set("train_dataset.type", "rl")
    draft.set(
        "gconfig.max_tokens", draft.config["gconfig"]["max_new_tokens"] + int(draft.values["data.max_prompt_length"])
    )
    draft.divided(key, batch, mini, "prompts")
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if draft.values.get(f"{ACTOR}.use_dynamic_bsz") and draft.values.get(key):
        draft.set("actor.mb_spec.max_tokens_per_mb", int(draft.values[key]))


def _generated(draft: Draft, batch: int) -> int:
    """Return the prompts of a step. verl's trainers before ``trainer.use_v1`` take ``gen_batch_size``, if groups are
    not filtered; the present one fetches so many prompts at a time."""
    key, target, values = "data.gen_batch_size", "train_dataset.batch_size", draft.values
    generated, is_present = values.get(key), values.get("trainer.use_v1")
    if not isinstance(generated, int):
        return batch
    if values.get("algorithm.filter_groups.enable") or is_present or generated == batch:
        draft.mark(key, Fate.IGNORED, f"a step has {batch} prompts")
        return batch
    note = "taken as the prompts of a step; with trainer.use_v1 these are train_batch_size: set it"
    draft.mark(key, Fate.MAPPED if is_present is False else Fate.LOSSY, "" if is_present is False else note, target)
    draft.set(target, generated)
    return generated


def _objective(draft: Draft) -> None:
    """Set the loss, and the log-probabilities of its ratio: the trainer's from before a step, or the engine's."""
    values = draft.values
    correction = "algorithm.rollout_correction"
    cap = values.get(f"{ACTOR}.tis_imp_ratio_cap") or 0
    bypassed: bool | None = bool(values.get(f"{correction}.bypass_mode"))
    level = values.get(f"{correction}.rollout_is") or ("token" if cap > 0 else None)
    earlier = [each.key for each in draft.entries if each.key.startswith(_EARLIER_IS)]
    if values.get(_EARLIER_IS) and (threshold := values.get(f"{_EARLIER_IS}_threshold")):
        _earlier_correction(draft, float(threshold))
        level = bypassed = None
    elif earlier and not values.get(_EARLIER_IS):
        for key in earlier:
            draft.mark(key, Fate.IGNORED, f"{_EARLIER_IS} is off")
    elif earlier:
        draft.mark(_EARLIER_IS, Fate.LOSSY, f"it has no {_EARLIER_IS}_threshold: set actor.rejection_sampling")
    soft = values.get(f"{ACTOR}.policy_loss.loss_mode") == "sapo"
    if level and soft:
        draft.mark(f"{correction}.rollout_is", Fate.LOSSY, "loss_mode sapo is not corrected")
        level = None
    if level and bypassed:
        draft.mark(f"{correction}.rollout_is", Fate.LOSSY, "the ratio is to the engine's: nothing is corrected")
    elif level:
        draft.set("actor.use_decoupled_loss", True)
        lower, upper = bounds(values.get(f"{correction}.rollout_is_threshold", cap or 2.0))
        rejection = {"level": level, "action": "mask" if lower else "clamp", "upper": upper, "lower": lower}
        draft.set("actor.rejection_sampling", rejection | ({"agg": "sum"} if level == "sequence" else {}))
    elif bypassed is not None:
        draft.set("actor.recompute_logprob", not bypassed)
    clip, used = f"{ACTOR}.clip_ratio", False
    for bound, target in (("low", "actor.eps_clip"), ("high", "actor.eps_clip_higher")):
        own = values.get(f"{clip}_{bound}", _CLIP)
        used |= own is None
        draft.set(target, values[clip] if own is None else own)
    if draft.is_given(clip) and not used:
        known = any(f"{clip}_{bound}" in values for bound in ("low", "high")) or values[clip] == _CLIP
        older = "" if known else "; verl before 0.4 uses this one: set them"
        note = f"clip_ratio_low and clip_ratio_high hold, {_CLIP} where they are not given{older}"
        draft.mark(clip, Fate.IGNORED if known else Fate.LOSSY, note)
    for sign in ("pos", "neg"):
        if soft and (key := f"{ACTOR}.tau_{sign}") in values:
            draft.set(f"actor.sapo_tau_{sign}", values[key])
        elif draft.is_given(key := f"{ACTOR}.tau_{sign}"):
            draft.mark(key, Fate.IGNORED, "it is of loss_mode sapo")
    if soft:
        draft.set("actor.use_sapo_loss", True)
        draft.set("actor.loss_agg_mode", "seq-mean-token-mean")
        draft.config["actor"].pop("c_clip")
        for key in (f"{ACTOR}.loss_agg_mode", *(f"{clip}{part}" for part in ("", "_low", "_high", "_c"))):
            if draft.is_given(key):
                draft.mark(key, Fate.IGNORED, "loss_mode sapo is seq-mean-token-mean, and clips nothing")
    if values.get(f"{ACTOR}.policy_loss.loss_mode") == "cispo":
        draft.set("actor.use_cispo_loss", True)
        draft.set("actor.eps_clip", min(1.0, draft.config["actor"]["eps_clip"]))  # no ratio is below 0
        draft.config["actor"].pop("c_clip")
        if draft.is_given(f"{ACTOR}.clip_ratio_c"):
            draft.mark(f"{ACTOR}.clip_ratio_c", Fate.IGNORED, "loss_mode cispo has no dual clip")
    if draft.config["actor"].get("importance_sampling_level") == "sequence":
        draft.set("actor.loss_agg_mode", "seq-mean-token-mean")
        draft.config["actor"].pop("c_clip")
        for key in (f"{ACTOR}.loss_agg_mode", f"{ACTOR}.clip_ratio_c"):
            if draft.is_given(key):
                draft.mark(key, Fate.IGNORED, "loss_mode gspo is seq-mean-token-mean, and has no dual clip")
    elif draft.config["actor"]["loss_agg_mode"] == "seq-mean-token-sum-norm":
        note = "verl leaves out the division by the number of sequences: gradient_clipping is of another scale"
        draft.mark(f"{ACTOR}.loss_agg_mode", Fate.LOSSY, note, "actor.loss_agg_mode")


_EARLIER_IS = "algorithm.rollout_is"  # of October 2025


def _earlier_correction(draft: Draft, upper: float) -> None:
    levels: dict[str, dict[str, Any]] = {
        "token": {"level": "token"},
        "sequence": {"level": "sequence", "agg": "sum"},
        "geometric": {"level": "sequence", "agg": "mean"},
    }
    values = draft.values
    action = "mask" if values.get(f"{_EARLIER_IS}_mode") == "mask" else "clamp"
    lower = (values.get(f"{_EARLIER_IS}_threshold_lower") or 1 / upper) if action == "mask" else None
    level = levels[str(values.get(f"{_EARLIER_IS}_level", "token"))]
    draft.set("actor.use_decoupled_loss", True)
    draft.set("actor.rejection_sampling", {**level, "action": action, "upper": upper, "lower": lower})


_CLIP = 0.2
_DISCOUNTED = {"algorithm.gamma": ("gae", "reinforce_plus_plus"), "algorithm.lam": ("gae",)}


def _advantages(draft: Draft) -> None:
    key, values = "algorithm.adv_estimator", draft.values
    estimator, by_std = str(values[key]), bool(values["algorithm.norm_adv_by_std_in_grpo"])
    draft.set("trainer.type", "ppo" if estimator == "gae" else "grpo")
    for name, target in (("algorithm.gamma", "actor.discount"), ("algorithm.lam", "actor.gae_lambda")):
        if estimator in _DISCOUNTED[name]:
            draft.set(target, values[name])
        elif draft.is_given(name):
            draft.mark(name, Fate.IGNORED, f"{estimator} does not use it")
    if estimator == "grpo":
        draft.set("actor.reward_norm", {"mean_level": "group", "std_level": "group" if by_std else None, "eps": 1e-6})
    elif estimator == "rloo":
        draft.set("actor.reward_norm", {"mean_level": "group", "std_level": None, "mean_leave1out": True})
    elif estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        draft.set("actor.adv_norm", {"mean_level": "batch", "std_level": "batch"})
        if estimator.endswith("_baseline"):
            draft.set("actor.reward_norm", {"mean_level": "group", "std_level": None})
    else:
        draft.mark(key, Fate.REFUSED, f"{estimator} is not here; {_ESTIMATORS} are")
    if values["algorithm.use_kl_in_reward"] and estimator not in _DISCOUNTED["algorithm.gamma"]:
        note = "the KL penalty is not part of the baseline"
        draft.mark("algorithm.use_kl_in_reward", Fate.LOSSY, note, "actor.kl_ctl")
    _critic(draft, estimator)


_ESTIMATORS = "grpo, rloo, gae, reinforce_plus_plus and reinforce_plus_plus_baseline"


def _critic(draft: Draft, estimator: str) -> None:
    if estimator != "gae":
        draft.drop_critic(estimator, Fate.MAPPED, Fate.LOSSY)
        return
    values, key = draft.values, "critic.ppo_mini_batch_size"
    draft.set("actor.value_bootstrap", False)
    draft.config["critic"] = {
        "path": values.get(f"{MODEL}.path") or "",
        "dtype": draft.config["actor"].get("dtype", "bfloat16"),
        "ppo_epochs": draft.config["actor"]["ppo_epochs"],
        **draft.config["critic"],
    }
    mini = int(values.get(key) or values[f"{ACTOR}.ppo_mini_batch_size"])
    draft.divided(key, draft.config["train_dataset"]["batch_size"], mini, "prompts", "critic")
    _schedule(draft, "critic.optim", "critic.optimizer")


_EARLIER = {
    f"{ACTOR}.entropy_coeff": "verl before 0.4 has 0.001",
    f"{ACTOR}.clip_ratio_c": "verl before 0.4 has no dual clip",
}
_ADAPTIVE = {"target_kl": 0.1, "horizon": 10_000}


def _kl(draft: Draft) -> None:
    values = draft.values
    in_reward, in_loss = values["algorithm.use_kl_in_reward"], values[f"{ACTOR}.use_kl_loss"]
    draft.set("actor.kl_ctl", float(values["algorithm.kl_ctrl.kl_coef"]) if in_reward else 0.0)
    if not in_reward and draft.config["actor"].pop("kl_estimator", None) is not None:
        draft.mark("algorithm.kl_penalty", Fate.IGNORED, "use_kl_in_reward is false")
    draft.set("actor.kl_loss_coef", float(values[f"{ACTOR}.kl_loss_coef"]) if in_loss else 0.0)
    key, switch = "algorithm.kl_ctrl.kl_coef", "algorithm.use_kl_in_reward"
    older = draft.is_given(key) and not draft.is_given(switch)
    if older and values[key] and not in_loss:
        note = "verl before 0.4 subtracts this KL from the reward, later ones not: set use_kl_in_reward"
        draft.mark(key, Fate.LOSSY, note)
    elif not in_reward and draft.is_given(key):
        draft.mark(key, Fate.IGNORED, "use_kl_in_reward is false")
    draft.ask_for_version(_EARLIER, is_older=older)
    if not in_loss:
        for name in ("kl_loss_coef", "kl_loss_type"):
            if draft.is_given(f"{ACTOR}.{name}"):
                draft.mark(f"{ACTOR}.{name}", Fate.IGNORED, "use_kl_loss is false")
    adaptive = in_reward and str(values.get("algorithm.kl_ctrl.type")) == "adaptive"
    for key, target in (("target_kl", "actor.kl_target"), ("horizon", "actor.kl_horizon")):
        if adaptive:
            draft.set(target, values.get(f"algorithm.kl_ctrl.{key}", _ADAPTIVE[key]))
        elif draft.is_given(f"algorithm.kl_ctrl.{key}"):
            draft.mark(f"algorithm.kl_ctrl.{key}", Fate.IGNORED, "the coefficient is fixed")
    if not in_loss:
        draft.config["actor"].pop("kl_loss_type", None)
    if in_reward or in_loss:
        draft.set("ref", {"path": values.get(f"{MODEL}.path") or "", **draft.config.get("ref", {})})
    else:
        draft.config.pop("ref", None)


def _optimizer(draft: Draft) -> None:
    """Set the optimizers. verl's engines of 2026 clip gradients by ``optim.clip_grad``, its earlier workers by
    ``grad_clip``: the one that differs from its default is used."""
    _schedule(draft, f"{ACTOR}.optim", "actor.optimizer")
    for prefix, model in ((ACTOR, "actor"), ("critic", "critic")):
        old, new = f"{prefix}.grad_clip", f"{prefix}.optim.clip_grad"
        if model not in draft.config or not draft.is_given(new):
            continue
        earlier, now = draft.values.get(old, _CLIPPED), draft.values[new]
        draft.set(f"{model}.optimizer.gradient_clipping", earlier if now == _CLIPPED else now)
        if draft.is_given(old) and _CLIPPED not in (earlier, now) and earlier != now:
            draft.mark(old, Fate.LOSSY, "optim.clip_grad is used")


_CLIPPED = 1.0


def _schedule(draft: Draft, prefix: str, target: str) -> None:
    betas, least, rate = (draft.values.get(f"{prefix}.{name}") for name in ("betas", "min_lr", "lr"))
    draft.adam(betas, least, rate, target)
    draft.warm_up(f"{prefix}.lr_warmup_steps", draft.config.get("total_train_steps"), target)


def _layout(draft: Draft) -> None:
    values = draft.values
    gpus = draft.number("trainer.n_gpus_per_node") * draft.number("trainer.nnodes")
    engine = str(values.get(f"{ROLLOUT}.name", "vllm"))
    tensor, apart = draft.number(f"{ROLLOUT}.tensor_model_parallel_size"), values.get("rollout.n_gpus_per_node")
    if apart is None:
        training, note = draft.lay_out(gpus, tensor, engine), "verl does both on all of them in turn"
    else:
        training, note = gpus, "as in verl, on GPUs of their own"
        draft.serve(int(apart) * draft.number("rollout.nnodes"), tensor, engine)
    prefix = f"{ACTOR}.megatron"
    asks = values[f"{ACTOR}.strategy"] == "megatron" or any(key.startswith(f"{prefix}.") for key in values)
    train = megatron_backend(draft, prefix, training) if asks else f"fsdp:d{training}"
    draft.train_on(training, train)
    note = f"{gpus} GPUs: {draft.backend} serves, {train} trains; {note}"
    draft.mark("trainer.n_gpus_per_node", Fate.MAPPED, note, "backend")
    names = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager", "dtype")
    draft.engine_flags(engine, *(f"{ROLLOUT}.{name}" for name in names))
    draft.model = str(values.get(f"{MODEL}.path") or "")


_SCORE = """
score = _MODULE.{name}(
    data_source=data.get("data_source", ""),
    solution_str=completions,
    ground_truth=(data.get("reward_model") or {{}}).get("ground_truth"),
    extra_info=data.get("extra_info"),
)
return float(score["score"] if isinstance(score, dict) else score)
"""
_MATH = """
truth = (data.get("reward_model") or {}).get("ground_truth")
return math_verify_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=truth)
"""


def _reward(draft: Draft) -> None:
    what = "what verl's reward manager computes for a row of its data sets"
    path = draft.values.get("custom_reward_function.path")
    if path:
        name = draft.values.get("custom_reward_function.name") or "compute_score"
        draft.write_rewards(what, "", {"reward": _SCORE.format(name=name)}, str(path))
    else:
        draft.write_rewards(what, "from areal.reward.math import math_verify_reward_fn", {"reward": _MATH})
        note = "answers are compared with ground_truth by math-verify, whatever the column data_source says"
        draft.mark("data.reward_fn_key", Fate.LOSSY, note, "reward_fn")


VERL = Framework("verl", RULES, DEFAULTS, finish, ALIASES, SWITCHES)
