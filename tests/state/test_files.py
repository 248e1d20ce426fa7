from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError
from areal.state.files import (
    UnreadableFile,
    is_temp,
    names_in,
    quarantine,
    quarantined,
    read_json,
    seal,
    unseal,
    write_atomic,
    write_json,
)
from areal.state.home import Home

from .support import run, small_disk

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
def test_unseal_of_sealed_returns_body(body: object) -> None:
    assert unseal(seal(body)) == body


@given(json_values, st.data())
def test_unseal_of_any_proper_prefix_is_refused(body: object, data: st.DataObject) -> None:
    raw = seal(body)
    with pytest.raises(ValueError):
        unseal(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(json_values, st.data())
def test_unseal_of_flipped_bit_is_refused(body: object, data: st.DataObject) -> None:
    raw = bytearray(seal(body))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        unseal(bytes(raw))


def test_write_atomic_creates_missing_folders_private(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomic(path, "text")
    assert path.read_text() == "text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert names_in(path.parent) == ["file"]


def test_write_atomic_below_file_names_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("in the way")
    with pytest.raises(ArealError, match="a file stands where a folder is needed"):
        write_atomic(tmp_path / "a" / "file", "text")


def test_read_json_absent_file_is_not_unreadable(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"{}", b'{"sha256": "', b"not json"])
def test_read_json_damaged_file_names_path_and_reason(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "object.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile, match=r"object\.json is unreadable: ") as caught:
        read_json(path)
    assert caught.value.damaged
    assert "doctor --fix" in (caught.value.hint or "")


def test_read_json_of_folder_is_not_damage(tmp_path: Path) -> None:
    (tmp_path / "object.json").mkdir()
    with pytest.raises(UnreadableFile) as caught:
        read_json(tmp_path / "object.json")
    assert not caught.value.damaged


def test_quarantine_twice_within_a_second_keeps_both(tmp_path: Path) -> None:
    path = tmp_path / "object.json"
    for content in ("one", "two"):
        path.write_text(content)
        quarantine(path)
    assert not path.exists()
    assert sorted((tmp_path / name).read_text() for name in quarantined(path)) == ["one", "two"]


@pytest.mark.parametrize(("point", "left"), [("write-before", "old"), ("write-synced", "old"), ("write-after", "new")])
def test_write_atomic_killed_leaves_the_old_or_the_new_file(home: Home, point: str, left: str) -> None:
    write_json(home.root / "file", "old")
    ended = run('write_json(home.root / "file", "new")', home, AREAL_CRASH_AT=point)
    assert ended.returncode == 137
    assert read_json(home.root / "file") == left
    others = {path.name for path in home.root.iterdir() if path.is_file()} - {"file"}
    assert all(is_temp(name) for name in others)


FILL = """
try:
    write_json(home.root / "file", "x" * 200_000)
except ArealError as error:
    print(error.message, "|", error.hint)
print(read_json(home.root / "file"), sorted(os.listdir(home.root)))
"""


def test_write_atomic_over_size_limit_keeps_old_file(home: Home) -> None:
    write_json(home.root / "file", "old")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    ended = run(limit + FILL, home)
    assert "file size limit was reached" in ended.stdout
    assert f"old {names_in(home.root)}" in ended.stdout


def test_write_atomic_on_full_disk_keeps_old_file(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ended = run('write_json(home.root / "file", "old")\n' + FILL, home, *small_disk(tmp_path))
    assert "the disk is full" in ended.stdout
    assert "--home" in ended.stdout
    assert "old ['file']" in ended.stdout
