from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from subprocess import Popen

import pytest

from areal.errors import Locked
from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.locks import (
    LockHolder,
    actor,
    command_line,
    holder,
    lock_objects,
    lock_path,
    lock_store,
    redact,
    user_name,
)
from areal.state.objects import ObjectStore

from .support import QWEN, an_object, contents, run, running

LLAMA = Ref("Model", "llama")
HOLD = """
with lock_objects(home, [Ref("Model", "qwen")], command="areal apply -f prod.yaml") as held:
    {announce}
    print("held", flush=True)
    sys.stdin.read()
"""
ANNOUNCED = HOLD.format(announce="held.announce()")
SILENT = HOLD.format(announce="pass")


def heard(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_held_lock_names_pid_command_and_user(home: Home) -> None:
    with running(ANNOUNCED, home) as process:
        assert heard(process) == "held"
        with pytest.raises(Locked, match=rf"pid {process.pid}, running `areal apply -f prod.yaml`, since ") as caught:
            with lock_objects(home, [QWEN]):
                pass
    assert caught.value.message.startswith("Model/qwen is locked by ")
    assert f"@{os.uname().nodename}" in caught.value.message
    assert "--lock-timeout" in (caught.value.hint or "")
    assert caught.value.exit_code == 6


def test_lock_of_job_cleanup_is_awaited_without_timeout(home: Home) -> None:
    ends = """
with lock_objects(home, [Ref("Model", "qwen")], command="areal.reconcilers.background TrainJob/j") as held:
    held.announce()
    print("held", flush=True)
    sys.stdin.readline()
"""
    with running(ends, home) as process:
        assert heard(process) == "held"
        told = threading.Timer(0.3, lambda: process.communicate("end\n"))  # after the time in which others give up
        told.start()
        with lock_objects(home, [QWEN]) as held:
            assert held.refs == (QWEN,)
        told.join()


def test_unannounced_lock_is_found_in_the_kernels_list(home: Home) -> None:
    with running(SILENT, home) as process:
        assert heard(process) == "held"
        found = holder(home, QWEN)
    assert found is not None
    assert found.pid == process.pid
    assert "python" in found.command


def test_lock_of_killed_process_is_free(home: Home) -> None:
    with running(ANNOUNCED, home) as process:
        assert heard(process) == "held"
        process.kill()
        process.wait()
        assert holder(home, QWEN) is None
        with lock_objects(home, [QWEN]):
            found = holder(home, QWEN)
            assert found is not None
            assert found.pid == os.getpid()


def test_one_of_racing_processes_gets_lock(home: Home) -> None:
    code = """
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with lock_objects(home, [Ref("Model", "qwen")]) as held:
            held.announce()
            print("got", os.getpid(), flush=True)
            sys.stdin.read()
    except Locked as error:
        print("lost", error.message, flush=True)
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(running(code, home)) for _ in range(4)]
        assert [heard(process) for process in processes] == ["ready"] * 4
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        words = [heard(process) for process in processes]
    winners = [word.split()[1] for word in words if word.startswith("got")]
    assert len(winners) == 1
    assert all(f"pid {winners[0]}," in word for word in words if word.startswith("lost"))
    assert sum(word.startswith("lost") for word in words) == 3


def test_lock_with_timeout_waits_and_names_holder_once(home: Home) -> None:
    told: list[str] = []
    with running(ANNOUNCED, home) as process:
        assert heard(process) == "held"

        def wake(message: str) -> None:
            told.append(message)
            assert process.stdin is not None
            process.stdin.close()

        with lock_objects(home, [QWEN], timeout_s=60, on_wait=wake) as held:
            assert held.refs == (QWEN,)
        process.stdin = None
    assert len(told) == 1
    assert "areal apply -f prod.yaml" in told[0]


def test_interrupted_lock_wait_ends_at_once(home: Home) -> None:
    interrupted = threading.Event()
    with running(ANNOUNCED, home) as process:
        assert heard(process) == "held"
        with pytest.raises(KeyboardInterrupt):
            with lock_objects(home, [QWEN], timeout_s=60, interrupted=interrupted, on_wait=lambda _: interrupted.set()):
                pass


def test_lock_failing_halfway_releases_acquired_ones(home: Home) -> None:
    with running(ANNOUNCED, home) as process:
        assert heard(process) == "held"
        with pytest.raises(Locked):
            with lock_objects(home, [LLAMA, QWEN]):
                pass
        assert holder(home, LLAMA) is None


def test_locks_in_any_order_never_deadlock(home: Home) -> None:
    code = """
    refs = [Ref("Model", "a"), Ref("Model", "b"), Ref("Model", "c")]
    for _ in range(100):
        with lock_objects(home, {order}, timeout_s=60):
            pass
    """
    forth, back = code.format(order="refs"), code.format(order="refs[::-1]")
    with running(forth, home) as one, running(back, home) as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)


def test_locks_are_taken_in_fixed_order(home: Home) -> None:
    with lock_objects(home, [QWEN, LLAMA, Ref("InferenceService", "z"), QWEN]) as held:
        assert [str(ref) for ref in held.refs] == ["InferenceService/z", "Model/llama", "Model/qwen"]


def test_relock_of_existing_object_writes_nothing(home: Home) -> None:
    ObjectStore(home).put(an_object())
    with lock_objects(home, [QWEN]):
        pass
    before = contents(home.root)
    with lock_objects(home, [QWEN], command="areal apply") as held:
        assert contents(home.root) == before
        held.announce()
        told = json.loads(lock_path(home, QWEN).read_text())
        assert (told["pid"], told["command"]) == (os.getpid(), "areal apply")
    assert {path.name for path in home.locks.iterdir()} == {"model.qwen.lock", "store.lock"}


def test_holder_of_many_locks_is_written_once(home: Home) -> None:
    refs = [Ref("Model", f"m{number}") for number in range(5)]
    for ref in refs:
        ObjectStore(home).put(replace(an_object(), name=ref.name))
    hold = """
    with lock_objects(home, [Ref("Model", f"m{number}") for number in range(5)], command="areal apply") as held:
        held.announce()
        print("held", flush=True)
        sys.stdin.read()
    """
    with running(hold, home) as process:
        assert heard(process) == "held"
        assert [lock_path(home, ref).stat().st_size > 0 for ref in refs] == [True, False, False, False, False]
        for ref in refs:
            found = holder(home, ref)
            assert found is not None and (found.pid, found.command) == (process.pid, "areal apply") and found.since
        process.kill()
        process.wait()
    with lock_objects(home, refs[1:3]) as held:  # the killed one's announcement names them, and counts for nothing
        silent, unheld = holder(home, refs[1]), holder(home, refs[0])
        assert unheld is None and silent is not None and (silent.pid, silent.since) == (os.getpid(), None)
        held.announce()
    assert lock_path(home, refs[1]).stat().st_size == 0


def test_lock_of_missing_object_leaves_no_file(home: Home) -> None:
    with lock_objects(home, [QWEN]) as held:
        held.announce()
        assert lock_path(home, QWEN).exists()
    assert list(home.locks.iterdir()) == []


def test_lock_file_removed_while_waiting_stays_exclusive(home: Home) -> None:
    """The last holder of a deleted object's lock removes its file; a waiter must not keep the nameless one."""
    code = """
    for _ in range(150):
        with lock_objects(home, [Ref("Model", "qwen")], timeout_s=60):
            fd = os.open(home.root / "inside", os.O_CREAT | os.O_EXCL)
            os.unlink(home.root / "inside")
            os.close(fd)
    """
    with running(code, home) as one, running(code, home) as two:
        assert (one.wait(60), two.wait(60)) == (0, 0)


def test_holder_of_free_or_unknown_lock_is_none(home: Home) -> None:
    before = contents(home.root)
    assert holder(home, QWEN) is None
    assert holder(Home(home.root / "absent"), QWEN) is None
    assert contents(home.root) == before


def test_holder_readers_never_fail_a_locker(home: Home) -> None:
    ObjectStore(home).put(an_object())
    code = """
    print("up", flush=True)
    while True:
        holder(home, Ref("Model", "qwen"))
    """
    with running(code, home) as reader:
        assert heard(reader) == "up"
        for _ in range(300):
            with lock_objects(home, [QWEN]):
                pass


def test_lock_store_held_elsewhere_names_holder(home: Home) -> None:
    code = """
    from areal.state import locks
    from areal.state.locks import lock_store
    locks._STORE_TIMEOUT_S = 0.05
    try:
        with lock_store(home):
            print("in")
    except Locked as error:
        print(error.message)
    """
    with lock_store(home):
        assert "the store is locked by " in run(code, home).stdout
    assert run(code, home).stdout == "in\n"


def test_invisible_holder_is_reported() -> None:
    assert "cannot be seen" in str(LockHolder("", "", 0, "", None))


def test_actor_is_user_at_host() -> None:
    assert actor() == f"{user_name(os.geteuid())}@{os.uname().nodename}"


def test_user_name_of_an_unknown_uid_is_its_number() -> None:
    assert user_name(987654) == "uid 987654"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/areal", "apply", "-f", "a b.yaml"], "areal apply -f 'a b.yaml'"),
        (["areal", "inf", "ps", "--api-key", "hush", "-q"], "areal inf ps --api-key REDACTED -q"),
        (["areal", "inf", "ps", "--api-key=hush"], "areal inf ps --api-key=REDACTED"),
        (["areal", "x", "--password", "-hush"], "areal x --password REDACTED"),
        (["areal", "x", "--api-key-file", "/k", "--provider-api-key-env", "VAR"], None),
        (["areal", "x", "--max-tokens", "5", "--max-tokens=5", "--tokenizer-path", "/t"], None),
        (["areal", "agent", "run", "--env", "API_KEY=hush"], "areal agent run --env API_KEY=REDACTED"),
        (["areal", "agent", "run", "--env=API_KEY=hush"], "areal agent run --env=API_KEY=REDACTED"),
        (["areal", "apply", "--set", "spec.env.HF_TOKEN=hush"], "areal apply --set spec.env.HF_TOKEN=REDACTED"),
        (["areal", "apply", "--set", "spec.apiKey=hush"], "areal apply --set spec.apiKey=REDACTED"),
        (["areal", "x", "--gateway", "http://u:hush@h:1/"], "areal x --gateway http://REDACTED@h:1/"),
        (["areal", "x", "sk-hushhushhush"], "areal x REDACTED"),
        ([], ""),
    ],
)
def test_command_line_hides_secrets(argv: list[str], shown: str | None) -> None:
    assert command_line(argv) == (" ".join(argv) if shown is None else shown)


@pytest.mark.parametrize(
    "text",
    ['{"api_key": "hush"}', "Authorization: Bearer hush", "token: hush", "secret='hush'", "https://x:hush@host/p"],
)
def test_redact_hides_the_secret_in_free_text(text: str) -> None:
    assert "hush" not in redact(text)
    assert "REDACTED" in redact(text)


@pytest.mark.parametrize("text", ["monkey: banana", "max_tokens=5", "keyboard=us", "path=/keys/x"])
def test_redact_keeps_ordinary_words(text: str) -> None:
    assert redact(text) == text
