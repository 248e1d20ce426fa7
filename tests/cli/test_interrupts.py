"""Ctrl-C, once and twice, in a process of its own."""

from __future__ import annotations

import signal

import pytest

from tests.cli.conftest import Spawner

# Stands for a reconciler: says that an operation has begun, ends it when told on stdin, then looks at the event.
WORK = """
import sys, threading
from areal.cli.interrupts import graceful
interrupted = threading.Event()
with graceful(interrupted):
    print("begun", flush=True)
    sys.stdin.readline()
    print("finished", interrupted.is_set(), flush=True)
sys.exit(130 if interrupted.is_set() else 0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_lets_the_operation_finish(spawn: Spawner, number: signal.Signals) -> None:
    process = spawn(code=WORK, stdin=-1)
    stdin, stdout, stderr = process.popen.stdin, process.popen.stdout, process.popen.stderr
    assert stdin and stdout and stderr
    assert stdout.readline() == "begun\n"
    process.popen.send_signal(number)
    assert stderr.readline() == "\n"
    assert stderr.readline().startswith("interrupted: finishing")
    stdin.write("\n")
    result = process.finish()
    assert result.code == 130
    assert result.out == "finished True\n"


def test_second_signal_leaves_at_once(spawn: Spawner) -> None:
    process = spawn(code=WORK, stdin=-1)
    stdout, stderr = process.popen.stdout, process.popen.stderr
    assert stdout and stderr
    assert stdout.readline() == "begun\n"
    process.popen.send_signal(signal.SIGINT)
    assert stderr.readline() == "\n"
    process.popen.send_signal(signal.SIGINT)
    result = process.finish()
    assert result.code == 130
    assert "finished" not in result.out


def test_reading_verb_ends_at_the_first_signal(spawn: Spawner) -> None:
    process = spawn("get", "kinds")
    assert process.finish().code == 0
    watching = spawn("events", "-w", "-o", "jsonl", code=WATCH)
    stdout = watching.popen.stdout
    assert stdout and stdout.readline() == "watching\n"
    watching.popen.send_signal(signal.SIGINT)
    result = watching.finish()
    assert result.code == 130
    assert "Traceback" not in result.err


WATCH = """
import sys, time
sys.argv[0] = "areal"
sleep = time.sleep
def told(seconds):
    print("watching", flush=True)
    time.sleep = sleep
    sleep(seconds)
time.sleep = told
from areal.cli.main import main
sys.exit(main())
"""
