from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.errors import ArealError
from areal.state.home import Home
from areal.state.journal import OpenTransaction, Transaction, decode_line, encode_line, orphans, parse

from .support import QWEN, an_object, contents, fast_home, run, running, small_disk

data_values = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=8), max_size=3)
entries = st.fixed_dictionaries({"type": st.sampled_from(["begin", "note", "end"]), "n": st.integers(1, 9)})


def crash(transaction: Transaction) -> None:
    """What the death of the process does to its journal: the lock goes, the file stays."""
    os.close(transaction._fd)
    transaction.closed = True


def orphan_of(home: Home) -> OpenTransaction:
    (found,) = orphans(home)
    return found


def test_open_transaction_of_living_command_is_not_orphan(home: Home) -> None:
    transaction = Transaction.open(home, "apply", [QWEN])
    assert orphans(home) == []
    transaction.commit()
    assert list(home.journal.iterdir()) == []


def test_orphan_has_command_actor_time_and_operations(home: Home) -> None:
    transaction = Transaction.open(home, "apply -f x.yaml", [QWEN])
    first, second = transaction.begin("spawn", run="u1"), transaction.begin("stop", run="u2")
    transaction.note(second, signalled=True)
    transaction.note(first, pid=42)
    transaction.end(first, ready=True)
    crash(transaction)
    found = orphan_of(home)
    assert (found.command, found.objects, found.pid, found.damaged) == (
        "apply -f x.yaml",
        ("Model/qwen",),
        os.getpid(),
        0,
    )
    assert "@" in found.actor
    assert found.at > 0
    spawn, stop = found.operations
    assert (spawn.op, spawn.ended, spawn.data) == ("spawn", True, {"run": "u1", "pid": 42, "ready": True})
    assert (stop.op, stop.ended, stop.data) == ("stop", False, {"run": "u2", "signalled": True})
    assert found.unfinished == (stop,)


def test_orphans_of_a_killed_process_are_found(home: Home) -> None:
    code = """
    tx = Transaction.open(home, "apply")
    tx.begin("spawn", run="u1")
    print("begun", flush=True)
    sys.stdin.read()
    """
    with running(code, home) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert orphans(home) == []
        process.kill()
        process.wait()
        assert [operation.data for operation in orphan_of(home).unfinished] == [{"run": "u1"}]


def test_commit_with_an_open_operation_is_refused(home: Home) -> None:
    transaction = Transaction.open(home, "apply")
    number = transaction.begin("spawn")
    with pytest.raises(ValueError, match="still open"):
        transaction.commit()
    transaction.end(number)
    with pytest.raises(ValueError, match="is not open"):
        transaction.end(number)
    transaction.commit()
    with pytest.raises(ValueError, match="closed"):
        transaction.begin("spawn")


def test_abort_keeps_the_journal_only_while_an_operation_is_open(home: Home) -> None:
    quiet, busy = Transaction.open(home, "quiet"), Transaction.open(home, "busy")
    busy.begin("spawn")
    quiet.abort("nothing was begun")
    busy.abort("the disk was full")
    found = orphan_of(home)
    assert (found.command, found.aborted) == ("busy", "the disk was full")


def test_transaction_context_commits_or_aborts(home: Home) -> None:
    with Transaction.open(home, "good") as transaction:
        transaction.end(transaction.begin("spawn"))
    assert list(home.journal.iterdir()) == []
    with pytest.raises(RuntimeError), Transaction.open(home, "bad") as transaction:
        transaction.begin("spawn")
        raise RuntimeError("boom")
    assert orphan_of(home).aborted == "boom"


def test_resume_ends_the_open_operations_and_removes_the_journal(home: Home) -> None:
    transaction = Transaction.open(home, "apply")
    transaction.begin("spawn", run="u1")
    crash(transaction)
    taken = Transaction.resume(orphan_of(home))
    assert taken is not None
    found, resumed = taken
    assert orphans(home) == []
    with pytest.raises(ValueError):
        resumed.commit()
    resumed.end(found.unfinished[0].n)
    assert resumed.begin("stop") == 2
    resumed.end(2)
    resumed.commit()
    assert list(home.journal.iterdir()) == []


def test_concurrent_resume_succeeds_for_one_command(home: Home) -> None:
    transaction = Transaction.open(home, "apply")
    crash(transaction)
    seen = orphan_of(home)
    taken = Transaction.resume(seen)
    assert taken is not None
    assert Transaction.resume(seen) is None
    taken[1].commit()
    assert Transaction.resume(seen) is None


def test_killed_recovery_leaves_orphan(home: Home) -> None:
    transaction = Transaction.open(home, "apply")
    transaction.begin("spawn", run="u1")
    transaction.begin("spawn", run="u2")
    crash(transaction)
    code = """
    found, resumed = Transaction.resume(orphans(home)[0])
    resumed.end(1)
    resumed.end(2)
    """
    assert run(code, home, AREAL_CRASH_AT="journal-append-after").returncode == 137
    assert [operation.n for operation in orphan_of(home).unfinished] == [2]


def test_reading_orphans_writes_nothing(home: Home) -> None:
    transaction = Transaction.open(home, "apply")
    transaction.begin("spawn")
    crash(transaction)
    before = contents(home.root)
    orphans(home)
    assert contents(home.root) == before


