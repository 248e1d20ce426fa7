"""Random histories: nothing acknowledged is lost, nothing is there twice, what is exported is what the engine saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.machine import machine_of

_QUICK = settings(
    max_examples=6,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


@pytest.fixture
def alone(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, tokenizer) as fleet:
        yield fleet


def test_random_histories_of_one_data_proxy_agree_with_the_model(alone: Fleet) -> None:
    run_state_machine_as_test(machine_of(alone, kills=1), settings=_QUICK)
