"""Each objective against its formula, token by token, in plain Python."""

import math

import pytest
import torch

from areal.training.algorithms.losses import PolicyObjective, policy_loss

LOGP = torch.tensor([[0.0, -1.0, -2.0, -0.5], [0.0, -0.1, -3.0, -0.7]])
PROX = torch.tensor([[0.0, -1.5, -1.0, -0.5], [0.0, -0.4, -2.9, -2.0]])
ADV = torch.tensor([[0.0, 1.0, -2.0, 0.5], [0.0, -1.0, -1.0, 3.0]])
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]])
TOKENS = [(b, t) for b in range(2) for t in range(4) if MASK[b, t]]


def _ratio(b: int, t: int) -> float:
    return math.exp(LOGP[b, t].item() - PROX[b, t].item())


def _check(objective: PolicyObjective, want, weights=None) -> None:
    got = policy_loss(LOGP, PROX, ADV, MASK, objective, weights).per_token
    for b in range(2):
        for t in range(4):
            assert got[b, t].item() == pytest.approx(want(b, t) if MASK[b, t] else 0.0, rel=1e-5)


def test_ppo_takes_pessimistic_objective() -> None:
    def want(b: int, t: int) -> float:
        u, a = _ratio(b, t), ADV[b, t].item()
        return -min(u * a, min(max(u, 0.8), 1.28) * a)

    _check(PolicyObjective(clip=(0.2, 0.28)), want)


def test_ppo_dual_clip_bounds_loss_of_bad_token() -> None:
    def want(b: int, t: int) -> float:
        u, a = _ratio(b, t), ADV[b, t].item()
        loss = -min(u * a, min(max(u, 0.8), 1.2) * a)
        return min(loss, -1.1 * a) if a < 0 else loss

    _check(PolicyObjective(dual_clip=1.1), want)


def test_decoupled_weights_multiply_loss() -> None:
    weights = torch.tensor([[1, 2.0, 0.0, 1], [1, 0.5, 1, 1]])

    def want(b: int, t: int) -> float:
        u, a = _ratio(b, t), ADV[b, t].item()
        return -min(u * a, min(max(u, 0.8), 1.2) * a) * weights[b, t].item()

    _check(PolicyObjective(), want, weights)


def test_gspo_has_one_ratio_for_a_sequence() -> None:
    def mean(b: int, of) -> float:
        tokens = [t for t in range(4) if MASK[b, t]]
        return sum(of(b, t) for t in tokens) / len(tokens)

    def want(b: int, t: int) -> float:
        u = math.exp(mean(b, lambda b, t: (LOGP - PROX)[b, t].item()))
        a = mean(b, lambda b, t: ADV[b, t].item())
        return -min(u * a, min(max(u, 0.8), 1.2) * a)

    _check(PolicyObjective(level="sequence"), want)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    objective = PolicyObjective(kind="cispo", clip=(1.0, 0.1))
    _check(objective, lambda b, t: -min(_ratio(b, t), 1.1) * ADV[b, t].item() * LOGP[b, t].item())
    logprobs = LOGP.clone().requires_grad_()
    policy_loss(logprobs, PROX, ADV, MASK, objective).per_token.sum().backward()
    assert logprobs.grad is not None and all(logprobs.grad[b, t] != 0 for b, t in TOKENS)


def test_sapo_gates_softly() -> None:
    def want(b: int, t: int) -> float:
        a = ADV[b, t].item()
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (_ratio(b, t) - 1))) * a

    _check(PolicyObjective(kind="sapo"), want)


def test_gradient_at_proximal_policy_equals_policy_gradient() -> None:
    for kind in ("ppo", "cispo", "sapo"):
        logprobs = PROX.clone().requires_grad_()
        objective = PolicyObjective(kind=kind, sapo_temperatures=(1.0, 1.0))
        policy_loss(logprobs, PROX, ADV, MASK, objective).per_token.sum().backward()
        torch.testing.assert_close(logprobs.grad, -ADV * MASK)


@pytest.mark.parametrize("moved", [11.0, 25.0])
def test_gradient_of_likelier_bad_token_scales_with_ratio(moved: float) -> None:
    for level in ("token", "sequence"):
        logprobs = torch.tensor([[0.0, -1.0 + moved]], requires_grad=True)
        advantages, mask = torch.full((1, 2), -1.0), torch.tensor([[0, 1]])
        got = policy_loss(logprobs, torch.full((1, 2), -1.0), advantages, mask, PolicyObjective(level=level))
        got.per_token.sum().backward()
        assert got.per_token[0, 1].item() == pytest.approx(math.exp(moved), rel=1e-5)
        assert logprobs.grad is not None and logprobs.grad[0, 1].item() == pytest.approx(math.exp(moved), rel=1e-5)


@pytest.mark.parametrize("moved", [60.0, 1e4])
def test_overflowing_ratio_keeps_finite_gradient(moved: float) -> None:
    for advantage, pushed in ((-1.0, True), (1.0, False), (0.0, False)):
        logprobs = torch.tensor([[0.0, -1.0 + moved]], requires_grad=True)
        got = policy_loss(
            logprobs, torch.full((1, 2), -1.0), torch.full((1, 2), advantage), torch.tensor([[0, 1]]), PolicyObjective()
        )
        got.per_token.sum().backward()
        assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
        assert (logprobs.grad[0, 1] > 0).item() is pushed


def test_masked_tokens_may_hold_any_value() -> None:
    dirty = torch.where(MASK.bool(), LOGP, torch.nan).requires_grad_()
    policy_loss(dirty, PROX, ADV, MASK, PolicyObjective()).per_token.sum().backward()
    assert dirty.grad is not None and torch.isfinite(dirty.grad).all()


def test_clipped_tokens_are_those_whose_loss_is_bounded() -> None:
    logprobs = torch.tensor([[0.0, 0.1, 0.5, -0.5, 0.5, -0.5, 0.9]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    got = {
        name: policy_loss(logprobs, torch.zeros(1, 7), advantages, mask, objective).clipped[0].int().tolist()
        for name, objective in {
            "ppo": PolicyObjective(),
            "dual": PolicyObjective(dual_clip=2.0),
            "cispo": PolicyObjective(kind="cispo"),
            "sapo": PolicyObjective(kind="sapo"),
        }.items()
    }
    assert got == {
        "ppo": [0, 0, 1, 0, 0, 1, 0],
        "dual": [0, 0, 1, 0, 0, 1, 1],
        "cispo": [0, 0, 1, 1, 1, 1, 1],
        "sapo": [0] * 7,
    }


@pytest.mark.parametrize(
    "allowed", [{"clip": (0.0, 0.0)}, {"clip": (0.2, 3.0)}, {"dual_clip": 1.5}, {"dual_clip": 3.0}]
)
def test_objective_at_the_bounds_is_allowed(allowed) -> None:
    PolicyObjective(**allowed)


@pytest.mark.parametrize("wrong", [{"clip": (-0.1, 0.2)}, {"clip": (0.2, -0.1)}, {"dual_clip": 1.0}])
def test_objective_out_of_range_is_an_error(wrong) -> None:
    with pytest.raises(ValueError):
        PolicyObjective(**wrong)
