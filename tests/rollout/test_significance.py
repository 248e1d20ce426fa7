"""Student's distribution and Welch's test, against tables and a permutation of the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.rollout.evaluation import Difference, holm, paired, student_quantile, student_tails, welch


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (100, 1.984)]
)
def test_student_quantiles_and_tails_match_tables(freedom: int, value: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(value, rel=5e-5)
    assert student_tails(value, freedom) == pytest.approx(0.05, rel=5e-4)


def test_welch_of_a_known_example() -> None:
    found = welch([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], 0.95)
    # t = 3 / sqrt(0.5 + 2), with 6.25 / (0.0625 + 1) degrees of freedom
    assert found.value == 3
    assert found.p == pytest.approx(student_tails(3 / math.sqrt(2.5), 6.25 / 1.0625))
    assert found.p == pytest.approx(0.1075, abs=5e-4)
    assert (found.low, found.high) == pytest.approx((-0.888, 6.888), abs=1e-3)
    assert found.method == "welch"


# Student (1908): hours of sleep that ten patients gained with either of two drugs. The values are those of R's t.test.
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


@pytest.mark.parametrize(
    ("test", "expected"),
    [(welch, (1.58, -0.2054832, 3.3654832, 0.07939414)), (paired, (1.58, 0.7001142, 2.4598858, 0.00283289))],
)
def test_published_intervals_and_p_of_sleep_data(test: Callable[..., Difference], expected: tuple[float, ...]) -> None:
    found = test(FIRST, SECOND, 0.95)
    assert (found.value, found.low, found.high, found.p) == pytest.approx(expected, abs=1e-6)
    assert found.document() == {
        "difference": found.value,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "method": test.__name__,
    }
    back = test(SECOND, FIRST, 0.95)
    assert (back.value, back.low, back.high, back.p) == pytest.approx((-1.58, -found.high, -found.low, found.p))


def test_samples_of_other_sizes_are_compared() -> None:
    """By hand: variances of 1 and 20/3 over 3 and 4 values, so an error of sqrt(2), and 4 / (1/18 + 25/27) degrees."""
    found = welch([1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0], 0.9)
    freedom = 4 / (1 / 18 + 25 / 27)
    assert found.p == pytest.approx(student_tails(math.sqrt(2), freedom))
    assert found.high - found.value == pytest.approx(student_quantile(0.95, freedom) * math.sqrt(2))


def test_paired_p_approximates_permutation_test() -> None:
    a = [0.31, 0.42, 0.38, 0.45, 0.29, 0.51, 0.36, 0.40, 0.33, 0.47]
    b = [0.36, 0.41, 0.44, 0.50, 0.31, 0.52, 0.43, 0.41, 0.39, 0.49]
    changes = [after - before for before, after in zip(a, b, strict=True)]
    signs = itertools.product((1, -1), repeat=len(changes))
    means = [abs(fmean(sign * change for sign, change in zip(each, changes, strict=True))) for each in signs]
    exact = sum(mean >= fmean(changes) - 1e-12 for mean in means) / len(means)
    assert paired(a, b, 0.95).p == pytest.approx(exact, abs=0.01)


def test_single_or_equal_runs_have_no_p() -> None:
    assert math.isnan(welch([1.0], [2.0, 3.0], 0.95).p) and welch([1.0], [2.0, 3.0], 0.95).method == "none"
    assert math.isnan(welch([1.0, 2.0], [3.0], 0.95).p) and welch([1.0, 2.0], [3.0], 0.95).value == 1.5
    assert paired([1.0], [3.0], 0.95).document() == {
        "difference": 2.0,
        "low": None,
        "high": None,
        "p": None,
        "method": "none",
    }
    assert math.isnan(paired([1.0, 2.0], [2.0, 3.0], 0.95).p)  # the same change twice
    assert welch([1.0, 1.0], [1.0, 1.0], 0.95).document()["p"] is None


def test_middle_of_the_distribution_is_zero() -> None:
    assert (student_tails(0.0, 4), student_tails(math.inf, 4)) == (1.0, 0.0)
    assert student_quantile(0.5, 4) == pytest.approx(0.0, abs=1e-12)
    assert student_tails(-2.7764, 4) == student_tails(2.7764, 4)


@given(st.floats(0.5, 300), st.floats(0.501, 0.9999))
def test_tails_invert_quantile(freedom: float, probability: float) -> None:
    quantile = student_quantile(probability, freedom)
    assert student_tails(quantile, freedom) == pytest.approx(2 * (1 - probability), rel=1e-6)


def test_holm_corrects_for_number_of_tests() -> None:
    # Holm's own example of steps: the smallest times 4, the next times 3, never below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.2]) == [0.2] and holm([]) == []
    corrected = holm([0.02, math.nan, 0.01])
    assert (corrected[0], corrected[2]) == (0.02, 0.02) and math.isnan(corrected[1])


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_keeps_order_and_lies_between_p_and_bonferroni(ps: list[float]) -> None:
    corrected = holm(ps)
    assert all(p <= more <= min(1.0, len(ps) * p) for p, more in zip(ps, corrected, strict=True))
    assert [p for _, p in sorted(zip(corrected, ps, strict=True))] == sorted(ps)
