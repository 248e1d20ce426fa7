"""From rewards to advantages by the settings of a config, against sums written out."""

import pytest
import torch

from areal.api.algorithm_api import AdvantageInputs
from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.errors import UsageFault
from areal.training.algorithms.actor import add_second_moment_mask, squared_log_ratios
from areal.training.algorithms.advantages import AuxiliaryOutputs, prepare

MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 1]])
GROUPS = torch.tensor([0, 0, 1, 1])


def _batch(rewards: list[float], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "loss_mask": MASK,
        "rewards": torch.tensor(rewards),
        "logprobs": torch.full((4, 4), -1.0),
        "turn_ids": torch.where(MASK.bool(), 0, -1),
        **more,
    }


def _config(**changes) -> PPOActorConfig:
    return PPOActorConfig(**({"kl_ctl": 0.0} | changes))


def test_grpo_gives_tokens_their_normalised_group_reward() -> None:
    group = NormConfig(mean_level="group", std_level="group", group_size=2)
    got = prepare(_batch([1.0, 0.0, 3.0, 3.0]), GROUPS, _config(reward_norm=group), AuxiliaryOutputs())["advantages"]
    high = 0.5 / (0.5**0.5 + 1e-5)
    want = torch.tensor([high, -high, 0.0, 0.0])[:, None] * MASK
    torch.testing.assert_close(got, want)


def test_batch_normalised_advantages_have_zero_mean() -> None:
    config = _config(
        reward_scaling=10.0,
        reward_bias=-0.5,
        reward_clip=4.0,
        adv_norm=NormConfig(mean_level="batch", std_level="batch"),
    )
    got = prepare(_batch([1.0, 0.0, 0.45, 1.0]), GROUPS, config, AuxiliaryOutputs())
    assert got["shaped_rewards"].tolist() == pytest.approx([4.0, -4.0, -0.5, 4.0])
    active = got["advantages"][MASK.bool()]
    assert active.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert active.std().item() == pytest.approx(1.0, rel=1e-3)


CUT = torch.tensor([True, False, False, False])


def test_mask_no_eos_with_zero_applies_after_norm() -> None:
    group = NormConfig(mean_level="group", std_level=None)
    config = _config(mask_no_eos_with_zero=True, reward_norm=group)
    got = prepare(_batch([1.0, 0.0, 1.0, 0.0], truncated=CUT), GROUPS, config, AuxiliaryOutputs())
    assert got["shaped_rewards"].tolist() == [0.0, -0.5, 0.5, -0.5]
    assert not got["advantages"][0].any()
    assert got["loss_mask"].equal(MASK)


def test_mask_truncated_excludes_loss_but_counts_in_baseline() -> None:
    group = NormConfig(mean_level="group", std_level=None)
    config = _config(mask_truncated_completions=True, reward_norm=group, adv_norm=NormConfig("batch"))
    got = prepare(_batch([1.0, 0.0, 1.0, 0.0], truncated=CUT), GROUPS, config, AuxiliaryOutputs())
    assert got["shaped_rewards"].tolist() == [0.5, -0.5, 0.5, -0.5]
    assert got["loss_mask"].tolist() == [[0, 0, 0, 0], *MASK.tolist()[1:]]
    rest = got["advantages"][MASK.bool() & ~CUT[:, None]]
    assert rest.mean().item() == pytest.approx(0.0, abs=1e-6)  # of those that are trained on
    assert not got["advantages"][0].any()


@pytest.mark.parametrize("name", ["mask_truncated_completions", "mask_no_eos_with_zero"])
def test_missing_truncation_column_is_an_error_if_needed(name: str) -> None:
    with pytest.raises(UsageFault, match=f"actor.{name} needs to know which answers were cut off"):
        prepare(_batch([1.0] * 4), GROUPS, _config(**{name: True}), AuxiliaryOutputs())


def test_missing_turns_are_an_error_for_turn_timestep() -> None:
    batch = _batch([1.0] * 4)
    del batch["turn_ids"]
    with pytest.raises(UsageFault, match="timestep_unit turn needs turns"):
        prepare(batch, GROUPS, _config(gae_timestep_unit="turn"), AuxiliaryOutputs())


