"""verl: Hydra configurations of its SFT trainers of January 2026, ``fsdp_sft_trainer`` and ``sft_trainer``.

The rules are for both: ``model.partial_pretrain`` of the first, ``model.path`` and ``engine.*`` of the second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal.convert.drafts import Draft, Fate
from areal.convert.rules import (
    FOLDER,
    NO_CODE,
    OFFLOAD,
    PACKED,
    REPORT,
    SPEED,
    Framework,
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

_SCHEDULE = choice(constant="constant", linear="linear", cosine="cosine")


_PARALLEL = {"t": "tensor_model", "p": "pipeline_model", "c": "context", "e": "expert_model"}


def parallel_rules(prefix: str) -> dict[str, Rule]:
    """Return the rules of Megatron's sizes in the section ``prefix``."""
    return {f"{prefix}.{name}_parallel_size": joint("actor.backend", whole(1)) for name in _PARALLEL.values()}


def optimizer_rules(prefix: str, target: str = "actor.optimizer") -> Mapping[str, Rule]:
    return {
        f"{prefix}.lr": to(f"{target}.lr"),
        f"{prefix}.betas": joint(f"{target}.beta1, beta2"),
        f"{prefix}.weight_decay": to(f"{target}.weight_decay"),
        f"{prefix}.weight_decay_incr_style": refused("the weight decay is constant", "constant"),
        f"{prefix}.clip_grad": to(f"{target}.gradient_clipping"),
        f"{prefix}.optimizer": to(f"{target}.type", choice(AdamW="adam", Adam="adam", adam="adam", SGD="sgd")),
        f"{prefix}.optimizer_impl": refused("the optimizers are torch's", "torch.optim"),
        f"{prefix}.override_optimizer_config": refused("set actor.optimizer", {}),
        f"{prefix}.override_optimizer_config.*": refused("set actor.optimizer"),
        f"{prefix}.override_optimizer_config.decoupled_weight_decay": refused("Adam is AdamW", True),
        **alike(
            OFFLOAD,
            "optimizer_offload_fraction offload_fraction optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d "
            "use_precision_aware_optimizer",
            f"{prefix}.override_optimizer_config",
        ),
        f"{prefix}.use_checkpoint_opt_param_scheduler": SPEED,
        **alike(to(f"{target}.lr_scheduler_type", _SCHEDULE), "lr_scheduler_type lr_decay_style", prefix),
        f"{prefix}.warmup_style": to(f"{target}.lr_scheduler_type", _SCHEDULE, neutral=(None,)),
        f"{prefix}.lr_warmup_steps_ratio": to(f"{target}.warmup_steps_proportion"),
        f"{prefix}.lr_warmup_steps": joint(f"{target}.warmup_steps_proportion", optional, neutral=(None, -1)),
        f"{prefix}.lr_warmup_init": refused("a warm-up begins at 0", 0.0),
        f"{prefix}.min_lr_ratio": to(f"{target}.min_lr_ratio", neutral=(None,)),
        f"{prefix}.min_lr": joint(f"{target}.min_lr_ratio", number, neutral=(None,)),
        f"{prefix}.zero_indexed_step": lossy("the schedule counts steps from 0", True),
        f"{prefix}.num_cycles": refused("a cosine has half a cycle", 0.5),
        **alike(lossy("its states are float32", "fp32"), "exp_avg_dtype exp_avg_sq_dtype main_grads_dtype", prefix),
        **alike(SPEED, "use_precision_aware_optimizer use_layer_wise_distributed_optimizer", prefix),
        **alike(
            ignored("it is of optimizer muon"),
            "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_match_adamw_update_rms "
            "muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv "
            "muon_tp_mode",
            prefix,
        ),
        f"{prefix}.total_training_steps": ignored("the schedule is over all steps of the run"),
        f"{prefix}.lr_decay_steps": joint(f"{target}.lr_scheduler_type", number, neutral=(None,)),
        **alike(ignored("it is of lr_decay_style WSD"), "lr_wsd_decay_style lr_wsd_decay_steps", prefix),
    }


