"""Progress on stderr, and Ctrl-C, once and twice, in a process of its own."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal.api.config import loading as uncaught
from areal.cli.operate import ProgressPrinter
from areal.interrupt import is_ours
from areal.reconcilers.context import Outcome, Progress
from areal.terminal import ESCAPE
from tests.cli.conftest import REPOSITORY, Areal, Spawner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fancy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def test_without_terminal_each_stage_change_writes_a_line() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream) as progress:
        for done in range(5):
            progress(Progress("Model/x engine/0", "loading weights", done, 5, elapsed_s=done))
        progress(Progress("Model/x engine/1", "loading weights"))
        progress(Progress("Model/x engine/0", "ready", elapsed_s=7))
    assert stream.getvalue().splitlines() == [
        "Model/x engine/0: loading weights 0/5",
        "Model/x engine/1: loading weights",
        "Model/x engine/0: ready (7s)",
    ]


def test_verbose_writes_every_count() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream, verbose=True) as progress:
        for done in (1, 1, 2):
            progress(Progress("a", "loading weights", done, 2))
    assert stream.getvalue().splitlines() == ["a: loading weights 1/2", "a: loading weights 2/2"]


def test_quiet_writes_nothing() -> None:
    stream = Terminal()
    with ProgressPrinter(quiet=True, stream=stream) as progress:
        progress(Progress("Model/x", "loading weights"))
    assert stream.getvalue() == ""


def test_large_totals_are_shown_as_bytes() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream) as progress:
        progress(Progress("Model/x", "loading weights", 3 << 29, 3 << 30))
    assert stream.getvalue() == "Model/x: loading weights 1.5GiB/3GiB 50%\n"


def test_terminal_keeps_one_line_per_target() -> None:
    stream = Terminal()
    printer = ProgressPrinter(stream=stream)
    with printer as progress:
        for ref in ("a", "b"):
            for stage in ("starting", "ready"):
                progress(Progress(ref, stage))
                with printer._lock:
                    printer._erase()
                    printer._draw("*")
    final = re.split(rf"{ESCAPE}\[\d+A{ESCAPE}\[J", stream.getvalue())[-1]
    assert final == "a: ready\nb: ready\n"


def test_low_terminal_shows_unfinished_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "4")
    stream = Terminal()
    printer = ProgressPrinter(stream=stream)
    for name in "abcd":
        printer(Progress(name, "ready"))
    printer(Progress("a", "loading weights", 1, 9))
    printer._draw("*")
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["a:", "d:"]


def test_progress_line_fits_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    printer = ProgressPrinter(stream=stream)
    printer(Progress("x" * 100, "starting"))
    printer._draw("*")
    assert max(len(line) for line in stream.getvalue().splitlines()) < 20


def test_no_color_disables_moving_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with ProgressPrinter(stream=stream) as progress:
        progress(Progress("a", "starting"))
    assert ESCAPE not in stream.getvalue() and "\x1b" not in stream.getvalue()


def _step(done: int) -> Progress:
    return Progress("TrainJob/x", "step", done, 200, elapsed_s=done, detail="reward 0.4", eta_s=200.9 - done)


def test_run_without_terminal_prints_every_tenth() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream) as progress:
        progress(Progress("TrainJob/x", "waiting for completed"))
        for done in (3, 5, 25, 30, 60, 199, 200):
            progress(_step(done))
    assert stream.getvalue().splitlines() == [
        "TrainJob/x: waiting for completed",
        "TrainJob/x: step 3/200 (3s, ETA 3m17s)  reward 0.4",
        "TrainJob/x: step 25/200 (25s, ETA 2m55s)  reward 0.4",
        "TrainJob/x: step 60/200 (60s, ETA 2m20s)  reward 0.4",
        "TrainJob/x: step 199/200 (3m19s, ETA 1s)  reward 0.4",
        "TrainJob/x: step 200/200 (3m20s, ETA 0s)  reward 0.4",
    ]


def test_run_on_terminal_shows_step_and_eta() -> None:
    stream = Terminal()
    printer = ProgressPrinter(stream=stream)
    with printer as progress:
        progress(_step(12))
        printer._draw("*")
    assert "TrainJob/x: step 12/200 (12s, ETA 3m8s)  reward 0.4" in stream.getvalue()


# -- deadlines


@pytest.mark.parametrize(
    ("command", "operation"),
    [(("reconcile",), "reconcile_once"), (("adopt", "--url", "http://10.0.0.7:8000", "--as", "model/q"), "adopt")],
)
def test_verb_timeout_applies_to_operation(
    areal: Areal, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], operation: str
) -> None:
    from areal.reconcilers import operations

    seen: list[object] = []

    def told(*args: object, **given: object) -> Outcome:
        seen.extend((*args, *given.values()))
        return Outcome()

    monkeypatch.setattr(operations, operation, told)

    assert areal(*command, "--timeout", "7s").code == 0
    assert 7.0 in seen


# -- Ctrl-C

# Stands for a reconciler: says that an operation has begun, ends it when told on stdin, then looks at the event.
WORK = """
import sys, threading
from areal.cli.operate import graceful
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


HELD = """
import signal, sys, threading
from areal.cli.operate import graceful
interrupted = threading.Event()
with graceful(interrupted):
    with interrupted._cond:  # as in its wait()
        signal.raise_signal(signal.SIGINT)
    sys.exit(130 if interrupted.wait(10) else 1)
"""


def test_signal_during_event_wait_does_not_hang(spawn: Spawner) -> None:
    assert spawn(code=HELD).finish().code == 130


def test_second_signal_exits_at_once(spawn: Spawner) -> None:
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


def test_read_command_exits_at_first_signal(spawn: Spawner) -> None:
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
import sys
sys.argv[0] = "areal"
from areal.cli import get
from areal.cli.main import main
pause = get.pause
def told(seconds):
    print("watching", flush=True)
    get.pause = pause
    pause(seconds)
get.pause = told
sys.exit(main())
"""


# Stands for a library that takes long to import, and for one that makes another error of an interrupt.
# Many short sleeps: a signal that comes just before a long one would be seen at its end.
SLOW = "print('importing', flush=True)\nimport time\nfor _ in range(6000):\n    time.sleep(0.01)\n"
SLY = """
try:
    print('importing', flush=True)
    import time
    for _ in range(6000):
        time.sleep(0.01)
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
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr in ("interrupted\n", "stopped\n"), stderr


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
def test_foreign_programs_are_not_handled(words: list[str], ours: bool) -> None:
    assert is_ours(words) is ours


def test_interrupted_driver_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        uncaught._uncaught(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"