def test_zero_overlong_penalty_factor_disables_penalty() -> None:
    for factor, want in ((0.0, 1.0), (None, 0.5), (1.0, 0.5)):
        config = _config(
            overlong_reward_penalty=True, overlong_tokens=2, max_new_tokens=4, overlong_penalty_factor=factor
        )
        got = prepare(_batch([1.0] * 4), GROUPS, config, AuxiliaryOutputs())["shaped_rewards"]
        assert got[1].item() == want  # 3 tokens of 4, of which the last 2 are charged


def test_second_moment_mask_covers_tokens_of_all_ranks() -> None:
    proximal = torch.full((4, 4), -1.0)
    moved = torch.tensor([[0, 0.1, 0.1, 9], [0, 2.0, 0.1, 0.1], [0, 0.1, 9, 9], [0, 0.1, 0.1, 3.0]])
    batch = _batch([1.0] * 4, proximal=proximal) | {"logprobs": proximal + moved}
    kept = add_second_moment_mask(batch, 0.6)["second_moment_mask"]
    assert kept.equal(MASK.bool() & (moved < 3.0))  # mean of squares (7 * 0.01 + 4) / 8; with the 9 it is above
    shares = [{name: column[rows] for name, column in batch.items()} for rows in ([0, 1], [2, 3])]
    squares = [squared_log_ratios(each["proximal"], each["logprobs"], each["loss_mask"]) for each in shares]
    parts = [add_second_moment_mask(each, 0.6, lambda mine: squares)["second_moment_mask"] for each in shares]
    assert torch.cat(parts).equal(kept)


def test_reference_kl_is_charged_from_each_token_on() -> None:
    reference = torch.full((4, 4), -1.5)  # k1 = 0.5 a token
    got = prepare(_batch([1.0, 1.0, 1.0, 1.0]), GROUPS, _config(kl_ctl=0.1), AuxiliaryOutputs(reference))["advantages"]
    torch.testing.assert_close(got[1], torch.tensor([0.0, 1 - 0.15, 1 - 0.10, 1 - 0.05]))


def test_critic_bootstraps_truncated_answer_from_last_value() -> None:
    batch = _batch([1.0, 1.0, 1.0, 1.0], truncated=torch.tensor([True, False, False, False]))
    auxiliary = AuxiliaryOutputs(values=torch.full((4, 4), 0.25), after=torch.full((4,), 2.0))
    config = _config(gae_lambda=0.5, discount=0.9)
    got = prepare(batch, GROUPS, config, auxiliary)
    last = 1.0 + 0.9 * 2.0 - 0.25
    first = 0.0 + 0.9 * 0.25 - 0.25 + 0.45 * last
    torch.testing.assert_close(got["advantages"][0], torch.tensor([0.0, first, last, 0.0]))
    assert got["advantages"][2, 1].item() == pytest.approx(1.0 - 0.25)
    torch.testing.assert_close(got["returns"], (got["advantages"] + 0.25) * MASK)


def gae_by_hand(rewards: list[float], values: list[float], end: float, discount: float, lam: float) -> list[float]:
    """Schulman et al. 2016, eq. 16, as sums: each timestep's reward, the value of its state, that of the last state."""
    steps = zip(rewards, values, [*values[1:], end], strict=True)
    errors = [reward + discount * following - value for reward, value, following in steps]
    return [
        sum((discount * lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]


VALUES = torch.tensor([[9, 0.5, -0.25, 9], [9, 0.125, 0.75, 2.0], [9, 1.5, 9, 9], [9, -1.0, 0.5, 0.25]])
AFTER = torch.tensor([2.0, -0.5, 3.0, 0.75])


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.5])
@pytest.mark.parametrize("values", [None, VALUES], ids=["no-critic", "critic"])
def test_advantages_follow_the_sum_for_any_discount_lambda_and_critic(
    values: torch.Tensor | None, gae_lambda: float, discount: float
) -> None:
    rewards, config = [1.0, -0.5, 2.0, 0.25], _config(discount=discount, gae_lambda=gae_lambda)
    got = prepare(_batch(rewards), GROUPS, config, AuxiliaryOutputs(values=values))
    for row, length in enumerate(MASK.sum(1).tolist()):
        states = [0.0] * length if values is None else values[row, 1 : 1 + length].tolist()
        want = gae_by_hand([0.0] * (length - 1) + rewards[row : row + 1], states, 0.0, discount, gae_lambda)
        assert got["advantages"][row, 1 : 1 + length].tolist() == pytest.approx(want, abs=1e-6)
        returns = [advantage + state for advantage, state in zip(want, states, strict=True)]
        assert got["returns"][row, 1 : 1 + length].tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize("is_zeroed", [False, True], ids=["rewarded", "mask_no_eos_with_zero"])
