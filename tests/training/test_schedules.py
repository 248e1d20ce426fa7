import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.training.schedules import learning_rate_factor


def _factors(total: int, **how) -> list[float]:
    return [learning_rate_factor(step, total_steps=total, **how) for step in range(total)]


def test_factor_linear_warms_up_and_falls_to_the_minimum() -> None:
    got = _factors(7, warmup_proportion=0.25, shape="linear", min_ratio=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_factor_cosine_is_half_way_in_the_middle() -> None:
    got = _factors(5, warmup_proportion=0.0, shape="cosine", min_ratio=0.0)
    assert got == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


@given(st.integers(1, 50), st.floats(0, 1), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1))
def test_factor_stays_in_range_and_ends_at_the_minimum(total, warmup, shape, least) -> None:
    got = _factors(total, warmup_proportion=warmup, shape=shape, min_ratio=least)
    assert all(0 < factor <= 1 or factor == pytest.approx(least) for factor in got)
    after = learning_rate_factor(total + 5, total_steps=total, warmup_proportion=warmup, shape=shape, min_ratio=least)
    assert after == pytest.approx(1.0 if shape == "constant" else least)
