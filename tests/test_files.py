"""Files that are replaced whole."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from areal.files import disk_remedy, last_lines, lock_named, parse_json, replace_file, still_named
from areal.runtime import records


def test_replaced_file_has_new_bytes_without_draft(tmp_path: Path) -> None:
    path = tmp_path / "about.json"
    replace_file(path, b"old")
    replace_file(path, b"new", durable=True)
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["about.json"]


def test_file_is_private_by_default(tmp_path: Path) -> None:
    replace_file(tmp_path / "stage.json", b"{}")
    assert (tmp_path / "stage.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "", b"\xff"])
def test_unparsable_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_secret_is_private_from_first_byte(tmp_path: Path) -> None:
    replace_file(tmp_path / "key", b"secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_full_disk_keeps_old_bytes_without_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "about.json"
    replace_file(path, b"old")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["about.json"]


def test_weights_that_find_no_room_ask_for_room(tmp_path: Path) -> None:
    import torch

    from areal.training.engines.huggingface import write_model

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="os error") as caught:
            write_model({"weight": torch.zeros(1 << 16)}, [], tmp_path / "model", "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (disk_remedy(caught.value), list(tmp_path.iterdir())) == ("free space", [])
    assert disk_remedy(OSError(errno.EIO, "a bad sector")) == "check the disk"


def test_run_record_is_written_without_folder_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems, which answer EINVAL."""
    sync = os.fsync

    def only_files(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(fd)

    monkeypatch.setattr(os, "fsync", only_files)
    records.write_json(str(tmp_path), "id.json", {"pid": 1})
    assert records.read_object(str(tmp_path), "id.json") == {"pid": 1}


@pytest.mark.parametrize(
    ("most_bytes", "lines", "is_all"),
    [(100, [b"one", b"two", b"three"], True), (13, [b"one", b"two", b"three"], True), (12, [b"two", b"three"], False)],
)
def test_last_lines_begin_in_the_last_bytes(tmp_path: Path, most_bytes: int, lines: list[bytes], is_all: bool) -> None:
    (tmp_path / "log").write_bytes(b"one\ntwo\nthree")
    assert last_lines(tmp_path / "log", most_bytes) == (lines, is_all)


def test_file_that_another_process_holds_is_not_locked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()

    def opened() -> int:
        return os.open(path, os.O_RDWR)

    held = lock_named(path, opened, range(1))
    assert held is not None and lock_named(path, opened, range(3)) is None
    os.close(held)


def test_file_that_was_removed_before_it_was_locked_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    opens: list[int] = []

    def opened() -> int:
        opens.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if len(opens) == 1:
            path.unlink()
        return opens[-1]

    held = lock_named(path, opened, range(2))
    assert held == opens[1] and still_named(held, path)
    os.close(held)