@pytest.mark.parametrize("truncated", [[0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1]])
@pytest.mark.parametrize("continues", [True, False])
def test_value_bootstrap_continues_truncated_answers_alone(
    truncated: list[int], continues: bool, is_zeroed: bool
) -> None:
    """The third answer has one token."""
    rewards, cut = [1.0, -0.5, 2.0, 0.25], torch.tensor(truncated).bool()
    settings = {"discount": 0.9, "gae_lambda": 0.5, "mask_no_eos_with_zero": is_zeroed, "value_bootstrap": continues}
    auxiliary = AuxiliaryOutputs(values=VALUES, after=AFTER)
    got = prepare(_batch(rewards, truncated=cut), GROUPS, _config(**settings), auxiliary)
    for row, length in enumerate(MASK.sum(1).tolist()):
        reward = 0.0 if is_zeroed and cut[row] else rewards[row]
        end = AFTER[row].item() if continues and cut[row] else 0.0
        values = VALUES[row, 1 : 1 + length].tolist()
        want = gae_by_hand([0.0] * (length - 1) + [reward], values, end, 0.9, 0.5)
        assert got["advantages"][row, 1 : 1 + length].tolist() == pytest.approx(want, abs=1e-6)
        returns = [advantage + value for advantage, value in zip(want, values, strict=True)]
        assert got["returns"][row, 1 : 1 + length].tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize("continues", [True, False])
def test_value_bootstrap_applies_after_last_turn(continues: bool) -> None:
    """A tool's output is between the turns of the fourth row; the end of its first turn is not an end."""
    turns = torch.tensor([[-1, 0, 1, -1], [-1, 0, 0, 1], [-1, 0, -1, -1], [-1, 0, -1, 1]])
    batch = _batch([1.0] * 4, truncated=torch.tensor([True] * 4), turn_ids=turns, loss_mask=(turns >= 0).long())
    auxiliary = AuxiliaryOutputs(values=VALUES, after=AFTER)
    for unit, rows in {"turn": [[1, 2], [1, 3], [1], [1, 3]], "token": [[1, 2], [1, 2, 3], [1], [1, 3]]}.items():
        config = _config(discount=0.9, gae_lambda=0.5, gae_timestep_unit=unit, value_bootstrap=continues)
        got = prepare(batch, GROUPS, config, auxiliary)["advantages"]
        for row, states in enumerate(rows):
            rewards, end = [0.0] * (len(states) - 1) + [1.0], AFTER[row].item() if continues else 0.0
            want = gae_by_hand(rewards, VALUES[row, states].tolist(), end, 0.9, 0.5)
            assert got[row, states].tolist() == pytest.approx(want, abs=1e-6)


def test_turns_share_advantage_but_keep_own_kl_penalty() -> None:
    turns = torch.tensor([[-1, 0, 1, -1], [-1, 0, 0, 1], [-1, 0, -1, -1], [-1, 0, 1, 1]])
    batch = _batch([1.0, 1.0, 1.0, 1.0], turn_ids=turns)
    config = _config(gae_timestep_unit="turn", discount=0.5, kl_ctl=0.1)
    reference = torch.full((4, 4), -1.5)
    got = prepare(batch, GROUPS, config, AuxiliaryOutputs(reference))["advantages"]
    torch.testing.assert_close(got[1], torch.tensor([0.0, 0.5 - 0.05, 0.5 - 0.05, 1.0 - 0.05]))


