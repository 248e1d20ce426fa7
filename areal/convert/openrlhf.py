"""OpenRLHF: the commands of ``openrlhf.cli.train_ppo_ray``, ``train_sft``, ``train_dpo`` and ``train_rm``.

Names and defaults are those of August 2026, which have dots. The names before April 2026 are their aliases. Sizes of a
rollout count prompts, sizes of an update count samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal.convert.drafts import Draft, Fate
from areal.convert.openrlhf_keys import (
    ANSWERS,
    DPO_RULES,
    OFFLINE_RENAMED,
    PPO_DEFAULTS,
    PPO_RENAMED,
    PPO_RULES,
    RM_RULES,
    SFT_RULES,
    offline_defaults,
    older,
)
from areal.convert.rules import Framework, period


def _begin(draft: Draft, trainer: str, rows: str, model: str, optimizer: str) -> None:
    values = draft.values
    draft.name_run()
    draft.set("trainer.type", trainer)
    draft.set("train_dataset.type", rows)
    draft.set("train_dataset.shuffle", True)
    draft.model = str(values.get(model) or "")
    draft.set("actor.path", draft.model)
    draft.set("actor.dtype", "bfloat16")
    if not draft.model:
        draft.mark(model, Fate.REFUSED, "no model is named")
    if "path" not in draft.config["train_dataset"]:
        draft.mark("data.dataset" if rows != "rl" else "data.prompt_dataset", Fate.REFUSED, "no data set is named")
    attention = "flash_attention_2" if values.get("flash_attn") else str(values["ds.attn_implementation"])
    draft.set("actor.attn_impl", attention)
    draft.adam(values[f"{optimizer}adam.betas"])
    _schedule(draft, optimizer, "actor.optimizer")
    if values["ds.lora.rank"]:
        draft.adapt("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules")
    if values.get("logger.wandb.key"):
        draft.set("stats_logger.wandb.mode", "online")
    if "valid_dataset" in draft.config:
        draft.set("valid_dataset.split", str(values["eval.split"]))
    draft.set("recover.mode", "auto" if values["ckpt.load_enable"] else "disabled")


def _schedule(draft: Draft, prefix: str, target: str) -> None:
    schedule, least = f"{prefix}lr_scheduler", f"{prefix}min_lr_ratio"
    if str(draft.values[schedule]) != "cosine_with_min_lr":
        draft.set(f"{target}.min_lr_ratio", 0.0)
        if draft.is_given(least):
            draft.mark(least, Fate.IGNORED, "it is of lr_scheduler cosine_with_min_lr")
    draft.without_warm_up(schedule, f"{prefix}lr_warmup_ratio", target=target)


def _end(draft: Draft) -> None:
    draft.validate()
    draft.save_and_resume(period(draft.values["ckpt.save_steps"]))


def _pair(value: Any) -> list[float]:
    return list(value) if isinstance(value, list | tuple) and len(value) == 2 else []


_EARLIER = {
    "actor.policy_loss_type": "the loss is the mean over all tokens; OpenRLHF before 0.7 has that over each answer"
}
_EARLIER_CRITIC = {
    "critic.value_clip": "OpenRLHF before 0.8.2 has 0.2",
    "algo.advantage.lambd": "many versions before 0.6.4 have 0.95",
}


def _is_older(draft: Draft) -> bool:
    """Return whether the file has keys that OpenRLHF removed in April 2026."""
    return any(map(draft.is_given, ("bf16", "prompt_max_len")))


def _ppo(draft: Draft) -> None:
    values = draft.values
    _begin(draft, "grpo", "rl", "actor.model_name_or_path", "actor.")
    bounded = "prompt_max_len" in values  # older versions limit prompt and answer separately
    longest = int(values.get("rollout.max_new_tokens") or (1024 if bounded else values["data.max_len"]))
    draft.set("gconfig.max_new_tokens", longest)
    if bounded:
        draft.set("gconfig.max_tokens", longest + draft.number("prompt_max_len"))
    samples = draft.number("rollout.batch_size") * draft.number("rollout.n_samples_per_prompt")
    draft.divided("train.batch_size", samples, draft.number("train.batch_size"), "samples")
    if values.get("train.dynamic_batch_enable"):
        draft.set("actor.mb_spec.max_tokens_per_mb", int(values.get("train.max_tokens_per_gpu") or 16192))
    bounds = _pair(values.get("actor.eps_clip_low_high"))
    if bounds:
        draft.set("actor.eps_clip", bounds[0])
        draft.set("actor.eps_clip_higher", bounds[1])
    draft.ask_for_version(_EARLIER, is_older=_is_older(draft))
    sequences = values.get("actor.policy_loss_type") == "gspo"
    draft.set("actor.loss_agg_mode", "seq-mean-token-mean" if sequences else "token-mean")
    if not values.get("data.apply_chat_template"):
        note = "a prompt is a conversation, rendered by the chat template"
        draft.mark("data.apply_chat_template", Fate.LOSSY, note)
    _advantages(draft)
    _kl(draft)
    _correction(draft)
    _overlong(draft)
    queue = draft.number("train.async_queue_size") if values["train.async_enable"] else 0
    draft.set("rollout.max_head_offpolicyness", queue)
    draft.set("rollout.dump_to_file", True)
    draft.pick_columns({"prompt": values["data.input_key"]}, "data.input_key")
    _layout(draft)
    rows = values.get("train.micro_batch_size", _MICRO)
    longest = draft.config["gconfig"]["max_tokens"]
    draft.bound_micro_batches(longest, dict.fromkeys(("actor", "critic", "ref"), rows))
    _reward(draft)
    _end(draft)


_MICRO = 4  # OpenRLHF's default, in rows


_NORMS: Mapping[str, Mapping[str, object] | None] = {
    "gae": None,
    "reinforce": None,
    "rloo": {"mean_level": "group", "std_level": None, "mean_leave1out": True},
    "reinforce_baseline": {"mean_level": "group", "std_level": None},
    "dr_grpo": {"mean_level": "group", "std_level": None},
    "group_norm": {"mean_level": "group", "std_level": "group"},
}


def _advantages(draft: Draft) -> None:
    values, key = draft.values, "algo.advantage.estimator"
    estimator = str(values[key])
    if estimator != "gae":
        draft.drop_critic(estimator, Fate.MAPPED)
    if estimator not in _NORMS:
        draft.mark(key, Fate.REFUSED, f"{estimator} is not here; {', '.join(_NORMS)} are")
        return
    if (norm := _NORMS[estimator]) is not None:
        draft.set("actor.reward_norm", dict(norm))
        draft.keep_rewards()
        note = "rewards are clipped before the baseline is subtracted: these are not"
        if draft.is_given("reward.clip_range"):
            draft.mark("reward.clip_range", Fate.LOSSY, note)
        draft.set("actor.discount", 1)
        if draft.is_given("algo.advantage.gamma"):
            draft.mark("algo.advantage.gamma", Fate.IGNORED, f"{estimator} takes it as 1")
    else:
        draft.clip_rewards("reward.clip_range")
    if estimator in ("gae", "reinforce", "reinforce_baseline"):
        by_std = None if values["algo.advantage.no_std_norm"] else "batch"
        draft.set("actor.adv_norm", {"mean_level": "batch", "std_level": by_std})
    if estimator == "gae":
        _critic(draft)


def _critic(draft: Draft) -> None:
    values, actor = draft.values, draft.config["actor"]
    draft.set("trainer.type", "ppo")
    draft.ask_for_version(_EARLIER_CRITIC, is_older=_is_older(draft))
    draft.set("actor.gae_lambda", float(values["algo.advantage.lambd"]))
    draft.set("actor.value_bootstrap", False)
    draft.adam(values["critic.adam.betas"], target="critic.optimizer")
    _schedule(draft, "critic.", "critic.optimizer")
    draft.config["critic"] = {
        "path": str(values.get("critic.model_name_or_path") or draft.model),
        **{name: actor[name] for name in ("dtype", "attn_impl", "gradient_checkpointing", "ppo_epochs")},
        "ppo_n_minibatches": actor.get("ppo_n_minibatches", 1),
        **draft.config["critic"],
    }


def _kl(draft: Draft) -> None:
    values = draft.values
    coefficient, in_loss = float(values["algo.kl.init_coef"]), values["algo.kl.use_loss"]
    draft.set("actor.kl_ctl", 0.0 if in_loss else coefficient)
    draft.set("actor.kl_loss_coef", coefficient if in_loss else 0.0)
    if coefficient:
        estimator = "k3" if values.get("use_kl_estimator_k3") else str(values["algo.kl.estimator"])
        draft.set("actor.kl_loss_type" if in_loss else "actor.kl_estimator", estimator)
        draft.set("ref", {"path": draft.model, "attn_impl": draft.config["actor"]["attn_impl"]})
        if "kl_target" in draft.config["actor"]:
            draft.set("actor.kl_horizon", int(values.get("algo.kl.horizon") or 10_000))
    else:
        draft.config["actor"].pop("kl_target", None)


def _correction(draft: Draft) -> None:
    values, key = draft.values, "algo.advantage.is_correction_type"
    corrects = values["algo.advantage.is_correction_enable"]
    if corrects and values.get("actor.policy_loss_type") == "gspo":
        return  # the ratio is to the engine's log-probabilities
    if not corrects:
        draft.set("actor.recompute_logprob", True)
        return
    kind = "icepop" if values.get("use_icepop") else str(values[key])
    forms = {"tis": ("token", "clamp"), "icepop": ("token", "mask"), "seq-mask-tis": ("sequence", "mask")}
    bounds = _pair(values["algo.advantage.is_correction_threshold"])
    if kind not in forms or not bounds:
        draft.mark(key, Fate.REFUSED, f"it is one of {', '.join(forms)}, with two thresholds")
        return
    level, action = forms[kind]
    draft.set("actor.use_decoupled_loss", True)
    # OpenRLHF masks a sequence by its geometric mean, and weights its tokens separately.
    if level == "sequence":
        draft.mark(key, Fate.LOSSY, "the weight is that of the sequence too", "actor.rejection_sampling")
    rejection = {"level": level, "action": action, "lower": bounds[0], "upper": bounds[1]}
    draft.set("actor.rejection_sampling", rejection)


def _overlong(draft: Draft) -> None:
    values = draft.values
    if values.get("reward.overlong_buffer_len") is not None:
        draft.set("actor.overlong_reward_penalty", True)
        draft.set("actor.overlong_tokens", draft.number("reward.overlong_buffer_len"))
        draft.set("actor.overlong_penalty_factor", float(values["reward.overlong_penalty_factor"]))


def _layout(draft: Draft) -> None:
    values = draft.values
    gpus = int(values.get("num_gpus") or draft.number("actor.num_nodes") * draft.number("actor.num_gpus_per_node"))
    tensor, engines = draft.number("vllm.tensor_parallel_size"), int(values.get("vllm.num_engines") or 0)
    if values["train.colocate_all"] or not engines:
        draft.lay_out(gpus, tensor)
    else:
        draft.serve(engines * tensor, tensor)
        draft.train_on(gpus)
    note = f"{draft.backend} serves, {draft.config['actor']['backend']} trains"
    if draft.is_given("actor.num_gpus_per_node"):
        draft.mark("actor.num_gpus_per_node", Fate.MAPPED, note, "backend")
    draft.engine_flags("vllm", "vllm.gpu_memory_utilization", "", "", "vllm.enforce_eager")


_CALLED = """
label = {label}
found = _MODULE.reward_func([prompt + completions], [prompt], [label])
found = found["rewards"] if isinstance(found, dict) else found
return float(found[0])
"""


def _reward(draft: Draft) -> None:
    url, label = draft.values.get("reward.remote_url"), draft.values.get("data.label_key")
    if isinstance(url, str) and url.endswith(".py"):
        given = f"data.get({label!r})" if label else "None"
        if label in ANSWERS:  # areal renames these columns to `answer`
            given = f'data.get({label!r}, data.get("answer"))'
        what = "OpenRLHF's reward function, called for one answer at a time"
        draft.write_rewards(what, "", {"reward": _CALLED.format(label=given)}, url)
    elif url:
        draft.mark("reward.remote_url", Fate.REFUSED, "a server does not score here; write a reward function")
    elif not (draft.values.get("reward.model_name_or_path") or draft.values.get("train.agent_func_path")):
        draft.mark("reward.remote_url", Fate.REFUSED, "no reward is configured")


def _offline(trainer: str, rows: str, more: Callable[[Draft], None]) -> Callable[[Draft], None]:
    def finish(draft: Draft) -> None:
        values = draft.values
        _begin(draft, trainer, rows, "model.model_name_or_path", "")
        note = "rows longer than max_len are left out, not cut"
        draft.mark("data.max_len", Fate.LOSSY, note, "train_dataset.max_length")
        if values.get("data.input_template") is None and not values.get("data.apply_chat_template"):
            draft.mark("data.input_template", Fate.LOSSY, "a prompt has no text around it but the chat template's")
        nodes = values.get("num_nodes") or values.get("nnodes") or 1
        more(draft)
        longest = draft.config["train_dataset"]["max_length"] * (1 if trainer == "sft" else 2)
        count = values.get("train.micro_batch_size", _MICRO)
        draft.bound_micro_batches(longest, {"actor": count, "ref": count})
        draft.train_on(int(nodes) * int(values.get("num_gpus") or values.get("nproc_per_node") or 8))
        _end(draft)

    return finish


def _sft(draft: Draft) -> None:
    draft.set("train_dataset.train_on", "assistant" if draft.values.get("data.multiturn") else "last")
    columns = {"prompt": draft.values["data.input_key"], "response": draft.values.get("data.output_key")}
    if draft.values.get("data.output_key") is None:  # one column contains the whole conversation
        columns = {"messages": draft.values["data.input_key"]}
    draft.pick_columns(columns, "data.input_key")


def _pairs(draft: Draft) -> None:
    keys = {"chosen": "data.chosen_key", "rejected": "data.rejected_key", "prompt": "data.prompt_key"}
    draft.pick_columns({ours: draft.values.get(key) for ours, key in keys.items()}, "data.chosen_key")


def _dpo(draft: Draft) -> None:
    _pairs(draft)
    draft.set("actor.loss_type", "ipo" if draft.values.get("model.ipo_enable") else "sigmoid")
    if draft.values.get("ref.model_name_or_path"):
        draft.set("ref.path", str(draft.values["ref.model_name_or_path"]))


PPO = Framework("openrlhf.cli.train_ppo_ray", PPO_RULES, PPO_DEFAULTS, _ppo, older(PPO_RULES, PPO_RENAMED))
SFT = Framework(
    "openrlhf.cli.train_sft",
    SFT_RULES,
    offline_defaults("sft", 5e-6, **{"data.max_len": 2048, "train.max_epochs": 2}),
    _offline("sft", "sft", _sft),
    older(SFT_RULES, OFFLINE_RENAMED),
)
DPO = Framework(
    "openrlhf.cli.train_dpo",
    DPO_RULES,
    offline_defaults("dpo", 1e-5, **{"data.max_len": 512, "model.beta": 0.1, "model.label_smoothing": 0.0}),
    _offline("dpo", "dpo", _dpo),
    older(DPO_RULES, OFFLINE_RENAMED),
)
RM = Framework(
    "openrlhf.cli.train_rm",
    RM_RULES,
    offline_defaults("rm", 9e-6, **{"data.max_len": 512}),
    _offline("rw", "rw", _pairs),
    older(RM_RULES, OFFLINE_RENAMED),
)
