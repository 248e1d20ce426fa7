from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import OptimizerConfig
from areal.training.engines import learning_rate


def rates(total: int, warmup: float, shape: Any, least: float, steps: int | None = None) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup_steps_proportion=warmup, lr_scheduler_type=shape, min_lr_ratio=least)
    return [learning_rate(config, step, total) for step in range(steps or total)]


def test_linear_rate_warms_up_and_falls_to_minimum() -> None:
    assert rates(7, 0.25, "linear", 0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_rate_is_half_in_the_middle() -> None:
    assert rates(5, 0.0, "cosine", 0.0) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


@given(st.integers(1, 50), st.floats(0, 1), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1))
def test_rate_stays_in_range_and_ends_at_the_minimum(total, warmup, shape, least) -> None:
    *got, after = rates(total, warmup, shape, least, total + 5)
    assert all(0 < rate <= 1 or rate == pytest.approx(least) for rate in got)
    assert after == pytest.approx(1.0 if shape == "constant" else least)
