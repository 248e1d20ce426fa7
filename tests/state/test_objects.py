from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from areal.errors import NotFound, UsageFault
from areal.resources.kinds import Ref
from areal.state.files import UnreadableFile, seal
from areal.state.home import Home
from areal.state.locks import lock_store
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject, encode

from .support import QWEN, an_object, contents, read_only, run, running

READ_EVERYTHING = """
print(store.get(Ref("Model", "qwen")) is not None)
store.list(), store.list("Model"), store.snapshot(), store.serial(), store.revisions(Ref("Model", "qwen"))
orphans(home), holder(home, Ref("Model", "qwen")), EventLog(home).read(), EventLog(home).read(Ref("Model", "qwen"))
"""


def damage(store: ObjectStore, ref: Ref = QWEN) -> None:
    path = store.home.object_folder(ref) / "object.json"
    path.write_bytes(path.read_bytes()[:-20])


def accept(store: ObjectStore, obj: StoredObject) -> StoredObject:
    stored = store.add_revision(obj)
    store.put(stored)
    return stored


def test_put_then_get_returns_equal_object(store: ObjectStore) -> None:
    obj = an_object(
        labels={"team": "é"}, depends_on=("Model/other",), owner="InferenceService/x", status={"a": [1, 2.5, None]}
    )
    assert store.put(obj)
    assert store.get(QWEN) == obj
    assert obj.spec == {"replicas": 1}


def test_get_absent_object_is_none(store: ObjectStore) -> None:
    assert store.get(QWEN) is None


def test_put_equal_object_writes_nothing(store: ObjectStore) -> None:
    store.put(an_object())
    before = contents(store.home.root)
    assert not store.put(an_object())
    store.put_statuses({QWEN: {}})
    assert contents(store.home.root) == before


def test_add_revision_equal_object_writes_nothing(store: ObjectStore) -> None:
    stored = accept(store, an_object())
    before = contents(store.home.root)
    assert accept(store, replace(stored, generation=9, status={"x": 1})).revision == 1
    assert set(contents(store.home.root)) == set(before)
    assert len(store.revisions(QWEN)) == 1


def test_put_bumps_the_serial_and_put_status_does_not(store: ObjectStore) -> None:
    assert store.serial() == 0
    store.put(an_object())
    store.put(an_object(replicas=2))
    assert store.serial() == 2
    store.put_statuses({QWEN: {"phase": "Ready"}})
    assert store.serial() == 2
    found = store.get(QWEN)
    assert found is not None
    assert found.status == {"phase": "Ready"}


def test_put_status_absent_object_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFound):
        store.put_statuses({QWEN: {}})


@pytest.mark.parametrize(
    "act",
    [
        lambda store, ref: store.get(ref),
        lambda store, ref: store.delete(ref),
        lambda store, ref: store.revisions(ref),
        lambda store, ref: store.put(replace(an_object(), name=ref.name)),
    ],
)
def test_names_escaping_folder_are_refused(store: ObjectStore, act: Callable[[ObjectStore, Ref], Any]) -> None:
    with pytest.raises(UsageFault):
        act(store, Ref("Model", "../../x"))


def test_list_is_by_kind_order_and_name(store: ObjectStore) -> None:
    for name in ("b", "a"):
        store.put(an_object(name))
    store.put(replace(an_object("z"), kind="InferenceService"))
    assert [str(obj.ref) for obj in store.list()] == ["InferenceService/z", "Model/a", "Model/b"]
    assert [obj.name for obj in store.list("Model")] == ["a", "b"]


def test_reading_an_absent_home_creates_nothing(home: Home) -> None:
    absent = Home(home.root / "absent")
    ended = run(READ_EVERYTHING, absent)
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr
    assert not absent.root.exists()


def test_reading_a_home_writes_nothing_and_needs_no_permission(store: ObjectStore) -> None:
    accept(store, an_object())
    before = contents(store.home.root)
    ended = run(READ_EVERYTHING, store.home, *read_only(store.home.root))
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
    assert contents(store.home.root) == before


def test_damaged_object_is_reported_and_untouched_by_readers(store: ObjectStore) -> None:
    for name in ("qwen", "whole"):
        store.put(an_object(name))
    damage(store)
    before = contents(store.home.root)
    with pytest.raises(UnreadableFile, match="torn write"):
        store.get(QWEN)
    with pytest.raises(UnreadableFile):
        store.get(QWEN)
    listing = store.list()
    assert [obj.name for obj in listing] == ["whole"]
    assert [path.parent.name for path, _ in listing.unreadable] == ["qwen"]
    assert contents(store.home.root) == before


