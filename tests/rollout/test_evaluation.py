"""Scores of evaluations and their intervals, against definitions, tables and a bootstrap."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import Conflict
from areal.rollout.evaluation import (
    PromptScores,
    check_prompts,
    compare,
    estimates,
    mean_estimate,
    pass_at,
    pass_estimate,
    ratio_estimate,
    reward_estimate,
    sample_counts,
    scores_of,
    share_estimate,
)
from areal.trajectories.record import Episode


def prompts(*rewards: tuple[float, ...]) -> list[PromptScores]:
    return [PromptScores(f"p{number}", number, each) for number, each in enumerate(rewards)]


def episode(prompt: int, sample: int, reward: float | None, **example: object) -> Episode:
    return Episode(f"{prompt}-{sample}", (), prompt=prompt, sample=sample, reward=reward, example=example)


@given(data=st.data(), samples=st.integers(1, 7))
def test_pass_at_k_is_share_of_passing_subsets(data: st.DataObject, samples: int) -> None:
    passes, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations([index < passes for index in range(samples)], k))
    assert pass_at(k, samples, passes) == pytest.approx(fmean(any(each) for each in subsets))


def test_intervals_match_bootstrap_over_prompts() -> None:
    chance = random.Random(7)
    scores = prompts(
        *(tuple(float(chance.random() < p) for _ in range(4)) for p in (chance.random() for _ in range(150)))
    )
    means = [fmean(each.rewards) for each in scores]
    resampled = sorted(fmean(chance.choices(means, k=len(means))) for _ in range(4000))
    low, high = resampled[100], resampled[3900]
    for estimate in (reward_estimate(scores, 0.95), pass_estimate(scores, 1, 1.0, 0.95)):
        assert estimate is not None and estimate.value == pytest.approx(fmean(means))
        assert estimate.low == pytest.approx(low, abs=0.01)
        assert estimate.high == pytest.approx(high, abs=0.01)


def test_interval_of_ratio_matches_bootstrap_over_rows() -> None:
    chance = random.Random(9)
    rows = [
        (length * chance.gauss(1.0, 0.3) * (1 + length / 40), length) for length in chance.choices(range(1, 40), k=150)
    ]
    totals, lengths = ([*column] for column in zip(*rows, (7.0, 0), strict=True))  # the last row has no token
    found = ratio_estimate(totals, lengths, 0.95)
    ratios = []
    for _ in range(4000):
        drawn = chance.choices(rows, k=len(rows))
        ratios.append(sum(total for total, _ in drawn) / sum(length for _, length in drawn))
    ratios.sort()
    width = ratios[3900] - ratios[100]
    assert found.prompts == 150
    assert found.value == pytest.approx(sum(total for total, _ in rows) / sum(length for _, length in rows))
    assert found.low == pytest.approx(ratios[100], abs=0.08 * width)
    assert found.high == pytest.approx(ratios[3900], abs=0.08 * width)


def test_ratio_of_equal_weights_is_mean() -> None:
    values = [0.5, 2.0, 3.5, 1.0]
    assert (
        ratio_estimate([3 * each for each in values], [3] * 4, 0.9).document() == mean_estimate(values, 0.9).document()
    )
    assert math.isnan(ratio_estimate([1.0], [2.0], 0.95).low)
    assert math.isnan(ratio_estimate([1.0], [0.0], 0.95).value)


def test_paired_difference_interval_matches_bootstrap() -> None:
    chance = random.Random(8)
    before = prompts(*((float(chance.random() < 0.4), float(chance.random() < 0.4)) for _ in range(120)))
    after = prompts(*((float(chance.random() < 0.55), float(chance.random() < 0.55)) for _ in range(120)))
    comparison = compare(after, before, 1.0, 0.95)
    differences = [fmean(new.rewards) - fmean(old.rewards) for old, new in zip(before, after, strict=True)]
    resampled = sorted(fmean(chance.choices(differences, k=120)) for _ in range(4000))
    assert comparison is not None
    assert comparison.reward.low == pytest.approx(resampled[100], abs=0.015)
    assert comparison.reward.high == pytest.approx(resampled[3900], abs=0.015)


def test_samples_of_one_prompt_are_not_independent() -> None:
    """Four equal samples of each prompt say no more than one."""
    one = prompts(*((float(number % 3 == 0),) for number in range(30)))
    four = prompts(*((float(number % 3 == 0),) * 4 for number in range(30)))
    assert pass_estimate(four, 1, 1.0, 0.95) == pass_estimate(one, 1, 1.0, 0.95)
    assert reward_estimate(four, 0.95) == reward_estimate(one, 0.95)


def test_interval_of_all_passes_extends_below_one() -> None:
    estimate = pass_estimate(prompts(*((1.0,) for _ in range(20))), 1, 1.0, 0.95)
    assert estimate is not None and estimate.value == estimate.high == 1.0
    assert estimate.low == pytest.approx(0.839, abs=1e-3)  # Wilson's interval of 20 of 20


def wilson(share: float, size: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson (1927): the shares that are ``z`` of their standard errors from the one that was seen."""
    margin = z * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    centre = share + z * z / (2 * size)
    return (centre - margin) / (1 + z * z / size), (centre + margin) / (1 + z * z / size)


