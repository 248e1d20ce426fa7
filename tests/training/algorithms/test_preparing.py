"""From rewards to advantages by the settings of a config, against sums written out."""

import pytest
import torch

from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.errors import UsageFault
from areal.training.algorithms.preparing import Beside, informative, prepared

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 1]])
GROUPS = torch.tensor([0, 0, 1, 1])


def _batch(rewards: list[float], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "loss_mask": MASK,
        "rewards": torch.tensor(rewards),
        "logprobs": torch.full((4, 4), -1.0),
        "turn_ids": torch.where(MASK.bool(), 0, -1),
        **more,
    }


def _config(**changes) -> PPOActorConfig:
    return PPOActorConfig(**({"kl_ctl": 0.0} | changes))


def test_grpo_every_token_of_an_answer_has_its_groups_normalised_reward() -> None:
    group = NormConfig(mean_level="group", std_level="group", group_size=2)
    got = prepared(_batch([1.0, 0.0, 3.0, 3.0]), GROUPS, _config(reward_norm=group), Beside())["advantages"]
    high = 0.5 / (0.5**0.5 + 1e-5)
    want = torch.tensor([high, -high, 0.0, 0.0])[:, None] * MASK
    torch.testing.assert_close(got, want)


def test_scaled_clipped_and_batch_normalised_advantages_have_mean_zero_over_tokens() -> None:
    config = _config(
        reward_scaling=10.0,
        reward_bias=-0.5,
        reward_clip=4.0,
        adv_norm=NormConfig(mean_level="batch", std_level="batch"),
    )
    got = prepared(_batch([1.0, 0.0, 0.45, 1.0]), GROUPS, config, Beside())
    assert got["shaped_rewards"].tolist() == pytest.approx([4.0, -4.0, -0.5, 4.0])
    active = got["advantages"][MASK.bool()]
    assert active.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert active.std().item() == pytest.approx(1.0, rel=1e-3)


def test_answers_that_were_cut_off_may_earn_nothing() -> None:
    batch = _batch([1.0, 1.0, 1.0, 1.0], truncated=torch.tensor([True, False, False, False]))
    got = prepared(batch, GROUPS, _config(mask_no_eos_with_zero=True), Beside())
    assert got["shaped_rewards"].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_divergence_from_the_reference_is_paid_for_from_each_token_on() -> None:
    reference = torch.full((4, 4), -1.5)  # k1 = 0.5 a token
    got = prepared(_batch([1.0, 1.0, 1.0, 1.0]), GROUPS, _config(kl_ctl=0.1), Beside(reference))["advantages"]
    torch.testing.assert_close(got[1], torch.tensor([0.0, 1 - 0.15, 1 - 0.10, 1 - 0.05]))


def test_with_a_critic_a_cut_off_answer_goes_on_from_its_last_value() -> None:
    batch = _batch([1.0, 1.0, 1.0, 1.0], truncated=torch.tensor([True, False, False, False]))
    beside = Beside(values=torch.full((4, 4), 0.25), after=torch.full((4,), 2.0))
    config = _config(gae_lambda=0.5, discount=0.9)
    got = prepared(batch, GROUPS, config, beside)
    last = 1.0 + 0.9 * 2.0 - 0.25
    first = 0.0 + 0.9 * 0.25 - 0.25 + 0.45 * last
    torch.testing.assert_close(got["advantages"][0], torch.tensor([0.0, first, last, 0.0]))
    assert got["advantages"][2, 1].item() == pytest.approx(1.0 - 0.25)
    torch.testing.assert_close(got["returns"], (got["advantages"] + 0.25) * MASK)


def test_turns_share_their_advantage_and_keep_their_own_penalty() -> None:
    turns = torch.tensor([[-1, 0, 1, -1], [-1, 0, 0, 1], [-1, 0, -1, -1], [-1, 0, 1, 1]])
    batch = _batch([1.0, 1.0, 1.0, 1.0], turn_ids=turns)
    config = _config(gae_timestep_unit="turn", discount=0.5, kl_ctl=0.1)
    reference = torch.full((4, 4), -1.5)
    got = prepared(batch, GROUPS, config, Beside(reference))["advantages"]
    torch.testing.assert_close(got[1], torch.tensor([0.0, 0.5 - 0.05, 0.5 - 0.05, 1.0 - 0.05]))


def test_informative_groups_are_those_whose_rewards_differ() -> None:
    got = informative(torch.tensor([1.0, 0.0, 3.0, 3.0]), GROUPS)
    assert got.tolist() == [True, True, False, False]


def by_length(lengths: torch.Tensor) -> torch.Tensor:
    return 1 - 1 / (2 * lengths.float())


def out_of_range(lengths: torch.Tensor) -> list[float]:
    return [1.5] * len(lengths)


def test_gae_lambda_that_names_a_function_is_one_for_each_answer() -> None:
    batch, beside = _batch([1.0, 1.0, 1.0, 1.0]), Beside(values=torch.full((4, 4), 0.25))
    got = prepared(batch, GROUPS, _config(gae_lambda=f"{__name__}:by_length"), beside)["advantages"]
    for row, length in enumerate(MASK.sum(1).tolist()):
        alone = prepared(batch, GROUPS, _config(gae_lambda=1 - 1 / (2 * length)), beside)["advantages"]
        torch.testing.assert_close(got[row], alone[row])


def test_gae_lambda_that_names_no_such_function_or_gives_no_such_numbers_is_told() -> None:
    batch, beside = _batch([1.0, 1.0, 1.0, 1.0]), Beside(values=torch.full((4, 4), 0.25))
    with pytest.raises(UsageFault, match="gae_lambda 'nowhere:f': there is no module nowhere"):
        prepared(batch, GROUPS, _config(gae_lambda="nowhere:f"), beside)
    with pytest.raises(UsageFault, match="for 4 answers: it must be a number between 0 and 1 for each"):
        prepared(batch, GROUPS, _config(gae_lambda=f"{__name__}:out_of_range"), beside)
