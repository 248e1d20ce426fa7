from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.runtime.causes import run_log_paths
from areal.runtime.shim.log import RotatingLog

from .support import unhurried


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path


def content(run_dir: Path) -> list[bytes]:
    return [Path(path).read_bytes() for path in run_log_paths(str(run_dir))]


def test_fitting_write_stays_in_one_file(run_dir: Path) -> None:
    RotatingLog(str(run_dir), 100, 3).write(b"one\ntwo\n")

    assert content(run_dir) == [b"one\ntwo\n"]


def test_write_past_the_limit_rotates_between_lines(run_dir: Path) -> None:
    RotatingLog(str(run_dir), 10, 3).write(b"aaaa\nbbbb\ncccc\n")

    assert content(run_dir) == [b"aaaa\nbbbb\n", b"cccc\n"]


def test_overlong_line_is_cut(run_dir: Path) -> None:
    RotatingLog(str(run_dir), 4, 4).write(b"abcdefghij\n")

    assert content(run_dir) == [b"abcd", b"efgh", b"ij\n"]


def test_oldest_file_is_deleted_beyond_limit(run_dir: Path) -> None:
    log = RotatingLog(str(run_dir), 2, 3)
    for letter in b"abcde":
        log.write(bytes([letter]) + b"\n")

    assert content(run_dir) == [b"c\n", b"d\n", b"e\n"]


def test_single_file_starts_over(run_dir: Path) -> None:
    log = RotatingLog(str(run_dir), 2, 1)
    log.write(b"a\nb\n")

    assert content(run_dir) == [b"b\n"]


def test_reopened_log_continues_within_limit(run_dir: Path) -> None:
    RotatingLog(str(run_dir), 6, 2).write(b"a\nb\n")

    RotatingLog(str(run_dir), 6, 2).write(b"c\nd\n")

    assert content(run_dir) == [b"a\nb\nc\n", b"d\n"]


def test_mark_starts_new_line(run_dir: Path) -> None:
    log = RotatingLog(str(run_dir), 1000, 2)
    log.write(b"no end")
    log.mark("exited 1")

    first, second = content(run_dir)[0].decode().splitlines()
    assert first == "no end"
    assert second.startswith("[areal] ") and second.endswith(" exited 1")


def test_full_disk_drops_output_and_reports_it_later(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RotatingLog(str(run_dir), 1000, 2)
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    real, log._fd = log._fd, full.fileno()
    log.write(b"lost\n")

    log._fd = real
    log.write(b"kept\n")

    assert content(run_dir) == [b"\n[areal] 5 bytes of output were lost: the disk was full\nkept\n"]
    full.close()


@unhurried
@given(
    st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"[", b"(")), max_size=30),
    st.integers(1, 64),
    st.integers(1, 4),
)
def test_any_output_is_kept_in_order_within_the_bounds(chunks: list[bytes], max_bytes: int, files: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "log").mkdir()
        log = RotatingLog(folder, max_bytes, files)
        for chunk in chunks:
            log.write(chunk)
        log.close()
        kept = content(Path(folder))

    assert len(kept) <= files
    assert all(len(data) <= max_bytes for data in kept)
    written = b"".join(chunks)
    assert written.endswith(b"".join(kept))
    if len(kept) < files:
        assert b"".join(kept) == written
