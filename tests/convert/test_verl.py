"""verl's keys: what they become, and that the result is a configuration of this project."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import GRPOConfig, PPOConfig, load_expr_config
from areal.convert.drafts import Draft, Fate
from areal.convert.reading import Unread
from areal.convert.rules import convert
from areal.convert.sources import SOURCES, read_keys
from areal.convert.verl import VERL
from areal.convert.verl_keys import DEFAULTS, RULES

ACTOR, VALIDATION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.val_kwargs"
BASE = {
    "data.train_files": "train.parquet",
    "data.train_batch_size": 64,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.model.path": "org/model",
    "actor_rollout_ref.rollout.name": "sglang",
    "algorithm.adv_estimator": "grpo",
}


def converted(**changes: Any) -> Draft:
    return convert(VERL, {**BASE, **{key.replace("__", "."): value for key, value in changes.items()}})


def fates(draft: Draft, fate: Fate) -> dict[str, str]:
    return {each.key: each.note for each in draft.entries if each.fate is fate}


def loaded(draft: Draft, tmp_path: Path) -> PPOConfig:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(draft.config))
    kind = PPOConfig if draft.config["trainer"]["type"] == "ppo" else GRPOConfig
    return load_expr_config(["--config", str(path)], kind)[0]


def test_verl_grpo_converts_to_equal_grpo(tmp_path: Path) -> None:
    draft = converted(
        **{
            "actor_rollout_ref.rollout.n": 5,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.kl_loss_coef": 0.01,
            "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
            "actor_rollout_ref.actor.clip_ratio_high": 0.28,
            "data.max_response_length": 1024,
        }
    )
    config = loaded(draft, tmp_path)
    actor = config.actor
    assert (config.train_dataset.batch_size, actor.ppo_n_minibatches, config.gconfig.n_samples) == (64, 4, 5)
    assert (actor.kl_loss_coef, actor.kl_loss_type, actor.kl_ctl) == (0.01, "k3", 0.0)
    assert (actor.eps_clip, actor.eps_clip_higher, actor.c_clip, actor.loss_agg_mode) == (0.2, 0.28, 3.0, "token-mean")
    assert actor.reward_norm is not None and actor.reward_norm.std_level == "group"
    assert config.ref is not None and config.ref.path == "org/model"
    assert (config.gconfig.max_new_tokens, config.rollout.max_head_offpolicyness) == (1024, 0)
    assert actor.optimizer is not None and (actor.optimizer.lr, actor.optimizer.weight_decay) == (1e-6, 0.01)
    assert not fates(draft, Fate.REFUSED)


def test_verl_defaults_apply_when_unset(tmp_path: Path) -> None:
    config = loaded(convert(VERL, {**BASE, "data.train_batch_size": 1024, "algorithm.adv_estimator": "gae"}), tmp_path)
    assert (config.gconfig.max_new_tokens, config.train_dataset.max_length, config.total_train_epochs) == (512, 512, 30)
    assert config.critic is not None and config.critic.optimizer is not None
    assert (config.critic.path, config.critic.optimizer.lr, config.critic.eps_clip) == ("org/model", 1e-5, 0.5)
    assert config.ref is None and config.actor.kl_loss_coef == config.actor.kl_ctl == 0


@pytest.mark.parametrize("path", [{}, {"actor_rollout_ref.model.path": None}])
def test_verl_without_a_model_names_none_anywhere(path: dict[str, Any]) -> None:
    plain = {name: value for name, value in BASE.items() if name != "actor_rollout_ref.model.path"}
    other = {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True}
    draft = convert(VERL, {**plain, **path, **other})
    assert [draft.config[name]["path"] for name in ("critic", "ref")] == ["", ""]


OVERLONG = {"enable": True, "len": 64, "penalty_factor": 0.5}


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ({f"{ACTOR}.clip_ratio": 0.1}, {f"{ACTOR}.clip_ratio"}),  # verl before 0.4 clips by it
        ({f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_low": 0.2}, set()),
        ({f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 0.3}, {f"{ACTOR}.grad_clip"}),
        # verl before 0.4 has no use_kl_in_reward, another entropy_coeff and no dual clip
        ({"algorithm.kl_ctrl.kl_coef": 0.0}, {f"{ACTOR}.entropy_coeff", f"{ACTOR}.clip_ratio_c"}),
        (
            {"algorithm.kl_ctrl.kl_coef": 0.1, f"{ACTOR}.entropy_coeff": 0, f"{ACTOR}.clip_ratio_c": 3.0},
            {"algorithm.kl_ctrl.kl_coef"},
        ),
        ({"algorithm.kl_ctrl.kl_coef": 0.1, "algorithm.use_kl_in_reward": False}, set()),
    ],
)
def test_setting_that_one_version_of_verl_has_is_lossy(given: dict[str, Any], lost: set[str]) -> None:
    assert set(fates(converted(**given), Fate.LOSSY)) == {*lost, "data.reward_fn_key"}


@pytest.mark.parametrize(
    ("switch", "setting"),
    [
        ("distillation.enabled", "distillation.teacher_models.teacher_model.model_path"),
        (f"{ACTOR}.qat.enable", f"{ACTOR}.qat.mode"),
        ("trainer.v1.trainer_mode", "trainer.v1.separate_async.parameter_sync_step"),
    ],
)
def test_settings_of_what_is_off_ask_for_nothing(switch: str, setting: str) -> None:
    off, on = ("sync", "separate_async") if switch.endswith("mode") else (False, True)
    assert set(fates(converted(**{switch: off, setting: "x"}), Fate.IGNORED)) >= {switch, setting}
    assert switch in fates(converted(**{switch: on, setting: "x"}), Fate.REFUSED)


def test_dr_grpo_rloo_and_gspo_follow_their_keys() -> None:
    assert converted(**{"algorithm.norm_adv_by_std_in_grpo": False}).config["actor"]["reward_norm"]["std_level"] is None
    assert converted(**{"algorithm.adv_estimator": "rloo"}).config["actor"]["reward_norm"]["mean_leave1out"]
    gspo = converted(**{"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}).config["actor"]
    assert gspo["importance_sampling_level"] == "sequence"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        # verl reads clip_ratio where clip_ratio_low or _high is null, and these are 0.2 by default
        ({f"{ACTOR}.clip_ratio": 0.1}, {"actor.eps_clip": 0.2, "actor.eps_clip_higher": 0.2}),
        (
            {f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio_high": 0.28},
            {"actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.28},
        ),
        # without a critic verl discounts nothing, but for reinforce_plus_plus, which has no lambda
        ({"algorithm.gamma": 0.9, "algorithm.lam": 0.95}, {"actor.discount": 1.0, "actor.gae_lambda": 1.0}),
        (
            {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.9, "algorithm.lam": 0.95},
            {"actor.discount": 0.9, "actor.gae_lambda": 1.0},
        ),
        (
            {"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.9, "algorithm.lam": 0.95},
            {"actor.discount": 0.9, "actor.gae_lambda": 0.95, "actor.value_bootstrap": False},
        ),
        # loss_mode gspo has its own aggregation, and no dual clip
        (
            {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_c": 10.0},
            {"actor.loss_agg_mode": "seq-mean-token-mean", "actor.c_clip": None},
        ),
        # its weight has no lower bound, and a ratio is never below 0
        (
            {f"{ACTOR}.policy_loss.loss_mode": "cispo", f"{ACTOR}.clip_ratio_low": 10, f"{ACTOR}.clip_ratio_high": 4},
            {"actor.use_cispo_loss": True, "actor.eps_clip": 1.0, "actor.eps_clip_higher": 4, "actor.c_clip": None},
        ),
        # names of the branch of DAPO
        ({f"{ACTOR}.use_token_level_loss": True}, {"actor.loss_agg_mode": "token-mean"}),
        ({f"{ACTOR}.use_token_level_loss": False}, {"actor.loss_agg_mode": "seq-mean-token-mean"}),
        (
            {f"custom_reward_function.overlong_buffer.{name}": value for name, value in OVERLONG.items()},
            {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 64, "actor.overlong_penalty_factor": 0.5},
        ),
        # the ratio is to the log-probabilities of the trainer, and rewards are not clipped
        ({}, {"actor.recompute_logprob": True, "actor.reward_clip": 1e9, "actor.dtype": "bfloat16"}),
        ({"algorithm.rollout_correction.bypass_mode": True}, {"actor.recompute_logprob": False}),
        (
            {"algorithm.rollout_correction.rollout_is": "token"},
            {
                "actor.use_decoupled_loss": True,
                "actor.rejection_sampling.level": "token",
                "actor.rejection_sampling.action": "clamp",
                "actor.rejection_sampling.upper": 2.0,
            },
        ),
        (
            {f"{ACTOR}.tis_imp_ratio_cap": 3},
            {
                "actor.use_decoupled_loss": True,
                "actor.rejection_sampling.level": "token",
                "actor.rejection_sampling.action": "clamp",
                "actor.rejection_sampling.upper": 3,
            },
        ),
        (
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": "0.5_4.0",
            },
            {
                "actor.rejection_sampling.action": "mask",
                "actor.rejection_sampling.lower": 0.5,
                "actor.rejection_sampling.upper": 4.0,
            },
        ),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_neg": 1.1, f"{ACTOR}.clip_ratio_c": 10.0},
            {
                "actor.use_sapo_loss": True,
                "actor.sapo_tau_pos": 1.0,
                "actor.sapo_tau_neg": 1.1,
                "actor.loss_agg_mode": "seq-mean-token-mean",
            },
        ),
        # the names of October 2025
        (
            {
                "algorithm.rollout_is": True,
                "algorithm.rollout_is_threshold": 2.0,
                "algorithm.rollout_is_mode": "truncate",
            },
            {
                "actor.use_decoupled_loss": True,
                "actor.rejection_sampling.level": "token",
                "actor.rejection_sampling.action": "clamp",
                "actor.rejection_sampling.upper": 2.0,
            },
        ),
        (
            {
                "algorithm.rollout_is": True,
                "algorithm.rollout_is_threshold": 1.25,
                "algorithm.rollout_is_level": "geometric",
                "algorithm.rollout_is_mode": "mask",
            },
            {
                "actor.rejection_sampling.level": "sequence",
                "actor.rejection_sampling.agg": "mean",
                "actor.rejection_sampling.action": "mask",
                "actor.rejection_sampling.lower": 0.8,
            },
        ),
        # a step has gen_batch_size prompts; with filter_groups they are sampled until train_batch_size are kept
        ({"data.gen_batch_size": 128}, {"train_dataset.batch_size": 128, "actor.ppo_n_minibatches": 8}),
        ({"data.gen_batch_size": 1, "trainer.use_v1": True}, {"train_dataset.batch_size": 64}),
        (
            {"data.gen_batch_size": 128, "algorithm.filter_groups.enable": True, "actor_rollout_ref.rollout.n": 4},
            {"train_dataset.batch_size": 64, "actor.dynamic_sampling": True},
        ),
        ({f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32"}, {"actor.dtype": "float32"}),
        ({f"{ACTOR}.tis_imp_ratio_cap": -1}, {"actor.recompute_logprob": True, "actor.use_decoupled_loss": False}),
        ({f"{ACTOR}.fsdp_config.model_dtype": "fp32"}, {"actor.dtype": "bfloat16"}),
        ({f"{ACTOR}.grad_clip": 0.5, f"{ACTOR}.optim.clip_grad": 1.0}, {"actor.optimizer.gradient_clipping": 0.5}),
        # verl's engines of 2026 clip by optim.clip_grad, and the dots of a reward begin with reward
        ({f"{ACTOR}.grad_clip": 1.0, f"{ACTOR}.optim.clip_grad": 0.3}, {"actor.optimizer.gradient_clipping": 0.3}),
        (
            {
                "reward_model.reward_kwargs.overlong_buffer_cfg.len": None,
                "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
                "reward.reward_kwargs.overlong_buffer_cfg.len": 100,
                "reward.reward_manager.name": "dapo",
                "model_engine": "megatron",
            },
            {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 100, "actor.backend": "megatron:d4"},
        ),
        # evaluation goes by the temperature, which is 0 by default
        ({"data.val_files": "v.parquet"}, {"eval_gconfig.temperature": 0, "eval_gconfig.max_new_tokens": 512}),
        (
            {"data.val_files": "v.parquet", f"{VALIDATION}.temperature": 0.6, f"{VALIDATION}.do_sample": False},
            {"eval_gconfig.temperature": 0.6, "eval_gconfig.is_greedy": False},
        ),
        ({"critic.optim.lr": 1e-4}, {"critic": None}),
        (
            {
                "algorithm.adv_estimator": "gae",
                "critic.grad_clip": 0.5,
                "critic.ppo_mini_batch_size": 32,
                f"{ACTOR}.ppo_epochs": 2,
                "critic.optim.betas": [0.8, 0.9],
                "critic.optim.lr_scheduler_type": "cosine",
            },
            {
                "critic.optimizer.gradient_clipping": 0.5,
                "critic.ppo_n_minibatches": 2,
                "critic.ppo_epochs": 2,
                "critic.optimizer.warmup_steps_proportion": 0.0,
                "critic.optimizer.beta1": 0.8,
                "critic.optimizer.lr_scheduler_type": "cosine",
                "actor.optimizer.lr_scheduler_type": "constant",
            },
        ),
    ],
)
def test_settings_keep_their_meaning_in_verl(given: dict[str, Any], meant: dict[str, Any], tmp_path: Path) -> None:
    config = loaded(converted(**given), tmp_path)
    assert {key: attrgetter(key)(config) for key in meant} == meant


def test_settings_verl_counts_differently_are_lossy() -> None:
    assert f"{ACTOR}.loss_agg_mode" in fates(
        converted(**{f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}), Fate.LOSSY
    )
    masks = {
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_rs": "token_k1",
    }
    assert set(fates(converted(**masks), Fate.LOSSY)) >= {"algorithm.rollout_correction.rollout_rs"}
    kl = {"algorithm.use_kl_in_reward": True}
    assert "algorithm.use_kl_in_reward" in fates(converted(**kl), Fate.LOSSY)
    assert "algorithm.use_kl_in_reward" in fates(converted(**kl, **{"algorithm.adv_estimator": "gae"}), Fate.MAPPED)


def test_verl_async_trainers_keep_batch_staleness_and_gpus(tmp_path: Path) -> None:
    words = " ".join(f"{key}={value}" for key, value in BASE.items() if key != "data.train_batch_size")
    script = f"""python -m verl.experimental.fully_async_policy.fully_async_main {words} data.train_batch_size=0 \\
        rollout.nnodes=2 rollout.total_rollout_steps=51200 rollout.test_freq=5 trainer.nnodes=1 \\
        async_training.trigger_parameter_sync_step=4 async_training.require_batches=2 \\
        async_training.staleness_threshold=0.5 data.val_files=v.parquet"""
    trainer, keys, *_ = read_keys("verl", None, script, {}, "run.sh")
    draft = convert(SOURCES["verl"].trainers[trainer], keys)
    config = loaded(draft, tmp_path)
    # Weights are pushed after 4 * 2 minibatches of 16 prompts.
    assert (config.train_dataset.batch_size, config.actor.ppo_n_minibatches) == (128, 8)
    assert (config.total_train_steps, config.evaluator.freq_steps, config.rollout.max_head_offpolicyness) == (400, 5, 1)
    assert (draft.backend, draft.config["actor"]["backend"]) == ("sglang:d8t2", "fsdp:d8")
    assert not config.actor.recompute_logprob and not fates(draft, Fate.REFUSED)
    behind = script.replace("fully_async_policy.fully_async_main", "one_step_off_policy.main_ppo")
    trainer, keys, *_ = read_keys("verl", None, behind.partition("rollout.total")[0] + "rollout.nnodes=1", {}, "run.sh")
    draft = convert(SOURCES["verl"].trainers[trainer], {**keys, "data.train_batch_size": 64})
    assert (trainer, draft.backend, draft.config["actor"]["backend"]) == ("one_step_off", "sglang:d4t2", "fsdp:d8")
    assert loaded(draft, tmp_path).rollout.max_head_offpolicyness == 1


def test_micro_batches_are_bounded_as_in_the_source() -> None:
    lengths = {"data.max_prompt_length": 100, "data.max_response_length": 28}
    models = {"actor": f"{ACTOR}.ppo", "critic": "critic.ppo", "ref": "actor_rollout_ref.ref.log_prob"}
    sizes = {f"{key}_micro_batch_size_per_gpu": count for count, key in enumerate(models.values(), 2)}
    asked = {**lengths, "algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True}
    for rows, counts in ((sizes, (2, 3, 4)), (dict.fromkeys(sizes, "$UNSET"), (1, 1, 1))):
        config = converted(**asked, **rows).config
        assert [config[model]["mb_spec"]["max_tokens_per_mb"] // 128 for model in models] == list(counts)
    dynamic = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 999}
    assert converted(**lengths, **dynamic).config["actor"]["mb_spec"]["max_tokens_per_mb"] == 999


def test_gpus_are_divided_between_engine_and_trainer() -> None:
    draft = converted(
        **{"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "actor_rollout_ref.rollout.tensor_model_parallel_size": 4}
    )
    assert (draft.backend, draft.config["actor"]["backend"]) == ("sglang:d2t4", "fsdp:d8")
    megatron = converted(
        **{
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
        }
    )
    assert megatron.config["actor"]["backend"] == "megatron:d1t2p2"
    arguments = converted(**{"actor_rollout_ref.rollout.gpu_memory_utilization": 0.7}).engine_args
    assert arguments == {"mem-fraction-static": 0.7}
    assert converted(**{"actor_rollout_ref.rollout.dtype": "float16"}).engine_args["dtype"] == "float16"


@pytest.mark.parametrize(
    ("key", "value", "fate"),
    [
        ("algorithm.adv_estimator", "remax", Fate.REFUSED),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov", Fate.REFUSED),
        ("actor_rollout_ref.actor.veomni.router_replay.mode", "R2", Fate.REFUSED),
        ("actor_rollout_ref.ref.param_offload", True, Fate.IGNORED),
        ("data.filter_accuracy", True, Fate.REFUSED),
        ("actor_rollout_ref.actor.veomni.ulysses_parallel_size", 2, Fate.LOSSY),
        ("actor_rollout_ref.actor.optim.muon_nesterov", False, Fate.IGNORED),
        ("actor_rollout_ref.rollout.skip.action", "cache", Fate.IGNORED),
        ("algorithm.rollout_is_level", "token", Fate.IGNORED),
        ("algorithm.rollout_is", True, Fate.LOSSY),
        ("trainer.remove_previous_ckpt_in_save", True, Fate.IGNORED),
        ("trainer.resume_from_path", "checkpoints/", Fate.IGNORED),
        ("trainer.resume_mode", "resume_path", Fate.REFUSED),
        ("trainer.device", "npu", Fate.IGNORED),
        ("data.gen_batch_size", "${data.train_batch_size}", Fate.IGNORED),
        ("data.gen_batch_size", 64, Fate.IGNORED),
        ("data.gen_batch_size", 128, Fate.LOSSY),  # before trainer.use_v1 it is the size of a step
        (f"{ACTOR}.optim.lr_decay_steps", 51200, Fate.IGNORED),
        (f"{ACTOR}.optim.override_optimizer_config.decoupled_weight_decay", True, Fate.IGNORED),
        (f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload", True, Fate.IGNORED),
        (f"{ACTOR}.optim.override_optimizer_config.amsgrad", True, Fate.REFUSED),
        (f"{ACTOR}.megatron.router_replay.mode", "R3", Fate.REFUSED),
        (f"{ACTOR}.fsdp_config.qat.enable", True, Fate.REFUSED),
        (f"{ACTOR}.megatron.override_transformer_config.fp8", False, Fate.IGNORED),
        (f"{ACTOR}.megatron.override_transformer_config.moe_router_bias_update_rate", 0.001, Fate.LOSSY),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", "fp8", Fate.LOSSY),
        ("distillation.distillation_loss.topk", 32, Fate.IGNORED),
        ("~data.seed", True, Fate.REFUSED),
        ("algorithm.rollout_correction.rollout_is_threshold", "2_many", Fate.REFUSED),
        (f"{ACTOR}.tau_pos", 1.0, Fate.IGNORED),
        ("~trainer.balance_batch", True, Fate.IGNORED),
        ("algorithm.kl_penalty", "kl", Fate.IGNORED),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", 0, Fate.IGNORED),
        ("trainer.test_freq", 10, Fate.IGNORED),  # there is no val_files
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 48, Fate.REFUSED),
        ("data.train_files", [], Fate.REFUSED),
        ("data.train_files", ["a.parquet", "b.parquet"], Fate.MAPPED),
        ("reward_model.enable", True, Fate.REFUSED),
        ("reward_model.enable", False, Fate.IGNORED),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, Fate.REFUSED),
        ("actor_rollout_ref.model.trust_remote_code", True, Fate.REFUSED),
        (f"{ACTOR}.megatron.dtype", "float16", Fate.REFUSED),
        ("actor_rollout_ref.rollout.dtype", "float16", Fate.MAPPED),
        ("trainer.nnodes", "$NODES", Fate.REFUSED),
        ("data.train_files", "$(realpath data)/train.parquet", Fate.REFUSED),
        ("actor_rollout_ref.model.override_config.attention_dropout", 0.0, Fate.IGNORED),
        ("actor_rollout_ref.model.override_config.attention_dropout", 0.1, Fate.REFUSED),
        ("trainer.nnodes", 0, Fate.REFUSED),
        ("data.train_batch_size", "many", Fate.REFUSED),
        ("data.train_batch_size", None, Fate.REFUSED),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 0, Fate.REFUSED),
        ("actor_rollout_ref.actor.use_kl_loss", "yes please", Fate.REFUSED),
        ("trainer.total_training_steps", 1.5, Fate.REFUSED),
        ("actor_rollout_ref.actor.clip_ration", 0.2, Fate.REFUSED),
        ("data.truncation", "left", Fate.LOSSY),
        ("data.truncation", "error", Fate.IGNORED),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", 10, Fate.LOSSY),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 4, Fate.IGNORED),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", True, Fate.IGNORED),
    ],
)
def test_key_without_counterpart_is_listed_with_reason(key: str, value: Any, fate: Fate) -> None:
    found = fates(converted(**{key: value}), fate)
    assert key in found
    assert found[key] or fate is Fate.MAPPED


@pytest.mark.parametrize("name", ["n_agent", "n_val", "val_temperature", "rollout_filter_ratio", "enable_tools"])
def test_key_of_a_fork_is_refused(name: str) -> None:
    key = f"actor_rollout_ref.rollout.{name}"
    assert "not a known key" in fates(converted(**{key: 5}), Fate.REFUSED)[key]


def test_configuration_file_of_another_is_refused() -> None:
    name = "--config-name"
    assert "--cfg job" in fates(converted(**{name: "gsm8k_multiturn_grpo"}), Fate.REFUSED)[name]
    assert name in fates(converted(**{name: "ppo_megatron_trainer.yaml"}), Fate.IGNORED)


def test_dapo_recipe_is_read() -> None:
    trainer, keys, *_ = read_keys("verl", None, "python3 -u -m recipe.dapo.main_dapo a.b=1", {}, "run.sh")
    assert (trainer, keys) == ("ppo", {"a.b": 1})


def test_decay_steps_of_a_falling_rate_are_lossy() -> None:
    given = {f"{ACTOR}.optim.lr_decay_steps": 512, f"{ACTOR}.optim.lr_decay_style": "cosine"}
    assert f"{ACTOR}.optim.lr_decay_steps" in fates(converted(**given), Fate.LOSSY)


def test_coefficients_of_kl_that_is_off_are_not_mapped() -> None:
    coefficient, loss = "algorithm.kl_ctrl.kl_coef", "actor_rollout_ref.actor.kl_loss_coef"
    assert "before 0.4" in fates(converted(**{coefficient: 0.001}), Fate.LOSSY)[coefficient]
    found = converted(**{coefficient: 0.001, loss: 0.1, "algorithm.use_kl_in_reward": False})
    assert fates(found, Fate.IGNORED).keys() >= {coefficient, loss}
    assert (found.config["actor"]["kl_ctl"], found.config["actor"]["kl_loss_coef"]) == (0.0, 0.0)


def test_misspelt_key_gets_a_suggestion_of_a_key_beside_it() -> None:
    assert "did you mean" not in fates(converted(**{"algorithm.reinforce_ada_choice": 1}), Fate.REFUSED).popitem()[1]
    note = fates(converted(**{"actor_rollout_ref.actor.clip_ration": 0.2}), Fate.REFUSED)
    assert "clip_ratio" in note["actor_rollout_ref.actor.clip_ration"]


def test_warm_up_steps_become_share_of_known_total() -> None:
    key = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    draft = converted(**{key: 10, "trainer.total_training_steps": 200})
    assert draft.config["actor"]["optimizer"]["warmup_steps_proportion"] == 0.05


def test_epochs_are_left_out_where_the_number_of_steps_is_given(tmp_path: Path) -> None:
    draft = converted(**{"trainer.total_training_steps": 200, "trainer.total_epochs": 15})
    assert "total_train_epochs" not in draft.config and loaded(draft, tmp_path).total_train_steps == 200
    assert "trainer.total_epochs" in fates(draft, Fate.IGNORED)


def test_verl_reward_is_called_with_its_signature(tmp_path: Path) -> None:
    score = tmp_path / "score.py"
    score.write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'source': data_source}\n"
    )
    draft = converted(**{"custom_reward_function.path": str(score), "custom_reward_function.name": "grade"})
    names: dict[str, Any] = {}
    exec(draft.files["reward.py"], names)
    assert names["reward"]("q", "42", [], [], data_source="d", reward_model={"ground_truth": "42"}) == 1.0
    assert names["reward"]("q", "41", [], [], data_source="d", reward_model={"ground_truth": "42"}) == 0.0


def test_verl_built_in_scorers_become_lossy_math_verify() -> None:
    draft = converted()
    assert "math-verify" in fates(draft, Fate.LOSSY)["data.reward_fn_key"]
    names: dict[str, Any] = {}
    exec(draft.files["reward.py"], names)
    assert names["reward"]("q", r"so \boxed{0.5}", [], [], reward_model={"ground_truth": "1/2"}) == 1.0


def test_every_default_has_a_mapping_rule() -> None:
    for key, value in DEFAULTS.items():
        entry, _ = RULES[key].entry(key, value)
        assert entry.fate is Fate.MAPPED, key


@given(
    key=st.sampled_from(sorted(RULES)),
    value=st.one_of(st.none(), st.booleans(), st.integers(-2, 4), st.floats(), st.text(), st.lists(st.text())),
)
def test_any_key_value_is_converted_or_listed(key: str, value: Any) -> None:
    draft = converted(**{key: value})
    assert [each.key for each in draft.entries].count(key) == 1


def test_unknown_name_of_run_is_ignored() -> None:
    draft = converted(trainer__experiment_name="${RUN}")
    (entry,) = (each for each in draft.entries if each.key == "trainer.experiment_name")
    assert (entry.fate, draft.config["trial_name"]) == (Fate.IGNORED, "gsm8k")


def test_critic_checkpoints_gradients_unless_it_is_switched_off() -> None:
    given = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.model.path": "m"}
    assert convert(VERL, given).config["critic"]["gradient_checkpointing"] is True
    off = convert(VERL, {**given, "critic.model.enable_gradient_checkpointing": False})
    assert off.config["critic"]["gradient_checkpointing"] is False


def test_main_ppo_of_another_package_is_not_that_of_verl() -> None:
    command = "python3 -m {}.trainer.main_ppo data.train_batch_size=8"
    with pytest.raises(Unread) as caught:
        read_keys("verl", None, command.format("mine.verl"), {}, "run.sh")
    assert (caught.value.hint or "").startswith(
        "it runs mine.verl.trainer.main_ppo: convert that file, or add --trainer"
    )
    assert read_keys("verl", "ppo", command.format("mine.verl"), {}, "run.sh").trainer == "ppo"
    for of_verl in ("python3 -m verl.trainer.main_ppo a.b=1", "python /x/verl/verl/trainer/main_ppo.py a.b=1"):
        assert read_keys("verl", None, of_verl, {}, "run.sh")[:2] == ("ppo", {"a.b": 1})


@pytest.mark.parametrize(
    ("defaults", "others"),
    [
        ("[ppo_trainer, _self_]", ""),
        ("[{actor@actor_rollout_ref.actor: dp_actor}, {../engine@fsdp: fsdp}, {data@data: legacy_data}, _self_]", ""),
        (
            "['actor@actor_rollout_ref.actor: ${model_engine}_actor']",
            "actor@actor_rollout_ref.actor: ${model_engine}_actor",
        ),
        ("[my_base, {data: gsm8k}, _self_]", "my_base, gsm8k"),
        ("../other.yaml", "other"),
    ],
)
def test_file_that_extends_another_than_those_of_verl_is_refused(defaults: str, others: str) -> None:
    for key, trainer in (("actor_rollout_ref: {model: {path: m}}", "ppo"), ("model: {path: m}", "sft")):
        found = read_keys("verl", None, f"defaults: {defaults}\n{key}\n", {}, "c.yaml")
        assert found.trainer == trainer
        entries = convert(SOURCES["verl"].trainers[trainer], found.keys).entries
        (entry,) = (each for each in entries if each.key == "defaults")
        assert entry.fate is (Fate.REFUSED if others else Fate.IGNORED)
        assert not others or entry.note.startswith(f"{others}: its keys are not read: convert the YAML file")


@pytest.mark.parametrize("value", ["${oc.env:ROOT}/m", "${no.such}", "${.beside}", "${now:%Y}"])
def test_interpolation_that_is_not_resolved_is_refused_with_what_to_write(value: str) -> None:
    entries = convert(SOURCES["verl"].trainers["ppo"], {"actor_rollout_ref.model.path": value}).entries
    (entry,) = (each for each in entries if each.key == "actor_rollout_ref.model.path")
    assert entry.note == f"{value.removesuffix('/m')} is not resolved here: add actor_rollout_ref.model.path=VALUE"


def test_dictionary_of_hydra_sets_the_keys_within_it() -> None:
    words = f"'{ACTOR}.optim={{lr:1e-5,betas:[0.9,0.95]}}' +data.apply_chat_template_kwargs={{enable_thinking:False}}"
    command = f'python3 -m verl.trainer.main_ppo data.seed=1 {words} \'+a={{"b": {{"c": "d:e"}}}}\' ~data.seed'
    assert read_keys("verl", None, command, {}, "run.sh").keys == {
        f"{ACTOR}.optim.lr": 1e-5, f"{ACTOR}.optim.betas": [0.9, 0.95], "a.b.c": "d:e",
        "data.apply_chat_template_kwargs": {"enable_thinking": False}, "~data.seed": True,
    }  # fmt: skip
