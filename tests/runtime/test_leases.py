"""Leases between real processes: held by whom has the descriptor, freed when the last of them dies."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from areal.errors import ArealError, NoCapacity
from areal.runtime.leases import LEASE_DIR_VARIABLE, LeaseDir, LeaseHolder, ports_of

from .conftest import Spawn


@pytest.fixture
def leases(lease_dir: Path) -> LeaseDir:
    return LeaseDir(lease_dir, scope="/home/a")


@pytest.fixture
def neighbours(lease_dir: Path) -> LeaseDir:
    """The leases of the same machine, seen from another home."""
    return LeaseDir(lease_dir, scope="/home/b")


def test_acquire_of_a_held_lease_names_the_holder(leases: LeaseDir, neighbours: LeaseDir) -> None:
    leases.acquire("port-1", owner="Model/a", uid="r1")

    with pytest.raises(NoCapacity, match=r"port 1 is held by Model/a \(home /home/a, run r1, user id \d+\)") as held:
        neighbours.acquire("port-1", owner="Model/b")
    assert held.value.hint == "areal get processes --home /home/a shows it, or areal doctor --home /home/a"


def test_acquire_after_close_succeeds(leases: LeaseDir, neighbours: LeaseDir) -> None:
    leases.acquire("gpu-GPU-1", owner="Model/a").close()

    neighbours.acquire("gpu-GPU-1", owner="Model/b").close()

    assert neighbours.holder("gpu-GPU-1") is not None
    assert not neighbours.is_held("gpu-GPU-1")


def test_lease_is_inherited_and_dies_with_heir(leases: LeaseDir, neighbours: LeaseDir, spawn: Spawn) -> None:
    lease = leases.acquire("port-1", owner="Model/a")
    heir = spawn(["sleep", "1000"], pass_fds=[lease.fd])
    lease.close()
    assert neighbours.is_held("port-1")
    assert leases.holding_pids("port-1") == [heir.pid]

    heir.kill()
    heir.wait()

    assert not neighbours.is_held("port-1")


def test_lease_of_a_killed_claimant_is_free(leases: LeaseDir, lease_dir: Path, spawn: Spawn) -> None:
    source = (
        "import sys, time; from pathlib import Path; from areal.runtime.leases import LeaseDir\n"
        "lease = LeaseDir(Path(sys.argv[1]), scope='x').acquire('port-1', owner='Model/a')\n"
        "print('held', flush=True); time.sleep(1000)"
    )
    claimant = spawn([sys.executable, "-c", source, str(lease_dir)], stdout=subprocess.PIPE)
    assert claimant.stdout is not None and claimant.stdout.readline() == b"held\n"
    assert leases.is_held("port-1")

    claimant.kill()
    claimant.wait()

    leases.acquire("port-1", owner="Model/b").close()


def test_shared_lease_is_held_together_by_one_owner(leases: LeaseDir) -> None:
    first, was_first = leases.acquire_shared("port-1", owner="InferenceService/a")
    second, was_second = leases.acquire_shared("port-1", owner="InferenceService/a")
    first.close()

    assert (was_first, was_second) == (True, False)
    assert leases.is_held("port-1")
    second.close()
    assert not leases.is_held("port-1")


def test_shared_lease_refuses_other_owners_and_exclusive_claims(leases: LeaseDir, neighbours: LeaseDir) -> None:
    leases.acquire_shared("port-1", owner="InferenceService/a")

    with pytest.raises(NoCapacity, match="InferenceService/a"):
        leases.acquire_shared("port-1", owner="InferenceService/b")
    with pytest.raises(NoCapacity, match="/home/a"):
        neighbours.acquire_shared("port-1", owner="InferenceService/a")
    with pytest.raises(NoCapacity):
        leases.acquire("port-1", owner="InferenceService/a")


def test_shared_claim_on_own_exclusive_lease_is_refused(leases: LeaseDir) -> None:
    leases.acquire("port-1", owner="InferenceService/a")

    with pytest.raises(NoCapacity):
        leases.acquire_shared("port-1", owner="InferenceService/a")


@pytest.mark.parametrize("tidied", [True, False])
def test_shared_lease_survives_inspection_of_former_one(leases: LeaseDir, lease_dir: Path, tidied: bool) -> None:
    """A command that forgets the former run tidies its lease while the next run starts."""
    leases.acquire_shared("port-1", owner="InferenceService/a", uid="former")[0].close()
    file = lease_dir / "port-1"
    looking = os.open(file, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)

    def end() -> None:
        if tidied:
            file.unlink()
        os.close(looking)

    timer = threading.Timer(0.03, end)
    timer.start()
    lease, first = leases.acquire_shared("port-1", owner="InferenceService/a", uid="next")
    timer.join()
    holder = leases.holder("port-1")
    assert first and holder is not None and holder.uid == "next" and leases.is_held("port-1")
    lease.close()


def test_shared_lease_is_first_when_holder_leaves_meanwhile(
    leases: LeaseDir, lease_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that held it alone leaves between the two tries to lock it."""
    leases.acquire_shared("port-1", owner="InferenceService/a", uid="former")[0].close()
    looking = os.open(lease_dir / "port-1", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    read = leases.holder

    def holder(name: str) -> LeaseHolder | None:
        found = read(name)
        fcntl.flock(looking, fcntl.LOCK_UN)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(leases, "holder", holder)
        lease, first = leases.acquire_shared("port-1", owner="InferenceService/a", uid="next")
    os.close(looking)
    described = leases.holder("port-1")
    assert first and described is not None and described.uid == "next"
    assert not leases.acquire_shared("port-1", owner="InferenceService/a", uid="other")[1]
    lease.close()


def test_share_opens_an_exclusive_lease_to_its_owner(leases: LeaseDir) -> None:
    lease = leases.acquire("port-1", owner="InferenceService/a")

    leases.share(lease)

    _, first = leases.acquire_shared("port-1", owner="InferenceService/a")
    assert not first


def test_is_held_of_untaken_lease_creates_no_file(leases: LeaseDir, lease_dir: Path) -> None:
    assert not leases.is_held("port-1")
    assert leases.names() == []
    assert not lease_dir.exists()


def test_inspecting_lease_disturbs_no_claim(leases: LeaseDir, lease_dir: Path, spawn: Spawn) -> None:
    source = (
        "import sys; from pathlib import Path; from areal.runtime.leases import LeaseDir\n"
        "leases = LeaseDir(Path(sys.argv[1]), scope='x'); print('go', flush=True)\n"
        "while True: leases.is_held('port-1')"
    )
    watcher = spawn([sys.executable, "-c", source, str(lease_dir)], stdout=subprocess.PIPE)
    assert watcher.stdout is not None and watcher.stdout.readline() == b"go\n"

    for _ in range(300):
        leases.acquire("port-1", owner="Model/a").close()


@pytest.mark.parametrize("name", ["port-1", "gpu-GPU-1"])
def test_inspecting_free_lease_disturbs_no_other_inspection(
    leases: LeaseDir, lease_dir: Path, spawn: Spawn, name: str
) -> None:
    leases.acquire(name, owner="Model/a").close()
    source = (
        "import sys; from pathlib import Path; from areal.runtime.leases import LeaseDir\n"
        "leases = LeaseDir(Path(sys.argv[1]), scope='x'); print('go', flush=True)\n"
        "while True: leases.is_held(sys.argv[2])"
    )
    watcher = spawn([sys.executable, "-c", source, str(lease_dir), name], stdout=subprocess.PIPE)
    assert watcher.stdout is not None and watcher.stdout.readline() == b"go\n"

    assert not any(leases.is_held(name) for _ in range(2000))


def test_lease_folder_and_files_are_usable_by_every_user(leases: LeaseDir, lease_dir: Path) -> None:
    old = os.umask(0o077)
    try:
        leases.acquire("port-1", owner="Model/a")
    finally:
        os.umask(old)

    assert stat.S_IMODE((lease_dir / "port-1").stat().st_mode) == 0o666
    assert stat.S_IMODE(lease_dir.stat().st_mode) == 0o1777


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_lease_is_respected_between_users(leases: LeaseDir, lease_dir: Path, tmp_path: Path) -> None:
    temporary = Path(tempfile.gettempdir())
    for folder in (tmp_path, *(each for each in tmp_path.parents if temporary in each.parents)):
        folder.chmod(0o755)
    leases.acquire("port-1", owner="Model/a")
    leases.acquire("port-2", owner="Model/a").close()
    (lease_dir / "port-2").chmod(0o644)  # written by somebody with another version or umask
    source = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from areal.runtime.leases import LeaseDir\n"
        "os.setuid(65534)\n"
        "leases = LeaseDir(Path(sys.argv[1]), scope='absent')\n"
        "assert leases.try_acquire('port-1', owner='Model/b') is None\n"
        "assert leases.try_acquire('port-2', owner='Model/b') is not None\n"
        "assert leases.try_acquire('port-3', owner='Model/b') is not None\n"
    )
    import areal

    root = str(Path(areal.__file__).parents[1])
    subprocess.run([sys.executable, "-c", source, str(lease_dir), root], check=True)


