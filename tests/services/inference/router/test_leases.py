"""Data proxies that register themselves, what outlives a router, and followers that get changes only."""

from __future__ import annotations

import errno
import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.router.app import DeclaredFile
from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.wire.bodies import RenewLease
from areal.wire.routing import CORDONED, DEAD, DRAINING, READY, Changes, Snapshot


def renewed(
    registry: WorkerRegistry, number: int, answer: ProbeResult = ProbeResult.READY, now: float = 0.0, **more: object
) -> bool:
    lease = RenewLease(worker_id=f"w{number}", worker_addr=f"http://h:{number + 1}", model="m", **more)  # type: ignore[arg-type]
    report = WorkerReport(journals=(f"tag{number}",), asked_at=time.monotonic())
    return registry.renew(lease, answer, report, now) is not None


def states(registry: WorkerRegistry) -> dict[str, str]:
    return {worker.id: worker.state for worker in registry.workers()}


def test_pool_is_published_once_expected_workers_are_ready() -> None:
    registry = WorkerRegistry()
    renewed(registry, 0, expected=2)
    renewed(registry, 1, ProbeResult.NOT_READY, expected=2)
    assert not registry.snapshot().models["m"].published
    renewed(registry, 1, expected=2)
    assert registry.snapshot().models["m"].published
    renewed(registry, 0, ProbeResult.NOT_READY, expected=2)
    assert registry.snapshot().models["m"].published


def test_expired_lease_kills_worker_until_next_renewal() -> None:
    registry = WorkerRegistry()
    renewed(registry, 0)
    registry.expire(4.9)
    assert states(registry) == {"w0": READY}
    registry.expire(5.1)
    assert states(registry) == {"w0": DEAD}
    renewed(registry, 0, now=6.0)
    renewed(registry, 0, now=7.0)
    assert states(registry) == {"w0": READY}


def test_next_expiry_is_of_earliest_healthy_worker() -> None:
    registry = WorkerRegistry()
    assert registry.next_expiry() == math.inf
    renewed(registry, 0, now=1.0)
    renewed(registry, 1, now=3.0)
    assert registry.next_expiry() == 6.0
    registry.expire(6.5)
    assert registry.next_expiry() == 8.0, "the other is dead already"


def test_lease_of_first_worker_follows_pool_size() -> None:
    registry = WorkerRegistry()
    for number in range(2_000):
        renewed(registry, number, expected=2_000)
    registry.expire(5.1)  # as long as the first ones' leases were when they joined
    assert registry.workers()[0].state == READY
    assert registry.snapshot().models["m"].published
    registry.expire(4.0 * 3 + 2.1)  # 2,000 renew every 4 seconds
    assert set(states(registry).values()) == {DEAD}


def test_returning_worker_renews_soon_in_large_pool() -> None:
    registry = WorkerRegistry()
    for number in range(2_000):
        renewed(registry, number)
    first = registry.workers()[0]
    assert registry.renew_s(first) == 4.0
    registry.expire(20.0)
    renewed(registry, 0, now=21.0)
    assert (first.state, registry.renew_s(first)) == (DEAD, 1.0), "one more answer decides"
    renewed(registry, 0, now=22.0)
    assert (first.state, registry.renew_s(first)) == (READY, 4.0)
    registry.observe(first, ProbeResult.LOST, None)
    assert (first.state, registry.renew_s(first)) == (READY, 1.0), "it may be dead: that is soon known"


def test_renewal_in_large_pool_reads_only_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, count, looked = WorkerRegistry(), 300, 0
    for number in range(count - 1):
        renewed(registry, number, expected=count)
    registry.expire(100.0)
    renewed(registry, count - 1, expected=count, now=100.0)  # as many were ready as there have to be, not at one time
    state_of = WorkerRecord.state

    def counted(worker: WorkerRecord) -> str:
        nonlocal looked
        looked += 1
        return str(state_of.fget(worker))  # type: ignore[attr-defined]

    monkeypatch.setattr(WorkerRecord, "state", property(counted))
    for number in range(100):
        renewed(registry, number, expected=count, now=101.0)
    assert looked < 10 * 100
    for number in range(count):
        renewed(registry, number, expected=count, now=102.0)
        renewed(registry, number, expected=count, now=103.0)
    assert registry.snapshot().models["m"].published


