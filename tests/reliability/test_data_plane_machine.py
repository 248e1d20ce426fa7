"""Random histories: nothing acknowledged is lost, nothing is there twice, what is exported is what the engine saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.machine import machine_of
from tests.reliability.profiles import profile


@pytest.fixture
def alone(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, tokenizer) as fleet:
        yield fleet


@pytest.fixture
def fleet(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, tokenizer, replicas=2, behind_gateway=True, relays=2) as fleet:
        yield fleet


def test_histories_of_one_data_proxy_agree_with_the_model(alone: Fleet) -> None:
    run_state_machine_as_test(machine_of(alone, kills=1), settings=profile(6, 25, derandomize=True))


def test_histories_of_the_whole_data_plane_agree_with_the_model(fleet: Fleet) -> None:
    run_state_machine_as_test(machine_of(fleet, kills=1), settings=profile(5, 25, derandomize=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_histories_of_one_data_proxy_agree_with_the_model(alone: Fleet) -> None:
    run_state_machine_as_test(machine_of(alone, kills=2), settings=profile(80, 50))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_histories_of_the_whole_data_plane_agree_with_the_model(fleet: Fleet) -> None:
    run_state_machine_as_test(machine_of(fleet, kills=2), settings=profile(60, 50))
