from typing import Any

import pytest
import torch

from areal.api.cli_args import PPOActorConfig
from areal.training.algorithms.advantages import kl_estimate, shape_rewards, token_rewards

OVERLONG: dict[str, Any] = {"overlong_reward_penalty": True, "overlong_tokens": 4, "max_new_tokens": 10}


def test_shaped_scales_after_the_bias_and_clips_last() -> None:
    config = PPOActorConfig(reward_scaling=10, reward_bias=-0.5, reward_clip=20)
    got = shape_rewards(torch.tensor([1.0, 0.0, 9.0]), torch.zeros(3), config)
    assert got.tolist() == [5.0, -5.0, 20.0]


def test_shaped_overlong_answers_lose_in_proportion_to_their_excess() -> None:
    config = PPOActorConfig(**OVERLONG, overlong_penalty_factor=2.0)
    got = shape_rewards(torch.ones(4), torch.tensor([6, 7, 8, 10]), config)
    assert got.tolist() == [1.0, 0.5, 0.0, -1.0]


def dapo_punishment(length: int, longest: int, buffer: int) -> float:
    """R_length of DAPO (arXiv 2503.14476, eq. 13), case by case."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_shaped_adds_the_overlong_punishment_to_the_reward_before_bias_scale_and_clip(factor: float) -> None:
    config = PPOActorConfig(
        **OVERLONG, reward_scaling=10, reward_bias=-0.5, reward_clip=12, overlong_penalty_factor=factor
    )
    lengths = [0, 6, 7, 9, 10, 11]
    got = shape_rewards(torch.ones(6), torch.tensor(lengths), config)
    want = [max(-12.0, (1.0 + factor * dapo_punishment(length, 10, 4) - 0.5) * 10) for length in lengths]
    assert got.tolist() == pytest.approx(want)


def test_shaped_overlong_without_a_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        shape_rewards(torch.ones(1), torch.ones(1), PPOActorConfig(overlong_reward_penalty=True, overlong_tokens=4))


def test_kl_estimates_of_many_samples_agree_with_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert kl_estimate(p.log()[drawn], q.log()[drawn], estimator).mean() == pytest.approx(exact.item(), abs=2e-3)
    assert (kl_estimate(p.log()[drawn], q.log()[drawn], "k2") >= 0).all()


def test_token_rewards_stand_on_the_last_generated_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    got = token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask, torch.full((3, 4), 0.5))
    assert got.tolist() == [[0, -0.5, 1.5, 0], [0, 0, 0, 0], [0, -0.5, 0, 3.5]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimate_is_finite_and_pulls_back_however_far_the_reference_is(estimator) -> None:
    for away in (40.0, 1e4):
        logprobs = torch.tensor([-away - 1.0], requires_grad=True)
        kl_estimate(logprobs, torch.tensor([-1.0]), estimator).sum().backward()
        assert torch.isfinite(logprobs.grad).all()
        assert (logprobs.grad < 0).all() or estimator == "k1"
