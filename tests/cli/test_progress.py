"""Progress on stderr: moving lines on a terminal, one line a change elsewhere."""

from __future__ import annotations

import io
import re

import pytest

from areal.cli.progress import ProgressPrinter
from areal.reconcilers.context import Progress
from areal.terminal import ESCAPE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fancy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def test_off_a_terminal_a_line_is_written_when_the_stage_changes() -> None:
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


def test_quiet_says_nothing() -> None:
    stream = Terminal()
    with ProgressPrinter(quiet=True, stream=stream) as progress:
        progress(Progress("Model/x", "loading weights"))
    assert stream.getvalue() == ""


def test_large_totals_are_bytes() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream) as progress:
        progress(Progress("Model/x", "loading weights", 3 << 29, 3 << 30))
    assert stream.getvalue() == "Model/x: loading weights 1.5GiB/3GiB 50%\n"


def test_on_a_terminal_each_target_keeps_one_line_and_the_last_stage_stays() -> None:
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


def test_on_a_terminal_no_line_is_wider_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    printer = ProgressPrinter(stream=stream)
    printer(Progress("x" * 100, "starting"))
    printer._draw("*")
    assert max(len(line) for line in stream.getvalue().splitlines()) < 20


def test_no_color_means_no_moving_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with ProgressPrinter(stream=stream) as progress:
        progress(Progress("a", "starting"))
    assert ESCAPE not in stream.getvalue() and "\x1b" not in stream.getvalue()


def _step(done: int) -> Progress:
    return Progress("TrainJob/x", "step", done, 200, elapsed_s=done, detail="reward 0.4", eta_s=200.9 - done)


def test_run_off_a_terminal_is_a_line_at_each_tenth() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream=stream) as progress:
        progress(Progress("TrainJob/x", "waiting for completed"))
        for done in (3, 5, 25, 30, 60, 199, 200):
            progress(_step(done))
    assert stream.getvalue().splitlines() == [
        "TrainJob/x: waiting for completed",
        "TrainJob/x: step 3/200 (3s, ETA 3m17s)",
        "TrainJob/x: step 25/200 (25s, ETA 2m55s)",
        "TrainJob/x: step 60/200 (60s, ETA 2m20s)",
        "TrainJob/x: step 199/200 (3m19s, ETA 1s)",
        "TrainJob/x: step 200/200 (3m20s, ETA 0s)",
    ]


def test_run_on_a_terminal_is_one_line_with_its_step_and_what_is_left() -> None:
    stream = Terminal()
    printer = ProgressPrinter(stream=stream)
    with printer as progress:
        progress(_step(12))
        printer._draw("*")
    assert "TrainJob/x: step 12/200 (12s, ETA 3m8s)  reward 0.4" in stream.getvalue()