@pytest.mark.parametrize(
    ("scores", "share", "size"),
    [
        (prompts(*((1.0,) for _ in range(10))), 1.0, 10),
        (prompts(*((0.0,) for _ in range(10))), 0.0, 10),
        (prompts((0.0, 1.0)), 0.5, 1),
        (prompts(*((float(n % 2),) for n in range(10))), 0.5, 9),  # an unbiased variance of 0.25 / 9
        (prompts(*((float(n % 2),) * 4 for n in range(10))), 0.5, 9),
        (prompts((0.0, 1.0, 0.0, 1.0), (0.0, 1.0, 1.0, 1.0)), 0.625, 8),  # never more than there are samples
    ],
)
def test_pass_interval_is_wilsons_of_the_effective_sample_size(
    scores: list[PromptScores], share: float, size: int
) -> None:
    found = pass_estimate(scores, 1, 1.0, 0.95)
    assert found is not None and found.value == share
    assert (found.low, found.high) == pytest.approx(wilson(share, size), abs=1e-6)


def test_mean_has_students_interval() -> None:
    """Of 1, 2, 3 and 6: a variance of 14/3, and a quantile of 3.1824 with 3 degrees of freedom."""
    found = reward_estimate(prompts((0.0, 2.0), (2.0,), (3.0,), (6.0, 6.0)), 0.95)
    margin = 3.1824 * math.sqrt(14 / 3 / 4)
    assert (found.value, found.prompts) == (3.0, 4)
    assert (found.low, found.high) == pytest.approx((3 - margin, 3 + margin), abs=1e-3)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_shown_for_powers_of_two_and_all(samples: int, ks: list[int]) -> None:
    assert sample_counts(samples) == ks
    names = [f"pass@{k}" for k in ks if k <= 2]
    assert list(estimates(prompts((1.0, 0.5)), samples, 0.5, 0.95)) == [*names, "reward"]
    assert estimates([], samples, 0.5, 0.95) == {}


def test_reward_at_the_threshold_passes() -> None:
    assert [prompts((0.4, 0.5, 0.6))[0].passes(threshold) for threshold in (0.4, 0.5, 0.51, 0.7)] == [3, 2, 1, 0]


def test_single_prompt_has_no_interval() -> None:
    estimate = reward_estimate(prompts((0.25, 0.75)), 0.95)
    assert estimate.value == 0.5 and math.isnan(estimate.low)
    assert estimate.document() == {"value": 0.5, "low": None, "high": None, "prompts": 1}


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=40), confidence=st.floats(0.5, 0.999))
def test_share_interval_contains_mean_within_zero_and_one(shares: list[float], confidence: float) -> None:
    estimate = share_estimate(shares, len(shares), confidence)
    assert 0 <= estimate.low <= estimate.value + 1e-9 and estimate.value - 1e-9 <= estimate.high <= 1


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_interval_of_a_mean_grows_with_the_confidence(values: list[float]) -> None:
    narrow, wide = mean_estimate(values, 0.8), mean_estimate(values, 0.99)
    assert wide.low <= narrow.low <= narrow.high <= wide.high


