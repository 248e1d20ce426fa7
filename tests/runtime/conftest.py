"""Homes in ``tmp_path``; whatever a test starts is stopped after it, and nothing may be left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.resources.kinds import BACKENDS
from areal.runtime.backends import open_backend
from areal.runtime.backends.base import Backend
from areal.runtime.backends.local import LocalBackend
from tests.cluster.ray import RayCluster, ray_cluster

from ..cluster.slurm import SlurmCluster
from .support import processes_under

Spawn = Callable[..., "subprocess.Popen[bytes]"]
MakeBackend = Callable[..., LocalBackend]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """``subprocess.Popen`` of a bystander: killed after the test, however it ends."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(*args, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def lease_dir(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def make_local(tmp_path: Path, lease_dir: Path) -> Iterator[MakeBackend]:
    """Local backends of any number of homes that share one machine's leases."""
    made: list[LocalBackend] = []

    def make(home: str = "home", **options: object) -> LocalBackend:
        backend = LocalBackend(tmp_path / home, lease_dir, **options)  # type: ignore[arg-type]
        made.append(backend)
        return backend

    yield make
    for backend in made:
        quiet = LocalBackend(Path(backend.store.root).parent, lease_dir)
        for uid in quiet.observe():
            quiet.stop(uid, grace_s=0.5)
        backend.release_claims()
    assert processes_under(tmp_path) == []


@pytest.fixture
def second(tmp_path: Path, lease_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A backend that is there by its registered name alone."""
    monkeypatch.setitem(BACKENDS.factories, "second", "tests.runtime.second_backend:SecondBackend")
    backend = open_backend("second", tmp_path / "home", lease_dir=lease_dir)
    yield backend
    for uid in backend.observe():
        backend.stop(uid, grace_s=0.5)
    backend.release_claims()
    assert processes_under(tmp_path) == []


@pytest.fixture
def remote(tmp_path: Path, lease_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A backend whose runs are jobs, placed after a while on another address."""
    monkeypatch.setitem(BACKENDS.factories, "remote", "tests.runtime.remote_backend:RemoteBackend")
    backend = open_backend("remote", tmp_path / "home", lease_dir=lease_dir)
    yield backend
    for uid in backend.observe():
        backend.stop(uid, grace_s=0.5)
    assert processes_under(tmp_path) == []


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A Ray cluster of two nodes, for all tests of the session."""
    with ray_cluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture
def ray(tmp_path: Path, ray_head: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A home whose runs are jobs of a real Ray."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_head.address)
    backend = open_backend("ray", tmp_path / "home")
    yield backend
    for uid in backend.observe():
        backend.stop(uid, grace_s=0.5)
    assert processes_under(tmp_path) == []


@pytest.fixture
def slurm(tmp_path: Path, slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A backend whose runs are jobs of a real Slurm."""
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.env["SLURM_CONF"])
    backend = open_backend("slurm", tmp_path / "home")
    yield backend
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.env["SLURM_CONF"])
    for uid in backend.observe():
        backend.stop(uid, grace_s=0.5)
    assert slurm_cluster.jobs() == []
    assert processes_under(tmp_path) == []


@pytest.fixture
def local(make_local: MakeBackend) -> LocalBackend:
    return make_local()
