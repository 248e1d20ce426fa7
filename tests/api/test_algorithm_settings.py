"""Settings of an algorithm: linked where they are one thing, refused at their place where they could have no effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from areal.api.cli_args import DPOConfig
from tests.api.test_config import SMALL, faults, load

OVERLONG = "gconfig: {max_new_tokens: 10}\nactor: {overlong_reward_penalty: true, overlong_tokens: 4"


def test_overlong_penalty_is_linked_to_the_answers_longest_length(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + OVERLONG + "}").actor.max_new_tokens == 10
    assert load(tmp_path, SMALL + OVERLONG + ", max_new_tokens: 8}").actor.max_new_tokens == 8
    said = faults(tmp_path, SMALL + OVERLONG + ", max_new_tokens: 1024}")
    assert "config.yaml:4: actor.max_new_tokens: " in said
    assert "gconfig.max_new_tokens 10" in said


def test_dropout_in_the_policys_ratio_is_refused(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL).actor.disable_dropout
    assert "config.yaml:3: actor.disable_dropout: " in faults(tmp_path, SMALL + "actor: {disable_dropout: false}")


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ("label_smoothing: 0.5", "actor.label_smoothing: label_smoothing must be at least 0 and below 0.5"),
        ("label_smoothing: -0.1", "actor.label_smoothing: label_smoothing must be at least 0 and below 0.5"),
        ("label_smoothing: 0.1, loss_type: ipo", "actor.label_smoothing: label_smoothing has no effect on loss_type"),
        ("beta: 0", "actor.beta: beta must be above 0"),
    ],
)
def test_dpo_settings_out_of_range_are_refused(tmp_path: Path, actor: str, said: str) -> None:
    assert f"config.yaml:3: {said}" in faults(tmp_path, SMALL + f"actor: {{{actor}}}", cls=DPOConfig)


def test_preset_is_chosen_by_name_also_on_the_command_line(tmp_path: Path) -> None:
    actor = load(tmp_path, SMALL, "actor.preset=dr_grpo").actor
    assert (actor.preset, actor.loss_agg_mode) == ("dr_grpo", "seq-mean-token-sum-norm")
    assert "config.yaml:3: actor.preset: must be one of grpo, " in faults(tmp_path, SMALL + "actor: {preset: grop}")


def test_configuration_that_a_preset_made_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    text = SMALL + "gconfig: {n_samples: 4}\nactor: {preset: gspo, eps_clip: 0.2}"
    config = load(tmp_path, text)
    written = yaml.safe_dump({"experiment_name": "e", "trial_name": "t", "actor": dataclasses.asdict(config.actor)})
    assert load(tmp_path, written + "gconfig: {n_samples: 4}").actor == config.actor
