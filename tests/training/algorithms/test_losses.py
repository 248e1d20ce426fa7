import math
from typing import Literal

import pytest
import torch

from areal.errors import UsageFault
from areal.training.algorithms.losses import (
    AggMode,
    Aggregation,
    dpo_loss,
    masked_mean,
    reward_model_loss,
    sft_loss,
    value_loss,
)
from areal.training.batches import paired_batch


def test_sft_loss_is_masked_negative_log_likelihood() -> None:
    got = sft_loss(torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0, 1, 0]]))
    assert got.tolist() == [[0.0, 1.0, 0.0]]


def test_value_loss_takes_maximum_of_clipped_and_unclipped() -> None:
    values, old, returns = torch.tensor([[2.0, 0.1]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 1.0]])
    got = value_loss(values, old, returns, torch.ones(1, 2), clip=0.5)
    torch.testing.assert_close(got, torch.tensor([[2.5**2 / 2, 0.9**2 / 2]]))
    torch.testing.assert_close(value_loss(values, old, returns, torch.ones(1, 2), None), torch.tensor([[0.5, 0.405]]))
    moved = value_loss(
        torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 1.0]]), returns, torch.tensor([[1, 0]]), clip=0.5
    )
    torch.testing.assert_close(moved, torch.tensor([[1.5**2 / 2, 0.0]]))


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


def test_ipo_divides_by_full_answer_length() -> None:
    row = {"chosen_ids": [1, 2, 5, 6, 7], "rejected_ids": [1, 2, 5, 8, 9, 9], "prompt_length": 2}
    batch = paired_batch([row])
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 6, generator=generator), torch.randn(2, 6, generator=generator)
    policy[1, 2], reference[1, 2] = policy[0, 2], reference[0, 2]  # the token that both answers begin with
    got = dpo_loss(policy, reference, batch["loss_mask"], beta=0.1, kind="ipo")
    chosen, rejected = (policy - reference)[0, 2:5].mean(), (policy - reference)[1, 2:6].mean()
    assert got.per_pair.item() == pytest.approx(((chosen - rejected) - 1 / (2 * 0.1)).item() ** 2)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_each_pair_has_a_loss_of_its_own(kind: Literal["sigmoid", "ipo"]) -> None:
    gained = [[1.0, 2.0], [0.5, -1.0], [0.0, 3.0], [2.0, 2.0]]
    policy, mask = torch.tensor(gained), torch.tensor([[1, 1], [0, 1], [1, 1], [1, 0]])
    got = dpo_loss(policy, torch.zeros(4, 2), mask, beta=0.5, kind=kind)
    if kind == "ipo":
        gaps = [1.5 - -1.0, 1.5 - 2.0]
        assert got.per_pair.tolist() == pytest.approx([(gap - 1) ** 2 for gap in gaps])
    else:
        gaps = [0.5 * (3.0 - -1.0), 0.5 * (3.0 - 2.0)]
        assert got.per_pair.tolist() == pytest.approx([math.log(1 + math.exp(-gap)) for gap in gaps])
    assert got.margins.tolist() == pytest.approx(gaps)


def test_mean_of_one_token_is_its_value() -> None:
    values = torch.tensor([[4.0, 9.0], [9.0, 9.0]])
    assert masked_mean(values, torch.tensor([[1, 0], [0, 0]])).item() == 4.0
    assert masked_mean(values, torch.tensor([[1, 0], [0, 0]]), dim=1).tolist() == [[4.0], [0.0]]


def test_pairs_without_prompt_share_common_prefix() -> None:
    batch = paired_batch([{"chosen_ids": [1, 2, 5, 6], "rejected_ids": [1, 2, 5, 8, 9]}])
    assert batch["loss_mask"].int().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_answer_without_preceding_token_is_refused() -> None:
    with pytest.raises(UsageFault, match="row 1 of the batch has an answer of one token and no prompt"):
        paired_batch([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}, {"chosen_ids": [5], "rejected_ids": [6]}])


@pytest.mark.parametrize(
    ("mode", "mean", "weight"),
    [
        ("token-mean", (1 + 2 + 6) / 3, 3),
        ("seq-mean-token-mean", ((1 + 2) / 2 + 6) / 2, 2),
        ("seq-mean-token-sum", ((1 + 2) + 6) / 2, 2),
        ("seq-mean-token-sum-norm", ((1 + 2) + 6) / 2 / 4, 2),
    ],
)
def test_aggregation_matches_published_mean(mode: AggMode, mean: float, weight: int) -> None:
    losses = torch.tensor([[9.0, 1.0, 2.0], [9.0, 6.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])
    aggregation = Aggregation(mode, scale=4.0)
    assert aggregation.mean(losses, mask).item() == pytest.approx(mean)
    assert aggregation.weight(mask).item() == weight
    assert aggregation.mean(losses, torch.zeros_like(mask)).item() == 0.0
