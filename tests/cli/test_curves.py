from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal.cli.curves import WIDTH, curves_of, sparkline


def test_curves_are_the_numbers_of_each_step() -> None:
    steps: list[dict[str, object]] = [
        {"step": 1, "attempt": 1, "time": 9.0, "reward/mean": 0.1, "loss": "nan", "ok": True},
        {"step": 2, "attempt": 1, "time": 9.5, "reward/mean": 0.3, "loss": 1},
    ]
    assert curves_of(steps) == {"reward/mean": [(1, 0.1), (2, 0.3)], "loss": [(2, 1.0)]}
    assert set(curves_of(steps, ["loss"])) == {"loss"}


def test_sparkline_rises_with_its_curve() -> None:
    assert sparkline([1, 2, 3]) == "▁▅█" or sparkline([1, 2, 3]) == "▁▄█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([]) == ""


@given(st.lists(st.floats(-1e6, 1e6), max_size=300))
def test_sparkline_is_never_wider_than_the_terminal(values: list[float]) -> None:
    assert len(sparkline(values)) == min(len(values), WIDTH)
