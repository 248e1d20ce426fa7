from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.wire.routing import (
    DEAD,
    DRAINING,
    READY,
    Changes,
    Followed,
    GatewayLimits,
    ModelEntry,
    Snapshot,
    WorkerEntry,
    worker_base_url,
)


def model(name: str, *addrs: str, state: str = READY, expected: int = 1) -> ModelEntry:
    return ModelEntry(name, tuple(WorkerEntry(addr, f"http://{addr}", state) for addr in addrs), expected)


def snapshot(epoch: str, serial: int, *models: ModelEntry, synced: bool = False, **more: object) -> Snapshot:
    return Snapshot(epoch, serial, synced, models={item.name: item for item in models}, **more)  # type: ignore[arg-type]


def addrs(followed: Followed, name: str) -> set[str]:
    entry = followed.table.models.get(name)
    return {worker.id for worker in entry.workers} if entry else set()


def test_first_unsynced_table_is_followed_with_its_removals() -> None:
    followed = Followed().follow(snapshot("e1", 1, model("m", "a", "b"))).follow(snapshot("e1", 2, model("m", "b")))
    assert addrs(followed, "m") == {"b"}


def test_restarted_empty_router_removes_nothing() -> None:
    before = Followed().follow(snapshot("e1", 7, model("m", "a", "b"), synced=True))
    after = before.follow(snapshot("e2", 0))
    assert addrs(after, "m") == {"a", "b"}


def test_restarted_router_adds_and_updates_at_once() -> None:
    before = Followed().follow(snapshot("e1", 7, model("m", "a", "b"), synced=True))
    after = before.follow(snapshot("e2", 1, model("m", "a", state=DRAINING), model("n", "c")))
    assert addrs(after, "m") == {"a", "b"} and addrs(after, "n") == {"c"}
    assert {worker.id: worker.state for worker in after.table.models["m"].workers} == {"a": DRAINING, "b": READY}


def test_restarted_router_removes_once_synced() -> None:
    before = Followed().follow(snapshot("e1", 7, model("m", "a", "b"), synced=True))
    after = before.follow(snapshot("e2", 1, model("m", "a"))).follow(snapshot("e2", 2, model("m", "a"), synced=True))
    assert addrs(after, "m") == {"a"}


def test_restarted_router_keeps_strategy_and_limits_until_synced() -> None:
    before = Followed().follow(snapshot("e1", 1, synced=True, strategy="prefix", limits={"max_body_bytes": 5}))
    unsynced = before.follow(snapshot("e2", 0))
    assert (unsynced.table.strategy, dict(unsynced.table.limits)) == ("prefix", {"max_body_bytes": 5})
    assert unsynced.follow(snapshot("e2", 1, synced=True)).table.strategy == "auto"


def recording(*workers: WorkerEntry, orphans: tuple[str, ...] = ()) -> ModelEntry:
    return ModelEntry("m", workers, orphans=orphans)


def test_restarted_router_keeps_journals_of_unheard_workers() -> None:
    known = WorkerEntry("a", "http://a", journals=("aaaaaaaa",))
    unheard = WorkerEntry("a", "http://a", DEAD, heard=False)
    before = Followed().follow(snapshot("e1", 1, recording(known, orphans=("oooooooo",)), synced=True))
    (worker,) = before.follow(snapshot("e2", 1, recording(unheard))).table.models["m"].workers
    assert (worker.state, worker.journals, worker.heard) == (DEAD, ("aaaaaaaa",), True)
    after = before.follow(snapshot("e2", 2, recording(WorkerEntry("a", "http://a", journals=("cccccccc",)))))
    assert after.table.models["m"].workers[0].journals == ("cccccccc",)
    assert after.table.models["m"].orphans == ("oooooooo",)


def test_two_restarts_in_a_row_remove_nothing() -> None:
    followed = Followed().follow(snapshot("e1", 7, model("m", "a"), synced=True))
    followed = followed.follow(snapshot("e2", 1, model("n", "b"))).follow(snapshot("e3", 0))
    assert addrs(followed, "m") == {"a"} and addrs(followed, "n") == {"b"}


def test_older_serial_of_the_same_epoch_changes_nothing() -> None:
    followed = Followed().follow(snapshot("e1", 5, model("m", "a"), synced=True))
    assert followed.follow(snapshot("e1", 4, synced=True)) is followed


