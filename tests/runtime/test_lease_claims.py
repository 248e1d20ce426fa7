"""Ports and GPUs of a run: all or nothing, sticky, and never a stranger's."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal.dataclasses import replace
from areal.errors import ArealError, NoCapacity
from areal.files import try_lock
from areal.runtime import leases
from areal.runtime.backends.base import Phase
from areal.runtime.backends.local import LocalBackend
from areal.runtime.gpus import Gpu, GpuListing
from areal.runtime.leases import FIRST_PORT, LAST_PORT, bind_error, candidates, foreign_listener, port_owner

from .conftest import MakeBackend, Spawn
from .support import run_spec


@pytest.fixture
def stranger(spawn: Spawn) -> tuple[int, subprocess.Popen[bytes]]:
    """A server that knows nothing of leases: its port and process."""
    source = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True); time.sleep(1000)"
    )
    process = spawn([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return int(process.stdout.readline()), process


def test_two_claimants_get_different_ports(make_local: MakeBackend) -> None:
    one, other = make_local("one"), make_local("other")

    assert set(one.claim_ports(5, owner="Model/a")).isdisjoint(other.claim_ports(5, owner="Model/a"))


def test_two_homes_on_one_machine_do_not_start_on_one_port(make_local: MakeBackend) -> None:
    one, other = make_local("one"), make_local("other")
    ports = one.claim_ports(1, owner="Model/a")
    one.start(run_spec(ports=ports))

    with pytest.raises(NoCapacity, match=f"port {ports[0]} is held by Model/qwen .*home .*/one, run r1"):
        other.start(run_spec(ports=ports))

    assert other.observe() == {}


def test_claimed_ports_pass_to_the_run_and_return_at_its_end(make_local: MakeBackend) -> None:
    one, other = make_local("one"), make_local("other")
    ports = one.claim_ports(2, owner="Model/a")
    one.start(run_spec(ports=ports))
    assert set(other.claim_ports(2, owner="Model/b", prefer=ports)).isdisjoint(ports)

    one.stop("r1")

    assert other.claim_ports(2, owner="Model/b", prefer=ports) == ports


def test_released_claims_are_free_again(make_local: MakeBackend) -> None:
    one, other = make_local("one"), make_local("other")
    ports = one.claim_ports(2, owner="Model/a")

    one.release_claims()

    assert other.claim_ports(2, owner="Model/b", prefer=ports) == ports


def test_start_on_foreign_port_names_pid_command_and_user(
    local: LocalBackend, stranger: tuple[int, subprocess.Popen[bytes]]
) -> None:
    port, process = stranger
    user = pwd.getpwuid(os.getuid()).pw_name

    with pytest.raises(NoCapacity) as caught:
        local.start(run_spec(ports=(port,)))

    assert f"port {port} is in use by pid {process.pid} (" in caught.value.message
    assert "create_server" in caught.value.message
    assert f"of user {user}" in caught.value.message
    assert local.observe() == {}
    assert not local.leases.is_held(f"port-{port}")


def test_preferred_port_being_inspected_is_claimed(local: LocalBackend, lease_dir: Path) -> None:
    ports = local.claim_ports(1, owner="Model/a")
    local.release_claims()
    looking = os.open(lease_dir / f"port-{ports[0]}", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_EX)
    look = threading.Timer(0.03, os.close, [looking])
    look.start()

    assert local.claim_ports(1, owner="Model/a", prefer=ports) == ports
    look.join()


def test_claim_skips_foreign_port(local: LocalBackend, stranger: tuple[int, subprocess.Popen[bytes]]) -> None:
    assert stranger[0] not in local.claim_ports(1, owner="Model/a", prefer=[stranger[0]])


def test_owner_of_a_port_is_its_process_and_user(stranger: tuple[int, subprocess.Popen[bytes]]) -> None:
    port, process = stranger
    found = port_owner(port)
    assert found is not None and (found.port, found.pid) == (port, process.pid)
    assert found.command.startswith(f"{sys.executable} -c import socket")
    assert str(found) == f"pid {process.pid} ({found.command}) of user {pwd.getpwuid(os.getuid()).pw_name}"
    assert found.remedy == "stop that process"
    assert str(replace(found, pid=None)) == f"a process of user {found.user} that cannot be inspected"


def test_user_without_a_name_is_shown_by_number() -> None:
    assert leases._user_name(2**31 - 7) == "2147483641"


def test_foreign_listener_of_a_shared_port_is_of_another_session(spawn: Spawn) -> None:
    source = (
        "import socket, sys, time; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen()\n"
        "print(s.getsockname()[1], flush=True); time.sleep(1000)"
    )

    def listen(port: int) -> tuple[int, subprocess.Popen[bytes]]:
        process = spawn([sys.executable, "-c", source, str(port)], stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        return int(process.stdout.readline()), process

    port, ours = listen(0)
    assert foreign_listener(port, {ours.pid}) is None
    assert foreign_listener(port, set()) is None, "one listener: no other gets its calls"
    _, other = listen(port)
    found = foreign_listener(port, {ours.pid})
    assert found is not None and (found.port, found.pid, found.user) == (port, other.pid, pwd.getpwuid(os.getuid())[0])
    assert found.command.endswith(f" {port}")
    assert foreign_listener(port, {ours.pid, other.pid}) is None


def test_free_port_has_no_owner(local: LocalBackend) -> None:
    (port,) = local.claim_ports(1, owner="Model/a")

    assert port_owner(port) is None


def test_bind_error_ignores_lingering_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert bind_error(port) is not None
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the server's side closes first: TIME_WAIT stays on its port
        client.close()

    assert bind_error(port) is None


def test_candidates_cover_range_outside_ephemeral_ports() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())

    ports = list(candidates("Model/a"))

    assert sorted(ports) == [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    assert ports[0] != next(iter(candidates("Model/b")))
    assert next(candidates("Model/a", "/home/a")) != next(candidates("Model/a", "/home/b"))


def test_claim_of_too_many_ports_holds_none(make_local: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.runtime.leases.candidates", lambda owner, scope: iter(range(FIRST_PORT, FIRST_PORT + 3)))
    one, other = make_local("one"), make_local("other")

    with pytest.raises(NoCapacity, match="Model/a needs 4 ports"):
        one.claim_ports(4, owner="Model/a")

    assert len(other.claim_ports(3, owner="Model/b")) == 3


def test_claim_failing_halfway_holds_none(make_local: MakeBackend, lease_dir: Path) -> None:
    one, other = make_local("one"), make_local("other")
    free, broken = one.claim_ports(2, owner="Model/a")
    one.release_claims()
    (lease_dir / f"port-{broken}").unlink(missing_ok=True)
    (lease_dir / f"port-{broken}").mkdir()

    with pytest.raises(ArealError, match="cannot open the lease"):
        one.claim_ports(2, owner="Model/a", prefer=[free, broken])

    assert other.claim_ports(1, owner="Model/b", prefer=[free]) == (free,)


def test_shared_port_is_held_by_old_and_new_run(local: LocalBackend) -> None:
    (port,) = local.claim_ports(1, owner="InferenceService/a")
    local.start(run_spec("old", owner="InferenceService/a", shared_ports=(port,)))

    local.start(run_spec("new", owner="InferenceService/a", shared_ports=(port,)))
    with pytest.raises(NoCapacity, match="InferenceService/a"):
        local.start(run_spec("thief", owner="InferenceService/b", shared_ports=(port,)))
    local.stop("old")

    assert local.leases.is_held(f"port-{port}")
    assert local.observe()["new"].phase is Phase.RUNNING
    local.stop("new")
    assert not local.leases.is_held(f"port-{port}")


def test_shared_port_of_other_owner_is_refused(
    local: LocalBackend, stranger: tuple[int, subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(NoCapacity, match=f"pid {stranger[1].pid}"):
        local.start(run_spec(shared_ports=(stranger[0],)))


def test_start_with_partial_leases_keeps_none(make_local: MakeBackend) -> None:
    one, other = make_local("one"), make_local("other")
    one.start(run_spec(gpus=("GPU-b",)))
    ports = other.claim_ports(1, owner="Model/b")

    with pytest.raises(NoCapacity, match="GPU GPU-b is held by Model/qwen"):
        other.start(run_spec(ports=ports, gpus=("GPU-a", "GPU-b")))

    assert not one.leases.is_held("gpu-GPU-a")
    assert not one.leases.is_held(f"port-{ports[0]}")
    assert other.observe() == {}


def machine(count: int) -> GpuListing:
    return GpuListing(tuple(Gpu(f"GPU-{index}", index, "H200", 141 << 30, 0, ()) for index in range(count)))


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs between any two locks."""

    def lock_and_yield(fd: int, *, shared: bool = False) -> bool:
        locked = try_lock(fd, shared=shared)
        time.sleep(0.0005)
        return locked

    monkeypatch.setattr("areal.runtime.leases.try_lock", lock_and_yield)


