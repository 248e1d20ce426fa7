"""verl's keys: what they become, and that the result is a configuration of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import GRPOConfig, PPOConfig, load_expr_config
from areal.convert.rules import Draft, Fate, convert
from areal.convert.verl import DEFAULTS, RULES, VERL

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


def test_grpo_of_verl_is_the_same_grpo(tmp_path: Path) -> None:
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


def test_defaults_of_verl_hold_where_nothing_is_given(tmp_path: Path) -> None:
    config = loaded(convert(VERL, {**BASE, "data.train_batch_size": 1024, "algorithm.adv_estimator": "gae"}), tmp_path)
    assert (config.gconfig.max_new_tokens, config.train_dataset.max_length, config.total_train_epochs) == (512, 512, 30)
    assert config.critic is not None and config.critic.optimizer is not None
    assert (config.critic.path, config.critic.optimizer.lr, config.critic.eps_clip) == ("org/model", 1e-5, 0.5)
    assert config.ref is None and config.actor.kl_loss_coef == config.actor.kl_ctl == 0


def test_dr_grpo_rloo_and_gspo_are_what_their_keys_say() -> None:
    assert converted(**{"algorithm.norm_adv_by_std_in_grpo": False}).config["actor"]["reward_norm"]["std_level"] is None
    assert converted(**{"algorithm.adv_estimator": "rloo"}).config["actor"]["reward_norm"]["mean_leave1out"]
    gspo = converted(**{"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}).config["actor"]
    assert gspo["importance_sampling_level"] == "sequence"


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


@pytest.mark.parametrize(
    ("key", "value", "fate"),
    [
        ("algorithm.adv_estimator", "remax", Fate.REFUSED),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "clip_cov", Fate.REFUSED),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 48, Fate.REFUSED),
        ("data.train_files", [], Fate.REFUSED),
        ("data.train_files", ["a.parquet", "b.parquet"], Fate.MAPPED),
        ("reward_model.enable", True, Fate.REFUSED),
        ("reward_model.enable", False, Fate.IGNORED),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, Fate.REFUSED),
        ("actor_rollout_ref.model.trust_remote_code", True, Fate.REFUSED),
        ("trainer.nnodes", "$NODES", Fate.REFUSED),
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
def test_key_without_a_counterpart_is_named_with_a_reason(key: str, value: Any, fate: Fate) -> None:
    found = fates(converted(**{key: value}), fate)
    assert key in found
    assert found[key] or fate is Fate.MAPPED


def test_misspelt_key_gets_a_suggestion() -> None:
    note = fates(converted(**{"actor_rollout_ref.actor.clip_ration": 0.2}), Fate.REFUSED)
    assert "clip_ratio" in note["actor_rollout_ref.actor.clip_ration"]


def test_warm_up_in_steps_is_a_share_of_a_known_number_of_steps() -> None:
    key = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    draft = converted(**{key: 10, "trainer.total_training_steps": 200})
    assert draft.config["actor"]["optimizer"]["warmup_steps_proportion"] == 0.05


def test_own_reward_of_verl_is_called_as_verl_calls_it(tmp_path: Path) -> None:
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


def test_built_in_scorers_of_verl_become_math_verify_and_that_is_lossy() -> None:
    draft = converted()
    assert "math-verify" in fates(draft, Fate.LOSSY)["data.reward_fn_key"]
    names: dict[str, Any] = {}
    exec(draft.files["reward.py"], names)
    assert names["reward"]("q", r"so \boxed{0.5}", [], [], reward_model={"ground_truth": "1/2"}) == 1.0


def test_every_default_has_a_rule_that_maps_it() -> None:
    for key, value in DEFAULTS.items():
        entry, _ = RULES[key].entry(key, value)
        assert entry.fate is Fate.MAPPED, key


@given(
    key=st.sampled_from(sorted(RULES)),
    value=st.one_of(st.none(), st.booleans(), st.integers(-2, 4), st.floats(), st.text(), st.lists(st.text())),
)
def test_any_value_of_any_key_is_converted_or_named(key: str, value: Any) -> None:
    draft = converted(**{key: value})
    assert [each.key for each in draft.entries].count(key) == 1