@given(st.lists(entries, min_size=1, max_size=5), st.data())
def test_journal_torn_at_any_byte_parses_to_prefix(written: list[dict[str, object]], data: st.DataObject) -> None:
    lines = [encode_line(entry) for entry in written]
    raw = b"".join(lines)
    cut = data.draw(st.integers(0, len(raw)))
    whole = sum(len(b"".join(lines[: index + 1])) - 1 <= cut for index in range(len(lines)))
    found = parse(Path("j"), raw[:cut])
    assert list(found.entries) == written[:whole]
    assert found.damaged == 0


@given(entries, data_values, st.data())
def test_decode_line_with_one_changed_byte_is_refused(
    entry: dict[str, object], extra: dict[str, object], data: st.DataObject
) -> None:
    line = bytearray(encode_line({**entry, "data": extra}).rstrip(b"\n"))
    assert decode_line(bytes(line)) == {**entry, "data": extra}
    at = data.draw(st.integers(0, len(line) - 2))
    line[at] ^= data.draw(st.integers(1, 255))
    assert decode_line(bytes(line)) is None


@settings(max_examples=40)
@given(st.integers(1, 400))
def test_resume_after_torn_append_starts_new_line(torn: int) -> None:
    line = encode_line({"type": "note", "n": 1, "data": {"pid": 42}})
    with fast_home() as home:
        transaction = Transaction.open(home, "apply")
        transaction.begin("spawn", run="u1")
        os.write(transaction._fd, line[: min(torn, len(line))])
        crash(transaction)
        taken = Transaction.resume(orphan_of(home))
        assert taken is not None
        found, resumed = taken
        whole = torn >= len(line) - 1
        assert found.operations[0].data == ({"run": "u1", "pid": 42} if whole else {"run": "u1"})
        resumed.end(1, done=True)
        crash(resumed)
        after = orphan_of(home)
        assert (after.damaged, after.unfinished) == (0, ())
        assert dict(after.operations[0].data)["done"] is True


def test_damage_before_the_tail_is_counted_and_the_rest_is_read(home: Home) -> None:
    transaction = Transaction.open(home, "apply")
    for name in ("a", "b", "c"):
        transaction.begin(name)
    crash(transaction)
    lines = transaction.path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"b"', b'"x"')
    transaction.path.write_bytes(b"\n".join(lines))
    found = orphan_of(home)
    assert found.damaged == 1
    assert [operation.op for operation in found.operations] == ["a", "c"]


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"garbage\n"])
def test_journal_without_readable_head_is_an_orphan(home: Home, content: bytes) -> None:
    (home.journal / "x.jsonl").write_bytes(content)
    found = orphan_of(home)
    assert (found.command, found.entries) == ("unknown", ())
    taken = Transaction.resume(found)
    assert taken is not None
    taken[1].commit()
    assert orphans(home) == []


def test_concurrent_appends_lose_and_mix_nothing(home: Home) -> None:
    transaction = Transaction.open(home, "apply")

    def work(name: str) -> None:
        for index in range(20):
            number = transaction.begin(name, index=index)
            transaction.note(number, noted=index)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    crash(transaction)
    found = orphan_of(home)
    assert sorted(operation.n for operation in found.operations) == list(range(1, 81))
    for name in "abcd":
        data = [operation.data for operation in found.operations if operation.op == name]
        assert data == [{"index": index, "noted": index} for index in range(20)]


def test_append_to_full_disk_is_an_error_and_keeps_whole_lines(tmp_path: Path) -> None:
    code = """
    home.ensure()
    tx = Transaction.open(home, "apply")
    count = 0
    try:
        while True:
            tx.begin("spawn", text="x" * 3000)
            count += 1
    except ArealError as error:
        print(error.message)
    tx.abort("full")
    (orphan,) = orphans(home)
    print(count > 0, len(orphan.unfinished) == count, orphan.damaged, tx.path.read_bytes().endswith(b"\\n"))
    """
    ended = run(code, Home(tmp_path / "home"), *small_disk(tmp_path))
    assert "the disk is full" in ended.stdout, ended.stderr
    assert "True True 0 True" in ended.stdout


def test_open_in_unwritable_home_names_it(home: Home) -> None:
    home.journal.rmdir()
    home.journal.write_text("")
    with pytest.raises(ArealError, match=str(home.journal)) as caught:
        Transaction.open(home, "apply")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno in (errno.ENOTDIR, errno.EEXIST)


@pytest.mark.parametrize(
    ("point", "found"),
    [
        ("journal-open-before", 0), ("journal-open-after", 1), ("journal-append-before", 1),
        ("journal-append-after:2", 1), ("journal-commit-before", 1), ("journal-commit-after", 0),
    ],
)  # fmt: skip
def test_command_killed_at_any_journal_step_is_recoverable(home: Home, point: str, found: int) -> None:
    code = """
    with Transaction.open(home, "apply") as tx:
        tx.end(tx.begin("spawn"))
    """
    assert run(code, home, AREAL_CRASH_AT=point).returncode == 137
    assert len(orphans(home)) == found


def test_journal_is_independent_of_stored_objects(home: Home) -> None:
    from areal.state.objects import ObjectStore

    ObjectStore(home).put(an_object())
    crash(Transaction.open(home, "apply", [QWEN]))
    assert orphan_of(home).objects == ("Model/qwen",)
