"""OpenRLHF's keys: the rule of each, their defaults, and their older names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from areal.convert.rules import (
    FOLDER,
    OFFLOAD,
    PACKED,
    REPORT,
    SCHEDULE,
    SPEED,
    Rule,
    alike,
    choice,
    files,
    ignored,
    joint,
    lossy,
    number,
    pair,
    period,
    refused,
    to,
    whole,
)

ANSWERS = ("answer", "response", "completion", "output", "solution")


def _files(value: Any) -> Any:
    """Return one data set, or a list. Raises ValueError for ``NAME@FOLDER``, a folder of a data set of the hub."""
    if "@" in str(value):
        raise ValueError("NAME@FOLDER is not read: name its files, or NAME:CONFIGURATION:SPLIT")
    return files(value)


_MIXED = refused("rows are read once each: write the mixture to a file", 1)
_ROWS = lossy("all rows are read")


def _optimizer(prefix: str, target: str) -> Mapping[str, Rule]:
    return {
        f"{prefix}optim": to(f"{target}.type", choice(adam="adam")),
        f"{prefix}muon.*": ignored("it is of optim muon"),
        f"{prefix}adam.lr": to(f"{target}.lr"),
        f"{prefix}adam.betas": joint(f"{target}.beta1, beta2"),
        f"{prefix}adam.eps": to(f"{target}.eps"),
        f"{prefix}adam.weight_decay": to(f"{target}.weight_decay"),
        f"{prefix}lr_scheduler": to(f"{target}.lr_scheduler_type", SCHEDULE),
        f"{prefix}lr_warmup_ratio": to(f"{target}.warmup_steps_proportion"),
        f"{prefix}min_lr_ratio": to(f"{target}.min_lr_ratio"),
        f"{prefix}max_norm": to(f"{target}.gradient_clipping"),
    }


def _optimizer_defaults(prefix: str, rate: float) -> Mapping[str, object]:
    return {
        f"{prefix}adam.lr": rate,
        f"{prefix}adam.betas": [0.9, 0.95],
        f"{prefix}adam.eps": 1e-8,
        f"{prefix}adam.weight_decay": 0.0,
        f"{prefix}lr_scheduler": "cosine_with_min_lr",
        f"{prefix}lr_warmup_ratio": 0.03,
        f"{prefix}min_lr_ratio": 0.1,
        f"{prefix}max_norm": 1.0,
    }


_COMMON: Mapping[str, Rule] = {
    "data.max_samples": _ROWS,
    "data.apply_chat_template": ignored("conversations are rendered by the chat template"),
    "data.tokenizer_chat_template": refused("the template is the tokenizer's"),
    "data.disable_fast_tokenizer": SPEED,
    "data.dataloader_num_workers": SPEED,
    "train.micro_batch_size": SPEED,
    "train.seed": to("seed"),
    "train.full_determinism_enable": SPEED,
    "ds.param_dtype": joint("actor.dtype", choice(bf16="bfloat16")),
    **alike(joint("actor.attn_impl"), "ds.attn_implementation flash_attn"),
    "ds.lora.rank": joint("actor.use_lora, actor.lora_rank", whole(0)),
    "ds.lora.alpha": joint("actor.lora_alpha", whole(0)),
    "ds.lora.target_modules": joint("actor.target_modules"),
    "ds.lora.dropout": lossy("adapters have no dropout", 0, 0.0),
    "ds.load_in_4bit": lossy("the frozen weights are bfloat16", False),
    "ds.packing_samples": PACKED,
    "ds.adam_offload": OFFLOAD,
    "ds.enable_sleep": ignored("the GPUs are divided"),
    "ds.ring_attn_size": lossy("rows are not split over GPUs; set actor.mb_spec", 1),
    "ds.ring_attn_head_stride": ignored("it is of ring_attn_size"),
    "ds.value_head_prefix": refused("a value head is `score`", "score"),
    "ds.*": SPEED,
    "eval.steps": to("evaluator.freq_steps", period),
    "eval.dataset": to("valid_dataset.path", _files, neutral=(None,)),
    "eval.split": joint("valid_dataset.split"),
    "ckpt.save_steps": to("saver.freq_steps", period),
    "ckpt.load_enable": joint("recover.mode"),
    "ckpt.save_hf": ignored("models are saved in Hugging Face's format"),
    **alike(FOLDER, "ckpt.output_dir ckpt.path"),
    "ckpt.best_metric_key": lossy("no model is kept for its score", "", "none"),
    "ckpt.*": ignored("the newest checkpoints are kept"),
    "logger.wandb.key": joint("stats_logger.wandb.mode", neutral=(None,)),
    "logger.wandb.org": to("stats_logger.wandb.entity", neutral=(None,)),
    "logger.wandb.group": to("stats_logger.wandb.group", neutral=(None,)),
    "logger.wandb.project": to("experiment_name"),
    "logger.wandb.run_name": to("trial_name"),
    "logger.tensorboard_dir": to("stats_logger.tensorboard.path", neutral=(None,)),
    "logger.logging_steps": REPORT,
    "use_ms": refused("models and data sets are Hugging Face's", False),
    "local_rank": SPEED,
    "bf16": ignored("weights are computed with in bfloat16"),
    **alike(
        SPEED,
        "actor_init_on_gpu disable_trace_cache torch_compile universal_ckpt colocate_actor_critic colocate_ref_reward",
    ),
    **alike(REPORT, "perf save_hf_model"),
    **alike(refused("the tokenizer says it"), "pad_token bos_token eos_token unk_token"),
}

PPO_RULES: Mapping[str, Rule] = {
    **_COMMON,
    **_optimizer("actor.", "actor.optimizer"),
    **_optimizer("critic.", "critic.optimizer"),
    # prompts and sampling
    "data.prompt_dataset": to("train_dataset.path", _files),
    "data.prompt_probs": _MIXED,
    "data.prompt_split": to("train_dataset.split"),
    "data.input_key": joint("rows.py"),
    "data.label_key": joint("reward.py", neutral=(None,)),
    "data.input_template": lossy("a prompt is a conversation, rendered by the chat template"),
    "data.max_len": to("gconfig.max_tokens", whole(1)),
    "data.image_key": ignored("rows with images are refused when they are read"),
    "data.max_images_per_prompt": refused("prompts are text", 0),
    "rollout.batch_size": to("train_dataset.batch_size", whole(1)),
    **alike(SPEED, "rollout.vllm_generate_batch_size rollout.micro_batch_size rollout.max_tokens_per_gpu"),
    "rollout.max_new_tokens": joint("gconfig.max_new_tokens", whole(1), neutral=(None,)),
    "rollout.n_samples_per_prompt": to("gconfig.n_samples", whole(1)),
    "rollout.temperature": to("gconfig.temperature"),
    "rollout.top_p": to("gconfig.top_p"),
    "prompt_max_len": to("train_dataset.max_length", whole(1), note="longer prompts are left out"),
    "eval.temperature": to("eval_gconfig.temperature"),
    "eval.n_samples_per_prompt": to("eval_gconfig.n_samples", whole(1)),
    # the reward
    "reward.remote_url": joint("reward.py", neutral=(None,)),
    "reward.model_name_or_path": refused("a reward model does not score here; write a reward function"),
    "reward.normalize_enable": lossy("rewards are not normalized over the run: actor.reward_norm", False),
    "reward.clip_range": joint("actor.reward_clip", pair),
    "reward.overlong_buffer_len": joint("actor.overlong_tokens", number, neutral=(None,)),
    "reward.overlong_penalty_factor": joint("actor.overlong_penalty_factor"),
    "reward.stop_properly_penalty_coef": refused("rewards of truncated answers are not scaled", 1),
    "reward.offload": SPEED,
    **alike(ignored("no reward model scores"), "reward.num_nodes reward.num_gpus_per_node"),
    "train.agent_func_path": refused("an agent is a workflow here: docs/agents.md"),
    # the algorithm
    "algo.advantage.estimator": joint("trainer.type, actor.reward_norm"),
    "algo.advantage.gamma": to("actor.discount"),
    "algo.advantage.lambd": joint("actor.gae_lambda"),
    "algo.advantage.no_std_norm": joint("actor.adv_norm"),
    "algo.advantage.is_correction_enable": joint("actor.rejection_sampling"),
    "algo.advantage.is_correction_threshold": joint("actor.rejection_sampling"),
    **alike(joint("actor.rejection_sampling"), "algo.advantage.is_correction_type use_icepop"),
    "algo.kl.init_coef": joint("actor.kl_ctl"),
    "algo.kl.use_loss": joint("actor.kl_loss_coef"),
    "algo.kl.estimator": joint("actor.kl_estimator", choice(k1="k1", k2="k2", k3="k3")),
    "use_kl_estimator_k3": joint("actor.kl_estimator", neutral=(False,)),
    "algo.kl.target": to("actor.kl_target", neutral=(None,)),
    "algo.kl.horizon": joint("actor.kl_horizon", whole(1)),
    "algo.dynamic_filtering_enable": to("actor.dynamic_sampling"),
    "algo.dynamic_filtering_range": lossy("a group is filtered where its rewards are all alike", [0, 1]),
    "actor.eps_clip": to("actor.eps_clip"),
    "actor.eps_clip_low_high": joint("actor.eps_clip, actor.eps_clip_higher", neutral=(None,)),
    "actor.dual_clip": to("actor.c_clip", neutral=(None,)),
    "actor.policy_loss_type": to("actor.importance_sampling_level", choice(ppo="token", gspo="sequence")),
    "actor.entropy_coef": to("actor.entropy_coeff", neutral=(None,)),
    "actor.aux_loss_coef": lossy("the balance of experts has no loss", 0, 0.0),
    "actor.model_name_or_path": joint("actor.path"),
    "actor.gradient_checkpointing_enable": to("actor.gradient_checkpointing"),
    "actor.gradient_checkpointing_reentrant": SPEED,
    "actor.freeze_visual_encoder": refused("models are text models", False),
    "ptx_coef": ignored("there is no pretraining data"),
    **alike(refused("there is no pretraining data"), "pretrain_data pretrain_data_probs"),
    "pretrain_split": ignored("it is of pretrain_data"),
    "critic.model_name_or_path": joint("critic.path", neutral=(None,)),
    "critic.value_clip": to("critic.eps_clip"),
    "critic.freezing_steps": lossy("the policy learns from the first step", -1, 0),
    "critic.save_value_network": REPORT,
    "train.batch_size": joint("actor.ppo_n_minibatches", whole(1)),
    "train.max_epochs": to("actor.ppo_epochs", whole(1)),
    "train.num_episodes": to("total_train_epochs", whole(1)),
    "train.dynamic_batch_enable": joint("actor.mb_spec"),
    "train.max_tokens_per_gpu": joint("actor.mb_spec", whole(1)),
    "train.async_enable": joint("rollout.max_head_offpolicyness"),
    "train.async_queue_size": joint("rollout.max_head_offpolicyness", whole(1)),
    "train.partial_rollout_enable": ignored("a generation goes on with new weights always"),
    "train.enable_ema": lossy("no moving average of the weights is kept", False),
    "train.ema_beta": ignored("it is of enable_ema"),
    # the GPUs
    "train.colocate_all": joint("backend"),
    **alike(SPEED, "train.colocate_actor_ref train.colocate_critic_reward ref.offload vllm.*"),
    **alike(joint("backend", whole(1)), "actor.num_nodes actor.num_gpus_per_node num_gpus"),
    **alike(ignored("a reference is on the trainer's GPUs"), "ref.num_nodes ref.num_gpus_per_node"),
    **alike(ignored("a critic is on the trainer's GPUs"), "critic.num_nodes critic.num_gpus_per_node"),
    "vllm.num_engines": joint("Model backend", whole(0), neutral=(None,)),
    "vllm.tensor_parallel_size": joint("Model backend", whole(1)),
    **alike(joint("Model engineArgs"), "vllm.gpu_memory_utilization vllm.enforce_eager"),
}

_OFFLINE: Mapping[str, Rule] = {
    **_COMMON,
    **_optimizer("", "actor.optimizer"),
    "data.dataset": to("train_dataset.path", _files),
    "data.dataset_probs": _MIXED,
    "data.dataset_split": to("train_dataset.split"),
    "data.max_len": to("train_dataset.max_length", whole(1)),
    "train.batch_size": to("train_dataset.batch_size", whole(1)),
    "train.max_epochs": to("total_train_epochs", whole(1)),
    "model.model_name_or_path": joint("actor.path"),
    "model.gradient_checkpointing_enable": to("actor.gradient_checkpointing"),
    "model.gradient_checkpointing_reentrant": SPEED,
    "model.aux_loss_coef": lossy("the balance of experts has no loss", 0, 0.0),
    **alike(joint("actor.backend", whole(1)), "num_gpus num_nodes nproc_per_node nnodes"),
}
SFT_RULES: Mapping[str, Rule] = {
    **_OFFLINE,
    "data.multiturn": joint("train_dataset.train_on"),
    "data.input_key": joint("rows.py"),
    "data.output_key": joint("rows.py", neutral=(None,)),
    "data.input_template": lossy("a prompt has no text around it but the chat template's"),
    "model.pretrain_mode_enable": refused("prompts are not learned", False),
}
_PAIRS: Mapping[str, Rule] = {
    **_OFFLINE,
    "data.prompt_key": joint("rows.py", neutral=(None,)),
    **alike(joint("rows.py"), "data.chosen_key data.rejected_key"),
    "data.input_template": lossy("a prompt has no text around it but the chat template's"),
}
DPO_RULES: Mapping[str, Rule] = {
    **_PAIRS,
    "model.beta": to("actor.beta"),
    "model.ipo_enable": joint("actor.loss_type"),
    "model.label_smoothing": to("actor.label_smoothing"),
    "model.nll_loss_coef": refused("the loss is of preferences alone", 0, 0.0),
    "ref.model_name_or_path": joint("ref.path", neutral=(None,)),
    "ref.offload": SPEED,
}
RM_RULES: Mapping[str, Rule] = {
    **_PAIRS,
    "model.loss_type": joint("trainer.type", choice(sigmoid="sigmoid")),
    "model.margin_loss_enable": refused("pairs have no margin", False),
    "model.compute_fp32_loss_enable": ignored("losses are float32 always"),
}

_DEFAULTS: Mapping[str, object] = {
    "train.seed": 42,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "ds.param_dtype": "bf16",
    "ds.attn_implementation": "flash_attention_2",
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ckpt.save_steps": -1,
    "ckpt.load_enable": False,
    "eval.steps": -1,
    "logger.wandb.run_name": "run",
}
PPO_DEFAULTS: Mapping[str, object] = {
    **_DEFAULTS,
    **_optimizer_defaults("actor.", 1e-6),
    **_optimizer_defaults("critic.", 9e-6),
    "data.prompt_split": "train",
    "data.input_key": "input",
    "data.max_len": 2048,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "eval.split": "train",
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "reward.clip_range": [-10, 10],
    "reward.overlong_penalty_factor": 1,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1,
    "algo.advantage.lambd": 1,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": False,
    "algo.kl.estimator": "k1",
    "actor.eps_clip": 0.2,
    "actor.gradient_checkpointing_enable": False,
    "critic.value_clip": 0.5,
    "train.num_episodes": 1,
    "train.async_enable": False,
    "train.async_queue_size": 1,
    "train.colocate_all": False,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.95,
    "logger.wandb.project": "openrlhf_train_ppo",
}


def offline_defaults(name: str, rate: float, **more: Any) -> Mapping[str, object]:
    own = {
        "data.dataset_split": "train",
        **(
            {"data.input_key": "input"}
            if name == "sft"
            else {"data.chosen_key": "chosen", "data.rejected_key": "rejected"}
        ),
        "model.gradient_checkpointing_enable": False,
        "logger.wandb.project": f"openrlhf_train_{name}",
        "eval.split": "test" if name == "dpo" else "train",
    }
    return {**_DEFAULTS, **_optimizer_defaults("", rate), **own, **more}


_RENAMED: Mapping[str, str] = {
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "colocate_all_models": "train.colocate_all",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "save_path": "ckpt.output_dir",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "deepcompile": "ds.deepcompile",
    "data_type": "ds.param_dtype",
    "zpg": "ds.zpg",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "ref_reward_offload": "ref.offload",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "head_prefix": "ds.value_head_prefix",
    "balancing_loss_coef": "actor.aux_loss_coef",
    "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "normalize_reward": "reward.normalize_enable",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "entropy_loss_coef": "actor.entropy_coef",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "critic_pretrain": "critic.model_name_or_path",
    "ref_pretrain": "ref.model_name_or_path",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "dataset": "data.dataset",
    "train_split": "data.dataset_split",
    "multiturn": "data.multiturn",
    "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "beta": "model.beta",
    "ipo": "model.ipo_enable",
    "pretrain_mode": "model.pretrain_mode_enable",
    "loss": "model.loss_type",
    "margin_loss": "model.margin_loss_enable",
    "compute_fp32_loss": "model.compute_fp32_loss_enable",
}


# Keys without a rule of their own: a rule with ``.*`` applies to them.
_BELOW = """
ds.zero_stage ds.deepcompile ds.zpg ds.use_liger_kernel ds.grad_accum_dtype ds.overlap_comm ds.tensor_parallel_size
vllm.sync_backend vllm.sync_with_ray vllm.enable_sleep vllm.enable_prefix_caching
"""


def older(rules: Mapping[str, Rule], own: Mapping[str, str]) -> Mapping[str, str]:
    """Return the present names by the older ones, which have underscores for dots, or only the part after the last dot
    if no other key has the same. The tables name the others."""
    dotted = [*(key for key in rules if "." in key and not key.endswith("*")), *_BELOW.split()]
    last = Counter(key.rpartition(".")[2] for key in dotted)
    short = {key.rpartition(".")[2]: key for key in dotted}
    found = {name: key for name, key in short.items() if "_" in name and last[name] == 1}
    found |= {key.replace(".", "_"): key for key in dotted}
    known = {name: key for name, key in _RENAMED.items() if key in rules or f"{key.partition('.')[0]}.*" in rules}
    return {**found, **known, **own}


PPO_RENAMED: Mapping[str, str] = {
    "pretrain": "actor.model_name_or_path",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    **{
        name: f"actor.{key} critic.{key}"  # older versions had one for both
        for name, key in {
            "adam_betas": "adam.betas",
            "l2": "adam.weight_decay",
            "lr_warmup_ratio": "lr_warmup_ratio",
            "lr_scheduler": "lr_scheduler",
            "max_norm": "max_norm",
        }.items()
    },
}
OFFLINE_RENAMED: Mapping[str, str] = {
    "pretrain": "model.model_name_or_path",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant",
    "learning_rate": "adam.lr",
    "l2": "adam.weight_decay",
}
