"""Every field that is taken without a word has an effect. Where it can be, the effect is seen here: the field is set,
and something changes. For the others a test is named, which is there and speaks of the field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from areal.api.cli_args import (
    GenerationHyperparameters,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
)
from areal.api.engine_api import TokenOutputs
from areal.training.algorithms.actor import ActorLoss, add_second_moment_mask
from areal.training.algorithms.advantages import AuxiliaryOutputs, prepare
from areal.training.algorithms.losses import dpo_loss, token_outputs
from areal.training.batches import micro_batches
from areal.training.engines import learning_rate, micro_batch_limits
from areal.training.engines.huggingface import clip_gradients, make_optimizer
from areal.training.trainers.ppo import critic_loss
from areal.wire.fields import hints_of
from tests.api.test_fields import EXPERIMENTS, classes_below, fields_of, marks_of
from tests.training.algorithms.test_presets import GROUPS, LONGEST, case
from tests.training.test_trackers import FIELDS as TRACKED
from tests.training.test_trackers import SECTIONS as TRACKERS

TESTS = Path(__file__).parents[1]


def owner_of(cls: type, name: str) -> str:
    """The class that declares the field, not those that inherit it."""
    return next(each.__name__ for each in reversed(cls.__mro__) if name in inspect.get_annotations(each))


def is_marked(hint: Any) -> bool:
    """Refused or warned of: itself, or all that is below it."""
    below = [hints_of(cls) for cls in classes_below(hint)]
    return bool(marks_of(hint) or (below and all(marks_of(each) for hints in below for each in hints.values())))


FIELDS = {
    f"{owner_of(cls, path[-1])}.{path[-1]}"
    for each in EXPERIMENTS
    for cls, path, hint in fields_of(each)
    if not is_marked(hint)
}

# -- seen here


def gradient(**settings: Any) -> Tensor:
    """Of an actor's update, in a case where the policies, the reference and the samples differ."""
    logits, batch, reference = case()
    batch["versions"] = torch.where(batch["loss_mask"].bool(), 1, -1)
    batch["truncated"] = torch.tensor([False, True, False, False, False, True])
    batch["turn_ids"] = torch.where(batch["loss_mask"].bool(), torch.arange(LONGEST + 1) // LONGEST, -1)
    batch["rewards"] = torch.tensor([1.0, 0.0, 0.3, 1.0, 1.0, 0.0])
    config = PPOActorConfig(**{"max_new_tokens": LONGEST, "kl_ctl": 0.0, **settings})
    if config.use_decoupled_loss or config.recompute_logprob:
        batch["proximal"] = batch["logprobs"] + 0.4 * torch.cos(torch.arange(LONGEST + 1.0))
    if config.prox_logp_method == "loglinear":
        del batch["proximal"]
    micro = prepare(batch, GROUPS, config, AuxiliaryOutputs(reference))
    if config.m2_threshold is not None:
        micro = add_second_moment_mask(micro, config.m2_threshold)
    leaf = logits.clone().requires_grad_()
    torch.autograd.backward(ActorLoss(config, version=3)(token_outputs(leaf, micro), micro))
    assert leaf.grad is not None
    return leaf.grad


def squared(given: Any) -> Tensor:
    return given.logprobs.square()


def ones(given: Any) -> Tensor:
    return torch.ones_like(given.token_rewards)


HERE = __name__
BY_GROUP = NormConfig("group", std_level="group")
DECOUPLED = {"use_decoupled_loss": True}
OVERLONG = {"overlong_reward_penalty": True, "overlong_tokens": 4}

ACTOR: dict[str, tuple[dict[str, Any], Any]] = {
    "eps_clip": ({}, 0.01),
    "eps_clip_higher": ({}, 0.01),
    "c_clip": ({"eps_clip": 9.0, "reward_norm": BY_GROUP}, 1.01),
    "importance_sampling_level": ({}, "sequence"),
    "loss_fn": ({}, f"{HERE}:squared"),
    "advantage_fn": ({}, f"{HERE}:ones"),
    "loss_agg_mode": ({}, "seq-mean-token-mean"),
    "loss_scale_factor": ({"loss_agg_mode": "seq-mean-token-sum-norm"}, 3),
    "max_new_tokens": ({"loss_agg_mode": "seq-mean-token-sum-norm"}, 16),
    "m2_threshold": (DECOUPLED, 0.01),
    "use_sapo_loss": ({}, True),
    "sapo_tau_pos": ({"use_sapo_loss": True}, 3.0),
    "sapo_tau_neg": ({"use_sapo_loss": True, "reward_norm": BY_GROUP}, 3.0),
    "use_cispo_loss": ({}, True),
    "reward_norm": ({}, BY_GROUP),
    "group_reward_norm": ({}, True),
    "reward_scaling": ({}, 3.0),
    "reward_bias": ({}, 0.5),
    "reward_clip": ({}, 0.5),
    "overlong_reward_penalty": ({"overlong_tokens": 4}, True),
    "overlong_tokens": (OVERLONG, 2),
    "overlong_penalty_factor": (OVERLONG, 0.0),
    "mask_no_eos_with_zero": ({"reward_norm": BY_GROUP}, True),
    "mask_truncated_completions": ({"reward_norm": BY_GROUP}, True),
    "discount": ({}, 0.5),
    "gae_lambda": ({}, 0.5),
    "gae_timestep_unit": ({"discount": 0.5}, "turn"),
    "adv_norm": ({}, NormConfig("batch")),
    "group_adv_norm": ({}, True),
    "kl_ctl": ({}, 0.5),
    "kl_estimator": ({"kl_ctl": 0.5}, "k3"),
    "kl_loss_coef": ({}, 0.5),
    "kl_loss_type": ({"kl_loss_coef": 0.5}, "k2"),
    "entropy_coeff": ({}, 0.1),
    "recompute_logprob": ({}, True),
    "use_decoupled_loss": ({}, True),
    "rejection_sampling": (DECOUPLED, RejectionSamplingConfig(upper=1.1)),
    "behave_imp_weight_cap": (DECOUPLED, 1.1),
    "behav_imp_weight_cap": (DECOUPLED, 1.1),
    "behave_imp_weight_mode": (DECOUPLED | {"behave_imp_weight_cap": 1.1}, "sequence_truncate"),
    "behav_imp_weight_mode": (DECOUPLED | {"behav_imp_weight_cap": 1.1}, "sequence_truncate"),
    "prox_logp_method": (DECOUPLED, "loglinear"),
}
"""Of each field what is set beside it, and the value whose gradient is another."""

NORM = {
    "mean_level": None,
    "mean_leave1out": True,
    "std_level": None,
    "std_unbiased": False,
    "eps": 0.5,
}
REJECTION: dict[str, tuple[dict[str, Any], Any]] = {
    "level": ({"upper": 1.05}, "sequence"),
    "action": ({"upper": 1.1}, "clamp"),
    "metric": ({"upper": 1.1}, "kl_k1"),
    "agg": ({"level": "sequence", "upper": 1.3}, "sum"),
    "upper": ({}, 1.1),
    "lower": ({"upper": 100.0}, 0.95),
}


@pytest.mark.parametrize("name", ACTOR)
def test_setting_of_the_actor_changes_the_update(name: str) -> None:
    beside, value = ACTOR[name]
    assert not torch.equal(gradient(**beside), gradient(**beside | {name: value}))


@pytest.mark.parametrize("name", NORM)
def test_setting_of_a_norm_changes_the_update(name: str) -> None:
    changed = dataclasses.replace(BY_GROUP, **{name: NORM[name]})  # type: ignore[arg-type]
    assert not torch.equal(gradient(reward_norm=BY_GROUP), gradient(reward_norm=changed))


@pytest.mark.parametrize("name", REJECTION)
def test_setting_of_rejection_changes_the_update(name: str) -> None:
    beside, value = REJECTION[name]
    before, after = (RejectionSamplingConfig(**each) for each in (beside, beside | {name: value}))
    found = [gradient(**DECOUPLED, rejection_sampling=each) for each in (before, after)]
    assert not torch.equal(*found)


SAMPLING = {
    "min_new_tokens": 2,
    "greedy": True,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "temperature": 0.5,
    "stop_token_ids": [3],
    "stop": ["x"],
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "ignore_eos": True,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("name", SAMPLING)
def test_setting_of_generation_changes_the_request(name: str) -> None:
    plain = GenerationHyperparameters()
    assert plain.request_fields() != plain.new(**{name: SAMPLING[name]}).request_fields()


OPTIMIZER: dict[str, tuple[dict[str, Any], Any]] = {
    "type": ({}, "sgd"),
    "lr": ({}, 0.5),
    "weight_decay": ({}, 0.5),
    "beta1": ({}, 0.1),
    "beta2": ({}, 0.1),
    "eps": ({}, 0.5),
    "lr_scheduler_type": ({}, "linear"),
    "min_lr_ratio": ({"lr_scheduler_type": "linear"}, 0.5),
    "warmup_steps_proportion": ({}, 0.9),
    "gradient_clipping": ({"type": "sgd"}, 0.01),
}


def weights_after(**settings: Any) -> Tensor:
    torch.manual_seed(0)
    model, config = nn.Linear(3, 3), OptimizerConfig(**settings)
    optimizer = make_optimizer(model, config)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, 4)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 3) * step).square().sum())
        clip_gradients(optimizer, config.gradient_clipping)
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("name", OPTIMIZER)
def test_setting_of_the_optimizer_changes_its_steps(name: str) -> None:
    beside, value = OPTIMIZER[name]
    assert not torch.equal(weights_after(**beside), weights_after(**beside | {name: value}))


CUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "n_mbs": ({}, 3),
    "granularity": ({"n_mbs": 2}, 4),
    "max_tokens_per_mb": ({}, 20),
    "n_mbs_divisor": ({"n_mbs": 3}, 4),
    "packing_algorithm": ({"max_tokens_per_mb": 20}, "kk"),
}


def cut(**settings: Any) -> list[list[int]]:
    return micro_batches([5, 9, 2, 7, 8, 3, 4, 6], micro_batch_limits(MicroBatchSpec(**settings), None))


@pytest.mark.parametrize("name", CUTS)
def test_micro_batch_setting_changes_split(name: str) -> None:
    beside, value = CUTS[name]
    assert cut(**beside) != cut(**beside | {name: value})


PREFERENCES = {"beta": 0.7, "loss_type": "ipo", "label_smoothing": 0.3}


@pytest.mark.parametrize("name", PREFERENCES)
def test_setting_of_dpo_changes_the_loss(name: str) -> None:
    how = SimpleNamespace(beta=0.1, loss_type="sigmoid", label_smoothing=0.0)
    found = []
    for settings in ({}, {name: PREFERENCES[name]}):
        now = SimpleNamespace(**vars(how) | settings)
        logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
        mask = torch.ones(2, 2)
        found.append(dpo_loss(logprobs, logprobs * 0.5, mask, now.beta, now.label_smoothing, now.loss_type).per_pair)
    assert not torch.equal(*found)


