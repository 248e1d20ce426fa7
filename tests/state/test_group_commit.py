"""Many threads, few syncs: a call that returns is durable, and none gets the failure of another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest

from areal.resources.kinds import Ref
from areal.state.files import GroupCommit
from areal.state.home import Home
from areal.state.journal import Transaction
from areal.state.objects import ObjectStore
from tests.state.support import an_object, run


class Held:
    """A commit that holds its first batch until it is released, and refuses batches with ``bad`` in them."""

    def __init__(self, bad: str = "") -> None:
        self.batches: list[list[str]] = []
        self.began, self.go = Event(), Event()
        self._bad = bad

    def __call__(self, batch: Sequence[str]) -> None:
        self.batches.append(list(batch))
        self.began.set()
        assert self.go.wait(10)
        if self._bad in batch:
            raise OSError("refused")


def submit_behind(held: Held, group: GroupCommit[str], items: Sequence[str]) -> dict[str, BaseException | None]:
    """Submit "first", and ``items`` while it is being committed; how each ended."""
    with ThreadPoolExecutor(len(items) + 1) as pool:
        futures = {"first": pool.submit(group.submit, "first")}
        assert held.began.wait(10)
        futures |= {item: pool.submit(group.submit, item) for item in items}
        while len(group._queue) < len(items):
            pass
        held.go.set()
        return {item: future.exception(10) for item, future in futures.items()}


def test_submissions_during_commit_form_one_batch() -> None:
    held = Held()
    ended = submit_behind(held, GroupCommit(held), ["a", "b", "c"])
    assert set(ended.values()) == {None}
    first, rest = held.batches
    assert first == ["first"] and sorted(rest) == ["a", "b", "c"]


def test_failure_affects_only_its_item() -> None:
    held = Held(bad="b")
    ended = submit_behind(held, GroupCommit(held), ["a", "b", "c"])
    assert {item for item, error in ended.items() if error} == {"b"}
    assert isinstance(ended["b"], OSError)


def test_group_commit_continues_after_failure() -> None:
    held = Held(bad="b")
    held.go.set()
    group = GroupCommit(held)
    with pytest.raises(OSError, match="refused"):
        group.submit("b")
    group.submit("a")
    assert held.batches == [["b"], ["a"]]


def test_objects_written_by_many_threads_are_all_stored(home: Home) -> None:
    store, start = ObjectStore(home), Barrier(16)

    def put(number: int) -> bool:
        start.wait()
        return store.put(an_object(f"m{number}"))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(put, range(16)))
    assert {obj.name for obj in store.list()} == {f"m{number}" for number in range(16)}
    assert 1 <= store.serial() <= 16


def test_status_is_merged_into_current_object(home: Home) -> None:
    store, start = ObjectStore(home), Barrier(2)
    store.put(an_object("qwen", replicas=1))
    status = {"phase": "Ready"}

    def configure() -> None:
        start.wait()
        store.put(an_object("qwen", replicas=2, status=status))

    def observe() -> None:
        start.wait()
        store.put_statuses({Ref("Model", "qwen"): status})

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(configure), pool.submit(observe)]:
            future.result()
    stored = store.get(Ref("Model", "qwen"))
    assert stored is not None and stored.status == status and stored.spec == {"replicas": 2}


def test_journal_written_by_many_threads_has_every_entry(home: Home) -> None:
    transaction = Transaction.open(home, "apply")

    def work(number: int) -> None:
        transaction.end(transaction.begin("op", number=number))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(200)))
    lines = transaction.path.read_bytes().splitlines()
    transaction.commit()
    assert len(lines) == 1 + 2 * 200


@pytest.mark.parametrize("point", ["write-before", "write-synced", "write-after", "journal-append-after"])
@pytest.mark.parametrize("nth", [3, 9])
def test_acknowledged_writes_survive_kill_during_batch(home: Home, point: str, nth: int) -> None:
    code = """
    from concurrent.futures import ThreadPoolExecutor
    transaction = Transaction.open(home, "apply")
    def put(number):
        layers = (Layer("apply", {"replicas": number}, None, "a", 1.0),)
        n = transaction.begin("RECORD", number=number)
        store.put(StoredObject("Model", f"m{number}", f"u{number}", layers=layers))
        transaction.end(n)
        os.write(1, f"{number}\\n".encode())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(64)))
    """
    done = run(code, home, AREAL_CRASH_AT=f"{point}:{nth}")
    assert done.returncode == 137, done.stderr
    there = {obj.name for obj in ObjectStore(home).list()}
    assert {f"m{number}" for number in done.stdout.split()} <= there
    assert ObjectStore(home).list().unreadable == []
