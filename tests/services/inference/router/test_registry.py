from __future__ import annotations

import time
from dataclasses import replace

import pytest

from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.registry import WorkerRegistry, WorkerReport
from areal.wire.routing import DEAD, DRAINING, READY, Changes, worker_base_url


def registry_with(*workers: tuple[str, str]) -> WorkerRegistry:
    registry = WorkerRegistry()
    registry.register_model("m", workers, expected=None, external=False)
    for worker in registry.workers():
        registry.observe(worker, ProbeResult.READY, WorkerReport())
    return registry


def states(registry: WorkerRegistry) -> dict[str, str]:
    return {worker.id: worker.state for worker in registry.snapshot().models["m"].workers}


def test_register_model_is_declarative() -> None:
    registry = registry_with(("a", "http://h:1"), ("b", "http://h:2"))
    registry.register_model("m", [("b", "http://h:2"), ("c", "http://h:3")], expected=None, external=False)
    assert states(registry) == {"b": READY, "c": DEAD}  # who stays keeps its health; who came was not probed yet


def test_repeated_register_model_changes_nothing() -> None:
    registry = registry_with(("a", "http://h:1"))
    serial = registry.serial
    registry.register_model("m", [("a", "http://h:1")], expected=None, external=False)
    assert registry.serial == serial


def test_register_model_keeps_drain_for_same_address() -> None:
    registry = registry_with(("a", "http://h:1"))
    worker = registry.find(worker_id="a")
    assert worker is not None
    registry.set_drained(worker, True)
    registry.register_model("m", [("a", "http://h:1")], expected=None, external=False)
    assert states(registry) == {"a": DRAINING}
    registry.register_model("m", [("a", "http://h:9")], expected=None, external=False)
    assert states(registry) == {"a": DEAD}


def test_model_with_missing_expected_workers_is_unpublished() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [("a", "http://h:1")], expected=2, external=False)
    assert not registry.snapshot().models["m"].published


def test_registering_worker_again_finds_it_by_address() -> None:
    registry = registry_with(("a", "http://h:1"))
    first = registry.register(None, "http://h:2", "m")
    again = registry.register(None, "http://h:2", "m")
    assert first.id == again.id
    assert set(states(registry)) == {"a", first.id}


def test_only_state_change_makes_new_table() -> None:
    registry = registry_with(("a", "http://h:1"))
    worker, serial = registry.workers()[0], registry.serial
    registry.observe(worker, ProbeResult.READY, WorkerReport(3, 100, 7))
    assert registry.serial == serial
    assert worker.to_json() | {"in_flight": 3, "in_flight_tokens": 100, "version": 7} == worker.to_json()
    registry.observe(worker, ProbeResult.NOT_READY, None)
    assert registry.serial == serial + 1


def test_late_probe_of_removed_worker_changes_nothing() -> None:
    registry = registry_with(("a", "http://h:1"))
    worker = registry.workers()[0]
    registry.unregister(worker)
    serial = registry.serial
    registry.observe(worker, ProbeResult.NOT_READY, None)
    assert registry.serial == serial


def test_every_change_wakes_the_followers() -> None:
    registry, woken = WorkerRegistry(), []
    registry.on_change = lambda: woken.append(registry.serial)
    registry.register_model("m", [("a", "http://h:1")], expected=1, external=False)
    registry.configure("prefix", {"max_body_bytes": 10})
    registry.configure("prefix", {"max_body_bytes": 10})
    registry.mark_synced()
    registry.mark_synced()
    registry.remove_model("m")
    assert woken == [1, 2, 3, 4]
    assert not registry.workers()


@pytest.mark.parametrize(
    ("text", "url"),
    [("127.0.0.1:80", "http://127.0.0.1:80"), ("http://h:1/", "http://h:1"), ("[::1]:8080", "http://[::1]:8080")],
)
def test_worker_address_is_a_base_url(text: str, url: str) -> None:
    assert worker_base_url(text) == url


@pytest.mark.parametrize("text", ["", "h", "ftp://h:1", "http://h:1/path", "http://u:p@h:1", "h:x", "http://h:1?q"])
def test_rejects_invalid_worker_address(text: str) -> None:
    with pytest.raises(ValueError):
        worker_base_url(text)


def reported(*journals: str, elsewhere: tuple[str, ...] = ()) -> WorkerReport:
    return WorkerReport(journals=journals, elsewhere=elsewhere, asked_at=time.monotonic())