def test_clip_of_the_critic_changes_its_loss() -> None:
    outputs, mask = TokenOutputs.of_critic(torch.linspace(-1, 1, 6)[None]), torch.ones(1, 6)
    micro = {"loss_mask": mask, "old_values": torch.zeros(1, 6), "returns": torch.full((1, 6), 2.0)}
    loose, tight = (critic_loss(PPOCriticConfig(eps_clip=clip))(outputs, micro) for clip in (0.5, 0.01))
    assert tight > loose


_SEEN_OF: dict[str, Iterable[str]] = {
    "PPOActorConfig": ACTOR,
    "NormConfig": NORM,
    "RejectionSamplingConfig": REJECTION,
    "GenerationHyperparameters": SAMPLING,
    "OptimizerConfig": OPTIMIZER,
    "MicroBatchSpec": CUTS,
    "DPOEngineConfig": PREFERENCES,
    "PPOCriticConfig": ("eps_clip",),
}
SEEN = {f"{cls}.{name}" for cls, names in _SEEN_OF.items() for name in names}

# -- shown elsewhere

CONFIG, GRPO, OFFLINE = "api/test_config.py", "training/trainers/test_grpo.py", "training/trainers/test_offline.py"
MEGATRON = "training/engines/test_megatron.py::test_megatron_settings_are_applied"
CONTROLLER, FSDP = "rollout/test_controller.py", "training/engines/test_fsdp.py"
PREPARE = "training/algorithms/test_prepare.py"
PROMETHEUS = "training/test_prometheus.py"
SETTINGS = "api/test_algorithm_settings.py"
HANDED = f"{CONFIG}::test_top_level_values_are_inherited"
AREAL_LITE = "drivers/test_drivers.py::test_areal_lite_overrides_reach_driver"
EPOCHS = f"{GRPO}::test_reference_is_logged_without_penalty_every_epoch"
CRITIC = f"{GRPO}::test_critic_and_reference_are_used"
LORA = f"{FSDP}::test_lora_trains_adapters_and_publishes_merged_weights"
DROPOUT = f"{FSDP}::test_disable_dropout_keeps_gradient_checkpointing"
SEVERAL = f"{GRPO}::test_weighted_rewards_are_each_in_metrics"
EVALUATED = f"{GRPO}::test_evaluation_uses_served_weights"
INTERVALS = "training/trainers/test_validation.py::test_validation_intervals_match_evaluation"
ORDER = "training/test_frontier.py::test_each_epoch_has_every_row_at_most_once"
OLDER = f"{CONFIG}::test_older_spellings_map_to_new_ones"
WINDOW = f"{CONTROLLER}::test_starts_stay_within_window_until_next_version"
TURNS = "rollout/test_workflows.py::test_turn_rewards_are_discounted_along_conversation"
RETRIED = f"{CONTROLLER}::test_failing_engine_is_retried_then_a_service_failure"
LAYOUT = "training/test_layout.py::test_process_count_is_of_training_engine"
DRIVERS = "training/test_drivers.py"
GROUPS_THAT_DIFFER = f"{DRIVERS}::test_trainer_samples_whole_and_varied_groups_if_configured"
LENGTH = f"{OFFLINE}::test_run_length_and_timers_follow_config"
DTYPES = f"{FSDP}::test_dtype_is_for_compute_and_optimizer_dtype_for_storage"
TRACKER = "training/test_trackers.py::test_tracker_receives_setting"
TENSORBOARD = "training/test_trackers.py::test_tensorboard_writes_to_its_path"
AGENT = "rollout/test_workflows.py::test_configured_agent_runs_without_workflow"
NO_SERVICE = "rollout/test_workflows.py::test_agent_service_settings_are_refused_for_inline_agents"
ONE_NUMBER = f"{GRPO}::test_mismatched_batch_sizes_are_an_error"

