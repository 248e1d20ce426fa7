"""The policy's loss: its gradient however a batch is cut, the correction of older samples, rows that are skipped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal.api.algorithm_api import LossInputs
from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
from areal.api.cli_args import RejectionSamplingConfig as Rejection
from areal.errors import UsageFault
from areal.training.algorithms.actor import (
    ActorLoss,
    add_second_moment_mask,
    correction,
    interpolate_proximal,
    rows_with_gradient,
    second_moment_bound,
)
from areal.training.algorithms.losses import token_logprobs, token_outputs
from areal.training.batches import select


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
    loss(token_outputs(leaf, micro), micro).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_first_update_measures_mismatch_without_proximal_policy() -> None:
    logits, micro = _case()
    behavior = micro["logprobs"] + 0.5 * micro["loss_mask"]
    loss = ActorLoss(PPOActorConfig())
    assert loss.pop_mismatch() is None
    _gradient(loss, logits, {**micro, "logprobs": behavior})
    loss.is_first_update = False
    _gradient(loss, logits, {**micro, "logprobs": behavior})
    mismatch = loss.pop_mismatch()
    assert mismatch is not None and mismatch.tolist() == pytest.approx([0.5 * 7, 7])
    assert "mismatch_kl" not in loss.pop_sums()[0], "0 by construction"
    decoupled = ActorLoss(PPOActorConfig(use_decoupled_loss=True))
    _gradient(decoupled, logits, {**micro, "logprobs": behavior})
    names, sums = decoupled.pop_sums()
    assert sums[names.index("mismatch_kl")].item() == pytest.approx(3.5) and decoupled.pop_mismatch() is None


def test_loss_on_policy_equals_plain_policy_gradient() -> None:
    logits, micro = _case()
    leaf = logits.clone().requires_grad_()
    logp = token_logprobs(leaf, micro["input_ids"])
    (-(logp * micro["advantages"] * micro["loss_mask"]).sum() / micro["loss_mask"].sum()).backward()
    for decoupled, method in ((False, "recompute"), (True, "reuse_train_logp"), (True, "loglinear")):
        config = PPOActorConfig(use_decoupled_loss=decoupled, prox_logp_method=method)  # type: ignore[arg-type]
        torch.testing.assert_close(_gradient(ActorLoss(config, version=4), logits, micro), leaf.grad)


def test_sapo_without_a_proximal_policy_rejects_nothing() -> None:
    logits, micro = _case()
    plain = _gradient(ActorLoss(PPOActorConfig(use_sapo_loss=True)), logits, micro)
    bounded = PPOActorConfig(use_sapo_loss=True, rejection_sampling=RejectionSamplingConfig(upper=1.0))
    torch.testing.assert_close(_gradient(ActorLoss(bounded), logits, micro), plain)
    assert plain.abs().sum() > 0


def test_rejected_tokens_do_not_change_denominator() -> None:
    logits, micro = _case()
    micro["logprobs"][0, 1] -= 10.0  # w = e^10
    config = PPOActorConfig(
        use_decoupled_loss=True, prox_logp_method="reuse_train_logp", rejection_sampling=RejectionSamplingConfig()
    )
    loss = ActorLoss(config)
    got = _gradient(loss, logits, micro)
    names, sums = loss.pop_sums()
    assert sums[-1] == micro["loss_mask"].sum()
    assert sums[names.index("rejected_ratio")] == 1
    assert got[0, 0].abs().sum() == 0  # the token at 1 is chosen by the logits at 0
    kept = _case()[1]
    whole = _gradient(ActorLoss(config), logits, kept)
    torch.testing.assert_close(got[0, 1], whole[0, 1])


def test_entropy_bonus_flattens_distribution() -> None:
    logits, micro = _case()
    micro["advantages"].zero_()
    leaf = logits.clone().requires_grad_()
    ActorLoss(PPOActorConfig(entropy_coeff=0.1))(token_outputs(leaf, micro), micro).backward()
    assert leaf.grad is not None
    stepped = logits - leaf.grad
    before, after = (-(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1) for x in (logits, stepped))
    assert (after[0, :3] > before[0, :3]).all()


def test_pop_sums_covers_micro_batches_and_resets() -> None:
    logits, micro = _case()
    loss = ActorLoss(PPOActorConfig())
    loss(token_outputs(logits, micro), micro)
    loss(token_outputs(logits, micro), micro)
    names, sums = loss.pop_sums()
    assert sums[-1] == 2 * micro["loss_mask"].sum()
    assert sums[names.index("importance_weight")].item() == sums[-1].item()
    loss(token_outputs(logits, micro), micro)
    assert loss.pop_sums()[1][-1] == micro["loss_mask"].sum()


def _in_parts(loss: ActorLoss, logits: torch.Tensor, batch: dict[str, torch.Tensor], parts: list[list[int]]) -> Tensor:
    """The gradient of a batch cut into micro-batches, put together as the engine does."""
    total = loss.weight(batch)
    gradient = torch.zeros_like(logits)
    for part in parts:
        micro = {name: column[part] for name, column in batch.items()}
        gradient[part] = _gradient(loss, logits[part], micro) * (loss.weight(micro) / total)
    return gradient


def test_second_moment_mask_is_independent_of_micro_batching() -> None:
    logits, micro = _case()
    moved = torch.tensor([[0, 0.1, 2.0, 0.1, 0], [0, 0, 0.1, 1.0, 0.1], [0, 1.5, 0, 0, 0]])
    batch = add_second_moment_mask({**micro, "proximal": micro["logprobs"] - moved}, 0.21)
    assert batch["second_moment_mask"].sum() == 5  # of 7
    config = PPOActorConfig(use_decoupled_loss=True, m2_threshold=0.21)
    whole = _gradient(ActorLoss(config), logits, batch)
    for parts in ([[0], [1], [2]], [[0, 2], [1]]):
        torch.testing.assert_close(_in_parts(ActorLoss(config), logits, batch, parts), whole)


def aggregated(per_token: Tensor, mask: Tensor, mode: str, scale: float) -> Tensor:
    """The loss of each mode, sequence by sequence."""
    rows = [row[chosen.bool()] for row, chosen in zip(per_token, mask, strict=True) if chosen.any()]
    if mode == "token-mean":
        return torch.cat(rows).mean()
    means = {
        "seq-mean-token-mean": [row.mean() for row in rows],
        "seq-mean-token-sum": [row.sum() for row in rows],
        "seq-mean-token-sum-norm": [row.sum() / scale for row in rows],
    }
    return torch.stack(means[mode]).mean()


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
def test_loss_agg_mode_is_independent_of_micro_batching(mode: str) -> None:
    logits, micro = _case()
    filler = {name: torch.cat([column, column[:1]]) for name, column in micro.items()}
    filler["loss_mask"][-1] = 0  # a row that is left out counts for nothing
    logits = torch.cat([logits, logits[:1]])
    leaf = logits.clone().requires_grad_()
    logp = token_logprobs(leaf, filler["input_ids"])
    ratio = (logp - filler["logprobs"]).exp()
    want = aggregated(-ratio * filler["advantages"], filler["loss_mask"], mode, 7)
    want.backward()
    config = PPOActorConfig(loss_agg_mode=mode, loss_scale_factor=7)  # type: ignore[arg-type]
    torch.testing.assert_close(ActorLoss(config)(token_outputs(logits, filler), filler), want.detach())
    for parts in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [1, 3]]):
        torch.testing.assert_close(_in_parts(ActorLoss(config), logits, filler, parts), leaf.grad)


def test_loss_agg_mode_with_constant_requires_it() -> None:
    with pytest.raises(ValueError, match="needs loss_scale_factor or max_new_tokens"):
        ActorLoss(PPOActorConfig(loss_agg_mode="seq-mean-token-sum-norm"))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_loss_uses_configured_estimator(estimator) -> None:
    logits, micro = _case()
    micro["ref_logprobs"] = micro["logprobs"] + 0.3 * torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    leaf = logits.clone().requires_grad_()
    logp, ref = token_logprobs(leaf, micro["input_ids"]), micro["ref_logprobs"]
    kl = {"k1": logp - ref, "k2": (logp - ref) ** 2 / 2, "k3": torch.exp(ref - logp) - 1 - (ref - logp)}[estimator]
    ratio = torch.exp(logp - micro["logprobs"])
    want = aggregated(0.1 * 1.5 * kl - ratio * micro["advantages"], micro["loss_mask"], "seq-mean-token-mean", 1)
    want.backward()
    config = PPOActorConfig(kl_loss_coef=0.1, kl_loss_type=estimator, loss_agg_mode="seq-mean-token-mean")
    got = _gradient(ActorLoss(config, kl_factor=1.5), logits, micro)
    torch.testing.assert_close(got, leaf.grad)
    assert rows_with_gradient({**micro, "advantages": micro["advantages"] * 0}, config) == [0, 1, 2]


def test_prox_logp_metrics_report_approximation_error() -> None:
    logits, micro = _case()
    micro["proximal"] = micro["logprobs"] + 0.5
    loss = ActorLoss(PPOActorConfig(use_decoupled_loss=True, prox_logp_method="metrics"), version=4)
    loss(token_outputs(logits, micro), micro)
    names, sums = loss.pop_sums()
    assert sums[names.index("prox_logp_error")].item() == pytest.approx(0.5 * sums[-1].item())  # of fresh samples


def reinforce_with_margin(given: LossInputs) -> Tensor:
    """A loss of one's own: REINFORCE less what the policy likes already."""
    return -given.logprobs * given.advantages + given.config.eps_clip * (given.logprobs - given.behaviour) ** 2


