from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from areal.state.objects import KEEP, ObjectStore, newest_revision
from areal.state.records import Layer

from .support import QWEN, an_object


def path_of(store: ObjectStore, number: int) -> Path:
    return store.home.object_folder(QWEN) / "revisions" / f"{number}.json"


def test_revision_records_author_time_and_file(store: ObjectStore) -> None:
    assert store.add_revision(an_object(replicas=2)).revision == 1
    (revision,) = store.revisions(QWEN)
    assert (revision.number, revision.actor, revision.at) == (1, "alice@box", 12.0)
    assert revision.source == {"file": "m.yaml", "line": 3}
    assert revision.spec == {"replicas": 2}


def test_revision_has_layer_set_last(store: ObjectStore) -> None:
    obj = an_object(replicas=2)
    scaled = replace(obj, layers=(*obj.layers, Layer("scale", {"replicas": 5}, None, "bob@box", 99.0)))
    store.add_revision(scaled)
    (revision,) = store.revisions(QWEN)
    assert (revision.actor, revision.at, revision.source) == ("bob@box", 99.0, None)
    applied = revision.object.applied
    assert applied is not None
    assert (revision.spec, applied.spec) == ({"replicas": 5}, {"replicas": 2})


def test_revisions_holds_no_status(store: ObjectStore) -> None:
    store.add_revision(an_object(status={"phase": "Ready"}))
    assert store.revisions(QWEN)[0].object.status == {}


def test_add_revision_keeps_the_last_twenty_in_order(store: ObjectStore) -> None:
    for replicas in range(1, KEEP + 6):
        assert store.add_revision(an_object(replicas=replicas)).revision == replicas
    assert [revision.number for revision in store.revisions(QWEN)] == list(range(6, KEEP + 6))


def test_add_revision_of_older_spec_is_a_new_revision(store: ObjectStore) -> None:
    numbers = [store.add_revision(an_object(replicas=replicas)).revision for replicas in (1, 2, 1)]
    assert numbers == [1, 2, 3]


def test_add_revision_after_crash_reuses_number(store: ObjectStore) -> None:
    store.put(store.add_revision(an_object(replicas=1)))
    store.add_revision(an_object(replicas=2))
    assert store.add_revision(an_object(replicas=2)).revision == 2


def test_damaged_revision_is_reported_and_skipped(store: ObjectStore) -> None:
    for replicas in (1, 2):
        store.add_revision(an_object(replicas=replicas))
    path_of(store, 2).write_bytes(b"torn")
    listing = store.revisions(QWEN)
    assert [revision.number for revision in listing] == [1]
    assert [path.name for path, _ in listing.unreadable] == ["2.json"]
    found = newest_revision(store.home, QWEN)
    assert found is not None
    assert found.number == 1
    assert store.add_revision(an_object(replicas=3)).revision == 3


def test_damaged_old_revision_is_set_aside(store: ObjectStore) -> None:
    store.add_revision(an_object(replicas=1))
    path_of(store, 1).write_bytes(b"torn")
    for replicas in range(2, KEEP + 2):
        store.add_revision(an_object(replicas=replicas))
    assert [path.read_bytes() for path in path_of(store, 1).parent.glob("1.json.quarantined-*")] == [b"torn"]


def test_revisions_ignores_unrelated_file_names(store: ObjectStore) -> None:
    store.add_revision(an_object())
    for name in ("x.json", "²3.json", "2.txt", "-1.json"):
        path_of(store, 1).with_name(name).write_text("")
    assert [revision.number for revision in store.revisions(QWEN)] == [1]
