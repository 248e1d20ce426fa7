import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import RejectionSamplingConfig as Rejection
from areal.training.algorithms.actor import correction, interpolate_proximal, second_moment_bound

PROX = torch.log(torch.tensor([[0.5, 0.9, 0.2, 0.5], [0.5, 0.6, 0.4, 0.5]]))
BEHAVIOUR = torch.log(torch.tensor([[0.5, 0.1, 0.4, 0.5], [0.5, 0.5, 0.5, 0.5]]))
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]])


def test_token_masking_leaves_out_what_exploded_and_keeps_the_rest() -> None:
    got = correction(PROX, BEHAVIOUR, MASK, Rejection(upper=5.0))
    torch.testing.assert_close(got.weights, torch.tensor([[0, 0, 0.5, 1.0], [0, 1.2, 0.8, 0]]))
    assert got.kept.tolist() == [[False, False, True, True], [False, True, True, False]]


def test_token_clamping_keeps_all() -> None:
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
def test_metrics_are_their_formulas(metric: str, value: float) -> None:
    for upper, kept in ((value - 1e-3, False), (value + 1e-3, True)):
        got = correction(PROX, BEHAVIOUR, MASK, Rejection(metric=metric, upper=upper))
        assert bool(got.kept[0, 1]) is kept


def test_a_behaviour_that_is_not_finite_is_left_out() -> None:
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
        weight = {"mean": product ** (1 / len(ratios)), "sum": product, "max": max(ratios)}[rejection.agg]
        low, high = rejection.lower or 0.0, rejection.upper or math.inf
        inside = low <= weight <= high
        weight = min(max(weight, low), high) if rejection.action == "clamp" else weight * inside
        result.append([weight * m for m in mask])
    return result


@pytest.mark.parametrize("aggregate", ["mean", "sum", "max"])
@pytest.mark.parametrize("bounds", [{"upper": 1.3}, {"upper": 5.0}, {"upper": 100.0, "lower": 0.97}])
@pytest.mark.parametrize("action", ["clamp", "mask"])
def test_sequence_level_gives_all_tokens_the_weight_of_their_sequence(action, bounds, aggregate) -> None:
    rejection = Rejection("sequence", action, agg=aggregate, **({"lower": None} | bounds))
    got = correction(PROX, BEHAVIOUR, MASK, rejection)
    torch.testing.assert_close(got.weights, torch.tensor(reference_weights(rejection)))
    left_out = torch.tensor(reference_weights(rejection)) == 0
    assert torch.equal(got.kept, MASK.bool() & ~left_out)


def test_sequence_level_by_a_divergence_masks_and_weighs_by_sequence() -> None:
    k3 = [math.exp(r) - 1 - r for r in (PROX - BEHAVIOUR)[0, 1:].tolist()]
    for upper, kept in ((sum(k3) / 3 - 1e-3, False), (sum(k3) / 3 + 1e-3, True)):
        got = correction(PROX, BEHAVIOUR, MASK, Rejection("sequence", metric="kl_k3", upper=upper))
        assert got.kept[0].any().item() is kept
        assert got.weights[0, 1:].tolist() == pytest.approx([(9 * 0.5) ** (1 / 3) if kept else 0.0] * 3)


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12), st.floats(1e-3, 4))
def test_second_moment_bound_is_where_leaving_out_the_largest_brings_the_mean_below(differences, threshold) -> None:
    squares = torch.tensor(differences, dtype=torch.float64).square()
    kept = [square.item() for square in squares if square <= second_moment_bound(squares, threshold)]
    by_hand = sorted(squares.tolist())
    while by_hand and sum(by_hand) / len(by_hand) >= threshold:
        by_hand = [square for square in by_hand if square < by_hand[-1]]  # equals go together
    assert sorted(kept) == by_hand


def test_second_moment_bound_leaves_out_what_is_not_finite() -> None:
    assert second_moment_bound(torch.tensor([0.5, torch.inf, torch.nan]), 1.0) == 0.5
    assert second_moment_bound(torch.tensor([torch.nan]), 1.0) == -1.0


def test_interpolated_proximal_fresh_tokens_are_the_behaviours_own() -> None:
    behavior, current = torch.full((1, 3), -2.0), torch.full((1, 3), -1.0)
    got = interpolate_proximal(behavior, current, torch.tensor([[-1, 4, 2]]), 5)
    torch.testing.assert_close(got[0, 1:], torch.tensor([-2.0, -2 + 2 / 3]))