def one_number(given: LossInputs) -> Tensor:
    return given.logprobs.mean()


def test_custom_loss_is_weighted_like_built_in_ones() -> None:
    logits, micro = _case()
    micro["proximal"] = micro["logprobs"] + 0.1
    micro["advantages"][0] = 0.0  # has a gradient all the same
    config = PPOActorConfig(
        loss_fn=f"{__name__}:reinforce_with_margin", use_decoupled_loss=True, loss_agg_mode="seq-mean-token-sum"
    )
    leaf = logits.clone().requires_grad_()
    logp = token_logprobs(leaf, micro["input_ids"])
    per_token = -logp * micro["advantages"] + 0.2 * (logp - micro["logprobs"]) ** 2
    aggregated(per_token * math.exp(0.1), micro["loss_mask"], "seq-mean-token-sum", 1).backward()
    named = _gradient(ActorLoss(config), logits, micro)
    torch.testing.assert_close(named, leaf.grad)
    plain = PPOActorConfig(use_decoupled_loss=True, loss_agg_mode="seq-mean-token-sum")
    given = ActorLoss(plain, loss_fn=reinforce_with_margin)
    torch.testing.assert_close(_gradient(given, logits, micro), named)
    assert rows_with_gradient(micro, config) == rows_with_gradient(micro, plain, own_loss=True) == [0, 1, 2]
    assert rows_with_gradient(micro, plain) == [1, 2]