def observe(registry: WorkerRegistry, worker_id: str, answer: ProbeResult, report: WorkerReport | None) -> None:
    worker = registry.find(worker_id=worker_id)
    assert worker is not None
    registry.observe(worker, answer, report)


def test_new_journal_makes_new_table() -> None:
    registry = registry_with(("a", "http://h:1"))
    serial = registry.serial
    observe(registry, "a", ProbeResult.READY, reported("aaaaaaaa"))
    assert registry.serial > serial
    assert registry.snapshot().models["m"].workers[0].journals == ("aaaaaaaa",)


def test_dead_worker_keeps_journals_until_adopted() -> None:
    registry = registry_with(("a", "http://h:1"), ("b", "http://h:2"))
    observe(registry, "a", ProbeResult.READY, reported("aaaaaaaa", elsewhere=("bbbbbbbb",)))
    observe(registry, "b", ProbeResult.READY, reported("bbbbbbbb", elsewhere=("aaaaaaaa",)))
    for _ in range(3):
        observe(registry, "a", ProbeResult.LOST, None)
    workers = {worker.id: worker for worker in registry.snapshot().models["m"].workers}
    assert (workers["a"].state, workers["a"].journals) == (DEAD, ("aaaaaaaa",))
    assert registry.snapshot().models["m"].orphans == ()


def test_unopenable_journal_of_dead_worker_is_damaged() -> None:
    registry = registry_with(("a", "http://h:1"), ("b", "http://h:2"))
    observe(registry, "a", ProbeResult.READY, reported("aaaaaaaa", elsewhere=("bbbbbbbb",)))
    report = replace(reported("bbbbbbbb"), damaged={"aaaaaaaa": "run-a"})
    observe(registry, "b", ProbeResult.READY, report)
    assert registry.snapshot().models["m"].damaged == {}, "it is open where it is served"
    for _ in range(3):
        observe(registry, "a", ProbeResult.LOST, None)
    assert registry.snapshot().models["m"].damaged == {"aaaaaaaa": "run-a"}
    observe(registry, "b", ProbeResult.READY, reported("bbbbbbbb", "aaaaaaaa"))
    assert registry.snapshot().models["m"].damaged == {}


def test_removed_worker_journal_is_orphan_until_adopted() -> None:
    registry = registry_with(("a", "http://h:1"), ("b", "http://h:2"))
    observe(registry, "b", ProbeResult.READY, reported("bbbbbbbb", elsewhere=("aaaaaaaa",)))
    observe(registry, "a", ProbeResult.READY, reported("aaaaaaaa", elsewhere=("bbbbbbbb",)))
    registry.register_model("m", [("b", "http://h:2")], expected=None, external=False)
    assert registry.snapshot().models["m"].orphans == ("aaaaaaaa",)
    observe(registry, "b", ProbeResult.READY, reported("bbbbbbbb", "aaaaaaaa"))
    assert registry.snapshot().models["m"].orphans == ()
    observe(registry, "b", ProbeResult.READY, reported("bbbbbbbb"))
    assert registry.snapshot().models["m"].orphans == ()


def test_orphan_stays_until_all_other_workers_reported() -> None:
    registry = registry_with(("a", "http://h:1"), ("b", "http://h:2"), ("c", "http://h:3"))
    for name in "abc":
        observe(registry, name, ProbeResult.READY, reported(name * 8))  # before they saw each other's journals
    late = reported("bbbbbbbb")
    registry.register_model("m", [("b", "http://h:2"), ("c", "http://h:3")], expected=None, external=False)
    observe(registry, "b", ProbeResult.READY, late)  # it was on its way when the worker was removed
    observe(registry, "c", ProbeResult.READY, reported("cccccccc"))
    assert registry.snapshot().models["m"].orphans == ("aaaaaaaa",)
    observe(registry, "b", ProbeResult.LOST, None)
    assert registry.snapshot().models["m"].orphans == ("aaaaaaaa",)
    serial = registry.serial
    observe(registry, "b", ProbeResult.READY, reported("bbbbbbbb"))
    assert registry.snapshot().models["m"].orphans == () and registry.serial > serial
    assert registry.snapshot().models["m"].orphans == ()