def by_length(lengths: torch.Tensor) -> torch.Tensor:
    return 1 - 1 / (2 * lengths.float())


def of_the_bounds(lengths: torch.Tensor) -> list[float]:
    return [0.0, 1.0, 0.0, 1.0]


def above_one(lengths: torch.Tensor) -> list[float]:
    return [0.5, 1.5, 0.5, 0.5]


def below_zero(lengths: torch.Tensor) -> list[float]:
    return [0.5, 0.5, 0.5, -0.1]


def too_few(lengths: torch.Tensor) -> list[float]:
    return [0.5, 0.5]


def test_gae_lambda_function_is_applied_per_answer() -> None:
    batch, auxiliary = _batch([1.0, 1.0, 1.0, 1.0]), AuxiliaryOutputs(values=torch.full((4, 4), 0.25))
    got = prepare(batch, GROUPS, _config(gae_lambda=f"{__name__}:by_length"), auxiliary)["advantages"]
    for row, length in enumerate(MASK.sum(1).tolist()):
        alone = prepare(batch, GROUPS, _config(gae_lambda=1 - 1 / (2 * length)), auxiliary)["advantages"]
        torch.testing.assert_close(got[row], alone[row])


def test_gae_lambda_function_may_return_the_bounds() -> None:
    batch, auxiliary = _batch([1.0, 1.0, 1.0, 1.0]), AuxiliaryOutputs(values=VALUES)
    got = prepare(batch, GROUPS, _config(gae_lambda=f"{__name__}:of_the_bounds"), auxiliary)["advantages"]
    for row, bound in enumerate(of_the_bounds(MASK.sum(1))):
        alone = prepare(batch, GROUPS, _config(gae_lambda=bound), auxiliary)["advantages"]
        torch.testing.assert_close(got[row], alone[row])


def test_invalid_gae_lambda_function_is_refused() -> None:
    batch, auxiliary = _batch([1.0, 1.0, 1.0, 1.0]), AuxiliaryOutputs(values=torch.full((4, 4), 0.25))
    with pytest.raises(UsageFault, match="gae_lambda 'nowhere:f': there is no module nowhere"):
        prepare(batch, GROUPS, _config(gae_lambda="nowhere:f"), auxiliary)
    for wrong in ("above_one", "below_zero", "too_few"):
        with pytest.raises(UsageFault, match="for 4 answers: it must be a number between 0 and 1 for each"):
            prepare(batch, GROUPS, _config(gae_lambda=f"{__name__}:{wrong}"), auxiliary)


def reward_to_go_less_the_group(given: AdvantageInputs) -> torch.Tensor:
    """Advantages of one's own: the reward less the least of the group, on every token."""
    least = torch.stack([given.rewards[given.groups == group].min() for group in given.groups])
    return (given.rewards - least)[:, None].expand(given.loss_mask.shape) + given.token_rewards * 0


def test_custom_advantages_replace_gae() -> None:
    config = _config(advantage_fn=f"{__name__}:reward_to_go_less_the_group", reward_scaling=2.0)
    auxiliary = AuxiliaryOutputs(values=torch.full((4, 4), 0.25))
    got = prepare(_batch([1.0, 0.0, 3.0, 3.0]), GROUPS, config, auxiliary)
    torch.testing.assert_close(got["advantages"], torch.tensor([2.0, 0, 0, 0])[:, None] * MASK)
    torch.testing.assert_close(got["returns"], (got["advantages"] + 0.25) * MASK)
    given = prepare(
        _batch([1.0, 0.0, 3.0, 3.0]),
        GROUPS,
        _config(reward_scaling=2.0),
        auxiliary,
        advantage_fn=reward_to_go_less_the_group,
    )
    torch.testing.assert_close(given["advantages"], got["advantages"])


def test_custom_advantages_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(UsageFault, match=r"the advantage_fn gave \[4\]: it must be an advantage for each token"):
        prepare(_batch([1.0] * 4), GROUPS, _config(), AuxiliaryOutputs(), advantage_fn=lambda given: given.rewards)