def test_custom_loss_not_per_token_is_refused() -> None:
    logits, micro = _case()
    with pytest.raises(UsageFault, match=r"the loss_fn gave \[\]: it must be a loss for each token, \[3, 5\]"):
        ActorLoss(PPOActorConfig(), loss_fn=one_number)(token_outputs(logits, micro), micro)
    with pytest.raises(UsageFault, match=r"actor\.loss_fn 'nowhere:f': there is no module nowhere"):
        ActorLoss(PPOActorConfig(loss_fn="nowhere:f"))


PROX = torch.log(torch.tensor([[0.5, 0.9, 0.2, 0.5], [0.5, 0.6, 0.4, 0.5]]))
BEHAVIOUR = torch.log(torch.tensor([[0.5, 0.1, 0.4, 0.5], [0.5, 0.5, 0.5, 0.5]]))
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]])


def test_token_masking_drops_only_exploded_tokens() -> None:
    got = correction(PROX, BEHAVIOUR, MASK, Rejection(upper=5.0))
    torch.testing.assert_close(got.weights, torch.tensor([[0, 0, 0.5, 1.0], [0, 1.2, 0.8, 0]]))
    assert got.kept.tolist() == [[False, False, True, True], [False, True, True, False]]


def test_token_clamping_keeps_all_tokens() -> None:
    got = correction(PROX, BEHAVIOUR, MASK, Rejection(action="clamp", upper=5.0, lower=0.9))
    torch.testing.assert_close(got.weights, torch.tensor([[0, 5.0, 0.9, 1.0], [0, 1.2, 0.9, 0]]))
    assert torch.equal(got.kept, MASK.bool())


def test_sequence_masking_by_the_geometric_mean() -> None:
    first = (9 * 0.5 * 1) ** (1 / 3)
    got = correction(PROX, BEHAVIOUR, MASK, Rejection(level="sequence", upper=first - 0.01))
    assert got.kept.any(1).tolist() == [False, True]
    got = correction(PROX, BEHAVIOUR, MASK, Rejection(level="sequence", upper=first + 0.01))
    assert got.kept.any(1).tolist() == [True, True]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("ratio", 9.0),
        ("kl_k1", math.log(9)),
        ("kl_k2", math.log(9) ** 2 / 2),
        ("kl_k3", 9 - 1 - math.log(9)),
        ("binary_kl", 0.9 * math.log(9) + 0.1 * math.log(1 / 9)),
    ],
)
def test_metrics_match_their_formulas(metric: str, value: float) -> None:
    for upper, kept in ((value - 1e-3, False), (value + 1e-3, True)):
        got = correction(PROX, BEHAVIOUR, MASK, Rejection(metric=metric, upper=upper))  # type: ignore[arg-type]
        assert bool(got.kept[0, 1]) is kept


def test_non_finite_behavior_logprob_is_masked() -> None:
    behavior = BEHAVIOUR.clone()
    behavior[0, 1], behavior[1, 1] = -torch.inf, torch.nan
    got = correction(PROX, behavior, MASK, Rejection(metric="binary_kl"))
    assert torch.isfinite(got.weights).all()
    assert got.kept[:, 1].tolist() == [False, False]


