"""verl: Hydra configurations of ``verl.trainer.main_ppo``, as a YAML file or as the command of a script.

Names and defaults are those of verl's configuration of January 2026. verl trains and samples on the same GPUs in turn;
here they are divided, half to serve and half to train. verl is synchronous: ``max_head_offpolicyness`` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.convert.rules import Draft, Fate, Framework, Rule, ignored, lossy, refused, to, whole
from areal.resources.backend import BackendError, parse_backend

PROGRAMS = ("verl.trainer.main_ppo",)

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_SPEED = ignored("it changes speed or memory, not the result")
_REPORT = ignored("it changes what is reported, not the result")
_PACKED = ignored("rows are packed always")
_OFFLOAD = ignored("weights and optimizer stay on the GPU")


def _file(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"it names {len(value)} files; a data set here is one: join them into one")
        value = value[0]
    return value


def _period(value: Any) -> int | None:
    return None if value is None or whole(-1)(value) < 1 else value


def _choice(**choices: Any) -> Any:
    def translate(value: Any) -> Any:
        if str(value) not in choices:
            raise ValueError(f"{value!r} has no counterpart; these have: {', '.join(choices)}")
        return choices[str(value)]

    return translate


_top_k = _period


def _optional(value: Any) -> int | None:
    return None if value is None else whole(-1)(value)


_VALIDATION: Mapping[str, Rule] = {
    f"{_ROLLOUT}.val_kwargs.n": to("eval_gconfig.n_samples"),
    f"{_ROLLOUT}.val_kwargs.temperature": to("eval_gconfig.temperature"),
    f"{_ROLLOUT}.val_kwargs.top_p": to("eval_gconfig.top_p"),
    f"{_ROLLOUT}.val_kwargs.top_k": to("eval_gconfig.top_k", _top_k),
    f"{_ROLLOUT}.val_kwargs.do_sample": to("eval_gconfig.greedy", lambda value: not value),
}

RULES: Mapping[str, Rule] = {
    # data
    "data.train_files": to("train_dataset.path", _file),
    "data.val_files": to("valid_dataset.path", _file),
    "data.train_batch_size": to("train_dataset.batch_size", whole(1)),
    "data.val_batch_size": ignored("all rows are evaluated"),
    "data.max_prompt_length": to("train_dataset.max_length", whole(1), note="longer prompts are left out"),
    "data.max_response_length": to("gconfig.max_new_tokens", whole(1)),
    "data.filter_overlong_prompts": ignored("longer prompts are left out always"),
    "data.filter_overlong_prompts_workers": _SPEED,
    "data.truncation": lossy("longer prompts are left out, not cut", "error"),
    "data.prompt_key": refused("the prompts have to be in the column `prompt`", "prompt"),
    "data.reward_fn_key": refused("the scorer is chosen by the column `data_source`", "data_source"),
    "data.shuffle": to("train_dataset.shuffle"),
    "data.seed": to("seed"),
    "data.return_raw_chat": ignored("prompts are conversations always"),
    "data.dataloader_num_workers": _SPEED,
    "data.image_key": lossy("images are not trained on"),
    "data.video_key": lossy("videos are not trained on"),
    "data.custom_cls.*": refused("write the rows to a file"),
    "data.trust_remote_code": refused("code of a model's folder does not run", False),
    # the model
    f"{_MODEL}.path": to("actor.path"),
    f"{_MODEL}.enable_gradient_checkpointing": to("actor.gradient_checkpointing"),
    f"{_MODEL}.use_remove_padding": _PACKED,
    f"{_MODEL}.lora_rank": to("(actor.use_lora, actor.lora_rank)", whole(0)),
    f"{_MODEL}.lora_alpha": to("(actor.lora_alpha)", whole(0)),
    f"{_MODEL}.target_modules": to("(actor.target_modules)"),
    f"{_MODEL}.use_fused_kernels": _SPEED,
    f"{_MODEL}.use_liger": _SPEED,
    f"{_MODEL}.use_shm": _SPEED,
    f"{_MODEL}.enable_activation_offload": _SPEED,
    f"{_MODEL}.trust_remote_code": refused("code of a model's folder does not run", False),
    f"{_MODEL}.override_config.*": refused("change the model's config.json"),
    # the policy
    f"{_ACTOR}.strategy": to("(actor.backend)", _choice(fsdp="fsdp", fsdp2="fsdp", megatron="megatron")),
    f"{_ACTOR}.ppo_mini_batch_size": to("(actor.ppo_n_minibatches)", whole(1)),
    f"{_ACTOR}.ppo_epochs": to("actor.ppo_epochs", whole(1)),
    f"{_ACTOR}.ppo_micro_batch_size": _SPEED,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _SPEED,
    f"{_ACTOR}.use_dynamic_bsz": to("(actor.mb_spec)"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": to("(actor.mb_spec)", whole(1)),
    f"{_ACTOR}.optim.lr": to("actor.optimizer.lr"),
    f"{_ACTOR}.optim.weight_decay": to("actor.optimizer.weight_decay"),
    f"{_ACTOR}.optim.betas": to("(actor.optimizer.beta1, beta2)"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": to("actor.optimizer.warmup_steps_proportion"),
    f"{_ACTOR}.optim.lr_warmup_steps": to("(actor.optimizer.warmup_steps_proportion)", _optional),
    f"{_ACTOR}.optim.lr_scheduler_type": to(
        "actor.optimizer.lr_scheduler_type", _choice(constant="constant", cosine="cosine")
    ),
    f"{_ACTOR}.optim.warmup_style": to(
        "actor.optimizer.lr_scheduler_type", _choice(constant="constant", cosine="cosine")
    ),
    f"{_ACTOR}.optim.min_lr_ratio": to("actor.optimizer.min_lr_ratio"),
    f"{_ACTOR}.optim.clip_grad": to("actor.optimizer.gradient_clipping"),
    f"{_ACTOR}.optim.override_optimizer_config.*": _OFFLOAD,
    f"{_ACTOR}.grad_clip": to("actor.optimizer.gradient_clipping"),
    f"{_ACTOR}.use_kl_loss": to("(actor.kl_loss_coef)"),
    f"{_ACTOR}.kl_loss_coef": to("(actor.kl_loss_coef)"),
    f"{_ACTOR}.kl_loss_type": to(
        "actor.kl_loss_type", _choice(kl="k1", k1="k1", mse="k2", k2="k2", low_var_kl="k3", k3="k3")
    ),
    f"{_ACTOR}.entropy_coeff": to("actor.entropy_coeff"),
    f"{_ACTOR}.clip_ratio": to("actor.eps_clip"),
    f"{_ACTOR}.clip_ratio_low": to("actor.eps_clip"),
    f"{_ACTOR}.clip_ratio_high": to("actor.eps_clip_higher"),
    f"{_ACTOR}.clip_ratio_c": to("actor.c_clip"),
    f"{_ACTOR}.loss_agg_mode": to(
        "actor.loss_agg_mode",
        _choice(
            **{
                name: name
                for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
            }
        ),
    ),
    f"{_ACTOR}.policy_loss.loss_mode": to("actor.importance_sampling_level", _choice(vanilla="token", gspo="sequence")),
    f"{_ACTOR}.use_torch_compile": _SPEED,
    f"{_ACTOR}.ulysses_sequence_parallel_size": lossy("rows are not split over GPUs; set actor.mb_spec", 1),
    f"{_ACTOR}.entropy_checkpointing": _SPEED,
    f"{_ACTOR}.entropy_from_logits_with_chunking": _SPEED,
    f"{_ACTOR}.fsdp_config.model_dtype": to(
        "actor.dtype", _choice(fp32="float32", float32="float32", bfloat16="bfloat16", bf16="bfloat16")
    ),
    f"{_ACTOR}.fsdp_config.*": _SPEED,
    f"{_ACTOR}.megatron.override_transformer_config.*": _SPEED,
    f"{_ACTOR}.megatron.tensor_model_parallel_size": to("(actor.backend)", whole(1)),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": to("(actor.backend)", whole(1)),
    f"{_ACTOR}.megatron.context_parallel_size": to("(actor.backend)", whole(1)),
    f"{_ACTOR}.megatron.expert_model_parallel_size": to("(actor.backend)", whole(1)),
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": lossy("experts use the tensor ranks", 1),
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": _SPEED,
    f"{_ACTOR}.megatron.*": _SPEED,
    f"{_ACTOR}.checkpoint.*": ignored("a checkpoint has all that a resumed run needs"),
    f"{_ACTOR}.profiler.*": _REPORT,
    # the reference
    "actor_rollout_ref.ref.model.path": to("ref.path"),
    "actor_rollout_ref.ref.*": _SPEED,
    "actor_rollout_ref.hybrid_engine": ignored("the GPUs are divided"),
    "actor_rollout_ref.nccl_timeout": _SPEED,
    # sampling and the engine
    f"{_ROLLOUT}.name": to("(Model backend)", _choice(vllm="vllm", sglang="sglang")),
    f"{_ROLLOUT}.mode": ignored("engines are servers always"),
    f"{_ROLLOUT}.n": to("gconfig.n_samples", whole(1)),
    f"{_ROLLOUT}.temperature": to("gconfig.temperature"),
    f"{_ROLLOUT}.top_p": to("gconfig.top_p"),
    f"{_ROLLOUT}.top_k": to("gconfig.top_k", _top_k),
    **_VALIDATION,
    f"{_ROLLOUT}.tensor_model_parallel_size": to("(Model backend)", whole(1)),
    f"{_ROLLOUT}.data_parallel_size": ignored("the GPUs that serve are divided by the tensor parallel size"),
    f"{_ROLLOUT}.gpu_memory_utilization": to("(Model engineArgs)"),
    f"{_ROLLOUT}.max_model_len": to("(Model engineArgs)"),
    f"{_ROLLOUT}.max_num_seqs": to("(Model engineArgs)"),
    f"{_ROLLOUT}.enforce_eager": to("(Model engineArgs)"),
    f"{_ROLLOUT}.prompt_length": ignored("the data set's max_length holds"),
    f"{_ROLLOUT}.response_length": to("gconfig.max_new_tokens"),
    f"{_ROLLOUT}.ignore_eos": to("gconfig.ignore_eos"),
    f"{_ROLLOUT}.calculate_log_probs": ignored("log-probabilities are recorded always"),
    f"{_ROLLOUT}.multi_turn.enable": refused("an agent is a workflow here: docs/agents.md", False),
    f"{_ROLLOUT}.multi_turn.*": refused("an agent is a workflow here: docs/agents.md"),
    f"{_ROLLOUT}.agent.*": refused("an agent is a workflow here: docs/agents.md"),
    f"{_ROLLOUT}.over_sample_rate": lossy("every sample of a group is waited for", 0),
    f"{_ROLLOUT}.*": _SPEED,
    # the algorithm
    "algorithm.adv_estimator": to("(trainer.type, actor.reward_norm)"),
    "algorithm.norm_adv_by_std_in_grpo": to("(actor.reward_norm)"),
    "algorithm.gamma": to("actor.discount"),
    "algorithm.lam": to("actor.gae_lambda"),
    "algorithm.use_kl_in_reward": to("(actor.kl_ctl)"),
    "algorithm.kl_ctrl.kl_coef": to("(actor.kl_ctl)"),
    "algorithm.kl_ctrl.type": refused("an adaptive coefficient is actor.kl_target and actor.kl_horizon", "fixed"),
    "algorithm.kl_penalty": to(
        "actor.kl_estimator", _choice(kl="k1", k1="k1", mse="k2", k2="k2", low_var_kl="k3", k3="k3")
    ),
    "algorithm.filter_groups.enable": to("actor.dynamic_sampling"),
    "algorithm.filter_groups.metric": ignored("groups are filtered by their rewards"),
    "algorithm.filter_groups.max_num_gen_batches": ignored("prompts are sampled until the batch is full"),
    "algorithm.rollout_correction.*": lossy("set actor.use_decoupled_loss and actor.behave_imp_weight_cap"),
    "algorithm.use_pf_ppo": refused("there is no PF-PPO", False),
    # the critic
    "critic.model.path": to("(critic.path)"),
    "critic.optim.lr": to("(critic.optimizer.lr)"),
    "critic.optim.weight_decay": to("(critic.optimizer.weight_decay)"),
    "critic.optim.lr_warmup_steps_ratio": to("(critic.optimizer.warmup_steps_proportion)"),
    "critic.model.enable_gradient_checkpointing": to("(critic.gradient_checkpointing)"),
    "critic.cliprange_value": to("(critic.eps_clip)"),
    "critic.ppo_epochs": to("(critic.ppo_epochs)"),
    "critic.*": _SPEED,
    # the reward
    "custom_reward_function.path": to("(reward.py)"),
    "custom_reward_function.name": to("(reward.py)"),
    "reward_model.enable": refused("a reward model does not score here; write a reward function", False),
    "reward_model.reward_manager": to("(reward.py)", _choice(naive="naive", dapo="dapo")),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": to("actor.overlong_reward_penalty"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": to("actor.overlong_tokens"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": to("actor.overlong_penalty_factor"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": _REPORT,
    "reward_model.reward_kwargs.max_resp_len": ignored("it is gconfig.max_new_tokens"),
    "reward_model.overlong_buffer.enable": to("actor.overlong_reward_penalty"),
    "reward_model.overlong_buffer.len": to("actor.overlong_tokens"),
    "reward_model.overlong_buffer.penalty_factor": to("actor.overlong_penalty_factor"),
    "reward_model.overlong_buffer.log": _REPORT,
    "reward_model.*": ignored("no reward model scores"),
    # the run
    "trainer.project_name": to("experiment_name"),
    "trainer.experiment_name": to("trial_name"),
    "trainer.logger": to("(stats_logger.wandb.mode)"),
    "trainer.total_epochs": to("total_train_epochs"),
    "trainer.total_training_steps": to("total_train_steps", _optional),
    "trainer.save_freq": to("saver.freq_steps", _period),
    "trainer.test_freq": to("evaluator.freq_steps", _period),
    "trainer.val_before_train": to("evaluator.eval_before_train"),
    "trainer.n_gpus_per_node": to("(backend)", whole(1)),
    "trainer.nnodes": to("(backend)", whole(1)),
    "trainer.resume_mode": to("recover.mode", _choice(auto="auto", disable="disabled")),
    "trainer.critic_warmup": lossy("the policy learns from the first step", 0),
    "trainer.val_only": refused("trainer.type=null evaluates, and `areal eval`", False),
    "trainer.default_local_dir": ignored("a job has a folder of its own"),
    "trainer.default_hdfs_dir": ignored("a job has a folder of its own"),
    "trainer.log_val_generations": _REPORT,
    "trainer.rollout_data_dir": _REPORT,
    "trainer.validation_data_dir": _REPORT,
    "trainer.max_actor_ckpt_to_keep": ignored("the newest checkpoints are kept"),
    "trainer.max_critic_ckpt_to_keep": ignored("the newest checkpoints are kept"),
    "trainer.balance_batch": _SPEED,
    "trainer.device": refused("CUDA and CPUs only", "cuda", "cpu"),
    "trainer.use_legacy_worker_impl": _SPEED,
    "trainer.ray_wait_register_center_timeout": _SPEED,
    "trainer.del_local_ckpt_after_load": _SPEED,
    "trainer.resume_from_path": lossy("a job resumes from its own checkpoint"),
    "global_profiler.*": _REPORT,
    "ray_kwargs.*": _SPEED,
    "ray_init.*": _SPEED,
    "transfer_queue.*": _SPEED,
    "defaults": ignored("Hydra composes the file"),
    "hydra.*": ignored("Hydra composes the file"),
}

DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    f"{_MODEL}.enable_gradient_checkpointing": True,
    f"{_MODEL}.lora_rank": 0,
    f"{_MODEL}.lora_alpha": 16,
    f"{_ACTOR}.strategy": "fsdp",
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.top_p": 1.0,
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}.val_kwargs.n": 1,
    f"{_ROLLOUT}.val_kwargs.do_sample": False,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.resume_mode": "auto",
}


def _finish(draft: Draft) -> None:
    _names(draft)
    _batches(draft)
    _advantages(draft)
    _kl(draft)
    _optimizer(draft)
    _adapter(draft)
    _layout(draft)
    _reward(draft)
    if "wandb" in (draft.values.get("trainer.logger") or []):
        draft.set("stats_logger.wandb.mode", "online")
    if not draft.model:
        draft.mark(f"{_MODEL}.path", Fate.REFUSED, "no model is named")
    draft.set("rollout.max_head_offpolicyness", 0)
    draft.set("rollout.dump_to_file", True)
    if draft.config["recover"]["mode"] == "auto" and (every := _period(draft.values.get("trainer.save_freq"))):
        draft.set("recover.freq_steps", every)
    if "valid_dataset" not in draft.config:
        for name in ("eval_gconfig", "evaluator"):
            draft.config.pop(name, None)


def _names(draft: Draft) -> None:
    for name in ("experiment_name", "trial_name"):
        draft.set(name, str(draft.config[name]))


def _batches(draft: Draft) -> None:
    """verl's sizes are prompts: of a step, and of a minibatch."""
    key = f"{_ACTOR}.ppo_mini_batch_size"
    batch, mini = int(draft.values["data.train_batch_size"]), int(draft.values[key])
    draft.set("train_dataset.type", "rl")
    draft.set(
        "gconfig.max_tokens", draft.config["gconfig"]["max_new_tokens"] + int(draft.values["data.max_prompt_length"])
    )
    if "valid_dataset" in draft.config:
        draft.set("valid_dataset", {**draft.config["valid_dataset"], "type": "rl", "batch_size": batch})
    if batch % mini:
        draft.mark(key, Fate.REFUSED, f"minibatches of {mini} prompts do not divide a batch of {batch}")
        return
    draft.set("actor.ppo_n_minibatches", batch // mini)
    draft.mark(key, Fate.MAPPED, f"{batch} prompts of a step in minibatches of {mini}", "actor.ppo_n_minibatches")
    key = f"{_ACTOR}.ppo_max_token_len_per_gpu"
    if draft.values.get(f"{_ACTOR}.use_dynamic_bsz") and draft.values.get(key):
        draft.set("actor.mb_spec.max_tokens_per_mb", int(draft.values[key]))


def _advantages(draft: Draft) -> None:
    key = "algorithm.adv_estimator"
    estimator, by_std = str(draft.values[key]), bool(draft.values["algorithm.norm_adv_by_std_in_grpo"])
    if estimator == "grpo":
        draft.set("trainer.type", "grpo")
        draft.set("actor.reward_norm", {"mean_level": "group", "std_level": "group" if by_std else None})
    elif estimator == "rloo":
        draft.set("trainer.type", "grpo")
        draft.set("actor.reward_norm", {"mean_level": "group", "std_level": None, "mean_leave1out": True})
    elif estimator == "gae":
        draft.set("trainer.type", "ppo")
        draft.set("actor.adv_norm", {"mean_level": "batch", "std_level": "batch"})
        _critic(draft)
    else:
        draft.mark(key, Fate.REFUSED, f"{estimator} is not here; grpo, rloo and gae are")


def _critic(draft: Draft) -> None:
    values = draft.values
    critic: dict[str, Any] = {
        "path": values.get("critic.model.path", values.get(f"{_MODEL}.path", "")),
        "dtype": draft.config["actor"].get("dtype", "bfloat16"),
        "gradient_checkpointing": values.get("critic.model.enable_gradient_checkpointing", True),
        "eps_clip": values["critic.cliprange_value"],
        "ppo_n_minibatches": draft.config["actor"].get("ppo_n_minibatches", 1),
        "optimizer": {
            "lr": values["critic.optim.lr"],
            "weight_decay": values["critic.optim.weight_decay"],
            "warmup_steps_proportion": values.get("critic.optim.lr_warmup_steps_ratio", 0.0),
        },
    }
    if "critic.ppo_epochs" in values:
        critic["ppo_epochs"] = values["critic.ppo_epochs"]
    draft.set("critic", critic)


def _kl(draft: Draft) -> None:
    values = draft.values
    in_reward, in_loss = values["algorithm.use_kl_in_reward"], values[f"{_ACTOR}.use_kl_loss"]
    draft.set("actor.kl_ctl", float(values["algorithm.kl_ctrl.kl_coef"]) if in_reward else 0.0)
    draft.set("actor.kl_loss_coef", float(values[f"{_ACTOR}.kl_loss_coef"]) if in_loss else 0.0)
    if not in_loss:
        draft.config["actor"].pop("kl_loss_type", None)
    if in_reward or in_loss:
        draft.set("ref", {"path": values.get(f"{_MODEL}.path", ""), **draft.config.get("ref", {})})
    else:
        draft.config.pop("ref", None)


def _optimizer(draft: Draft) -> None:
    key = f"{_ACTOR}.optim.betas"
    if isinstance(betas := draft.values.get(key), list) and len(betas) == 2:
        draft.set("actor.optimizer.beta1", betas[0])
        draft.set("actor.optimizer.beta2", betas[1])
    key = f"{_ACTOR}.optim.lr_warmup_steps"
    steps, total = draft.values.get(key), draft.values.get("trainer.total_training_steps")
    if steps is None or int(steps) <= 0:
        return
    if total:
        draft.set("actor.optimizer.warmup_steps_proportion", round(int(steps) / int(total), 6))
        draft.mark(key, Fate.MAPPED, f"{steps} of {total} steps", "actor.optimizer.warmup_steps_proportion")
    else:
        draft.mark(key, Fate.LOSSY, "the warm-up is a share of the steps here, and their number is not given")


def _adapter(draft: Draft) -> None:
    rank = int(draft.values[f"{_MODEL}.lora_rank"] or 0)
    if rank <= 0:
        return
    draft.set("actor.use_lora", True)
    draft.set("actor.lora_rank", rank)
    draft.set("actor.lora_alpha", int(draft.values[f"{_MODEL}.lora_alpha"]))
    modules = draft.values.get(f"{_MODEL}.target_modules", "all-linear")
    draft.set("actor.target_modules", modules if isinstance(modules, list) else [modules])


_ARGUMENTS = {
    "vllm": {
        "gpu_memory_utilization": "gpu-memory-utilization",
        "max_model_len": "max-model-len",
        "max_num_seqs": "max-num-seqs",
        "enforce_eager": "enforce-eager",
    },
    "sglang": {
        "gpu_memory_utilization": "mem-fraction-static",
        "max_model_len": "context-length",
        "max_num_seqs": "max-running-requests",
        "enforce_eager": "disable-cuda-graph",
    },
}


def _layout(draft: Draft) -> None:
    """Half of the GPUs serve and half train; one GPU does both."""
    values = draft.values
    gpus = int(values["trainer.n_gpus_per_node"]) * int(values["trainer.nnodes"])
    tensor, engine = int(values[f"{_ROLLOUT}.tensor_model_parallel_size"]), str(values.get(f"{_ROLLOUT}.name", "vllm"))
    serving = max(1, gpus // 2)
    tensor = min(tensor, serving)
    arguments = _ARGUMENTS.get(engine, {})
    draft.backend = f"{engine}:d{serving // tensor}" + (f"t{tensor}" if tensor > 1 else "")
    train = _train_backend(draft, max(1, gpus - serving))
    for part in ("actor", "critic", "ref"):
        if part in draft.config:
            draft.set(f"{part}.backend", f"fsdp:d{gpus - serving}" if part == "critic" else train)
    note = f"{gpus} GPUs: {draft.backend} serves, {train} trains; verl does both on all of them in turn"
    draft.mark("trainer.n_gpus_per_node", Fate.MAPPED, note, "backend")
    for key, name in arguments.items():
        if (value := values.get(f"{_ROLLOUT}.{key}")) not in (None, False):
            draft.engine_args[name] = value
            if any(each.key == f"{_ROLLOUT}.{key}" for each in draft.entries):
                draft.mark(f"{_ROLLOUT}.{key}", Fate.MAPPED, "", f"Model engineArgs.{name}")
    draft.model = str(values.get(f"{_MODEL}.path") or "")


_PARALLEL = {"tensor": "t", "pipeline": "p", "context": "c", "expert": "e"}


def _train_backend(draft: Draft, gpus: int) -> str:
    """fsdp, or megatron with verl's parallel sizes where the GPUs that train hold them."""
    values, prefix = draft.values, f"{_ACTOR}.megatron."
    if values[f"{_ACTOR}.strategy"] != "megatron" and not any(key.startswith(prefix) for key in values):
        return f"fsdp:d{gpus}"
    keys = {name: f"{prefix}{name}{'_model' if name != 'context' else ''}_parallel_size" for name in _PARALLEL}
    sizes = {_PARALLEL[name]: int(values.get(key) or 1) for name, key in keys.items()}
    ranks = sizes["t"] * sizes["p"] * sizes["c"]
    replicas = max(1, gpus // ranks)
    layout = "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1)
    backend = f"megatron:d{replicas}{layout}"
    try:
        parse_backend(backend)
    except BackendError as error:
        draft.mark(keys["expert"], Fate.LOSSY, f"{backend}: {error.message}")
        return f"megatron:d{replicas}" + layout.partition("e")[0]
    return backend


_REWARD = '''"""The reward of the converted run: what verl's reward manager computes for a row of its data sets."""

from __future__ import annotations

from typing import Any

{imports}

def reward(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    data_source: str = "",
    reward_model: dict[str, Any] | None = None,
    extra_info: dict[str, Any] | None = None,
    **data: Any,
) -> float:
    truth = (reward_model or {{}}).get("ground_truth")
{body}
'''
_OWN = """import importlib.util

_SPEC = importlib.util.spec_from_file_location("custom_reward_function", {path!r})
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
"""
_OWN_BODY = """    score = _MODULE.{name}(
        data_source=data_source, solution_str=completions, ground_truth=truth, extra_info=extra_info
    )
    return float(score["score"] if isinstance(score, dict) else score)"""


def _reward(draft: Draft) -> None:
    path = draft.values.get("custom_reward_function.path")
    if path:
        name = draft.values.get("custom_reward_function.name") or "compute_score"
        imports, body = _OWN.format(path=str(path)), _OWN_BODY.format(name=name)
    else:
        imports = "from areal.reward.math import math_verify_reward_fn\n"
        body = "    return math_verify_reward_fn(prompt, completions, prompt_ids, completion_ids, answer=truth)"
        note = "answers are compared with ground_truth by math-verify, whatever the column data_source says"
        draft.mark("data.reward_fn_key", Fate.LOSSY, note, "reward_fn")
    draft.files["reward.py"] = _REWARD.format(imports=imports, body=body)
    draft.set("reward_fn", "reward:reward")


VERL = Framework("verl", RULES, DEFAULTS, _finish)