def test_quarantined_object_is_not_absent(store: ObjectStore) -> None:
    store.put(an_object())
    path = store.home.object_folder(QWEN) / "object.json"
    path.rename(path.with_name("object.json.quarantined-20260101T000000"))
    with pytest.raises(UnreadableFile, match="set aside as"):
        store.get(QWEN)
    assert len(store.list().unreadable) == 1


def test_put_over_a_damaged_object_keeps_the_damaged_file(store: ObjectStore) -> None:
    store.put(an_object())
    damage(store)
    assert store.put(an_object(replicas=3))
    assert store.get(QWEN) == an_object(replicas=3)
    assert len(list(store.home.object_folder(QWEN).glob("object.json.quarantined-*"))) == 1


def test_object_of_a_newer_format_is_left_alone_by_all(store: ObjectStore) -> None:
    path = store.home.object_folder(QWEN) / "object.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(seal({**encode(an_object()), "format": 2, "something": "new"}))
    before = path.read_bytes()
    acts: list[Callable[[], object]] = [
        lambda: store.get(QWEN), lambda: store.put(an_object()), lambda: store.restore(QWEN),
        lambda: store.delete(QWEN),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(UnreadableFile, match="newer areal") as caught:
            act()
        assert not caught.value.damaged
    assert path.read_bytes() == before


def test_object_in_foreign_folder_is_refused(store: ObjectStore) -> None:
    store.put(an_object())
    folder = store.home.object_folder(QWEN)
    folder.rename(folder.with_name("other"))
    with pytest.raises(UnreadableFile, match="describes Model/qwen, not Model/other"):
        store.get(Ref("Model", "other"))


def test_body_of_another_shape_is_damaged(store: ObjectStore) -> None:
    path = store.home.object_folder(QWEN) / "object.json"
    path.parent.mkdir(parents=True)
    bodies: list[Any] = [
        [],
        {"format": 1},
        {**encode(an_object()), "extra": 1},
        {**encode(an_object()), "layers": [{}]},
    ]
    for body in bodies:
        path.write_bytes(seal(body))
        with pytest.raises(UnreadableFile) as caught:
            store.get(QWEN)
        assert caught.value.damaged


def test_restore_uses_newest_revision(store: ObjectStore) -> None:
    accept(store, an_object(replicas=1))
    latest = accept(store, an_object(replicas=2, labels={"a": "b"}))
    store.put_statuses({QWEN: {"phase": "Ready"}})
    damage(store)
    assert store.restore(QWEN) == latest
    assert store.get(QWEN) == latest
    assert len(list(store.home.object_folder(QWEN).glob("*.quarantined-*"))) == 1


def test_restore_readable_object_changes_nothing(store: ObjectStore) -> None:
    stored = accept(store, an_object())
    before = contents(store.home.root)
    assert store.restore(QWEN) == stored
    assert contents(store.home.root) == before


def test_restore_without_revisions_gives_advice(store: ObjectStore) -> None:
    store.put(an_object())
    damage(store)
    with pytest.raises(UnreadableFile, match="no revision is left") as caught:
        store.restore(QWEN)
    assert "areal delete" in (caught.value.hint or "")


def test_delete_removes_object_revisions_and_events(store: ObjectStore) -> None:
    accept(store, an_object())
    assert store.delete(QWEN)
    assert store.get(QWEN) is None
    assert list((store.home.objects / "model").iterdir()) == []
    assert store.serial() == 2
    assert not store.delete(QWEN)
    assert store.serial() == 2


def test_delete_damaged_object_keeps_the_damaged_file(store: ObjectStore) -> None:
    store.put(an_object())
    damage(store)
    assert store.delete(QWEN)
    assert store.get(QWEN) is None
    (kept,) = (store.home.objects / ".quarantine").iterdir()
    assert "object.json.quarantined-" in kept.name


@pytest.mark.parametrize("content", ["x", "", "\0" * 8])
def test_damaged_serial_stops_no_reader_and_is_replaced_by_writers(store: ObjectStore, content: str) -> None:
    store.put(an_object())
    (store.home.objects / "serial").write_text(content)
    assert store.serial() == -1
    store.put(an_object(replicas=2))
    assert store.serial() > 1_000_000_000


COUNT_UP = """
for count in range(1, 41):
    store.put(StoredObject("Model", "{name}", "u", annotations={{"count": str(count)}}))
"""


def test_concurrent_writers_count_every_serial(store: ObjectStore) -> None:
    with running(COUNT_UP.format(name="a"), store.home) as one, running(COUNT_UP.format(name="b"), store.home) as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)
    assert store.serial() == 80
    assert [obj.annotations["count"] for obj in store.list()] == ["40", "40"]


