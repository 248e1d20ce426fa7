from pathlib import Path

import pytest

from areal.state.home import Home
from areal.state.objects import ObjectStore


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home").ensure()


@pytest.fixture
def store(home: Home) -> ObjectStore:
    return ObjectStore(home)
