"""TRL's keys: the rule of each, and their defaults, by trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.convert.rules import (
    NO_CODE,
    OFFLOAD,
    PACKED,
    REPORT,
    SCHEDULE,
    SPEED,
    Rule,
    alike,
    choice,
    ignored,
    joint,
    lossy,
    number,
    pair,
    refused,
    to,
    whole,
)

_HUB = ignored("nothing is pushed: models are saved in the job's folder")
_OWN_MODEL = refused("give the model a folder of its own with this")
_NO_MODULES = refused("adapters are of linear layers, and the rest is frozen")


def _epochs(value: Any) -> int:
    if number(value) < 1 or value != int(value):
        raise ValueError(f"epochs are whole here, not {value}: set max_steps")
    return int(value)


def mixture(value: Any) -> list[str]:
    """Return the data sets of TRL's ``datasets``, or of ``dataset_mixture`` of the alignment handbook, whose rows are
    learned one after the other. Raises ValueError for shares of their rows."""
    listed = value.get("datasets") if isinstance(value, Mapping) else value
    found = list[str]()
    for each in listed if isinstance(listed, list) else []:
        if not isinstance(each, Mapping) or not (path := each.get("path") or each.get("id")):
            raise ValueError("each data set of a mixture has a path")
        if {each.get("fraction"), each.get("weight")} - {None, 1} or each.get("data_dir") or each.get("data_files"):
            raise ValueError("a mixture of parts of data sets: write the rows to a file")
        parts = (str(path), each.get("name") or each.get("config"), each.get("split", "train"))
        found.append(":".join(str(part) for part in parts if part))
    if not found:
        raise ValueError("a mixture names data sets with their paths")
    return found


_REPORTED = """
logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level run_id
log_level_replica log_on_each_node disable_tqdm include_num_input_tokens_seen log_completions log_multimodal
num_completions_to_print log_unique_prompts log_completions_hub_repo wandb_log_unique_prompts trackio_bucket_id
trackio_static_space_id include_for_metrics prediction_loss_only batch_eval_metrics eval_do_concat_batches
eval_use_gather_object generate_during_eval debug skip_memory_metrics include_tokens_per_second overwrite_output_dir
ignore_data_skip
"""
_OF_SPEED = """
tf32 bf16_full_eval fp16_full_eval torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
liger_kernel_config activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs
activation_offloading torch_empty_cache_steps dataloader_num_workers dataloader_pin_memory
dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
accelerator_config parallelism_config full_determinism local_rank save_on_each_node save_safetensors
enable_jit_checkpoint use_ipex restore_callback_states_from_checkpoint mixed_precision ds3_gather_for_generation
device_map use_cache cache_dir token low_cpu_mem_usage num_proc verification_mode sanity_check fast_inference
max_lora_rank gpu_memory_utilization preprocessing_num_workers
gradient_checkpointing_use_reentrant force_use_ref_model is_encoder_decoder
cache_implementation use_transformers_paged use_transformers_continuous_batching
transformers_continuous_batching_config precompute_ref_log_probs precompute_ref_batch_size use_logits_to_keep
use_num_logits_to_keep use_liger use_liger_loss dataset_batch_size base_model_attribute_name
"""
_OF_HUB = """
push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision hub_model_revision
"""
_COMMON: Mapping[str, Rule] = {
    # the model
    "model_name_or_path": joint("actor.path"),
    "model_revision": refused("a model is a folder, or a name on the hub", "main"),
    "dtype": joint("actor.dtype", choice(auto="", float32="float32", bfloat16="bfloat16"), neutral=(None,)),
    "torch_dtype": joint("actor.dtype", choice(auto="", float32="float32", bfloat16="bfloat16"), neutral=(None,)),
    "bf16": joint("actor.dtype", neutral=(None,)),
    "fp16": refused("float16 has no loss scaling here: bfloat16", False),
    "attn_implementation": to("actor.attn_impl", neutral=(None,)),
    "use_flash_attention_2": to("actor.attn_impl", choice(**{"True": "flash_attention_2"}), neutral=(None, False)),
    "trust_remote_code": NO_CODE,
    "model_init_kwargs": _OWN_MODEL,
    "gradient_checkpointing": to("actor.gradient_checkpointing"),
    "quantization_config": lossy("the frozen weights are bfloat16"),
    "disable_dropout": ignored("a policy has no dropout"),
    "cast_lm_head_to_fp32": ignored("log-probabilities are float32 always"),
    "router_aux_loss_coef": lossy("the balance of experts has no loss", 0, 0.0),
    "use_peft": joint("actor.use_lora"),
    "lora_r": joint("actor.lora_rank", whole(1)),
    "lora_alpha": joint("actor.lora_alpha", whole(1)),
    "lora_dropout": joint("actor.use_lora", number),
    "lora_target_modules": joint("actor.target_modules", neutral=(None,)),
    **alike(_NO_MODULES, "lora_target_parameters lora_modules_to_save"),
    "lora_task_type": ignored("the trainer says it"),
    "use_rslora": refused("the scale of an adapter is alpha / rank", False),
    "use_dora": refused("adapters are LoRA", False),
    **alike(lossy("the frozen weights are bfloat16", False), "load_in_4bit load_in_8bit"),
    **alike(ignored("no weights are quantized"), "bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant"),
    # the data
    "dataset_name": joint("train_dataset.path"),
    "dataset_config": joint("train_dataset.path", neutral=(None,)),
    "dataset_train_split": to("train_dataset.split"),
    "dataset_test_split": joint("valid_dataset.split"),
    **alike(SPEED, "dataset_streaming dataset_num_proc streaming ignore_bias_buffers"),
    **alike(joint("train_dataset.path", mixture, neutral=(None, [])), "datasets dataset_mixture"),
    "test_split_size": refused("name a split, or a file of its own", 0, 0.0),
    "chat_template_kwargs": to("train_dataset.chat_template_kwargs", neutral=(None, {})),
    **alike(refused("the template is the tokenizer's"), "chat_template_path chat_template"),
    **alike(refused("name one data set: dataset_name"), "dataset_mixer dataset_splits dataset_configs"),
    # arguments of a trainer in Python code
    **alike(lossy("the tokenizer is the model's own"), "processing_class tokenizer"),
    "eval_dataset": ignored("it changes what is reported: set valid_dataset"),
    "compute_metrics": REPORT,
    "callbacks": lossy("callbacks do not run", []),
    "data_seed": ignored("`seed` orders the rows too"),
    "train_sampling_strategy": to("train_dataset.shuffle", choice(random=True, sequential=False)),
    "group_by_length": ignored("rows are packed by length"),
    "remove_unused_columns": ignored("the reward takes the columns that it names"),
    **alike(SPEED, "label_names length_column_name"),
    "eos_token": refused("the tokenizer says it"),
    **alike(PACKED, "pad_token pad_to_multiple_of padding_value label_pad_token_id"),
    # the optimizer
    "learning_rate": to("actor.optimizer.lr"),
    "lr_scheduler_type": to("actor.optimizer.lr_scheduler_type", SCHEDULE),
    "lr_scheduler_kwargs": joint("actor.optimizer.min_lr_ratio", neutral=(None, {})),
    "warmup_steps": joint("actor.optimizer.warmup_steps_proportion", number),
    "warmup_ratio": to("actor.optimizer.warmup_steps_proportion"),
    "optim": joint("actor.optimizer.type"),
    **alike(refused("the optimizers are torch's"), "optim_args optim_target_modules"),
    "weight_decay": to("actor.optimizer.weight_decay"),
    "adam_beta1": to("actor.optimizer.beta1"),
    "adam_beta2": to("actor.optimizer.beta2"),
    "adam_epsilon": to("actor.optimizer.eps"),
    "max_grad_norm": to("actor.optimizer.gradient_clipping"),
    "label_smoothing_factor": refused("there is no label smoothing", 0, 0.0),
    "neftune_noise_alpha": refused("embeddings have no noise"),
    # sizes and steps
    "per_device_train_batch_size": joint("train_dataset.batch_size", whole(1)),
    "gradient_accumulation_steps": joint("train_dataset.batch_size", whole(1)),
    **alike(joint("train_dataset.batch_size", whole(1)), "num_processes nproc_per_node nnodes num_gpus num_nodes"),
    "num_machines": ignored("num_processes is of all machines"),
    "num_train_epochs": to("total_train_epochs", _epochs),
    "max_steps": joint("total_train_steps", whole(-1)),
    "seed": to("seed"),
    "auto_find_batch_size": refused("a step's size changes what is learned", False),
    "average_tokens_across_devices": ignored("a loss is the mean over all ranks"),
    # evaluation and saving
    **alike(joint("evaluator", choice(no="no", steps="steps", epoch="epoch")), "eval_strategy evaluation_strategy"),
    "eval_steps": joint("evaluator.freq_steps", number, neutral=(None,)),
    "eval_on_start": joint("evaluator.eval_before_train"),
    "eval_delay": lossy("every evaluation is made", 0),
    "eval_packing": PACKED,
    **alike(SPEED, "do_train do_eval do_predict per_device_eval_batch_size eval_accumulation_steps"),
    "save_strategy": joint("saver", choice(no="no", steps="steps", epoch="epoch")),
    "save_steps": joint("saver.freq_steps"),
    "save_total_limit": ignored("the newest checkpoints are kept"),
    "save_only_model": ignored("a job can always be resumed"),
    "load_best_model_at_end": lossy("the last weights are those that the run ends with", False),
    **alike(ignored("it is of load_best_model_at_end"), "metric_for_best_model greater_is_better"),
    "resume_from_checkpoint": lossy("a job resumes from its own checkpoint", False, True),
    "output_dir": joint("experiment_name"),
    "run_name": joint("trial_name"),
    "report_to": joint("stats_logger"),
    "project": REPORT,
    "trackio_space_id": joint("stats_logger.trackio.space_id", neutral=(None,)),
    "config": ignored("its keys are read"),
    **alike(lossy("the file of accelerate is not read: say num_processes=N"), "config_file accelerate_config"),
    "env": ignored("set it in the job's env"),
    "sync_ref_model": refused("a reference stays as it was", False),
    **alike(ignored("it is of sync_ref_model"), "ref_model_mixup_alpha ref_model_sync_steps"),
    **alike(REPORT, _REPORTED),
    **alike(SPEED, _OF_SPEED),
    **alike(OFFLOAD, "fsdp fsdp_config deepspeed"),
    **alike(_HUB, _OF_HUB),
    **alike(joint("actor.dtype"), "use_cpu no_cuda"),
}

_ONLINE: Mapping[str, Rule] = {
    **_COMMON,
    "reward_funcs": joint("reward_fn", neutral=(None, [])),
    "system_prompt": joint("rows.py", neutral=(None, "")),
    "dataset_prompt_column": joint("rows.py"),
    "reward_weights": joint("reward_weights", neutral=(None,)),
    "reward_model_name_or_path": refused("a reward model does not score here; write a reward function"),
    "num_generations": to("gconfig.n_samples", whole(1)),
    "num_generations_eval": joint("eval_gconfig.n_samples", whole(1), neutral=(None,)),
    "max_completion_length": to("gconfig.max_new_tokens", whole(1)),
    "max_prompt_length": joint("train_dataset.max_length", whole(1), neutral=(None,)),
    "max_seq_length": ignored("prompts and answers have bounds of their own"),
    "generation_batch_size": joint("train_dataset.batch_size", whole(1), neutral=(None,)),
    "steps_per_generation": joint("actor.ppo_n_minibatches", whole(1), neutral=(None,)),
    "num_iterations": to("actor.ppo_epochs", whole(1)),
    "temperature": to("gconfig.temperature"),
    "top_p": to("gconfig.top_p"),
    "top_k": to("gconfig.top_k", lambda value: value or None, neutral=(None,)),
    "min_p": to("gconfig.min_p", neutral=(None,)),
    "repetition_penalty": to("gconfig.repetition_penalty"),
    "generation_kwargs": refused("set gconfig", {}),
    "shuffle_dataset": to("train_dataset.shuffle"),
    "dataloader_drop_last": ignored("a step has all its prompts always"),
    "max_tool_calling_iterations": refused("an agent is a workflow here: docs/agents.md"),
    "epsilon": to("actor.eps_clip"),
    "epsilon_high": joint("actor.eps_clip_higher", neutral=(None,)),
    "mask_truncated_completions": to("actor.mask_truncated_completions"),
    "use_vllm": ignored("an engine serves the model always"),
    "vllm_mode": joint("Model backend", choice(colocate="colocate", server="server")),
    "vllm_tensor_parallel_size": joint("Model backend", whole(1)),
    "vllm_gpu_memory_utilization": joint("Model engineArgs"),
    **alike(joint("Model engineArgs", neutral=(None,)), "vllm_max_model_length vllm_max_model_len"),
    "vllm_dtype": joint("Model engineArgs", neutral=(None, "auto")),
    **alike(SPEED, "vllm_model_impl vllm_server_timeout vllm_group_port vllm_enable_prefix_caching"),
    **alike(ignored("the GPUs are divided"), "vllm_enable_sleep_mode vllm_device"),
    **alike(refused("answers of a policy are free"), "vllm_structured_outputs_regex vllm_guided_decoding_regex"),
    **alike(ignored("the service is the converted one"), "vllm_server_base_url vllm_server_host vllm_server_port"),
    "beta": joint("actor.kl_loss_coef", number),
}

SCALES = {"group": "group", "True": "group", "batch": "batch", "none": None, "False": None}
GRPO_RULES: Mapping[str, Rule] = {
    **_ONLINE,
    "loss_type": joint("actor.loss_agg_mode"),
    "importance_sampling_level": to("actor.importance_sampling_level", choice(token="token", sequence="sequence")),
    "scale_rewards": joint("actor.reward_norm", choice(**SCALES)),
    "delta": to("actor.c_clip", neutral=(None,)),
    "sapo_temperature_pos": joint("actor.sapo_tau_pos"),
    "sapo_temperature_neg": joint("actor.sapo_tau_neg"),
    **{f"vespo_{name}": ignored("it is of loss_type vespo") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "multi_objective_aggregation": refused("rewards are summed, then normalized", "sum_then_normalize"),
    "top_entropy_quantile": refused("every token is learned", 1, 1.0),
    "entropy_coef": to("actor.entropy_coeff"),
    "use_adaptive_entropy": refused("the coefficient of the entropy is fixed", False),
    **{f"entropy_{name}": ignored("it is of use_adaptive_entropy") for name in ("coef_min", "coef_max", "coef_delta")},
    "entropy_target": ignored("it is of use_adaptive_entropy"),
    "off_policy_mask_threshold": refused("set actor.rejection_sampling"),
    "use_bias_correction_kl": lossy("the KL term is not weighted by the ratio", False),
    **alike(joint("actor.rejection_sampling"), "vllm_importance_sampling_correction vllm_importance_sampling_mode"),
    "vllm_importance_sampling_clip_max": joint("actor.rejection_sampling", neutral=(None,)),
    "vllm_importance_sampling_clip_min": joint("actor.rejection_sampling", neutral=(None,)),
    "vllm_importance_sampling_cap": joint("actor.rejection_sampling", neutral=(None,)),
}
RLOO_RULES: Mapping[str, Rule] = {
    **_ONLINE,
    "normalize_advantages": joint("actor.adv_norm"),
    "reward_clip_range": joint("actor.reward_clip", pair, neutral=(None,)),
}
_CUT = joint("train_dataset.max_length")
SFT_RULES: Mapping[str, Rule] = {
    **_COMMON,
    **alike(to("train_dataset.max_length", whole(1), neutral=(None,)), "max_length max_seq_length"),
    "truncation_mode": _CUT,
    "dataset_text_field": refused("rows are conversations, or a prompt and an answer", "text"),
    "dataset_kwargs": refused("rows are conversations, or a prompt and an answer", {}),
    "shuffle_dataset": ignored("the trainer shuffles the rows"),
    "dataloader_drop_last": to("train_dataset.drop_last"),
    "packing": lossy("a batch is of rows, not of sequences that are packed full", False),
    **alike(ignored("it is of packing"), "packing_strategy num_of_sequences chars_per_token"),
    "padding_free": PACKED,
    "completion_only_loss": joint("train_dataset.train_on", neutral=(None,)),
    "assistant_only_loss": joint("train_dataset.train_on"),
    "loss_type": joint("trainer.type", choice(nll="nll", chunked_nll="nll")),
}
_PAIRS: Mapping[str, Rule] = {
    **_COMMON,
    "max_length": to("train_dataset.max_length", whole(1), neutral=(None,)),
    **alike(
        lossy("max_length bounds prompt and answer together"),
        "max_prompt_length max_completion_length max_target_length",
    ),
    "truncation_mode": _CUT,
    "padding_free": PACKED,
    "dataloader_drop_last": to("train_dataset.drop_last"),
}
DPO_RULES: Mapping[str, Rule] = {
    **_PAIRS,
    "beta": to("actor.beta"),
    "loss_type": joint("actor.loss_type"),
    "loss_weights": refused("the loss is one"),
    "label_smoothing": to("actor.label_smoothing"),
    "f_divergence_type": refused("the divergence is the reverse KL", "reverse_kl"),
    "f_alpha_divergence_coef": ignored("it is of f_divergence_type"),
    "discopop_tau": ignored("it is of loss_type discopop"),
    "ld_alpha": refused("every token counts alike"),
    "rpo_alpha": refused("the loss is of preferences alone"),
    "use_weighting": refused("every pair counts alike", False),
    "reference_free": refused("the reference is the model as it begins", False),
    **alike(ignored("there is one adapter"), "model_adapter_name ref_adapter_name"),
}
REWARD_RULES: Mapping[str, Rule] = {**_PAIRS, "center_rewards_coefficient": refused("rewards are not centred")}

_DEFAULTS: Mapping[str, object] = {
    "dtype": "float32",
    "bf16": None,
    "gradient_checkpointing": True,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
    "num_train_epochs": 3,
    "max_steps": -1,
    "seed": 42,
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "use_cpu": False,
}
_ONLINE_DEFAULTS: Mapping[str, object] = {
    **_DEFAULTS,
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "num_iterations": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "shuffle_dataset": True,
    "epsilon": 0.2,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
    "beta": 0.0,
}
_OFFLINE_DEFAULTS = {**_DEFAULTS, "max_length": 1024, "truncation_mode": "keep_start", "dataloader_drop_last": False}
GRPO_DEFAULTS = {
    **_ONLINE_DEFAULTS,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
RLOO_DEFAULTS = {**_ONLINE_DEFAULTS, "beta": 0.05, "num_generations": 2, "normalize_advantages": False}
SFT_DEFAULTS = {**_OFFLINE_DEFAULTS, "learning_rate": 2e-5, "assistant_only_loss": False}
DPO_DEFAULTS = {**_OFFLINE_DEFAULTS, "learning_rate": 1e-6, "beta": 0.1, "label_smoothing": 0.0}
REWARD_DEFAULTS = {**_OFFLINE_DEFAULTS, "learning_rate": 1e-4}
