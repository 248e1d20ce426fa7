"""Units of tables, and durations of flags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.cli.options import parse_seconds
from areal.cli.output import age, iso, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "0s"),
        (0, "0s"),
        (119.9, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (900, "15m"),
        (3600, "1h"),
        (18720, "5h12m"),
        (86400, "1d"),
        (273600, "3d4h"),
        (86400 * 400, "400d"),
    ],
)
def test_age_is_two_units_at_most(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (12 << 30, "12GiB"), (1 << 50, "1024TiB")],
)
def test_size_in_powers_of_1024(count: int | None, text: str) -> None:
    assert size(count) == text


def test_iso_is_utc() -> None:
    assert iso(0.0) == "1970-01-01T00:00:00Z"
    assert iso(None) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("500ms", 0.5), (30, 30)]
)
def test_duration_with_a_unit_is_seconds(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "nan", "inf", "1m30s", "ten"])
def test_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_any_plain_number_is_seconds(number: float) -> None:
    assert parse_seconds(f"{number:.6f}s") == pytest.approx(number, abs=1e-6)


@given(st.integers(0, 10**9))
def test_age_never_fails_and_grows_with_its_first_number(seconds: int) -> None:
    assert age(seconds)[:-1].replace("m", "").replace("h", "").replace("d", "").isdigit()
