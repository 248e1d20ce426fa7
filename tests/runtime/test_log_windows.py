"""Windows of a log by byte positions, over generated logs that are rotated while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal.runtime.logs import Place, PlacedLine, end_of, level_of, lines_after, lines_before

WIDE = 1 << 30
LINES = st.lists(st.text("ab\r\u00e9 E", max_size=12), max_size=40)


def everything(line: PlacedLine) -> bool:
    return True


def write(folder: Path, files: list[list[str]]) -> list[str]:
    """The paths of files, oldest first."""
    paths = []
    for number, lines in enumerate(files):
        path = folder / f"log.{number}"
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        paths.append(str(path))
    return paths


def texts(lines: list[PlacedLine]) -> list[str]:
    return [line.text for line in lines]


@given(files=st.lists(LINES, min_size=1, max_size=4), page=st.integers(1, 7))
def test_backward_pages_cover_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], page: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    paths = write(folder, files)
    place = end_of(paths, ended=False)
    found: list[PlacedLine] = []
    while place is not None:
        window = lines_before(paths, place, page, everything, most_bytes=WIDE)
        found = window.lines + found
        place = window.start
    assert texts(found) == [line.rstrip("\r") for lines in files for line in lines]


@given(files=st.lists(LINES, min_size=1, max_size=4), most=st.integers(16, 200))
@example(files=[["x" * 27, "x" * 26], ["y" * 9]], most=64)
def test_forward_pages_cover_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], most: int
) -> None:
    paths = write(tmp_path_factory.mktemp("log"), files)
    place, more = None, True
    found: list[PlacedLine] = []
    while more:
        window = lines_after(paths, place, everything, most_bytes=max(most, 64), ended=False)
        found += window.lines
        place, more = window.end, window.more
    assert texts(found) == [line.rstrip("\r") for lines in files for line in lines]


def test_incomplete_line_is_returned_once_whole(tmp_path: Path) -> None:
    log = tmp_path / "current.log"
    log.write_bytes(b"one\ntw")
    end = end_of([str(log)], ended=False)
    assert end is not None and end.offset == 4
    assert texts(lines_before([str(log)], end, 9, everything, most_bytes=WIDE).lines) == ["one"]
    assert lines_after([str(log)], end, everything, most_bytes=WIDE, ended=False).lines == []
    with log.open("ab") as file:
        file.write(b"o\nthree\n")
    newer = lines_after([str(log)], end, everything, most_bytes=WIDE, ended=False)
    assert texts(newer.lines) == ["two", "three"]
    log.write_bytes(log.read_bytes() + b"Segmentation fault")
    assert texts(lines_after([str(log)], newer.end, everything, most_bytes=WIDE, ended=True).lines) == [
        "Segmentation fault"
    ]


def test_rotation_between_reads_loses_and_repeats_nothing(tmp_path: Path) -> None:
    current, older = tmp_path / "current.log", tmp_path / "current.log.1"
    current.write_bytes(b"one\ntwo\n")
    end = end_of([str(current)], ended=False)
    with current.open("ab") as file:
        file.write(b"three\n")
    current.rename(older)
    current.write_bytes(b"four\n")
    newer = lines_after([str(older), str(current)], end, everything, most_bytes=WIDE, ended=False)
    assert texts(newer.lines) == ["three", "four"]
    assert end is not None
    assert texts(lines_before([str(older), str(current)], end, 9, everything, most_bytes=WIDE).lines) == ["one", "two"]


def test_distant_filter_match_returns_continuation(tmp_path: Path) -> None:
    log = tmp_path / "current.log"
    log.write_bytes(b"ERROR first\n" + b"x" * 99 + b"\n" * 1 + b"plain line\n" * 30_000)
    end = end_of([str(log)], ended=False)
    asked = 0
    found: list[PlacedLine] = []
    while end is not None and not found:
        window = lines_before([str(log)], end, 5, lambda line: line.level == "error", most_bytes=1 << 16)
        found, end, asked = window.lines, window.start, asked + 1
    assert texts(found) == ["ERROR first"] and asked >= 3


def test_line_of_a_megabyte_is_cut_and_the_next_one_found(tmp_path: Path) -> None:
    log = tmp_path / "current.log"
    log.write_bytes(b"a" * (1 << 20) + b"\nb\n")
    end = end_of([str(log)], ended=False)
    assert end is not None
    long, short = lines_before([str(log)], end, 9, everything, most_bytes=WIDE).lines
    assert len(long.text) + long.cut == 1 << 20 and len(long.text) < 10_000
    assert short.text == "b"


def test_level_is_parsed_from_line() -> None:
    assert level_of("2026 ERROR engine: no memory") == "error"
    assert level_of("ValueError: bad") == "error"
    assert level_of("Traceback (most recent call last):") == "error"
    assert level_of("UserWarning: slow") == "warning"
    assert level_of("WARNING  queue is full") == "warning"
    assert level_of("INFO no errors") == "info"


def test_place_round_trips_through_text() -> None:
    assert Place.parse(str(Place(12345, 6789))) == Place(12345, 6789)