def test_symlinked_lease_file_is_not_followed(leases: LeaseDir, lease_dir: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lease_dir.mkdir()
    (lease_dir / "port-1").symlink_to(victim)

    with pytest.raises(ArealError, match="port-1"):
        leases.acquire("port-1", owner="Model/a")

    assert victim.read_text() == "precious"


def test_uncreatable_lease_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ArealError, match="lease folder") as caught:
        LeaseDir(tmp_path / "file" / "leases", scope="x").acquire("port-1", owner="Model/a")

    assert LEASE_DIR_VARIABLE in (caught.value.hint or "")


def test_world_writable_lease_folder_without_sticky_is_refused(lease_dir: Path, leases: LeaseDir) -> None:
    lease_dir.mkdir(exist_ok=True)
    lease_dir.chmod(0o777)
    with pytest.raises(ArealError, match="without the sticky bit") as caught:
        leases.acquire("port-1", owner="Model/a")
    assert caught.value.hint == f"chmod 1777 {lease_dir}"


def test_lease_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(tmp_path / "elsewhere"))

    LeaseDir(None, scope="x").acquire("port-1", owner="Model/a").close()

    assert (tmp_path / "elsewhere" / "port-1").exists()


# -- test_ports


def test_ports_of_process_are_its_listening_ports() -> None:
    before = set(ports_of(os.getpid()))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        bound = {server.getsockname()[1], six.getsockname()[1]}
        with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
            found = set(ports_of(os.getpid()))
            assert client.getsockname()[1] not in found

    assert found - before == bound


def test_unknown_process_has_no_ports() -> None:
    assert ports_of(2**22 + 1) == ()


def test_ports_are_found_in_multi_page_table() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(500)]
        bound = {server.getsockname()[1] for server in servers}
        assert bound <= set(ports_of(os.getpid()))
