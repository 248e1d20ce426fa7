import torch

from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
from areal.training.algorithms.actor import ActorLoss
from areal.training.algorithms.logprobs import token_logprobs


def _case() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 9, generator=generator)
    ids = torch.randint(0, 9, (3, 5), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]])
    micro = {
        "input_ids": ids,
        "loss_mask": mask,
        "versions": torch.where(mask.bool(), 3, -1),
        "logprobs": token_logprobs(logits, ids).detach(),
        "advantages": torch.randn(3, 5, generator=generator),
    }
    return logits, micro


def _gradient(loss: ActorLoss, logits: torch.Tensor, micro: dict[str, torch.Tensor]) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    loss(leaf, micro).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_loss_on_policy_has_the_gradient_of_plain_policy_gradient() -> None:
    logits, micro = _case()
    leaf = logits.clone().requires_grad_()
    logp = token_logprobs(leaf, micro["input_ids"])
    (-(logp * micro["advantages"] * micro["loss_mask"]).sum() / micro["loss_mask"].sum()).backward()
    for decoupled, method in ((False, "recompute"), (True, "reuse_train_logp"), (True, "loglinear")):
        config = PPOActorConfig(use_decoupled_loss=decoupled, prox_logp_method=method)
        torch.testing.assert_close(_gradient(ActorLoss(config, version=4), logits, micro), leaf.grad)


def test_loss_rejected_tokens_leave_the_denominator_alone() -> None:
    logits, micro = _case()
    micro["logprobs"][0, 1] -= 10.0  # w = e^10
    config = PPOActorConfig(
        use_decoupled_loss=True, prox_logp_method="reuse_train_logp", rejection_sampling=RejectionSamplingConfig()
    )
    loss = ActorLoss(config)
    got = _gradient(loss, logits, micro)
    names, sums = loss.taken()
    assert sums[-1] == micro["loss_mask"].sum()
    assert sums[names.index("rejected_ratio")] == 1
    assert got[0, 0].abs().sum() == 0  # the token at 1 is chosen by the logits at 0
    kept = _case()[1]
    whole = _gradient(ActorLoss(config), logits, kept)
    torch.testing.assert_close(got[0, 1], whole[0, 1])


def test_loss_an_entropy_bonus_flattens() -> None:
    logits, micro = _case()
    micro["advantages"].zero_()
    leaf = logits.clone().requires_grad_()
    ActorLoss(PPOActorConfig(entropy_coeff=0.1))(leaf, micro).backward()
    assert leaf.grad is not None
    stepped = logits - leaf.grad
    before, after = (-(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1) for x in (logits, stepped))
    assert (after[0, :3] > before[0, :3]).all()


def test_taken_counts_over_micro_batches_and_begins_anew() -> None:
    logits, micro = _case()
    loss = ActorLoss(PPOActorConfig())
    loss(logits, micro)
    loss(logits, micro)
    names, sums = loss.taken()
    assert sums[-1] == 2 * micro["loss_mask"].sum()
    assert sums[names.index("importance_weight")].item() == sums[-1].item()
    loss(logits, micro)
    assert loss.taken()[1][-1] == micro["loss_mask"].sum()