@pytest.mark.usefixtures("interleaved")
@pytest.mark.parametrize("claimed", [1, 2])
def test_concurrent_claims_get_all_gpus(make_local: MakeBackend, claimed: int) -> None:
    listing = machine(8)
    backends = [make_local(f"home-{number}", list_gpus=lambda: listing) for number in range(8 // claimed)]
    together = threading.Barrier(len(backends))

    def claim(backend: LocalBackend) -> tuple[str, ...]:
        together.wait()
        return backend.claim_gpus(claimed, owner="Model/a")

    with ThreadPoolExecutor(len(backends)) as threads:
        for _ in range(20):
            taken = list(threads.map(claim, backends))
            for backend in backends:
                backend.release_claims()
            assert len({uuid for each in taken for uuid in each}) == 8


@pytest.mark.usefixtures("interleaved")
def test_one_of_two_claims_over_half_the_gpus_succeeds(make_local: MakeBackend) -> None:
    listing = machine(8)
    backends = [make_local(f"home-{number}", list_gpus=lambda: listing) for number in range(2)]
    together = threading.Barrier(2)

    def claim(backend: LocalBackend) -> int:
        together.wait()
        try:
            return len(backend.claim_gpus(5, owner="Model/a"))
        except NoCapacity:
            return 0

    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            assert sorted(threads.map(claim, backends)) == [0, 5]
            for backend in backends:
                backend.release_claims()


def test_same_named_runs_of_two_homes_never_share_gpu(make_local: MakeBackend) -> None:
    listing = machine(3)
    one, other = (make_local(name, list_gpus=lambda: listing) for name in ("one", "other"))
    held = {}
    for backend in (one, other):
        (gpu,) = backend.claim_gpus(1, owner="Model/qwen")
        backend.start(run_spec(gpus=(gpu,)))
        held[backend] = gpu
    assert held[one] != held[other]
    (last,) = set(one.capacity().gpus)
    assert other.capacity().gpus == (last,)
    with pytest.raises(NoCapacity):
        one.claim_gpus(2, owner="Model/qwen")

    one.stop("r1")

    assert set(other.capacity().gpus) == {last, held[one]}
    assert other.observe()["r1"].phase is Phase.RUNNING