def test_lease_does_not_restore_removed_worker() -> None:
    registry = WorkerRegistry()
    renewed(registry, 0)
    renewed(registry, 1)
    registry.register_model("m", [("w0", "http://h:1")], expected=1, external=False)
    assert not renewed(registry, 1)
    assert states(registry) == {"w0": READY}
    registry.register_model("m", [("w0", "http://h:1"), ("w1", "http://h:2")], expected=2, external=False)
    assert renewed(registry, 1)
    registry.remove_model("m")
    assert not renewed(registry, 0)
    assert registry.snapshot().models == {}


def test_model_scaled_from_zero_is_published_when_ready() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [("w0", "http://h:1")], expected=1, external=False)
    registry.register_model("m", [], expected=0, external=False)
    assert registry.snapshot().models["m"].idle
    restored = WorkerRegistry()
    restored.restore(registry.declared(), 0.0)
    assert restored.snapshot().models["m"].idle
    renewed(registry, 1, expected=2)
    assert not registry.snapshot().models["m"].published and not registry.snapshot().models["m"].idle
    renewed(registry, 2, expected=2)
    assert registry.snapshot().models["m"].published


def test_held_worker_is_idle_until_declared() -> None:
    registry = WorkerRegistry()
    renewed(registry, 0, held=True)
    assert states(registry) == {"w0": CORDONED}
    assert not registry.snapshot().models["m"].published
    registry.register_model("m", [("w0", "http://h:1")], expected=1, external=False)
    assert states(registry) == {"w0": READY}
    renewed(registry, 0, held=True)
    assert states(registry) == {"w0": READY}


def test_successor_at_same_address_replaces_dead_worker() -> None:
    registry = WorkerRegistry()
    renewed(registry, 0)
    registry.renew(
        RenewLease(worker_id="other", worker_addr="http://h:1", model="m"), ProbeResult.READY, WorkerReport(), 0.0
    )
    assert states(registry) == {"other": READY}


def test_restarted_router_loads_declarations(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    before = WorkerRegistry()
    kept = DeclaredFile(path, before)
    kept.read()
    assert before.synced, "nothing to report of a new service"
    renewed(before, 0)
    renewed(before, 1, held=True)
    before.register_model("m", [("w0", "http://h:1")], expected=1, external=False)
    before.configure("prefix", {"max_queued_requests": 7})
    worker = before.find(worker_id="w0")
    assert worker is not None
    before.set_drained(worker, True, stopping=True)
    kept.announce("http://127.0.0.1:1")
    after = WorkerRegistry()
    DeclaredFile(path, after).read()
    assert (after.synced, after.learning, after.declared()) == (True, False, before.declared())
    assert states(after) == {"w0": DEAD}, "it was not heard from yet"
    assert after.snapshot().models["m"].orphans == ("tag0", "tag1")
    renewed(after, 0)
    assert after.snapshot().models["m"].orphans == (), "the other worker has reported since the removal"
    assert states(after) == {"w0": DRAINING}
    assert not renewed(after, 1), "who was removed stays out"


def test_failed_declaration_write_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, registry = tmp_path / "routes.json", WorkerRegistry()
    kept = DeclaredFile(path, registry)
    kept.announce("http://127.0.0.1:1")

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    registry.register_model("m", [("w0", "http://h:1")], expected=1, external=False)
    with monkeypatch.context() as disk:
        disk.setattr("areal.services.inference.router.app.replace_file", refuse)
        with pytest.raises(OSError, match="No space"):
            kept.write()

    registry.register_model("m", [("w0", "http://h:1")], expected=1, external=False)
    kept.write()
    assert json.loads(path.read_text())["declared"] == json.loads(json.dumps(registry.declared()))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"declared": {"limits": {"nonsense": 1}}}', "\x00"])