@given(
    st.lists(
        st.tuples(st.sampled_from(["e1", "e2", "e3"]), st.booleans(), st.sets(st.sampled_from("abcd"))), max_size=12
    )
)
def test_unsynced_new_epoch_never_loses_a_worker(history: list[tuple[str, bool, set[str]]]) -> None:
    followed = Followed()
    for serial, (epoch, synced, workers) in enumerate(history):
        before, same_epoch = addrs(followed, "m"), epoch == followed.table.epoch
        followed = followed.follow(snapshot(epoch, serial, model("m", *sorted(workers)), synced=synced))
        if synced:
            assert addrs(followed, "m") == workers
        elif not same_epoch:
            assert addrs(followed, "m") == before | workers


def test_snapshot_round_trips_through_json() -> None:
    workers = WorkerEntry("a", "http://a", DEAD, ("aaaaaaaa", "bbbbbbbb")), WorkerEntry("b", "http://b", heard=False)
    original = snapshot(
        "e1",
        3,
        ModelEntry("m", workers, expected=2, orphans=("oooooooo",)),
        synced=True,
        strategy="prefix",
        limits={"max_queued_requests": 3},
    )
    assert Snapshot.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_snapshot_of_newer_router_ignores_unknown_fields() -> None:
    data = snapshot("e1", 3, model("m", "a")).to_json()
    data["news"] = 1
    data["models"]["m"]["news"] = data["models"]["m"]["workers"][0]["news"] = 1
    assert Snapshot.from_json(data) == snapshot("e1", 3, model("m", "a"))


def test_snapshot_of_older_router_gets_defaults() -> None:
    worker = {"id": "a", "addr": "http://a", "state": READY}
    data = {"epoch": "e", "serial": 1, "synced": True, "strategy": "auto", "limits": {}}
    read = Snapshot.from_json({**data, "models": {"m": {"workers": [worker]}}})
    entry = read.models["m"]
    assert entry.published and not entry.external and not read.learning
    assert not Snapshot("e", 1).synced, "until all workers were heard"
    assert (entry.workers[0].heard, entry.workers[0].turns_away, entry.workers[0].journals) == (True, False, ())


def test_changed_table_has_new_updated_and_no_gone_workers() -> None:
    table = snapshot("e1", 3, model("m", "a", "b", "c"), model("other", "x"), strategy="prefix")
    new = {"m": model("m", "b", "d", state=DEAD, expected=3), "n": model("n", "y")}
    changed = table.changed(Changes("e1", 3, 5, new, {"m": ("c", "never there"), "n": ()}))
    assert [(each.id, each.state) for each in changed.models["m"].workers] == [("a", READY), ("b", DEAD), ("d", DEAD)]
    assert (changed.serial, changed.strategy, changed.models["m"].expected) == (5, "prefix", 3)
    assert changed.models["n"] == model("n", "y") and changed.models["other"] == model("other", "x")
    for epoch, base in (("e2", 3), ("e1", 2), ("e1", 4)):
        with pytest.raises(ValueError, match=f"changes of table {epoch} {base}, not of e1 3"):
            table.changed(Changes(epoch, base, 9, {}, {}))


def test_model_is_published_once_the_expected_workers_are_known() -> None:
    assert not model("m", "a", expected=2).published
    assert model("m", "a", "b", expected=2).published
    assert not model("m", expected=0).published


def test_limits_update_keeps_unset_fields() -> None:
    assert GatewayLimits(1, 2.0, 3).updated({"request_timeout_seconds": 9}) == GatewayLimits(1, 9.0, 3)


@pytest.mark.parametrize(
    "given_limits", [{"nope": 1}, {"max_body_bytes": -1}, {"max_body_bytes": True}, {"max_body_bytes": "1"}]
)
def test_rejects_invalid_limits(given_limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="limits"):
        GatewayLimits().updated(given_limits)


@pytest.mark.parametrize("text", ["host:80", "http://host:80", "http://host:80/"])
def test_worker_address_is_a_host_and_a_port(text: str) -> None:
    assert worker_base_url(text) == "http://host:80"
    assert worker_base_url("https://[::1]:80") == "https://[::1]:80"


@pytest.mark.parametrize(
    "text", ["host", "http://host", ":80", "ftp://host:80", "host:80/v1", "host:80?a=b", "host:80#a", "user@host:80"]
)
def test_malformed_worker_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="worker address"):
        worker_base_url(text)