_OWN_CONFIGS = [
    f"{before}{trainer}{ending}"
    for before in ("", "transfer_queue_", "fully_async_", "one_step_off_")
    for trainer in ("ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "sft_trainer")
    for ending in ("", ".yaml")
]
_OWN_GROUPS = re.compile(
    r"_self_|(?:dp|megatron|veomni|torchtitan|\$\{\w+\})(?:_(?:actor|critic|ref|reward\w*))?|automodel|fsdp|mindspeed|actor|"
    r"critic|ref|rollout|reward(?:_model|_manager)?|legacy_reward_impl|profiler|legacy_data|hf_model|rollout_correction|distillation|npu_profile|"
    r"transfer_queue"
)
_ACTOR = "actor_rollout_ref.actor"
_COMPOSED = "its keys are not read: convert the YAML file that the command prints with --cfg job --resolve"


def begin(draft: Draft) -> None:
    """Name the run, and refuse the files that Hydra merges into this one, except verl's own."""
    draft.name_run()
    for prefix, target in (("optim", "actor"), (f"{_ACTOR}.optim", "actor"), ("critic.optim", "critic")):
        if draft.is_given(key := f"{prefix}.lr_decay_steps") and draft.values.get(key) is not None:
            optimizer = draft.config.get(target, {}).get("optimizer", {})
            falls = optimizer.get("lr_scheduler_type", "constant") != "constant"
            note = "the schedule is over all steps of the run" if falls else "a constant rate does not fall"
            draft.mark(key, Fate.LOSSY if falls else Fate.IGNORED, note)
    given = draft.values.get("defaults") or []
    given = given if isinstance(given, list) else [given]
    named = [str(name) for each in given for name in (each.values() if isinstance(each, Mapping) else [each])]
    files = (each.rpartition("/")[2].removesuffix(".yaml") for each in named)
    others = [each for each in files if each not in _OWN_CONFIGS and not _OWN_GROUPS.fullmatch(each)]
    if others:
        draft.mark("defaults", Fate.REFUSED, f"{', '.join(others)}: {_COMPOSED}")


COMMON: Mapping[str, Rule] = {
    "--config-name": refused(_COMPOSED, *_OWN_CONFIGS, "sft_trainer_engine"),
    **alike(ignored("it is of --config-name"), "--config-path --config-dir"),
    "data.train_files": to("train_dataset.path", files),
    "data.train_batch_size": to("train_dataset.batch_size", whole(1)),
    "data.use_shm": SPEED,
    "data.prompt_key": joint("rows.py"),
    **alike(lossy("all rows are read", -1), "data.train_max_samples data.val_max_samples"),
    "data.apply_chat_template_kwargs": to("train_dataset.chat_template_kwargs", neutral=(None, {})),
    "trainer.project_name": to("experiment_name"),
    "trainer.experiment_name": to("trial_name"),
    "trainer.logger": joint("stats_logger.wandb.mode"),
    "trainer.resume_mode": to("recover.mode", choice(auto="auto", disable="disabled")),
    **alike(ignored("it is of resume_mode resume_path"), "trainer.resume_from_path trainer.resume_path"),
    **alike(FOLDER, "trainer.default_local_dir trainer.default_hdfs_dir"),
    "trainer.device": ignored("the backend says it"),
    **alike(ignored("Hydra composes the file"), "defaults hydra.*"),
}
"""The keys that all of verl's trainers have."""

RULES: Mapping[str, Rule] = {
    **COMMON,
    **optimizer_rules("optim"),
    "data.val_files": to("valid_dataset.path", files, neutral=(None,)),
    **alike(
        SPEED,
        "data.micro_batch_size data.micro_batch_size_per_gpu data.balance_dp_token data.num_workers model.use_shm "
        "model.fsdp_config.* model.use_liger model.use_fused_kernels model.enable_activation_offload engine.*",
    ),
    "data.use_dynamic_bsz": joint("actor.mb_spec"),
    "data.max_token_len_per_gpu": joint("actor.mb_spec", whole(1)),
    "data.response_key": joint("rows.py"),
    **alike(joint("rows.py", neutral=(None,)), "data.prompt_dict_keys data.response_dict_keys"),
    "data.multiturn.enable": joint("train_dataset.train_on"),
    **alike(
        joint("rows.py", neutral=(None, "messages", "tools")),
        "multiturn.messages_key messages_key multiturn.tools_key tools_key",
        "data",
    ),
    "data.multiturn.enable_thinking_key": refused("the column is `chat_template_kwargs`", "enable_thinking"),
    "data.enable_thinking_key": refused("the column is `chat_template_kwargs`", "enable_thinking"),
    **alike(PACKED, "data.pad_mode model.use_remove_padding use_remove_padding"),
    "data.max_length": to("train_dataset.max_length", whole(1)),
    "data.truncation": lossy("longer rows are left out, not cut", "error"),
    "data.chat_template": refused("the template is the tokenizer's"),
    "data.custom_cls.path": refused("write the rows to a file"),
    "data.custom_cls.name": ignored("it is of custom_cls.path"),
    "data.ignore_input_ids_mismatch": ignored("a conversation is rendered as a whole"),
    **alike(joint("actor.path", neutral=(None,)), "model.partial_pretrain model.path"),
    "model.fsdp_config.model_dtype": ignored("master weights are float32"),
    **alike(NO_CODE, "model.external_lib model.trust_remote_code"),
    "model.enable_gradient_checkpointing": to("actor.gradient_checkpointing"),
    "model.lora_rank": joint("actor.use_lora, actor.lora_rank", whole(0)),
    "model.lora_alpha": joint("actor.lora_alpha", whole(0)),
    "model.target_modules": joint("actor.target_modules"),
    "model.strategy": ignored("actor.backend says it"),
    "ulysses_sequence_parallel_size": lossy("rows are not split over GPUs; set actor.mb_spec", 1),
    **alike(ignored("Hydra composes the file"), "model optim"),
    "optim.lr_scheduler": to("actor.optimizer.lr_scheduler_type", _SCHEDULE),
    "optim.lr_min": joint("actor.optimizer.min_lr_ratio", number, neutral=(None,)),
    **alike(joint("actor.backend", choice(fsdp="fsdp", fsdp2="fsdp", megatron="megatron")), "engine engine.strategy"),
    "engine.ulysses_sequence_parallel_size": lossy("rows are not split over GPUs; set actor.mb_spec", 1),
    **parallel_rules("engine"),
    **alike(joint("actor.backend", whole(1)), "trainer.nnodes trainer.n_gpus_per_node nnodes nproc_per_node"),
    **alike(ignored("a checkpoint has all that a resumed run needs"), "checkpoint.* trainer.checkpoint.*"),
    **alike(REPORT, "profiler.* trainer.profile_interval"),
    "trainer.total_epochs": to("total_train_epochs", whole(1)),
    "trainer.total_training_steps": to("total_train_steps", optional, neutral=(None,)),
    "trainer.seed": to("seed"),
    "trainer.save_freq": joint("saver"),
    "trainer.test_freq": joint("evaluator"),
    "trainer.max_ckpt_to_keep": ignored("the newest checkpoints are kept"),
}

DEFAULTS: Mapping[str, object] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.01,
    "optim.lr_warmup_steps_ratio": 0.1,
    "optim.clip_grad": 1.0,
    "optim.lr_scheduler": "cosine",
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "trainer.resume_mode": "auto",
    "trainer.nnodes": 1,
}
_OF_ENGINES = {
    **DEFAULTS,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler": "constant",
    "trainer.n_gpus_per_node": 1,
}
_AFTER_EPOCH = "after_each_epoch"


