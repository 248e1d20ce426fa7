"""Estimation over tokens and over turns against the recursion written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.training.algorithms.advantages import gae_by_token, gae_by_turn


def _reference(rewards, values, mask, discount, lam, bootstrap):
    steps = [t for t, active in enumerate(mask) if active]
    out = [0.0] * len(mask)
    carried, upcoming = 0.0, bootstrap
    for t in reversed(steps):
        delta = rewards[t] + discount * upcoming - values[t]
        carried = delta + discount * lam * carried
        out[t], upcoming = carried, values[t]
    return out


_ROW = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=8
)


@given(_ROW, st.floats(0, 1), st.floats(0, 1), st.floats(-3, 3, width=32))
def test_by_token_any_row_is_the_recursion(row, discount, lam, bootstrap) -> None:
    rewards, values, mask = (torch.tensor([[item[n] for item in row]], dtype=torch.float32) for n in range(3))
    got = gae_by_token(rewards, values, mask, discount=discount, gae_lambda=lam, bootstrap=torch.tensor([bootstrap]))
    want = _reference(rewards[0].tolist(), values[0].tolist(), mask[0].tolist(), discount, lam, bootstrap)
    assert got.advantages[0].tolist() == pytest.approx(want, rel=1e-4, abs=1e-3)
    torch.testing.assert_close(got.returns, (got.advantages + values) * mask)


def test_by_turn_one_timestep_a_turn_and_one_advantage_for_its_tokens() -> None:
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1, -1]])
    mask = (turns >= 0).float()
    rewards = torch.tensor([[0, 0, 1.0, 0, 0, 2.0, 0]])
    values = torch.tensor([[9, 0.5, 7, 9, 0.25, 7, 9]])
    got = gae_by_turn(rewards, values, mask, turns, discount=0.9, gae_lambda=0.8)
    second = 2.0 - 0.25
    first = 1.0 + 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * second
    torch.testing.assert_close(got.advantages, torch.tensor([[0, first, first, 0, second, second, 0]]))
    torch.testing.assert_close(got.returns[0, 1:3], torch.tensor([first + 0.5] * 2))


def test_by_turn_of_a_single_turn_is_its_reward_above_its_value() -> None:
    turns = torch.tensor([[-1, 0, 0]])
    rewards, values = torch.tensor([[0, 0.5, 1.0]]), torch.tensor([[9.0, 0.25, 7.0]])
    got = gae_by_turn(rewards, values, (turns >= 0).float(), turns, discount=0.9, gae_lambda=0.8)
    torch.testing.assert_close(got.advantages, torch.tensor([[0, 1.25, 1.25]]))


def test_by_turn_nothing_generated_gives_zeros() -> None:
    turns = torch.full((2, 3), -1)
    got = gae_by_turn(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3), turns, discount=1.0, gae_lambda=1.0)
    assert got.advantages.abs().sum() == 0