def test_orphan_does_not_wait_for_dead_worker() -> None:
    registry = registry_with(("a", "http://h:1"), ("b", "http://h:2"), ("c", "http://h:3"))
    for name in "abc":
        observe(registry, name, ProbeResult.READY, reported(name * 8))
    registry.register_model("m", [("b", "http://h:2"), ("c", "http://h:3")], expected=None, external=False)
    dead, living = registry.find(worker_id="b"), registry.find(worker_id="c")
    assert dead is not None and living is not None
    observe(registry, "c", ProbeResult.READY, reported("cccccccc"))
    assert registry.snapshot().models["m"].orphans == ("aaaaaaaa",)
    later = time.monotonic() + registry.lease_s(dead) + 1.0
    registry.observe(living, ProbeResult.READY, WorkerReport(journals=("cccccccc",), asked_at=later))
    assert registry.snapshot().models["m"].orphans == ()


def test_replacing_all_workers_keeps_journals() -> None:
    registry = registry_with(("a", "http://h:1"))
    observe(registry, "a", ProbeResult.READY, reported("aaaaaaaa"))
    registry.register_model("m", [], expected=1, external=False)
    assert registry.snapshot().models["m"].orphans == ("aaaaaaaa",)
    registry.register_model("m", [("a", "http://h:9")], expected=1, external=False)
    assert registry.snapshot().models["m"].orphans == ("aaaaaaaa",)
    assert not registry.snapshot().models["m"].workers[0].heard
    observe(registry, "a", ProbeResult.READY, reported("cccccccc", "aaaaaaaa"))
    assert registry.snapshot().models["m"].orphans == ()


def test_cordoned_worker_stays_known_until_reregistered() -> None:
    registry = WorkerRegistry()
    workers = [("a", "http://h:1"), ("b", "http://h:2")]
    registry.register_model("m", workers, expected=2, external=False, cordoned=["a"])
    for worker in registry.workers():
        registry.observe(worker, ProbeResult.READY, None)
    assert [worker.state for worker in registry.snapshot().models["m"].workers] == ["cordoned", "ready"]
    serial = registry.serial
    registry.register_model("m", workers, expected=2, external=False, cordoned=["a"])
    assert registry.serial == serial, "saying the same again changes nothing"
    registry.register_model("m", workers, expected=2, external=False)
    assert [worker.state for worker in registry.snapshot().models["m"].workers] == ["ready", "ready"]


def test_new_router_has_not_heard_all_journals() -> None:
    registry = WorkerRegistry()
    assert not registry.all_heard
    registry.register_model("m", [("a", "http://h:1")], expected=None, external=False)
    assert not registry.all_heard
    observe(registry, "a", ProbeResult.READY, reported("aaaaaaaa"))
    assert registry.all_heard
    empty = WorkerRegistry()
    empty.mark_synced()
    assert empty.all_heard


def test_only_joined_worker_is_sent_to_followers() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [("a", "http://h:1"), ("b", "http://h:2")], expected=2, external=False)
    before = registry.snapshot()
    registry.register_model("m", [("b", "http://h:2"), ("c", "http://h:3")], expected=1, external=False)
    changes = registry.changes_since(before.serial)
    assert changes is not None
    assert {worker.id for worker in changes.models["m"].workers} == {"c"}
    assert changes.gone == {"m": ("a",)}
    after = before.changed(Changes.from_json(changes.to_json()))
    assert after.models["m"] == registry.snapshot().models["m"]


def test_worker_moved_between_models_makes_new_table() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [("a", "http://h:1")], expected=1, external=False)
    registry.register_model("n", [("b", "http://h:2")], expected=1, external=False)
    serial = registry.serial
    registry.register_model("n", [("a", "http://h:1"), ("b", "http://h:2")], expected=2, external=False)
    assert registry.changes_since(serial) is None
    assert [len(model.workers) for model in registry.snapshot().models.values()] == [0, 2]


def test_holders_of_a_journal_follow_reports_and_removals() -> None:
    registry = WorkerRegistry()
    registry.register_model("m", [("a", "http://h:1"), ("b", "http://h:2")], expected=2, external=False)
    observe(registry, "a", ProbeResult.READY, reported("one", "one"))
    observe(registry, "b", ProbeResult.READY, reported("two"))
    observe(registry, "b", ProbeResult.READY, reported("two", "one"))
    assert [worker.id for worker in registry.holders("one")] == ["a", "b"]
    registry.register_model("m", [("b", "http://h:2")], expected=1, external=False)
    observe(registry, "b", ProbeResult.READY, reported("one"))
    assert ([worker.id for worker in registry.holders("one")], registry.holders("two")) == (["b"], [])
