from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.runtime.causes import run_log_paths
from areal.runtime.logs import LogFollower, timed_lines
from areal.runtime.shim.log import RotatingLog

from .support import unhurried


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path


class Clock:
    """The wall clock of the shim, as far as a log asks it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_follower_sees_new_whole_lines_only(run_dir: Path) -> None:
    log = RotatingLog(str(run_dir), 1000, 3)
    log.write(b"old\n")
    follower = LogFollower(lambda: run_log_paths(str(run_dir)))

    log.write(b"one\ntw")
    first = follower.poll()
    log.write(b"o\n")

    assert (first, follower.poll(), follower.poll()) == (["one"], ["two"], [])
    follower.close()


def test_follower_started_before_log_reads_from_beginning(run_dir: Path) -> None:
    follower = LogFollower(lambda: run_log_paths(str(run_dir)))
    assert follower.poll() == []

    RotatingLog(str(run_dir), 1000, 3).write(b"one\n")

    assert follower.poll() == ["one"]
    follower.close()


@unhurried
@given(st.lists(st.integers(1, 9), max_size=30))
def test_follower_survives_rotation_without_loss_or_repeat(counts: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "log").mkdir()
        log = RotatingLog(folder, 30, 5)
        follower = LogFollower(lambda: run_log_paths(folder), from_start=True)
        written: list[str] = []
        seen: list[str] = []
        for count in counts:
            lines = [f"line {len(written) + number}" for number in range(count)]
            written += lines
            log.write("".join(f"{line}\n" for line in lines).encode())
            seen += follower.poll()
        assert seen == written
        follower.close()
        log.close()


def test_timed_lines_carry_the_time_of_their_second(run_dir: Path) -> None:
    clock = Clock()
    log = RotatingLog(str(run_dir), 12, 3, clock)
    for number in range(4):
        clock.now = 1000.0 + 10 * number
        log.write(f"line {number}\n".encode())

    lines = list(timed_lines(run_log_paths(str(run_dir))))

    assert [(line.at, line.text) for line in lines] == [
        (1010.0, "line 1"),
        (1020.0, "line 2"),
        (1030.0, "line 3"),
    ]


def test_timed_lines_since_moment_omit_earlier_lines(run_dir: Path) -> None:
    clock = Clock()
    log = RotatingLog(str(run_dir), 1000, 3, clock)
    for number in range(4):
        clock.now = 1000.0 + 10 * number
        log.write(f"line {number}\n".encode())

    since = [line.text for line in timed_lines(run_log_paths(str(run_dir)), since=1020.0)]

    assert since == ["line 2", "line 3"]


def test_timed_lines_without_times_are_kept(run_dir: Path) -> None:
    (run_dir / "log" / "current.log").write_text("one\ntwo\n")

    assert [(line.at, line.text) for line in timed_lines(run_log_paths(str(run_dir)), since=5.0)] == [
        (0.0, "one"),
        (0.0, "two"),
    ]