def test_snapshot_never_sees_partial_change(store: ObjectStore) -> None:
    with running(COUNT_UP.format(name="a"), store.home) as writer:
        while writer.poll() is None:
            snapshot = store.snapshot()
            assert snapshot.serial == int(snapshot.objects[0].annotations["count"] if snapshot.objects else 0)
            with contextlib.suppress(TimeoutExpired):
                writer.wait(0.002)
    assert store.serial() == 40


def test_snapshot_waits_for_running_change(store: ObjectStore) -> None:
    store.put(an_object())
    with lock_store(store.home):
        ended = run(
            """
            from areal.state import locks
            locks._STORE_TIMEOUT_S = 0.05
            try:
                with locks.share_store(home):
                    print("in")
            except Locked as error:
                print(error.message)
            """,
            store.home,
        )
    assert "the store is locked by" in ended.stdout


ACCEPT_AND_DELETE = """
home.ensure()
for replicas in (1, 2):
    layer = Layer("apply", {"replicas": replicas}, None, "alice@box", float(replicas))
    store.put(store.add_revision(StoredObject("Model", "qwen", "u", layers=(layer,))))
store.delete(Ref("Model", "qwen"))
store.put(StoredObject("Model", "last", "u"))
"""


def test_store_killed_at_every_durable_step_converges(home: Home) -> None:
    serial, step = 0, 0
    while True:
        step += 1
        ended = run(ACCEPT_AND_DELETE, home, AREAL_CRASH_AT=f"any:{step}")
        store = ObjectStore(home)
        listing = store.list()
        assert not listing.unreadable
        assert store.serial() >= serial
        serial = store.serial()
        obj = store.get(QWEN)
        assert obj is None or obj.spec in ({"replicas": 1}, {"replicas": 2})
        assert not store.revisions(QWEN).unreadable
        if ended.returncode == 0:
            break
        assert ended.returncode == 137, ended.stderr
    assert step > 20
    assert [obj.name for obj in listing] == ["last"]
    assert list(home.objects.glob("model/.trash-*")) == []


def test_killed_put_never_changes_object_under_old_serial(store: ObjectStore) -> None:
    store.put(an_object())
    serial, step, returncode = store.serial(), 0, 137
    while returncode == 137:
        step += 1
        code = f'store.put(StoredObject("Model", "qwen", "step-{step}"))'
        returncode = run(code, store.home, AREAL_CRASH_AT=f"any:{step}").returncode
        found = store.get(QWEN)
        assert found is not None
        assert (found.uid == f"step-{step}") <= (store.serial() > serial)
        serial = store.serial()
    assert returncode == 0
    assert step == 7


def test_stored_layers_keep_their_source(store: ObjectStore) -> None:
    layer = Layer("apply", {"a": 1}, {"file": "x.yaml", "line": 1, "sha256": "0"}, "alice@box", 1.5)
    store.put(replace(an_object(), layers=(layer,)))
    found = store.get(QWEN)
    assert found is not None
    assert found.layers == (layer,)


def test_concurrent_status_writes_are_merged(tmp_path: Path) -> None:
    store = ObjectStore(Home(tmp_path))
    before = StoredObject("Model", "m", "uid", status={"commits": {"a": "1"}, "phase": "Ready"})
    store.put(before)
    store.put(replace(before, generation=2, status={"restartedAt": "3"}), keeps=("commits",))
    found = store.get(before.ref)
    assert found is not None and found.status == {"commits": {"a": "1"}, "restartedAt": "3"}
    store.put(replace(before, uid="other", status={}), keeps=("commits",))  # another object of the same name
    assert store.get(before.ref).status == {}  # type: ignore[union-attr]
