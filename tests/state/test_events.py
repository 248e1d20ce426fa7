from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError, UsageFault
from areal.resources.kinds import Ref
from areal.state import events
from areal.state.events import KEEP, Event, EventLog, fold
from areal.state.objects import ObjectStore

from .support import QWEN, an_object, contents, run, running

happenings = st.builds(
    lambda reason, at: Event("Model/qwen", "Normal", reason, "m", "a@b", at, first_at=at),
    st.sampled_from("ab"),
    st.floats(0, 9),
)


@pytest.fixture
def log(store: ObjectStore) -> EventLog:
    store.put(an_object())
    return EventLog(store.home)


def file_of(log: EventLog) -> Path:
    return log._home.object_folder(QWEN) / "events.jsonl"


def test_record_round_trips(log: EventLog) -> None:
    log.record(QWEN, "Warning", "Failed", "out of memory", actor="alice@box")
    (event,) = log.read(QWEN)
    assert (event.ref, event.type, event.reason, event.message) == ("Model/qwen", "Warning", "Failed", "out of memory")
    assert (event.actor, event.count) == ("alice@box", 1)


def test_repeated_record_is_one_event_with_count(log: EventLog) -> None:
    for reason in ("Unhealthy", "Unhealthy", "Ready", "Unhealthy"):
        log.record(QWEN, "Normal", reason, "probe")
    found = log.read(QWEN)
    assert [(event.reason, event.count) for event in found] == [("Unhealthy", 2), ("Ready", 1), ("Unhealthy", 1)]
    assert found[0].first_at < found[0].at


@given(st.lists(happenings))
def test_fold_keeps_counts_and_leaves_no_repetition(written: list[Event]) -> None:
    folded = fold(written)
    assert sum(event.count for event in folded) == len(written)
    assert all(one.same != two.same for one, two in pairwise(folded))
    assert fold(folded) == folded


def test_read_of_all_objects_is_time_ordered_and_limited(log: EventLog, store: ObjectStore) -> None:
    store.put(an_object("llama"))
    for index, name in enumerate(["qwen", "llama", "qwen"]):
        log.record(Ref("Model", name), "Normal", f"R{index}", "m")
    assert [event.reason for event in log.read()] == ["R0", "R1", "R2"]
    assert [event.reason for event in log.read(limit=2)] == ["R1", "R2"]
    assert log.read(limit=0) == []


def test_events_of_deleted_object_are_readable(log: EventLog, store: ObjectStore) -> None:
    store.delete(QWEN)
    log.record(QWEN, "Normal", "Deleted", "by alice")
    assert [event.reason for event in log.read(QWEN)] == ["Deleted"]
    assert [event.reason for event in log.read()] == ["Deleted"]
    assert store.get(QWEN) is None


def test_record_beyond_the_bound_keeps_the_newest(log: EventLog) -> None:
    for index in range(KEEP + 300):
        log.record(QWEN, "Normal", "Tick", f"number {index:06d} of a long row of events to be kept or not")
    found = [int(event.message.split()[1]) for event in log.read(QWEN)]
    assert found[-1] == KEEP + 299
    assert KEEP <= len(found) <= KEEP + 250
    assert found == list(range(found[0], KEEP + 300))


def test_record_truncation_folds_before_dropping(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP", 10)
    monkeypatch.setattr(events, "_SLACK", 5)
    log.record(QWEN, "Normal", "First", "m")
    for _ in range(100):
        log.record(QWEN, "Normal", "Again", "m")
    assert [(event.reason, event.count) for event in log.read(QWEN)] == [("First", 1), ("Again", 100)]
    assert len(file_of(log).read_bytes().splitlines()) <= 15


def test_concurrent_records_lose_nothing(log: EventLog) -> None:
    code = """
    log = EventLog(home)
    for index in range(200):
        log.record(Ref("Model", "qwen"), "Normal", "Tick", "{name} " + str(index))
    """
    with running(code.format(name="a"), log._home) as one, running(code.format(name="b"), log._home) as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)
    messages = [event.message for event in log.read(QWEN)]
    assert len(messages) == 400
    for name in "ab":
        own = [message for message in messages if message.startswith(name)]
        assert own == [f"{name} {index}" for index in range(200)]


def test_concurrent_records_during_truncation_keep_newest(log: EventLog) -> None:
    code = """
    from areal.state import events
    events.KEEP, events._SLACK = 50, 5
    log = EventLog(home)
    for index in range(300):
        log.record(Ref("Model", "qwen"), "Normal", "Tick", "{name} " + str(index))
    """
    with running(code.format(name="a"), log._home) as one, running(code.format(name="b"), log._home) as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)
    messages = [event.message for event in log.read(QWEN)]
    assert len(messages) >= 50
    for name in "ab":
        own = [int(message.split()[1]) for message in messages if message.startswith(name)]
        assert own == list(range(300 - len(own), 300))


def test_record_after_torn_line_starts_new_line(log: EventLog) -> None:
    log.record(QWEN, "Normal", "Before", "m")
    with file_of(log).open("ab") as file:
        file.write(b'{"ref": "Model/qwen", "ty')
    log.record(QWEN, "Normal", "After", "m")
    assert [event.reason for event in log.read(QWEN)] == ["Before", "After"]


def test_read_skips_lines_without_events(log: EventLog) -> None:
    file_of(log).write_bytes(b'\0\0\n[]\n{"a": 1}\n7\nnonsense\n\xff\n')
    assert log.read(QWEN) == []


def test_overlong_message_is_shortened(log: EventLog) -> None:
    log.record(QWEN, "Warning", "Failed", "x" * 100_000)
    assert len(log.read(QWEN)[0].message) == 4096


def test_multi_line_message_is_one_event(log: EventLog) -> None:
    log.record(QWEN, "Warning", "Failed", "first\nsecond\u2028third")
    assert [event.message for event in log.read(QWEN)] == ["first\nsecond\u2028third"]


def test_record_bad_name_is_refused(log: EventLog) -> None:
    with pytest.raises(UsageFault):
        log.record(Ref("Model", "../x"), "Normal", "R", "m")


def test_unwritable_event_file_is_named(log: EventLog) -> None:
    file_of(log).mkdir()
    with pytest.raises(ArealError, match=r"events\.jsonl"):
        log.record(QWEN, "Normal", "R", "m")


def test_read_writes_nothing(log: EventLog) -> None:
    log.record(QWEN, "Normal", "R", "m")
    before = contents(log._home.root)
    log.read(QWEN)
    log.read()
    assert contents(log._home.root) == before


def test_record_lock_wait_is_limited_like_store(log: EventLog) -> None:
    code = """
    import fcntl
    from areal.state import events
    events._LOCK_TIMEOUT_S = 0.05
    try:
        EventLog(home).record(Ref("Model", "qwen"), "Normal", "R", "m")
    except Locked as error:
        print(error.message)
    """
    import fcntl
    import os

    log.record(QWEN, "Normal", "R", "m")
    with file_of(log).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"is locked by pid {os.getpid()}" in run(code, log._home).stdout