def test_prompts_with_fewer_than_k_samples_have_no_pass_at_k() -> None:
    scores = prompts((1.0, 0.0), (0.0,))
    two = pass_estimate(scores, 2, 1.0, 0.95)
    assert two is not None and (two.value, two.prompts) == (1.0, 1)
    assert pass_estimate(scores, 3, 1.0, 0.95) is None


def test_equal_prompts_are_distinguished_by_order() -> None:
    found = scores_of(
        [
            episode(2, 0, 1.0, question="1+1"),
            episode(0, 0, 0.0, question="1+1"),
            episode(0, 1, None, question="1+1"),
            episode(1, 0, 0.5, question="2+2"),
        ]
    )
    assert [(each.number, each.rewards) for each in found] == [(0, (0.0,)), (1, (0.5,)), (2, (1.0,))]
    assert len({each.key for each in found}) == 3


def test_prompt_key_ignores_system_prompt_and_column() -> None:
    plain = scores_of([episode(0, 0, 1.0, question="1+1", answer="2")])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    assert scores_of([episode(0, 0, 0.0, messages=messages, answer="2")])[0].key == plain[0].key
    assert scores_of([episode(0, 0, 1.0, title="1+1")])[0].key != plain[0].key


def test_drop_is_significant_when_interval_excludes_zero() -> None:
    before = prompts(*((1.0,) for _ in range(20)))
    slight = compare(prompts((0.0,), *((1.0,) for _ in range(19))), before, 1.0, 0.95)
    large = compare(prompts(*((float(number % 2),) for number in range(20))), before, 1.0, 0.95)
    assert slight is not None and not slight.dropped and large is not None and large.dropped
    assert [each.number for each in slight.changes] == [0]
    better = compare(before, prompts(*((0.0,) for _ in range(20))), 1.0, 0.95)
    assert better is not None and not better.dropped and better.reward.value == 1.0


def test_comparison_is_of_prompts_in_both_with_each_change() -> None:
    before = prompts((0.0, 1.0), (0.5,), (1.0,), (0.25,))
    after = [*prompts((1.0, 1.0), (0.5,), (0.0,)), PromptScores("new", 7, (1.0,))]
    found = compare(after, before, 0.5, 0.95)
    assert found is not None and found.reward.prompts == found.pass_at_1.prompts == 3
    assert [(each.number, each.before, each.after) for each in found.changes] == [(0, 0.5, 1.0), (2, 1.0, 0.0)]
    assert found.reward.value == found.pass_at_1.value == pytest.approx(-0.5 / 3)
    assert found.document()["changed"] == [each._asdict() for each in found.changes]
    assert compare(after[-1:], before, 0.5, 0.95) is None


@pytest.mark.parametrize(
    ("after", "dropped"),
    [((0.0, 0.0), True), ((1.0, 1.0), True), ((4.0, 0.5), True), ((2.0, 2.0), False), ((3.0, 3.0), False)],
)
def test_drop_is_of_the_reward_or_of_the_passes(after: tuple[float, float], dropped: bool) -> None:
    before, now = prompts(*((2.0, 2.0),) * 21), prompts(*(after,) * 20, (2.0, 2.0))
    found = compare(now, before, 1.0, 0.95)
    assert found is not None
    assert found.dropped is found.document()["dropped"] is dropped


def test_baseline_without_a_scored_episode_is_refused() -> None:
    with pytest.raises(Conflict, match="the baseline has no scored episode"):
        check_prompts(["p0"], [])


def test_baseline_of_other_prompts_is_refused() -> None:
    with pytest.raises(Conflict, match="1 of its 3 are among the 2 here"):
        check_prompts(["p0", "q1"], prompts((1.0,), (1.0,), (1.0,)))
    check_prompts(["p0"], prompts((1.0,), (1.0,)))  # fewer, by --limit
    check_prompts(["p0", "p1", "q9"], prompts((1.0,), (1.0,)))