def _finish(draft: Draft) -> None:
    values = draft.values
    begin(draft)
    draft.set("trainer.type", "sft")
    draft.set("train_dataset.type", "sft")
    conversations = values.get("data.multiturn.enable") or values.get("model.path")  # sft_trainer reads only these
    draft.set("train_dataset.train_on", "assistant" if conversations else "last")
    draft.set("train_dataset.shuffle", True)
    if conversations:
        _pick_conversations(draft)
    else:
        columns = {"prompt": _column(draft, "prompt"), "response": _column(draft, "response")}
        draft.pick_columns(columns, "data.prompt_key")
    draft.model = str(values.get("model.partial_pretrain") or values.get("model.path") or "")
    draft.set("actor.path", draft.model)
    if not draft.model:
        draft.mark("model.path", Fate.REFUSED, "no model is named")
    if "path" not in draft.config["train_dataset"]:
        draft.mark("data.train_files", Fate.REFUSED, "no data set is named")
    draft.adam(values["optim.betas"], values.get("optim.min_lr") or values.get("optim.lr_min"), values["optim.lr"])
    draft.warm_up("optim.lr_warmup_steps", values.get("trainer.total_training_steps"))
    if values["model.lora_rank"]:
        draft.adapt("model.lora_rank", "model.lora_alpha", "model.target_modules")
    if values.get("data.use_dynamic_bsz") and values.get("data.max_token_len_per_gpu"):
        draft.set("actor.mb_spec.max_tokens_per_mb", draft.number("data.max_token_len_per_gpu"))
    rows = values.get("data.micro_batch_size_per_gpu")
    draft.bound_micro_batches(draft.config["train_dataset"]["max_length"], {"actor": rows})
    _layout(draft)
    for key, target in (("trainer.save_freq", "saver"), ("trainer.test_freq", "evaluator")):
        every = values.get(key)
        if every == _AFTER_EPOCH:
            draft.set(f"{target}.freq_epochs", 1)
        elif (steps := _steps(draft, key, every)) is not None:
            draft.set(f"{target}.freq_steps", steps)
    if "wandb" in str(values.get("trainer.logger")):
        draft.set("stats_logger.wandb.mode", "online")
    draft.validate()
    draft.save_and_resume(draft.config.get("saver", {}).get("freq_steps"))


