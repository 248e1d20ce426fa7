"""What doctor says of services that other machines reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from areal.reconcilers import doctor
from areal.reconcilers.context import Context
from areal.runtime.backends.base import Capacity, Phase, Problem, RunState
from areal.state.home import Home
from tests.runtime.support import run_spec


class OneRun:
    """A backend whose one run listens on ``host``."""

    def __init__(self, host: str) -> None:
        spec = run_spec(owner="InferenceService/default", component="gateway", config={"host": host})
        self._state = RunState(spec, Phase.RUNNING)

    def observe(self) -> Mapping[str, RunState]:
        return {self._state.spec.uid: self._state}

    def inspect(self) -> Iterator[Problem]:
        return iter(())

    def capacity(self) -> Capacity:
        return Capacity()


@pytest.mark.parametrize(
    ("host", "is_told"), [("127.0.0.1", False), ("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_security_tells_of_a_service_that_other_machines_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, is_told: bool
) -> None:
    monkeypatch.setattr(doctor, "Backends", lambda root, crash: OneRun(host))

    found = doctor.doctor(Context(Home(tmp_path).ensure(), "someone", "doctor"), security=True)

    assert any(finding.what.endswith(f"listens on {host}") for finding in found) == is_told
