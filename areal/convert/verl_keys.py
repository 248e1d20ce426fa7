"""verl: the keys of its RL trainers: the rule of each, their defaults, and their names of January 2026 by those of
August."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.convert.rules import (
    KLS,
    NO_CODE,
    PACKED,
    REPORT,
    SPEED,
    Rule,
    alike,
    choice,
    files,
    ignored,
    joint,
    lossy,
    number,
    optional,
    period,
    refused,
    to,
    whole,
)
from areal.convert.verl_sft import COMMON, optimizer_rules, parallel_rules


def bounds(value: Any) -> tuple[float | None, float]:
    """Return the lower and the upper bound of an importance weight, from verl's ``UPPER`` or ``LOWER_UPPER``. Raises
    ValueError."""
    lower, _, upper = str(value).rpartition("_")
    return (float(lower) if lower else None), float(upper)


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

_PICTURES = ignored("rows with images or videos are refused when they are read")
_CORRECTION = lossy("set actor.rejection_sampling")
_VALIDATION: Mapping[str, Rule] = {
    f"{ROLLOUT}.val_kwargs.n": to("eval_gconfig.n_samples"),
    f"{ROLLOUT}.val_kwargs.temperature": to("eval_gconfig.temperature"),
    f"{ROLLOUT}.val_kwargs.top_p": to("eval_gconfig.top_p"),
    f"{ROLLOUT}.val_kwargs.top_k": to("eval_gconfig.top_k", period),
    f"{ROLLOUT}.val_kwargs.do_sample": ignored("verl's engines go by the temperature alone"),
}

RULES: Mapping[str, Rule] = {
    **COMMON,
    **optimizer_rules(f"{ACTOR}.optim"),
    # data
    "data.val_files": to("valid_dataset.path", files),
    **alike(ignored("all rows are evaluated"), "data.val_batch_size data.validation_shuffle"),
    "data.max_prompt_length": to("train_dataset.max_length", whole(1), note="longer prompts are left out"),
    "data.max_response_length": to("gconfig.max_new_tokens", whole(1)),
    "data.filter_overlong_prompts": ignored("longer prompts are left out always"),
    **alike(SPEED, "data.filter_overlong_prompts_workers data.dataloader_num_workers"),
    "data.truncation": lossy("longer prompts are left out, not cut", "error"),
    "data.reward_fn_key": refused("the scorer is chosen by the column `data_source`", "data_source"),
    "data.shuffle": to("train_dataset.shuffle"),
    "data.seed": to("seed"),
    "data.return_raw_chat": ignored("prompts are conversations always"),
    **alike(
        _PICTURES,
        "data.image_key data.video_key data.audio_key data.image_patch_size data.mm_processor_kwargs "
        "data.return_multi_modal_inputs",
    ),
    "data.continuous_token.enable": refused("tokens of an answer are rendered once", False),
    "data.continuous_token.*": ignored("it is of `enable`"),
    **alike(REPORT, "data.return_raw_input_ids data.return_full_prompt"),
    "data.apply_chat_template_kwargs.*": joint("train_dataset.chat_template_kwargs"),
    "data.custom_cls.*": refused("write the rows to a file"),
    **alike(refused("rows are sampled at random, or in order"), "data.sampler.class_path data.sampler.class_name"),
    "data.gen_batch_size": joint("train_dataset.batch_size", whole(1), neutral=(None, "${data.train_batch_size}")),
    "data.trust_remote_code": NO_CODE,
    # the model
    f"{MODEL}.path": to("actor.path"),
    f"{MODEL}.enable_gradient_checkpointing": to("actor.gradient_checkpointing"),
    f"{MODEL}.use_remove_padding": PACKED,
    f"{MODEL}.lora_rank": joint("actor.use_lora, actor.lora_rank", whole(0)),
    f"{MODEL}.lora_alpha": joint("actor.lora_alpha", whole(0)),
    f"{MODEL}.target_modules": joint("actor.target_modules"),
    f"{MODEL}.use_fused_kernels": SPEED,
    f"{MODEL}.use_liger": SPEED,
    f"{MODEL}.use_shm": SPEED,
    **alike(SPEED, "enable_activation_offload enable_activation_offloading", MODEL),
    **alike(NO_CODE, "trust_remote_code external_lib", MODEL),
    **alike(refused("the tokenizer is the model's own"), f"{MODEL}.tokenizer_path data.tokenizer"),
    f"{MODEL}.custom_chat_template": refused("the template is the tokenizer's"),
    **alike(refused("change the model's config.json", {}), "override_config override_config.model_config", MODEL),
    f"{MODEL}.override_config.moe_config.freeze_moe_router": refused("the router is trained", False),
    **alike(
        refused("change the model's config.json", 0),
        "attention_dropout embd_pdrop resid_pdrop",
        f"{MODEL}.override_config",
    ),
    f"{MODEL}.override_config.*": refused("change the model's config.json"),
    f"{MODEL}.fused_kernel_options.*": SPEED,
    f"{MODEL}.tiled_mlp.*": SPEED,
    f"{MODEL}.mtp.enable": refused("there is no multi-token prediction", False),
    f"{MODEL}.mtp.*": refused("there is no multi-token prediction"),
    f"{MODEL}.lora.rank": refused("the megatron engine trains all weights", 0),
    f"{MODEL}.lora.*": refused("the megatron engine trains all weights"),
    f"{MODEL}.lora_adapter_path": refused("an adapter begins anew"),
    f"{MODEL}.exclude_modules": refused("name the modules that have adapters"),
    f"{MODEL}.torch_dtype": ignored("master weights are float32"),
    # the policy
    f"{ACTOR}.strategy": joint(
        "actor.backend", choice(**dict.fromkeys(("fsdp", "fsdp2", "dp", "veomni"), "fsdp"), megatron="megatron")
    ),
    f"{ACTOR}.ppo_mini_batch_size": joint("actor.ppo_n_minibatches", whole(1)),
    f"{ACTOR}.ppo_epochs": to("actor.ppo_epochs", whole(1)),
    **alike(
        SPEED,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu sum_pi_squared_checkpointing use_prefix_grouper "
        "use_fused_kernels use_torch_compile entropy_checkpointing entropy_from_logits_with_chunking "
        "entropy_from_logits_chunk_size pad_to_length "
        "fsdp_config.* veomni.* megatron.override_transformer_config.* megatron.virtual_pipeline_model_parallel_size "
        "megatron.*",
        ACTOR,
    ),
    **alike(
        lossy("the loss has no term of the router, and its bias is not updated", 0, "none"),
        "moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate dsa_indexer_loss_coeff",
        f"{ACTOR}.megatron.override_transformer_config",
    ),
    f"{ACTOR}.use_dynamic_bsz": joint("actor.mb_spec"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": joint("actor.mb_spec", whole(1)),
    **alike(
        refused("weights are not quantized in training", False),
        "qat.enable fsdp_config.qat.enable megatron.qat.enable megatron.override_transformer_config.fp8",
        ACTOR,
    ),
    f"{ACTOR}.load_weight": refused("set actor.init_from_scratch", True),
    f"{ACTOR}.grad_clip": to("actor.optimizer.gradient_clipping"),
    **alike(joint("actor.kl_loss_coef"), "use_kl_loss kl_loss_coef", ACTOR),
    f"{ACTOR}.kl_loss_type": to("actor.kl_loss_type", KLS),
    f"{ACTOR}.entropy_coeff": to("actor.entropy_coeff"),
    f"{ACTOR}.clip_ratio": joint("actor.eps_clip"),
    f"{ACTOR}.clip_ratio_low": joint("actor.eps_clip", neutral=(None,)),
    f"{ACTOR}.clip_ratio_high": joint("actor.eps_clip_higher", neutral=(None,)),
    f"{ACTOR}.clip_ratio_c": to("actor.c_clip"),
    f"{ACTOR}.loss_agg_mode": to(
        "actor.loss_agg_mode",
        choice(
            **{
                name: name
                for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
            }
        ),
    ),
    f"{ACTOR}.use_token_level_loss": to(
        "actor.loss_agg_mode", choice(**{"True": "token-mean", "False": "seq-mean-token-mean"})
    ),
    f"{ACTOR}.policy_loss.loss_mode": to(
        "actor.importance_sampling_level", choice(vanilla="token", gspo="sequence", cispo="token", sapo="token")
    ),
    f"{ACTOR}.loss_scale_factor": to("actor.loss_scale_factor", whole(1), neutral=(None,)),
    f"{ACTOR}.policy_loss.*": ignored("it is of another loss_mode"),
    f"{ACTOR}.tau_pos": joint("actor.sapo_tau_pos", number),
    f"{ACTOR}.tau_neg": joint("actor.sapo_tau_neg", number),
    f"{ACTOR}.rollout_n": ignored("it is rollout.n"),
    f"{ACTOR}.freeze_vision_tower": refused("models are text models", False),
    **alike(REPORT, "calculate_entropy calculate_sum_pi_squared profiler.*", ACTOR),
    f"{ACTOR}.use_remove_padding": PACKED,
    f"{ACTOR}.shuffle": lossy("a step's rows are divided by their length", False),
    f"{ACTOR}.data_loader_seed": ignored("it is of `shuffle`"),
    **alike(
        refused("experts are routed anew in training", "disabled"),
        "router_replay.mode veomni.router_replay.mode megatron.router_replay.mode fsdp_config.router_replay.mode",
        ACTOR,
    ),
    f"{ACTOR}.router_replay.*": ignored("it is of router_replay.mode"),
    **alike(
        lossy("rows are not split over GPUs; set actor.mb_spec", 1),
        "ulysses_sequence_parallel_size veomni.ulysses_parallel_size",
        ACTOR,
    ),
    f"{ACTOR}.fsdp_config.model_dtype": ignored("master weights are float32"),
    **alike(
        to("actor.dtype", choice(fp32="float32", float32="float32", bfloat16="bfloat16", bf16="bfloat16")),
        "fsdp_config.dtype megatron.dtype fsdp_config.mixed_precision.param_dtype",
        ACTOR,
    ),
    **parallel_rules(f"{ACTOR}.megatron"),
    f"{ACTOR}.megatron.expert_tensor_parallel_size": lossy("experts use the tensor ranks", 1),
    f"{ACTOR}.checkpoint.*": ignored("a checkpoint has all that a resumed run needs"),
    # the reference
    "actor_rollout_ref.ref.model.path": to("ref.path"),
    **alike(
        SPEED,
        "fsdp_config.* veomni.* megatron.* profiler.* router_replay.* strategy log_prob_micro_batch_size "
        "micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu "
        "param_offload mindspeed.* torchtitan.* "
        "ulysses_sequence_parallel_size use_torch_compile rollout_n load_weight entropy_checkpointing "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size pad_to_length",
        "actor_rollout_ref.ref",
    ),
    "actor_rollout_ref.nccl_timeout": SPEED,
    "actor_rollout_ref.hybrid_engine": ignored("the GPUs are divided"),
    # sampling and the engine
    f"{ROLLOUT}.name": joint("Model backend", choice(vllm="vllm", sglang="sglang")),
    f"{ROLLOUT}.mode": ignored("engines are servers always"),
    f"{ROLLOUT}.n": to("gconfig.n_samples", whole(1)),
    f"{ROLLOUT}.temperature": to("gconfig.temperature"),
    f"{ROLLOUT}.top_p": to("gconfig.top_p"),
    f"{ROLLOUT}.top_k": to("gconfig.top_k", period),
    **_VALIDATION,
    f"{ROLLOUT}.tensor_model_parallel_size": joint("Model backend", whole(1)),
    f"{ROLLOUT}.data_parallel_size": ignored("the GPUs that serve are divided by the tensor parallel size"),
    **alike(
        joint("Model engineArgs"), "gpu_memory_utilization max_model_len max_num_seqs enforce_eager dtype", ROLLOUT
    ),
    f"{ROLLOUT}.prompt_length": ignored("the data set's max_length holds"),
    f"{ROLLOUT}.response_length": to("gconfig.max_new_tokens", whole(1)),
    f"{ROLLOUT}.ignore_eos": to("gconfig.ignore_eos"),
    f"{ROLLOUT}.calculate_log_probs": ignored("log-probabilities are recorded always"),
    f"{ROLLOUT}.multi_turn.enable": refused("an agent is a workflow here: docs/agents.md", False),
    **alike(refused("an agent is a workflow here: docs/agents.md"), "multi_turn.* agent.*", ROLLOUT),
    **alike(
        SPEED,
        "agent.num_workers free_cache_engine cudagraph_capture_sizes expert_parallel_size engine_kwargs.* "
        "pipeline_model_parallel_size max_num_batched_tokens enable_chunked_prefill enable_prefix_caching swap_space "
        "scheduling_policy load_format log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu micro_batch_size "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu multi_stage_wake_up checkpoint_engine.* "
        "update_weights_bucket_megabytes skip_dump_dir skip_tokenizer_init layered_summon limit_images mtp server.* "
        "enable_sleep_mode layer_name_map.* sglang_rollout_mode disaggregation.* full_determinism",
        ROLLOUT,
    ),
    **alike(REPORT, "disable_log_stats prometheus.* profiler.* trace.* moe_load_balance_metrics_interval", ROLLOUT),
    f"{ROLLOUT}.do_sample": ignored("verl's engines go by the temperature alone"),
    f"{ROLLOUT}.logprobs_mode": lossy("log-probabilities are those of the sampled tokens", "processed_logprobs"),
    f"{ROLLOUT}.use_fire_sampling": refused("all tokens are sampled at one temperature", False),
    f"{ROLLOUT}.quantization_config_file": ignored("it is of `quantization`"),
    f"{ROLLOUT}.agent.default_agent_loop": refused("an agent is a workflow here: docs/agents.md", "single_turn_agent"),
    f"{ROLLOUT}.over_sample_rate": lossy("every sample of a group is waited for", 0),
    f"{ROLLOUT}.enable_rollout_routing_replay": lossy("experts are routed anew in training", False),
    **alike(
        lossy("set engineArgs of the Model", "auto"),
        " ".join(
            f"engine_kwargs.{engine}.{name}"
            for engine in ("vllm", "sglang")
            for name in ("kv_cache_dtype", "quantization", "hf_overrides", "rope_scaling", "rope_theta")
        ),
        ROLLOUT,
    ),
    f"{ROLLOUT}.quantization": lossy("set engineArgs of the Model"),
    f"{ROLLOUT}.seed": ignored("the seed of the run is data.seed"),
    f"{ROLLOUT}.nnodes": refused("GPUs that serve alone: --backend and --train-backend", 0),
    f"{ROLLOUT}.n_gpus_per_node": ignored("it is of rollout.nnodes"),
    **alike(
        refused("answers are sampled always", False),
        f"{ROLLOUT}.skip_rollout {ROLLOUT}.skip.enable skip.rollout.enable skip.rollout_tq.enable "
        "skip.async_rollout.enable",
    ),
    f"{ROLLOUT}.skip.*": ignored("it is of `enable`"),
    "skip.*": ignored("it is of `enable`"),
    "distillation.enabled": refused("there is no distillation", False),
    "distillation.*": ignored("it is of distillation.enabled"),
    # the algorithm
    "algorithm.adv_estimator": joint("trainer.type, actor.reward_norm"),
    "algorithm.norm_adv_by_std_in_grpo": joint("actor.reward_norm"),
    "algorithm.gamma": joint("actor.discount"),
    "algorithm.lam": joint("actor.gae_lambda"),
    **alike(joint("actor.kl_ctl"), "algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.type": joint("actor.kl_target", choice(fixed="fixed", adaptive="adaptive")),
    "algorithm.kl_ctrl.target_kl": joint("actor.kl_target"),
    "algorithm.kl_ctrl.horizon": joint("actor.kl_horizon", whole(1)),
    "algorithm.kl_penalty": to("actor.kl_estimator", KLS),
    "algorithm.filter_groups.enable": to("actor.dynamic_sampling"),
    "algorithm.filter_groups.metric": ignored("groups are filtered by their rewards"),
    **alike(
        ignored("prompts are sampled until the batch is full"),
        "algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.max_inflight_gen_batches",
    ),
    "algorithm.rollout_correction.bypass_mode": joint("actor.recompute_logprob"),
    "algorithm.rollout_correction.rollout_is": joint(
        "actor.rejection_sampling", choice(token="token", sequence="sequence"), neutral=(None,)
    ),
    "algorithm.rollout_correction.rollout_is_threshold": joint("actor.rejection_sampling", bounds),
    "algorithm.rollout_correction.rollout_is_batch_normalize": lossy("weights are not normalized", False),
    "algorithm.rollout_correction.loss_type": refused("the loss is that of PPO", "ppo_clip"),
    "algorithm.rollout_correction.rollout_rs": _CORRECTION,
    "algorithm.rollout_correction.rollout_token_veto_threshold": _CORRECTION,
    "algorithm.rollout_correction.*": _CORRECTION,
    "algorithm.rollout_is": joint("actor.rejection_sampling"),
    "algorithm.rollout_is_threshold": joint("actor.rejection_sampling", number, neutral=(None,)),
    "algorithm.rollout_is_threshold_lower": joint("actor.rejection_sampling", number, neutral=(None,)),
    "algorithm.rollout_is_level": joint(
        "actor.rejection_sampling", choice(token="token", sequence="sequence", geometric="geometric")
    ),
    "algorithm.rollout_is_mode": joint("actor.rejection_sampling", choice(truncate="clamp", mask="mask")),
    "algorithm.rollout_is_veto_threshold": _CORRECTION,
    "data.filter_accuracy": refused("groups are filtered where rewards are all alike: algorithm.filter_groups", False),
    **alike(ignored("it is of filter_accuracy"), "accuracy_lower_bound accuracy_upper_bound oversample_factor", "data"),
    f"{ACTOR}.tis_imp_ratio_cap": joint("actor.rejection_sampling", number, neutral=(None, -1)),
    "algorithm.use_pf_ppo": refused("there is no PF-PPO", False),
    "algorithm.pf_ppo.*": refused("there is no PF-PPO"),
    # the critic
    **optimizer_rules("critic.optim", "critic.optimizer"),
    "critic.model.path": to("critic.path"),
    "critic.model.enable_gradient_checkpointing": to("critic.gradient_checkpointing"),
    "critic.model.trust_remote_code": NO_CODE,
    **alike(refused("a critic is trained whole", 0), "critic.model.lora_rank critic.model.lora.rank"),
    "critic.model.mtp.enable": refused("there is no multi-token prediction", False),
    "critic.grad_clip": to("critic.optimizer.gradient_clipping"),
    "critic.cliprange_value": to("critic.eps_clip"),
    "critic.ppo_epochs": to("critic.ppo_epochs", whole(1)),
    "critic.ppo_mini_batch_size": joint("critic.ppo_n_minibatches", whole(1)),
    "critic.loss_agg_mode": lossy("a critic's loss is the mean over tokens", "token-mean"),
    "critic.shuffle": lossy("a step's rows are divided by their length", False),
    "critic.enable": ignored("the estimator says whether there is a critic"),
    **alike(
        SPEED,
        "strategy ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size use_dynamic_bsz "
        "forward_micro_batch_size_per_gpu ppo_max_token_len_per_gpu forward_max_token_len_per_gpu load_weight "
        "ulysses_sequence_parallel_size rollout_n nccl_timeout megatron.* fsdp_config.* model.fsdp_config.* "
        "model.use_remove_padding model.use_shm model.enable_activation_offload model.tiled_mlp.* fsdp.* "
        "model.use_liger model.use_fused_kernels model.fused_kernel_options.*",
        "critic",
    ),
    "critic.model.tokenizer_path": ignored("the critic reads the policy's tokens"),
    **alike(ignored("it is of lora_rank"), "lora_alpha target_modules", "critic.model"),
    **alike(refused("change the model's config.json", {}, False), "override_config override_config.*", "critic.model"),
    "critic.model.external_lib": NO_CODE,
    "critic.data_loader_seed": ignored("it is of `shuffle`"),
    "critic.checkpoint.*": ignored("a checkpoint has all that a resumed run needs"),
    "critic.profiler.*": REPORT,
    "critic.kl_ctrl.*": ignored("it is algorithm.kl_ctrl"),
    # the reward
    **alike(joint("reward.py"), "custom_reward_function.path custom_reward_function.name"),
    "reward_model.enable": refused("a reward model does not score here; write a reward function", False),
    **alike(
        joint("reward.py", choice(naive="naive", dapo="dapo"), neutral=(None,)),
        "reward_manager.name reward_model.reward_manager",
    ),
    "reward_manager.source": refused("a reward is a function here", "register"),
    "reward_manager.module.path": refused("a reward is a function here"),
    "reward_manager.module.name": ignored("it is of module.path"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": to("actor.overlong_reward_penalty"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": to("actor.overlong_tokens"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": to("actor.overlong_penalty_factor"),
    **alike(REPORT, "reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log"),
    "reward_model.reward_kwargs.max_resp_len": ignored("it is gconfig.max_new_tokens"),
    "reward_model.overlong_buffer.enable": to("actor.overlong_reward_penalty"),
    "reward_model.overlong_buffer.len": to("actor.overlong_tokens"),
    "reward_model.overlong_buffer.penalty_factor": to("actor.overlong_penalty_factor"),
    "reward_model.sandbox_fusion.url": lossy("a reward that runs code calls its sandbox itself"),
    **alike(ignored("no reward model scores"), "reward_model.* reward.reward_model.* reward.sandbox_fusion.*"),
    # the run
    "trainer.total_epochs": to("total_train_epochs"),
    "trainer.total_training_steps": to("total_train_steps", optional),
    "trainer.save_freq": to("saver.freq_steps", period),
    "trainer.test_freq": to("evaluator.freq_steps", period),
    "trainer.val_before_train": to("evaluator.eval_before_train"),
    **alike(joint("backend", whole(1)), "trainer.n_gpus_per_node trainer.nnodes"),
    "trainer.critic_warmup": lossy("the policy learns from the first step", 0),
    "trainer.val_only": refused("trainer.type=null evaluates, and `areal eval`", False),
    "trainer.v1.trainer_mode": refused("set rollout.max_head_offpolicyness", "sync"),
    "trainer.v1.*": ignored("it is of trainer_mode"),
    "trainer.log_val_generations": REPORT,
    "trainer.rollout_data_dir": REPORT,
    "trainer.validation_data_dir": REPORT,
    **alike(
        ignored("the newest checkpoints are kept"),
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep remove_previous_ckpt_in_save",
        "trainer",
    ),
    **alike(
        SPEED,
        "trainer.balance_batch trainer.use_legacy_worker_impl trainer.use_v1 reward.num_workers "
        "trainer.ray_wait_register_center_timeout "
        "trainer.del_local_ckpt_after_load trainer.esi_redundant_time ray_kwargs.* ray_init.* transfer_queue.*",
    ),
    **alike(
        REPORT,
        "global_profiler.* trainer.npu_profile.* trainer.controller_nsight_options.* trainer.worker_nsight_options.* "
        "trainer.profile_steps trainer.val_generations_to_log_to_wandb actor_rollout_ref.profiler.* "
        "actor_rollout_ref.ref.profile.* actor_rollout_ref.actor.profile.*",
    ),
}

DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora_alpha": 16,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    "critic.model.enable_gradient_checkpointing": True,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.total_epochs": 30,
    "trainer.val_before_train": True,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.resume_mode": "auto",
}
SWITCHES = {
    f"{ROLLOUT}.multi_turn.": f"{ROLLOUT}.multi_turn.enable",
    f"{MODEL}.mtp.": f"{MODEL}.mtp.enable",
    f"{MODEL}.lora.": f"{MODEL}.lora.rank",
    f"{ACTOR}.qat.": f"{ACTOR}.qat.enable",
    "critic.model.mtp.": "critic.model.mtp.enable",
    "critic.model.lora.": "critic.model.lora.rank",
    "distillation.": "distillation.enabled",
    "algorithm.pf_ppo.": "algorithm.use_pf_ppo",
    "algorithm.rollout_correction.": "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_": "algorithm.rollout_is_threshold",
}
ALIASES = {
    "model_engine": f"{ACTOR}.strategy",
    f"{ACTOR}.model_engine": f"{ACTOR}.strategy",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.sandbox_fusion.url": "reward_model.sandbox_fusion.url",
    **{f"reward.{key}": key for key in RULES if key.startswith(("custom_reward_function.", "reward_manager."))},
    **{
        f"reward.{key.removeprefix('reward_model.')}": key
        for key in RULES
        if key.startswith("reward_model.reward_kwargs.")
    },
    **{
        f"custom_reward_function.overlong_buffer.{name}": f"reward_model.overlong_buffer.{name}"
        for name in ("enable", "len", "penalty_factor", "log")
    },
}
