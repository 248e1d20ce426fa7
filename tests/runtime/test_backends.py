"""The registry and factory of backends, and all backends of a home as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.errors import NotFound, UsageFault
from areal.resources.kinds import BACKENDS
from areal.resources.validation import effective, validate
from areal.runtime.backends import Backends, open_backend
from areal.runtime.backends.base import Phase, ProblemKind, StopReport

from .second_backend import NAME, NODE
from .support import processes_under, run_spec

FACTORY = "tests.runtime.second_backend:SecondBackend"
DIST_INFO = "areal_second-1.0.dist-info"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS.factories, NAME, FACTORY)


@pytest.fixture
def both(tmp_path: Path, lease_dir: Path, registered: None) -> Iterator[Backends]:
    backends = Backends(tmp_path / "home", lease_dir=lease_dir)
    yield backends
    for uid in backends.observe():
        backends.stop(uid, grace_s=0.5)
    backends.release_claims()
    assert processes_under(tmp_path) == []


def test_open_backend_of_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="scheduler type 'nowhere' is not available"):
        open_backend("nowhere", tmp_path)
    assert "nowhere" not in BACKENDS


def test_scheduler_type_accepts_only_registered_names(registered: None) -> None:
    assert validate("InferenceService", {"scheduler": {"type": NAME}}) == []
    assert effective("InferenceService", {"scheduler": {"type": NAME}}).scheduler.model_dump()["type"] == NAME
    ((path, message),) = validate("InferenceService", {"scheduler": {"type": "nowhere"}})
    assert (path, message) == (("scheduler", "type"), '"nowhere" is not one of local, ray, slurm')


def test_backend_of_an_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DIST_INFO).mkdir()
    (tmp_path / DIST_INFO / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-second\nVersion: 1.0\n")
    (tmp_path / DIST_INFO / "entry_points.txt").write_text(f"[areal.backends]\n{NAME} = {FACTORY}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert open_backend(NAME, tmp_path / "home").name == NAME


@pytest.mark.parametrize("name, factory", [("", "m:f"), ("../x", "m:f"), ("x", "m"), ("x", ":f")])
def test_register_of_an_invalid_name_or_factory_is_refused(name: str, factory: str) -> None:
    with pytest.raises(ValueError, match="not the name and the factory"):
        BACKENDS.register(name, factory)


def test_runs_of_every_backend_are_observed_and_handled_together(both: Backends, tmp_path: Path) -> None:
    both.start(run_spec("here"))
    there = both.start(run_spec("there", backend=NAME))

    assert (there.node, there.job_id) == (NODE, "job-there")
    later = Backends(tmp_path / "home", lease_dir=tmp_path / "leases")  # another command
    assert {uid: state.node for uid, state in later.observe().items()} == {"here": "", "there": NODE}
    assert list(later.observe(["there"])) == ["there"]
    assert later.log_paths("there")[0].startswith(str(tmp_path / "home" / "second" / "runs" / "there"))
    later.kick("there")
    assert later.stop("there").was_alive
    assert later.observe()["there"].phase is Phase.EXITED
    later.forget("there")
    assert list(later.observe()) == ["here"]


def test_run_unknown_to_all_backends_is_handled_as_local(both: Backends) -> None:
    assert both.stop("absent") == StopReport("absent", was_alive=False)
    assert both.log_paths("absent") == () and both.stage("absent") is None
    with pytest.raises(NotFound):
        both.kick("absent")


def test_local_runs_create_no_state_of_other_backends(both: Backends, tmp_path: Path) -> None:
    both.observe()
    both.start(run_spec("here"))

    assert not (tmp_path / "home" / "backends").exists()


def test_problems_are_repaired_by_their_backend(both: Backends, tmp_path: Path) -> None:
    both.start(run_spec("there", backend=NAME))
    state = both.observe()["there"]
    assert state.shim_pid is not None
    both.stop("there")
    (tmp_path / "home" / "second" / "runs" / "there" / "exit.json").unlink()

    (problem,) = both.inspect()

    assert (problem.trouble, problem.subject, problem.backend) == (ProblemKind.DEAD_RECORD, "there", NAME)
    assert "stopped run there" in both.repair(problem)
    assert both.inspect() == ()


def test_capacity_of_named_backends_is_joined(both: Backends) -> None:
    assert both.capacity([]).gpus == ()
    assert both.capacity(["local"]) == both.named("local").capacity()