def test_damaged_file_is_set_aside_and_the_router_learns(tmp_path: Path, text: str) -> None:
    path = tmp_path / "routes.json"
    path.write_text(text)
    registry = WorkerRegistry()
    DeclaredFile(path, registry).read()
    assert (registry.learning, registry.synced, path.exists()) == (True, False, False)
    assert [each.read_text() for each in tmp_path.iterdir()] == [text]


_STEP = st.tuples(
    st.sampled_from(["renew", "renew", "renew", "expire", "declare", "remove", "drain", "configure", "tell"]),
    st.integers(0, 5),
    st.sampled_from([ProbeResult.READY, ProbeResult.NOT_READY, ProbeResult.DRAINING]),
)


@given(st.lists(_STEP, max_size=40))
def test_follower_of_changes_has_same_table(steps: list[tuple[str, int, ProbeResult]]) -> None:
    registry, table = WorkerRegistry(), None
    for now, (step, number, answer) in enumerate([*steps, ("tell", 0, ProbeResult.READY)]):
        if step == "renew":
            renewed(registry, number, answer, float(now), expected=1 + number % 3)
        elif step == "expire":
            registry.expire(float(now))
        elif step == "declare":
            workers = [(f"w{each}", f"http://h:{each + 1}") for each in range(number)]
            registry.register_model("m", workers, expected=number, external=False)
        elif step == "remove":
            registry.remove_model("m")
        elif step == "drain":
            for worker in registry.workers()[:1]:
                registry.set_drained(worker, bool(number % 2))
        elif step == "configure":
            registry.configure(None, {"max_queued_requests": number})
        elif step == "tell":
            changes = registry.changes_since(table.serial) if table is not None else None
            if table is None or changes is None:
                table = Snapshot.from_json(json.loads(json.dumps(registry.snapshot().to_json())))
            else:
                table = table.changed(Changes.from_json(json.loads(json.dumps(changes.to_json()))))
    assert table is not None
    wanted = Snapshot.from_json(registry.snapshot().to_json())
    assert {name: set(model.workers) for name, model in table.models.items()} == {
        name: set(model.workers) for name, model in wanted.models.items()
    }
    assert (table.serial, table.limits, table.synced) == (wanted.serial, wanted.limits, wanted.synced)
    for name, model in wanted.models.items():
        reported = table.models[name]
        assert (reported.expected, reported.published, reported.orphans) == (
            model.expected,
            model.published,
            model.orphans,
        )


def test_changes_contain_only_changed_worker() -> None:
    registry = WorkerRegistry()
    for number in range(500):
        renewed(registry, number)
    serial = registry.serial
    renewed(registry, 250, ProbeResult.NOT_READY)
    changes = registry.changes_since(serial)
    assert changes is not None
    assert [worker.id for worker in changes.models["m"].workers] == ["w250"]


# -- the declared file is damaged while its router lives


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\x00"])
def test_damaged_declared_file_is_rewritten(tmp_path: Path, content: bytes | None) -> None:
    path, registry = tmp_path / "routes.json", WorkerRegistry()
    file = DeclaredFile(path, registry)
    renewed(registry, 0)
    file.announce("http://h:1")
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    file.keep()
    assert path.read_bytes() == whole


def test_unwritable_declared_file_is_a_fault_until_written(tmp_path: Path) -> None:
    path, registry = tmp_path / "routes.json", WorkerRegistry()
    file = DeclaredFile(path, registry)
    file.announce("http://h:1")
    file.keep()
    assert file.fault is None
    path.unlink()
    path.mkdir()
    file.keep()
    assert file.fault is not None and str(path) in file.fault
    path.rmdir()
    file.keep()
    assert file.fault is None and json.loads(path.read_bytes())["url"] == "http://h:1"
