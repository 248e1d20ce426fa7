"""When a data proxy renews its lease."""

from __future__ import annotations

import pytest

from areal.services.http.lease import renewal_s


@pytest.mark.parametrize(
    ("answer", "idle_s"),
    [
        ({"renew_seconds": 1.0, "lease_seconds": 5.0}, 2.0),
        ({"renew_seconds": 1.0, "lease_seconds": 2.0}, 1.0),
        ({"renew_seconds": 4.0, "lease_seconds": 14.0}, 5.6),
        ({"renew_seconds": 1.0, "lease_seconds": 100.0}, 2.0),
        ({"renew_seconds": 1.0}, 1.0),
    ],
)
def test_lease_of_an_idle_process_is_renewed_less_often_but_twice_in_its_length(
    answer: dict[str, float], idle_s: float
) -> None:
    assert renewal_s(answer, is_idle=True) == pytest.approx(idle_s)
    assert renewal_s(answer, is_idle=False) == answer["renew_seconds"]
    assert 2 * idle_s <= answer.get("lease_seconds", 2.0)