def reference_weights(rejection: Rejection) -> list[list[float]]:
    """The weights of sequence-level rejection, sequence by sequence."""
    result = []
    for logps, olds, mask in zip(PROX.tolist(), BEHAVIOUR.tolist(), MASK.tolist(), strict=True):
        ratios = [math.exp(p - b) for p, b, m in zip(logps, olds, mask, strict=True) if m]
        product = math.prod(ratios)
        weight = {"mean": product ** (1 / len(ratios)), "sum": product}[rejection.agg]
        low, high = rejection.lower or 0.0, rejection.upper or math.inf
        inside = low <= weight <= high
        weight = min(max(weight, low), high) if rejection.action == "clamp" else weight * inside
        result.append([weight * m for m in mask])
    return result


@pytest.mark.parametrize("aggregate", ["mean", "sum"])
@pytest.mark.parametrize("bounds", [{"upper": 1.3}, {"upper": 5.0}, {"upper": 100.0, "lower": 0.97}])
@pytest.mark.parametrize("action", ["clamp", "mask"])
def test_sequence_level_gives_tokens_their_sequence_weight(action, bounds, aggregate) -> None:
    rejection = Rejection("sequence", action, agg=aggregate, **({"lower": None} | bounds))
    got = correction(PROX, BEHAVIOUR, MASK, rejection)
    torch.testing.assert_close(got.weights, torch.tensor(reference_weights(rejection)))
    left_out = torch.tensor(reference_weights(rejection)) == 0
    assert torch.equal(got.kept, MASK.bool() & ~left_out)


def test_sequence_divergence_masks_and_weighs_by_sequence() -> None:
    k3 = [math.exp(r) - 1 - r for r in (PROX - BEHAVIOUR)[0, 1:].tolist()]
    for upper, kept in ((sum(k3) / 3 - 1e-3, False), (sum(k3) / 3 + 1e-3, True)):
        got = correction(PROX, BEHAVIOUR, MASK, Rejection("sequence", metric="kl_k3", upper=upper))
        assert got.kept[0].any().item() is kept
        assert got.weights[0, 1:].tolist() == pytest.approx([(9 * 0.5) ** (1 / 3) if kept else 0.0] * 3)


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12), st.floats(1e-3, 4))
def test_second_moment_bound_drops_largest_until_mean_is_below(differences, threshold) -> None:
    squares = torch.tensor(differences, dtype=torch.float64).square()
    kept = [square.item() for square in squares if square <= second_moment_bound(squares, threshold)]
    by_hand = sorted(squares.tolist())
    while by_hand and sum(by_hand) / len(by_hand) >= threshold:
        by_hand = [square for square in by_hand if square < by_hand[-1]]  # equals go together
    assert sorted(kept) == by_hand


def test_second_moment_bound_drops_non_finite_values() -> None:
    assert second_moment_bound(torch.tensor([0.5, torch.inf, torch.nan]), 1.0) == 0.5
    assert second_moment_bound(torch.tensor([torch.nan]), 1.0) == -1.0


def test_fresh_tokens_interpolate_to_behavior_logprobs() -> None:
    behavior, current = torch.full((1, 3), -2.0), torch.full((1, 3), -1.0)
    got = interpolate_proximal(behavior, current, torch.tensor([[-1, 4, 2]]), 5)
    torch.testing.assert_close(got[0, 1:], torch.tensor([-2.0, -2 + 2 / 3]))


def case_of_four() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 9, generator=generator)
    ids = torch.randint(0, 9, (4, 6), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]])
    advantages = torch.randn(4, 6, generator=generator) * mask
    advantages[[1, 3]] = 0.0
    behavior = token_logprobs(logits, ids) + 0.3 * torch.randn(4, 6, generator=generator)
    columns = {"input_ids": ids, "loss_mask": mask, "versions": mask * 3, "logprobs": behavior}
    return logits, {**columns, "advantages": advantages, "attention_mask": torch.ones_like(mask, dtype=torch.bool)}


def test_rows_without_advantages_have_no_gradient() -> None:
    logits, batch = case_of_four()
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


def test_one_row_is_kept_when_none_has_advantages() -> None:
    _, batch = case_of_four()
    assert rows_with_gradient({**batch, "advantages": torch.zeros(4, 6)}, PPOActorConfig()) == [0]


def test_all_rows_are_kept_when_loss_needs_more_than_advantages() -> None:
    _, batch = case_of_four()
    assert rows_with_gradient(batch, PPOActorConfig(entropy_coeff=0.1)) == [0, 1, 2, 3]
