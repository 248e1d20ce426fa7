import math

import pytest
import torch

from areal.training.algorithms.losses import dpo_loss, reward_model_loss, sft_loss, value_loss


def test_sft_loss_is_the_negative_log_likelihood_of_the_mask() -> None:
    got = sft_loss(torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0, 1, 0]]))
    assert got.tolist() == [[0.0, 1.0, 0.0]]


def test_value_loss_takes_the_worse_of_the_bounded_and_the_free_step() -> None:
    values, old, returns = torch.tensor([[2.0, 0.1]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 1.0]])
    got = value_loss(values, old, returns, torch.ones(1, 2), clip=0.5)
    torch.testing.assert_close(got, torch.tensor([[2.5**2 / 2, 0.9**2 / 2]]))
    torch.testing.assert_close(value_loss(values, old, returns, torch.ones(1, 2), None), torch.tensor([[0.5, 0.405]]))


def test_reward_model_loss_is_bradley_terry() -> None:
    got = reward_model_loss(torch.tensor([1.0, 0.0, -1.0, 2.0]))
    want = [math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(3.0))]
    assert got.per_pair.tolist() == pytest.approx(want)
    assert got.margins.tolist() == [1.0, -3.0]


def test_dpo_loss_counts_only_the_answers() -> None:
    logprobs = torch.tensor([[-9.0, -1.0, -1.0], [-9.0, -2.0, -5.0]])
    reference = torch.tensor([[-1.0, -2.0, -2.0], [-1.0, -2.0, -1.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    got = dpo_loss(logprobs, reference, mask, beta=0.1, label_smoothing=0.0)
    margin = 0.1 * (2.0 - 0.0)
    assert got.per_pair.item() == pytest.approx(math.log(1 + math.exp(-margin)))
    smooth = dpo_loss(logprobs, reference, mask, beta=0.1, label_smoothing=0.25).per_pair.item()
    assert smooth == pytest.approx(0.75 * math.log(1 + math.exp(-margin)) + 0.25 * math.log(1 + math.exp(margin)))
