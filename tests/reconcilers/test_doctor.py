"""Findings of doctor, and the repairs that need a yes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from areal.reconcilers import doctor
from areal.reconcilers.context import Context
from areal.resources.kinds import Ref
from areal.runtime.backends import Backends
from areal.runtime.backends.base import Capacity, Phase, Problem, RunState
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject
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
def test_security_reports_exposed_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, is_told: bool
) -> None:
    monkeypatch.setattr(doctor, "Backends", lambda root, crash: OneRun(host))

    found = doctor.doctor(Context(Home(tmp_path).ensure(), "someone", "doctor"), security=True)

    assert any(finding.what.endswith(f"listens on {host}") for finding in found) == is_told


def test_process_of_unrecorded_owner_is_ended_only_with_yes(tmp_path: Path) -> None:
    context, backend = Context(Home(tmp_path).ensure(), "someone", "doctor"), Backends(tmp_path)
    backend.start(run_spec("lost", owner="Model/lost"))
    try:
        kept = doctor.doctor(context, fix=True)
        assert [(each.what, each.fixed) for each in kept] == [
            ("run lost lives and its owner Model/lost is not recorded", False)
        ]
        assert backend.observe()["lost"].phase is Phase.RUNNING

        assert [each.fixed for each in doctor.doctor(context, fix=True, may_end=lambda what: "Model/lost" in what)] == [
            True
        ]
        assert not backend.observe()
    finally:
        if "lost" in backend.observe():
            backend.stop("lost", grace_s=0)


def test_restored_model_keeps_commits_of_its_processes(tmp_path: Path) -> None:
    context, backend = Context(Home(tmp_path).ensure(), "someone", "doctor"), Backends(tmp_path)
    store, ref = ObjectStore(context.home), Ref("Model", "qwen")
    spec = {"path": "org/name", "tokenizerPath": "org/words", "backend": "embedded:d1"}
    store.put(store.add_revision(StoredObject("Model", "qwen", "u1", layers=(Layer("apply", spec),)), actor="someone"))
    words, weights = f"/cache/models--org--words/snapshots/{'b' * 40}", f"/cache/models--org--name/snapshots/{'a' * 40}"
    backend.start(run_spec("engine", owner=str(ref), argv=("sleep", "1000"), config={"model_path": weights}))
    backend.start(run_spec("proxy", owner=str(ref), argv=("sh", "-c", "sleep 1000", words)))
    try:
        (context.home.object_folder(ref) / "object.json").write_text("torn")
        doctor.doctor(context, fix=True)
        assert store.expect(ref).status["commits"] == {"org/name@main": "a" * 40, "org/words@main": "b" * 40}
    finally:
        for uid in ("engine", "proxy"):
            backend.stop(uid, grace_s=0)