def _pick_conversations(draft: Draft) -> None:
    """Read the columns that the source names for conversations and tools. Rows need no tools."""
    keys = {ours: f"data.multiturn.{ours}_key" for ours in ("messages", "tools")}
    keys = {ours: key if draft.is_given(key) else f"data.{ours}_key" for ours, key in keys.items()}
    columns = {ours: draft.values.get(key) or ours for ours, key in keys.items()}
    if columns["tools"] == "tools":
        del columns["tools"]
    draft.pick_columns(columns, keys["messages"])


def _column(draft: Draft, side: str) -> str:
    """Return the column of the prompt or of the response, with a dot if it is a value within an object."""
    inner = draft.values.get(f"data.{side}_dict_keys")
    names = inner if isinstance(inner, list) else [inner] if inner else []
    if len(names) > 1:
        draft.mark(f"data.{side}_dict_keys", Fate.REFUSED, f"{len(names)} columns: write them as one")
    return ".".join(str(each) for each in (draft.values[f"data.{side}_key"], *names[:1]))


def _steps(draft: Draft, key: str, every: Any) -> int | None:
    """Return a period in steps. A value that is not a number is refused."""
    try:
        return period(every)
    except ValueError as error:
        draft.mark(key, Fate.REFUSED, str(error))
        return None


def megatron_backend(draft: Draft, prefix: str, gpus: int) -> str:
    """Return the layout of Megatron on ``gpus`` GPUs, with the parallel sizes of the section ``prefix``."""
    keys = {letter: f"{prefix}.{name}_parallel_size" for letter, name in _PARALLEL.items()}
    return draft.megatron({letter: int(draft.values.get(key) or 1) for letter, key in keys.items()}, gpus, keys["e"])


def _layout(draft: Draft) -> None:
    values = draft.values
    a_node = values.get("nproc_per_node") or values.get("trainer.n_gpus_per_node") or 8
    gpus = int(a_node) * int(values.get("nnodes") or values["trainer.nnodes"])
    if "megatron" in (values.get("engine"), values.get("engine.strategy")):
        draft.set("actor.backend", megatron_backend(draft, "engine", gpus))
    else:
        draft.train_on(gpus)


FSDP_SFT = Framework(
    "verl's fsdp_sft_trainer", RULES, DEFAULTS, _finish, {"optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio"}
)
SFT = Framework("verl's sft_trainer", RULES, _OF_ENGINES, _finish)
