"""Rows without an advantage are left out of an update, and change nothing by it."""

from __future__ import annotations

import torch

from areal.api.cli_args import PPOActorConfig
from areal.training.algorithms.actor import ActorLoss, rows_with_gradient
from areal.training.algorithms.losses import token_logprobs
from areal.training.batches import select


def _case() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 9, generator=generator)
    ids = torch.randint(0, 9, (4, 6), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]])
    advantages = torch.randn(4, 6, generator=generator) * mask
    advantages[[1, 3]] = 0.0
    behavior = token_logprobs(logits, ids) + 0.3 * torch.randn(4, 6, generator=generator)
    columns = {"input_ids": ids, "loss_mask": mask, "versions": mask * 3, "logprobs": behavior}
    return logits, {**columns, "advantages": advantages, "attention_mask": torch.ones_like(mask, dtype=torch.bool)}


def _gradient(loss: ActorLoss, logits: torch.Tensor, micro: dict[str, torch.Tensor]) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    torch.autograd.backward(loss(leaf, micro))
    assert leaf.grad is not None
    return leaf.grad


def test_rows_without_advantages_change_no_gradient() -> None:
    logits, batch = _case()
    for config in (
        PPOActorConfig(),
        PPOActorConfig(use_cispo_loss=True),
        PPOActorConfig(use_sapo_loss=True),
        PPOActorConfig(loss_agg_mode="seq-mean-token-mean"),
        PPOActorConfig(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=6),
    ):
        chosen = rows_with_gradient(batch, config)
        assert chosen == [0, 2]
        few = select(batch, chosen)
        share = float(ActorLoss(config).weight(few) / ActorLoss(config).weight(batch))
        width = few["input_ids"].shape[1]
        whole = _gradient(ActorLoss(config), logits, batch)
        part = _gradient(ActorLoss(config, share=share), logits[chosen][:, :width], few)
        torch.testing.assert_close(part, whole[chosen][:, :width])
        assert not whole[[1, 3]].any()


def test_one_row_stays_where_none_teaches() -> None:
    _, batch = _case()
    assert rows_with_gradient({**batch, "advantages": torch.zeros(4, 6)}, PPOActorConfig()) == [0]


def test_all_rows_stay_where_a_loss_has_more_than_advantages() -> None:
    _, batch = _case()
    assert rows_with_gradient(batch, PPOActorConfig(entropy_coeff=0.1)) == [0, 1, 2, 3]
