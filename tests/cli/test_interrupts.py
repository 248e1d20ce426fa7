"""Ctrl-C, once and twice, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.config import uncaught
from areal.interrupt import is_ours
from tests.cli.conftest import REPOSITORY, Spawner

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


# Stands for a library that takes long to import, and for one that makes another error of an interrupt.
SLOW = "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"
SLY = """
try:
    print('importing', flush=True)
    import time
    time.sleep(60)
except BaseException:
    raise ImportError('broken')
"""


@pytest.mark.parametrize(
    ("words", "library", "source"),
    [
        (("areal.cli", "version"), "click", SLOW),
        (("areal.cli", "version"), "click", SLY),
        (("areal.cli", "render", "-f", "x"), "yaml", SLY),
        (("areal.services.inference.router",), "orjson", SLOW),
        (("areal.services.weight_update",), "orjson", SLY),
        (("areal.training", "--driver", "slow_driver:main"), "slow_driver", SLOW),
        (("areal.training", "--driver", "slow_driver:main"), "slow_driver", SLY),
    ],
)
def test_interrupt_during_an_import_is_one_line(
    tmp_path: Path, words: tuple[str, ...], library: str, source: str
) -> None:
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / f"{library}.py").write_text(source)
    argv = [sys.executable, "-m", *words]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{REPOSITORY}"},
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n", process.communicate()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said in ("interrupted\n", "stopped\n"), said


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["python", "/usr/bin/areal", "get"], True),
        (["python", "-X", "utf8", "-m", "areal.cli", "get"], True),
        (["python", "-m", "areal"], True),
        (["python", "-m", "arealx.cli"], False),
        (["python", "driver.py", "areal"], False),
        (["python", "-c", "import areal"], False),
        (["python"], False),
    ],
)
def test_programs_of_others_are_left_alone(words: list[str], ours: bool) -> None:
    assert is_ours(words) is ours


def test_plain_driver_that_is_interrupted_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        uncaught._uncaught(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"
