import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.training.algorithms.correction import (
    Rejection,
    correction,
    interpolated_proximal,
    second_moment_mask,
)

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
    behaviour = BEHAVIOUR.clone()
    behaviour[0, 1], behaviour[1, 1] = -torch.inf, torch.nan
    got = correction(PROX, behaviour, MASK, Rejection(metric="binary_kl"))
    assert torch.isfinite(got.weights).all()
    assert got.kept[:, 1].tolist() == [False, False]


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12), st.floats(1e-3, 4))
def test_second_moment_mask_keeps_as_many_as_stay_below(differences, threshold) -> None:
    behaviour = torch.tensor([differences])
    mask = torch.ones_like(behaviour)
    kept = second_moment_mask(torch.zeros_like(behaviour), behaviour, mask, threshold)
    squares = behaviour.square()
    if kept.any():
        assert squares[kept].mean() < threshold + 1e-6
    left_out = squares[~kept]
    if len(left_out):
        one_more = torch.cat([squares[kept], left_out.min().reshape(1)])
        assert one_more.mean() >= threshold - 1e-4


def test_interpolated_proximal_fresh_tokens_are_the_behaviours_own() -> None:
    behaviour, current = torch.full((1, 3), -2.0), torch.full((1, 3), -1.0)
    got = interpolated_proximal(behaviour, current, torch.tensor([[-1, 4, 2]]), 5)
    torch.testing.assert_close(got[0, 1:], torch.tensor([-2.0, -2 + 2 / 3]))
