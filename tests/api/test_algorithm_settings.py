"""Settings of an algorithm: linked where they are one thing, refused at their place where they could have no effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.api.cli_args import DPOConfig, GRPOConfig, NormConfig, RWConfig, SFTConfig, TrainDatasetConfig
from areal.api.config.experiment import ROW_TYPES
from areal.api.config.fields import ranges_of
from areal.dataset.loading import KINDS
from tests.api.test_config import SMALL, faults, load
from tests.api.test_fields import EXPERIMENTS, fields_of, marks_of

OVERLONG = "gconfig: {max_new_tokens: 10}\nactor: {overlong_reward_penalty: true, overlong_tokens: 4"


def test_overlong_penalty_uses_max_new_tokens(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + OVERLONG + "}").actor.max_new_tokens == 10
    assert load(tmp_path, SMALL + OVERLONG + ", max_new_tokens: 8}").actor.max_new_tokens == 8
    found = faults(tmp_path, SMALL + OVERLONG + ", max_new_tokens: 1024}")
    assert "config.yaml:4: actor.max_new_tokens: " in found
    assert "gconfig.max_new_tokens 10" in found


def test_dropout_in_the_policys_ratio_is_refused(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL).actor.disable_dropout
    assert "config.yaml:3: actor.disable_dropout: " in faults(tmp_path, SMALL + "actor: {disable_dropout: false}")


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        ("label_smoothing: 0.5", "actor.label_smoothing: must be at least 0 and below 0.5"),
        ("label_smoothing: -0.1", "actor.label_smoothing: must be at least 0 and below 0.5"),
        ("label_smoothing: 0.1, loss_type: ipo", "actor.label_smoothing: has no effect on loss_type"),
        ("beta: 0", "actor.beta: must be above 0"),
        ("is_critic: true", "actor.is_critic: must be false: a policy has log-probabilities"),
        ("temperature: 0.5", "actor.temperature: must be 1, not 0.5: the rows of a data set are not sampled"),
        ("mb_spec: {granularity: 3}", "actor.mb_spec.granularity: must be 2, not 3: two answers stay together"),
    ],
)
def test_dpo_settings_out_of_range_are_refused(tmp_path: Path, actor: str, message: str) -> None:
    assert f"config.yaml:3: {message}" in faults(tmp_path, SMALL + f"actor: {{{actor}}}", cls=DPOConfig)


@pytest.mark.parametrize("name", ["model", "actor"])
def test_value_head_is_only_for_reward_models(tmp_path: Path, name: str) -> None:
    text = SMALL + name + ": {is_critic: true}"
    assert f"config.yaml:3: {name}.is_critic: " in faults(tmp_path, text, cls=SFTConfig)
    assert load(tmp_path, text, cls=RWConfig).model.is_critic


@pytest.mark.parametrize("cls", [GRPOConfig, DPOConfig])
def test_reference_inherits_compute_settings_of_actor(tmp_path: Path, cls: Any) -> None:
    text = SMALL + "actor: {dtype: float32, attn_impl: eager}\nref: "
    ref = load(tmp_path, text + "{}", cls=cls).ref
    assert (ref.dtype, ref.attn_impl) == ("float32", "eager")
    assert load(tmp_path, text + "{dtype: bfloat16}", cls=cls).ref.dtype == "bfloat16"
    assert load(tmp_path, SMALL + "ref: {}", cls=cls).ref.dtype == load(tmp_path, SMALL, cls=cls).actor.dtype


def test_preset_can_be_chosen_on_command_line(tmp_path: Path) -> None:
    actor = load(tmp_path, SMALL, "actor.preset=dr_grpo").actor
    assert (actor.preset, actor.loss_agg_mode) == ("dr_grpo", "seq-mean-token-sum-norm")
    assert "config.yaml:3: actor.preset: must be one of grpo, " in faults(tmp_path, SMALL + "actor: {preset: grop}")


def test_config_made_by_preset_reads_back_unchanged(tmp_path: Path) -> None:
    text = SMALL + "gconfig: {n_samples: 4}\nactor: {preset: gspo, eps_clip: 0.2}"
    config = load(tmp_path, text)
    written = yaml.safe_dump({"experiment_name": "e", "trial_name": "t", "actor": dataclasses.asdict(config.actor)})
    assert load(tmp_path, written + "gconfig: {n_samples: 4}").actor == config.actor


_IMAGES = "\nworkflow: areal.workflow.vision_rlvr:VisionRLVRWorkflow"
REFUSED = {
    f"actor: {{backend: 'fsdp:d2'}}{_IMAGES}": "actor.backend: fsdp:d2: a policy that sees images is trained by",
    f"actor: {{backend: 'megatron:d1'}}{_IMAGES}": "actor.backend: megatron:d1: a policy that sees images",
    f"actor: {{use_lora: true}}{_IMAGES}": "actor.use_lora: adapters of a policy that sees images",
    f"critic: {{path: m}}{_IMAGES}": "critic: there is no critic that sees images",
    f"critic: {{path: m}}{_IMAGES.replace(':V', '.V')}": "critic: there is no critic that sees images",
    "actor: {rejection_sampling: {upper: 5.0}}": "actor.rejection_sampling: needs a proximal policy",
    "actor: {behave_imp_weight_cap: 5.0}": "actor.rejection_sampling: needs a proximal policy",
    "actor: {rejection_sampling: {action: clamp}, recompute_logprob: true}": "actor.rejection_sampling.action: ",
    "actor: {use_decoupled_loss: true, rejection_sampling: {upper: -1}}": "actor.rejection_sampling.upper: must",
    "actor: {use_decoupled_loss: true, rejection_sampling: {upper: 0.5}}": "actor.rejection_sampling.upper: must",
    "actor: {use_decoupled_loss: true, rejection_sampling: {lower: 1.5}}": "actor.rejection_sampling.lower: must",
    "actor: {use_decoupled_loss: true, rejection_sampling: {metric: kl_k1, upper: -1}}": (
        "actor.rejection_sampling.upper: must not be negative"
    ),
    "actor: {use_decoupled_loss: true, rejection_sampling: {metric: kl_k3, lower: 0.1}}": (
        "actor.rejection_sampling.lower: must be at most 0"
    ),
    "actor: {m2_threshold: 0.04}": "actor.m2_threshold: needs a proximal policy",
    "actor: {m2_threshold: 0.04, use_decoupled_loss: true, prox_logp_method: loglinear}": "actor.m2_threshold: ",
    "actor: {prox_logp_method: loglinear}": "actor.prox_logp_method: loglinear is a proximal policy of",
    "actor: {use_sapo_loss: true, use_decoupled_loss: true}": "actor.use_sapo_loss: gates the ratio",
    "actor: {preset: sapo, use_decoupled_loss: true}": "actor.use_decoupled_loss: use_sapo_loss gates the ratio",
    "actor: {use_sapo_loss: true, use_cispo_loss: true}": "actor.use_sapo_loss: is another objective than",
    "actor: {use_sapo_loss: true, importance_sampling_level: sequence}": "actor.importance_sampling_level: ",
    "actor: {use_cispo_loss: true, importance_sampling_level: sequence}": "actor.importance_sampling_level: ",
    "actor: {use_decoupled_loss: true, rejection_sampling: {level: sequence, agg: max}}": (
        "actor.rejection_sampling.agg: max weighs all tokens by the largest ratio"
    ),
    "actor: {preset: grpo, optimizer: null}\ntrainer: {type: grpo}": "actor.optimizer: is needed",
    "actor: {reward_scaling: 0}": "actor.reward_scaling: 0 makes all rewards the same",
    "actor: {discount: 3}": "actor.discount: must be from 0 to 1, not 3",
    "actor: {gae_lambda: 1.5}": "actor.gae_lambda: must be from 0 to 1, not 1.5",
    "actor: {eps_clip: -0.2}": "actor.eps_clip: must not be negative",
    "actor: {eps_clip_higher: -0.2}": "actor.eps_clip_higher: must not be negative",
    "actor: {c_clip: 1.0}": "actor.c_clip: must be above 1",
    "actor: {reward_clip: -1}": "actor.reward_clip: must be above 0",
    "actor: {reward_scaling: .inf}": "actor.reward_scaling: must be a finite number, not inf",
    "actor: {entropy_coeff: .nan}": "actor.entropy_coeff: must be a finite number, not nan",
    "actor: {is_critic: true}": "actor.is_critic: must be false: a policy has log-probabilities",
    "ref: {is_critic: true}": "ref.is_critic: must be false: a policy has log-probabilities",
    "critic: {is_critic: false}": "critic.is_critic: must be true",
    "actor: {mb_spec: {granularity: 4}}": "actor.mb_spec.granularity: ",
    "actor: {dynamic_sampling: true}": "actor.dynamic_sampling: gconfig.n_samples is 1",
    "actor: {use_decoupled_loss: true, rejection_sampling: {metric: kl_k2, upper: -1}}": (
        "actor.rejection_sampling.upper: must not be negative"
    ),
    "actor: {use_decoupled_loss: true, behave_imp_weight_mode: token_mask, behav_imp_weight_mode: sequence_mask}": (
        "actor.behav_imp_weight_mode: "
    ),
    "actor: {kl_loss_coef: 0.1}": "actor.kl_loss_coef: 0.1 charges for the distance from a reference model",
    "actor: {kl_target: 0.1}": "actor.kl_target: 0.1 charges for the distance from a reference model",
    "actor: {kl_ctl: 0, kl_target: 0.1}\nref: {path: m}": "actor.kl_target: needs a coefficient to move",
    "gconfig: {greedy: true, n_samples: 4}": "gconfig.greedy: a policy is trained on samples",
    "gconfig: {temperature: 0}": "gconfig.temperature: a policy is trained on samples",
    "gconfig: {ignore_eos: true}": "gconfig.ignore_eos: no answer would end",
    "gconfig: {temperature: -1}": "gconfig.temperature: must be from 0 to 2, not -1",
    "gconfig: {temperature: 5}": "gconfig.temperature: must be from 0 to 2, not 5",
    "gconfig: {temperature: 1e-9}": "gconfig.temperature: a policy is trained on samples",
    "gconfig: {top_k: 1}": "gconfig.top_k: a policy is trained on samples",
    "gconfig: {top_p: 1e-9}": "gconfig.top_p: a policy is trained on samples",
    "gconfig: {min_p: 1}": "gconfig.min_p: a policy is trained on samples",
    "gconfig: {stop: ['']}": "gconfig.stop: must have at most 16 strings, not empty ones",
    "gconfig: {stop_token_ids: [-1]}": "gconfig.stop_token_ids: must not be negative",
    "reward_weights: [.nan]\nreward_fn: m:f": "reward_weights: must be finite numbers",
    "reward_weights: [0]\nreward_fn: m:f": "reward_weights: must not all be 0",
    "actor: {overlong_reward_penalty: true, overlong_tokens: 20000}": "actor.overlong_tokens: is",
    "actor: {weight_update_mode: shm}\nweight_update_mode: disk": "actor.weight_update_mode: 'shm' and weight",
    "actor: {use_lora: true, peft_type: ia3}": "actor.peft_type: ",
    "actor: {dtype: float16, optimizer: {lr: 1}}": "actor.dtype: float16 loses small gradients",
    "actor: {attn_impl: eagre}": "actor.attn_impl: 'eagre' is not one of eager, sdpa",
    "train_dataset: {path: rows.jsonl, type: rll}": "train_dataset.type: 'rll' is not one of rl, sft",
    "critic: {eps_clip: -1}": "critic.eps_clip: must not be negative",
}


@pytest.mark.parametrize("text", REFUSED)
def test_rejects_meaningless_settings_at_their_place(tmp_path: Path, text: str) -> None:
    assert f"config.yaml:3: {REFUSED[text]}" in faults(tmp_path, SMALL + text)


@pytest.mark.parametrize(
    "text",
    [
        "gconfig: {greedy: true}\ntrainer: {type: 'null'}",
        "eval_gconfig: {greedy: true, temperature: 0}",
        "actor: {eps_clip: 0}",
        "actor: {use_decoupled_loss: true, rejection_sampling: {action: clamp}}",
        "actor: {recompute_logprob: true, rejection_sampling: {upper: 2}}",
        "actor: {use_cispo_loss: true, use_decoupled_loss: true}",
    ],
)
def test_meaningful_settings_are_accepted(tmp_path: Path, text: str) -> None:
    load(tmp_path, SMALL + text)


INEFFECTIVE = {
    "actor: {use_sapo_loss: true, eps_clip: 0.3}": "actor.eps_clip: has no effect: use_sapo_loss gates softly",
    "actor: {use_sapo_loss: true, rejection_sampling: {upper: 5.0}}": (
        "actor.rejection_sampling: has no effect: use_sapo_loss gates softly, and has no proximal policy"
    ),
    "actor: {preset: cispo, c_clip: 3}": "actor.c_clip: has no effect: use_cispo_loss has no dual clip",
    "actor: {sapo_tau_pos: 2}": "actor.sapo_tau_pos: has no effect: it is of use_sapo_loss",
    "actor: {overlong_tokens: 4}": "actor.overlong_tokens: has no effect: it is of overlong_reward_penalty",
    "actor: {loss_scale_factor: 4}": "actor.loss_scale_factor: has no effect: it is of loss_agg_mode",
    "actor: {kl_loss_type: k2}": "actor.kl_loss_type: has no effect: kl_loss_coef is 0",
    "actor: {kl_estimator: k2}": "actor.kl_estimator: has no effect: there is no ref",
    "actor: {kl_horizon: 2}": "actor.kl_horizon: has no effect: there is no kl_target",
    "actor: {preset: grpo}": "actor.preset: has no effect: gconfig.n_samples is 1",
    "actor: {reward_norm: {mean_level: group}}": "actor.reward_norm: has no effect: gconfig.n_samples is 1",
    "actor: {use_decoupled_loss: true, rejection_sampling: {agg: sum}}": "actor.rejection_sampling.agg: has no effect",
    "actor: {use_decoupled_loss: true, rejection_sampling: {lower: 0}}": (
        "actor.rejection_sampling.lower: has no effect: no ratio is below 0"
    ),
    "actor: {use_decoupled_loss: true, behave_imp_weight_mode: token_mask}": (
        "actor.behave_imp_weight_mode: has no effect: there is no cap beside it"
    ),
    "actor: {mask_no_eos_with_zero: true, mask_truncated_completions: true}": (
        "actor.mask_no_eos_with_zero: has no effect: mask_truncated_completions leaves"
    ),
    "actor: {value_bootstrap: false}": "actor.value_bootstrap: has no effect: there is no critic",
    "actor: {value_bootstrap: false, advantage_fn: 'm:f'}\ncritic: {path: m}": (
        "actor.value_bootstrap: has no effect: advantage_fn replaces GAE"
    ),
    "actor: {value_bootstrap: false, mask_truncated_completions: true}\ncritic: {path: m}": (
        "actor.value_bootstrap: has no effect: mask_truncated_completions leaves"
    ),
    "actor: {reward_norm: {std_level: null, eps: 0.1}}": "actor.reward_norm.eps: has no effect: std_level is null",
    "actor: {adv_norm: {mean_level: null, std_level: null}}": "actor.adv_norm.mean_level: has no effect: mean_",
    "actor: {max_new_tokens: 7}": "actor.max_new_tokens: has no effect: only overlong_reward_penalty and",
    "actor: {lora_rank: 4}": "actor.lora_rank: has no effect: use_lora is false",
    "actor: {optimizer: {type: sgd, beta1: 0.5}}": "actor.optimizer.beta1: has no effect: it is of type adam",
    "actor: {optimizer: {min_lr_ratio: 0.5}}": "actor.optimizer.min_lr_ratio: has no effect: lr_scheduler_type",
    "ref: {path: m, gradient_checkpointing: true}": "ref.gradient_checkpointing: has no effect: there is no optimizer",
    "allocation_mode: 'sglang:d4+fsdp:d3'\nactor: {backend: 'fsdp:d2'}": (
        "allocation_mode: has no effect: actor.backend says fsdp:d2 instead of fsdp:d3"
    ),
    "allocation_mode: 'sglang:d4+fsdp:d3'\nrollout: {backend: 'sglang:d2'}": (
        "allocation_mode: has no effect: rollout.backend says sglang:d2 instead of sglang:d4"
    ),
    "recover: {freq_steps: 5}": "recover.freq_steps: has no effect: recover.mode is disabled",
    "rollout: {max_head_offpolicyness: 2}\nasync_training: false": "rollout.max_head_offpolicyness: has no effect: ",
    "rollout: {max_head_offpolicyness: 2}\ntrainer: {async_training: false}": (
        "rollout.max_head_offpolicyness: has no effect: trainer.async_training is false"
    ),
    "actor: {ppo_n_minibatches: 4}\ntrain_dataset: {batch_size: 1}": (
        "actor.ppo_n_minibatches: a step has 1 samples, each in one minibatch"
    ),
    "trainer: {type: grpo}": "trainer.type: rewards have no baseline: set actor.preset",
    "trainer: {type: ppo}": "trainer.type: rewards have no baseline: set actor.preset",
    "ref: {path: m, optimizer: {lr: 1.0e-5}}": "ref.optimizer: has no effect: a reference is not trained",
    "ref: {path: m, weight_update_mode: disk}": "ref.weight_update_mode: has no effect: only the weights of a policy",
    "critic: {weight_update_mode: disk}": "critic.weight_update_mode: has no effect: only the weights of a policy",
    **{
        f"gconfig: {{{name}: {value}}}": f"gconfig.{name}: samples are of another distribution"
        for name, value in {
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "min_new_tokens": 4,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
        }.items()
    },
    "evaluator: {freq_steps: 5}": "evaluator.freq_steps: has no effect: there is no valid_dataset",
    "actor: {megatron: {recompute_granularity: full}}": "actor.megatron: has no effect: the backend is fsdp",
    "critic: {path: m, megatron: {recompute_granularity: full}}": "critic.megatron: has no effect: the backend is fsdp",
    "actor: {backend: 'megatron:d1', fsdp: {memory_efficient_load: false}}": (
        "actor.fsdp: has no effect: the backend is megatron"
    ),
    "ref: {path: m, use_lora: true}": "ref.use_lora: has no effect: a reference is not trained",
    "total_train_epochs: 4\ntotal_train_steps: 5": "total_train_epochs: has no effect: total_train_steps is 5",
    "rollout: {queue_size: 3}": "rollout.queue_size: has no effect: a trainer submits as many episodes as may run",
    "eval_gconfig: {drop_incomplete_group: true}": "eval_gconfig.drop_incomplete_group: has no effect: gconfig.",
    "train_dataset: {train_on: assistant}": "train_dataset.train_on: has no effect: no row's own messages are learned",
    "stats_logger: {wandb: {project: p}}": "stats_logger.wandb.project: has no effect: mode is disabled",
    "stats_logger: {trackio: {name: p}}": "stats_logger.trackio.name: has no effect: mode is disabled",
}


@pytest.mark.parametrize("text", INEFFECTIVE)
def test_ineffective_setting_combination_is_reported(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, SMALL + text)
    assert any(f"config.yaml:3: {INEFFECTIVE[text]}" in message for message in caplog.messages)


NUMBERS = {
    (cls.__name__, path[-1]): (each, path, ranges_of(cls)[path[-1]])
    for each in EXPERIMENTS
    for cls, path, hint in fields_of(each)
    if not marks_of(hint) and path[-1] in ranges_of(cls)
}
ANY_NUMBER = {"temperature", "reward_scaling", "reward_bias", "entropy_coeff", "upper", "lower", "pass_threshold"}
"""Of these any finite one is taken, or another field decides which."""


def test_every_number_has_a_range_or_is_exempt() -> None:
    assert {name for (_, name), (_, _, allowed) in NUMBERS.items() if allowed is None} <= ANY_NUMBER


@pytest.mark.parametrize("number", sorted(NUMBERS), ids=".".join)
def test_number_out_of_range_is_refused_at_its_place(tmp_path: Path, number: tuple[str, str]) -> None:
    experiment, path, allowed = NUMBERS[number]
    key = ".".join(path)
    wrong = [".nan", ".inf", "-.inf"]  # of an integer, too: it is none
    if allowed is not None:
        bounds = (allowed.least, -1), (allowed.above, 0), (allowed.most, 1), (allowed.below, 0)
        wrong += [str(bound + beyond) for bound, beyond in bounds if bound is not None]
    for value in wrong:
        assert f"{key}: " in faults(tmp_path, SMALL, f"+{key}={value}", cls=experiment)


@pytest.mark.parametrize(
    "actor", ["preset: grpo", "reward_norm: {mean_level: group}", "group_reward_norm: true", "reward_norm: null"]
)
def test_built_in_grpo_uses_group_baseline_by_default(tmp_path: Path, actor: str) -> None:
    chosen = load(tmp_path, SMALL + f"gconfig: {{n_samples: 4}}\nactor: {{{actor}}}").actor.reward_norm
    text = SMALL + "trainer: {type: grpo}\ngconfig: {n_samples: 4}\nactor: {path: m, "
    assert load(tmp_path, text + f"{actor}}}").actor.reward_norm == chosen
    assert load(tmp_path, text + "}").actor.reward_norm == NormConfig("group", std_level="group")
    assert load(tmp_path, text.replace("type: grpo", "async_training: true") + "}").actor.reward_norm is None


def test_evaluation_inherits_sampling_of_training(tmp_path: Path) -> None:
    text = SMALL + "gconfig: {n_samples: 8, max_new_tokens: 64, top_k: 5, stop: [x]}"
    config = load(tmp_path, text, "eval_gconfig.temperature=0.6")
    assert config.eval_gconfig == config.gconfig.new(temperature=0.6, n_samples=1)
    assert load(tmp_path, text, "eval_gconfig={n_samples: 2, stop: null}").eval_gconfig == config.gconfig.new(
        n_samples=2, stop=None
    )


def test_dataset_types_match_loader() -> None:
    assert ROW_TYPES == KINDS
    TrainDatasetConfig(path="my_rows:load", type="of my own")