NAMED: dict[str, dict[str, str]] = {
    "AgentConfig": {"mode": "rollout/test_workflows.py::test_online_mode_takes_user_trajectories"},
    "AgentServiceConfig": {
        "agent_cls_path": AGENT,
        "export_style": TURNS,
        "turn_discount": TURNS,
        "admin_api_key": f"{OFFLINE}::test_written_config_reproduces_run",
        **dict.fromkeys(("service", "gateway_addr", "admin_api_key_file", "request_timeout"), NO_SERVICE),
        **dict.fromkeys(("inference", "model", "num_pairs", "setup_timeout", "health_poll_interval"), NO_SERVICE),
        **dict.fromkeys(("drain_timeout", "session_timeout", "log_level", "env"), NO_SERVICE),
    },
    "BaseExperimentConfig": {
        "allocation_mode": LAYOUT,
        "stats_logger": TRACKER,
        "total_train_epochs": LENGTH,
        "vllm": f"{DRIVERS}::test_engine_section_sets_its_flags",
        **dict.fromkeys(("experiment_name", "trial_name", "cluster", "saver", "tokenizer_path"), HANDED),
        "checkpointer": OLDER,
        "weight_update_mode": OLDER,
        "driver": "training/drivers/test_running.py::test_custom_driver_is_found_in_working_folder",
        "trainer": AREAL_LITE,
        "evaluator": EVALUATED,
        "valid_dataset": EVALUATED,
        "recover": f"{GRPO}::test_resumed_run_consumes_each_prompt_once",
        "seed": "training/test_frontier.py::test_shuffled_epochs_differ_and_are_repeatable",
        "min_required_servers": AREAL_LITE,
        "shutdown_server_on_exit": AREAL_LITE,
        "total_train_steps": AREAL_LITE,
        "sglang": f"{DRIVERS}::test_engine_section_sets_its_flags",
        "train_dataset": ONE_NUMBER,
    },
    "ClusterSpecConfig": {"fileroot": HANDED},
    "DPOConfig": {
        "actor": f"{OFFLINE}::test_dpo_widens_margin_of_chosen_answer",
        "ref": f"{OFFLINE}::test_dpo_uses_configured_reference",
    },
    "EvaluatorConfig": {
        "eval_before_train": EVALUATED,
        **dict.fromkeys(("pass_threshold", "confidence"), INTERVALS),
    },
    "GenerationHyperparameters": {
        "drop_incomplete_group": GROUPS_THAT_DIFFER,
        "max_tokens": "rollout/test_engine.py::test_budget_respects_every_limit",
        "max_new_tokens": f"{SETTINGS}::test_overlong_penalty_uses_max_new_tokens",
        "n_samples": f"{CONFIG}::test_interpolation_sees_the_defaults_of_the_class",
        "seed": f"{CONTROLLER}::test_seeded_sampling_depends_only_on_data_order",
    },
    "InferenceEngineConfig": {
        "check_trajectory_format": f"{CONTROLLER}::test_check_trajectory_format_rejects_malformed_rows",
        "episode_timeout": f"{CONTROLLER}::test_episode_timeout_ends_hanging_workflow",
        "request_timeout": f"{CONTROLLER}::test_request_timeout_ends_hanging_call",
        "reward_workers": f"{CONTROLLER}::test_reward_workers_limit_reward_processes",
        "model": f"{CONTROLLER}::test_sampled_model_is_configured_one",
        "openai": AGENT,
        **dict.fromkeys(("experiment_name", "trial_name", "fileroot", "tokenizer_path"), HANDED),
        **dict.fromkeys(("admin_api_key_file", "gateway_addr", "min_required_servers"), AREAL_LITE),
        "shutdown_server_on_exit": AREAL_LITE,
        "admin_api_key": f"{OFFLINE}::test_written_config_reproduces_run",
        "agent": TURNS,
        "backend": "drivers/test_own_service.py::test_unstartable_engine_is_one_line_without_leftovers",
        "consumer_batch_size": ONE_NUMBER,
        "deterministic_sampling": f"{CONTROLLER}::test_seeded_sampling_depends_only_on_data_order",
        "dump_to_file": f"{CONTROLLER}::test_consumed_rollouts_are_dumped_for_viewer",
        "max_concurrent_rollouts": WINDOW,
        "max_head_offpolicyness": WINDOW,
        "queue_size": WINDOW,
        "request_retries": RETRIED,
        "setup_timeout": f"{CONTROLLER}::test_service_is_found_from_config_or_environment",
    },
    "PPOActorConfig": {
        "dynamic_sampling": GROUPS_THAT_DIFFER,
        "value_bootstrap": f"{PREPARE}::test_value_bootstrap_continues_truncated_answers_alone",
        **dict.fromkeys(("kl_horizon", "kl_target", "ppo_epochs", "ppo_n_minibatches"), EPOCHS),
        "preset": "training/algorithms/test_presets.py::test_preset_gradient_matches_its_paper",
        "group_size": f"{CONFIG}::test_interpolation_sees_the_defaults_of_the_class",
    },
    "PPOConfig": {
        "actor": EPOCHS,
        "ref": EPOCHS,
        "critic": CRITIC,
        "async_training": AREAL_LITE,
        "dynamic_bs": f"{CONTROLLER}::test_dynamic_batch_returns_accepted_rollouts_of_its_prompts",
        "gconfig": f"{CONFIG}::test_interpolation_sees_the_defaults_of_the_class",
        "eval_gconfig": f"{CONFIG}::test_areal_file_loads_unchanged",
        "reward_fn": SEVERAL,
        "reward_weights": SEVERAL,
        "workflow": SEVERAL,
        "workflow_kwargs": SEVERAL,
        "rollout": ONE_NUMBER,
    },
    "MegatronDDPConfig": {"overlap_grad_reduce": MEGATRON},
    "MegatronEngineConfig": {
        **dict.fromkeys(("ddp", "recompute_granularity", "recompute_method", "recompute_num_layers"), MEGATRON),
        "use_deterministic_algorithms": MEGATRON.partition("::")[0] + "::test_deterministic_algorithms_set_torch",
    },
    "PPOCriticConfig": dict.fromkeys(("ppo_n_minibatches", "ppo_epochs"), CRITIC),
    "PrometheusConfig": {
        **dict.fromkeys(("host", "key_file"), f"{PROMETHEUS}::test_public_trainer_metrics_require_key"),
        **dict.fromkeys(("port", "enabled"), f"{PROMETHEUS}::test_configured_port_is_used"),
    },
    "RecoverConfig": {"mode": f"{CONFIG}::test_yaml_boolean_words_are_read_as_recover_mode"},
    "SFTConfig": dict.fromkeys(("actor", "model"), f"{CONFIG}::test_sft_takes_model_or_actor"),
    "StatsLoggerConfig": {
        **dict.fromkeys(("experiment_name", "trial_name", "fileroot"), HANDED),
        "prometheus": f"{PROMETHEUS}::test_public_trainer_metrics_require_key",
        **dict.fromkeys(("wandb", "swanlab", "trackio"), TRACKER),
        "tensorboard": TENSORBOARD,
    },
    **{cls.__name__: dict.fromkeys(TRACKED[name], TRACKER) for name, cls in TRACKERS.items()},
    "TensorBoardConfig": {"path": TENSORBOARD},
    "TrainDatasetConfig": {
        "split": "dataset/test_dataset.py::test_configured_split_is_read",
        "batch_size": ONE_NUMBER,
        "drop_last": ORDER,
        "shuffle": ORDER,
        "max_length": "dataset/test_dataset.py::test_overlong_rows_are_dropped",
        "type": "dataset/test_dataset.py::test_pairs_become_two_token_rows",
        "train_on": "dataset/test_conversations.py::test_train_on_is_a_dataset_setting",
        "chat_template_kwargs": "dataset/test_conversations.py::test_template_variables_apply_to_every_row_kind",
        "path": "dataset/test_dataset.py::test_pairs_become_two_token_rows",
    },
    "TrainEngineConfig": {
        **dict.fromkeys(("dtype", "optimizer_dtype"), DTYPES),
        "grad_reduce_dtype": f"{FSDP}::test_grad_reduce_dtype_sets_dtype_of_gradient_reduction",
        "attn_impl": f"{FSDP}::test_attn_impl_reaches_model",
        "backend": LAYOUT,
        "path": f"{FSDP}::test_path_selects_trained_weights",
        "peft_type": f"{SETTINGS}::test_rejects_meaningless_settings_at_their_place",
        "target_modules": f"{FSDP}::test_adapters_are_on_target_modules",
        **dict.fromkeys(("experiment_name", "trial_name"), HANDED),
        **dict.fromkeys(("use_lora", "lora_rank", "lora_alpha"), LORA),
        "disable_dropout": DROPOUT,
        "gradient_checkpointing": DROPOUT,
        "freeze_vision_tower": "training/engines/test_vision.py::test_update_changes_vision_tower_unless_frozen",
        "init_from_scratch": "training/trainers/test_bad_input.py::test_model_folder_without_weights_is_named",
        "is_critic": f"{FSDP}::test_packed_critic_has_value_of_last_token",
        "megatron": MEGATRON,
        "mb_spec": f"{FSDP}::test_train_batch_in_micro_batches_matches_whole_step",
        "optimizer": CRITIC,
        "temperature": f"{GRPO}::test_temperature_differing_from_samples_is_refused",
        "weight_update_mode": OLDER,
    },
    "TrainerConfig": {
        "async_training": AREAL_LITE,
        "type": f"{SETTINGS}::test_meaningful_settings_are_accepted",
    },
    "PeriodicConfig": {
        "freq_secs": LENGTH,
        **dict.fromkeys(("experiment_name", "trial_name", "fileroot"), HANDED),
        "freq_epochs": f"{OFFLINE}::test_sft_learns_and_saves_model",
        "freq_steps": EVALUATED,
    },
}

SHOWN = {f"{cls}.{name}": test for cls, tests in NAMED.items() for name, test in tests.items()}


def test_every_field_has_a_test_of_its_effect() -> None:
    assert SEEN | set(SHOWN) == FIELDS, "a new field is given its effect here, or marked NoEffect or NotSupported"
    assert not SEEN & set(SHOWN)


@pytest.mark.parametrize("field", sorted(SHOWN))
def test_named_effect_test_exists_and_mentions_field(field: str) -> None:
    file, name = SHOWN[field].split("::")
    source = (TESTS / file).read_text(encoding="utf-8")
    assert name in {
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert re.search(rf"\b{field.split('.')[1]}\b", source)
