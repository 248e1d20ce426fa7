"""AReaL's example drivers train for two steps, unmodified: ``AREAL_EXAMPLES=CHECKOUT pytest -m slow`` of this file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.drivers.areal_runs import FAMILIES, run, write_data, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("AREAL_EXAMPLES" not in os.environ, reason="AREAL_EXAMPLES is a checkout of AReaL"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_areal_example_family_trains_two_steps(name: str, model: Path, data: Path, tmp_path: Path) -> None:
    family = FAMILIES[name]
    if lacking := [package for package in family.needs if find_spec(package) is None]:
        pytest.skip(f"needs {', '.join(lacking)}")
    lines = run(Path(os.environ["AREAL_EXAMPLES"]), family, model, data, tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
