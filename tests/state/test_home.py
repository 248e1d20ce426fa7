from __future__ import annotations

import stat
from pathlib import Path

import pytest

from areal.errors import ArealError, NotFound, UsageFault
from areal.resources.kinds import Ref
from areal.state.home import Home, _create_key, admin_key_path, ensure_admin_key, forget_admin_key, read_key

from .support import QWEN, contents, read_only, run, running, without_override

ENSURE = """
try:
    home.ensure()
except ArealError as error:
    print(error.message, "|", error.hint)
"""


def test_resolve_flag_before_variable_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AREAL_HOME", raising=False)
    assert Home.resolve().root == tmp_path / ".areal"
    monkeypatch.setenv("AREAL_HOME", "~/other")
    assert Home.resolve().root == tmp_path / "other"
    assert Home.resolve(str(tmp_path / "flag")).root == tmp_path / "flag"
    monkeypatch.setenv("AREAL_HOME", "")
    assert Home.resolve().root == tmp_path / ".areal"


def test_resolve_makes_relative_path_absolute_keeping_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert Home.resolve("link").root == tmp_path / "link"


@pytest.mark.parametrize("flag", ["~absent-name/x", "a\0b"])
def test_resolve_impossible_path_is_an_error_with_a_hint(flag: str) -> None:
    with pytest.raises(ArealError) as caught:
        Home.resolve(flag)
    assert "--home" in (caught.value.hint or "")


def test_ensure_creates_private_folders(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home").ensure()
    for folder in (home.root, *home.folders):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", ["home", "home/journal"])
def test_ensure_names_obstructing_file(tmp_path: Path, part: str) -> None:
    (tmp_path / part).parent.mkdir(exist_ok=True)
    (tmp_path / part).write_text("")
    with pytest.raises(ArealError, match=f"{tmp_path / part} is not a folder") as caught:
        Home(tmp_path / "home").ensure()
    assert "--home" in (caught.value.hint or "")


def test_ensure_in_foreign_folder_reports_permission_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    told = run(ENSURE, Home(tmp_path / "home"), *without_override())
    tmp_path.chmod(0o700)
    assert f"cannot use {tmp_path / 'home'}: permission denied" in told.stdout
    assert "--home" in told.stdout


def test_ensure_reports_missing_write_permission(home: Home) -> None:
    home.journal.chmod(0o500)
    told = run(ENSURE, home, *without_override())
    home.journal.chmod(0o700)
    assert f"cannot use {home.journal}: it cannot be written" in told.stdout


def test_ensure_on_read_only_file_system_is_reported(tmp_path: Path) -> None:
    told = run(ENSURE, Home(tmp_path / "home"), *read_only(tmp_path))
    assert "the file system is read-only" in told.stdout
    assert "--home" in told.stdout


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "/etc/passwd", "a\0b", "A", "a" * 64, ".hidden"])
def test_object_folder_bad_name_is_refused(home: Home, name: str) -> None:
    with pytest.raises(UsageFault):
        home.object_folder(Ref("Model", name))


@pytest.mark.parametrize("kind", ["../Model", "model", "", "Secret"])
def test_object_folder_unknown_kind_is_refused(home: Home, kind: str) -> None:
    with pytest.raises(NotFound):
        home.object_folder(Ref(kind, "qwen"))


def test_object_folder_of_valid_name_is_inside_home(home: Home) -> None:
    assert home.object_folder(QWEN) == home.root / "objects" / "model" / "qwen"


def test_ensure_admin_key_generates_a_private_key_once(home: Home) -> None:
    path = ensure_admin_key(home, "default")
    assert path == home.root / "credentials" / "default"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_key(path)
    assert len(key) == 43
    before = contents(home.root)
    assert read_key(ensure_admin_key(home, "default")) == key
    assert contents(home.root) == before
    assert read_key(ensure_admin_key(home, "other")) != key


def test_ensure_admin_key_is_same_for_concurrent_callers(home: Home) -> None:
    code = """
    from areal.state.home import ensure_admin_key, read_key
    print("ready", flush=True)
    sys.stdin.readline()
    print(read_key(ensure_admin_key(home, "default")), flush=True)
    """
    with running(code, home) as one, running(code, home) as two:
        keys = set()
        for process in (one, two):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in (one, two):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in (one, two):
            assert process.stdout is not None
            keys.add(process.stdout.readline())
    assert keys == {read_key(admin_key_path(home, "default")) + "\n"}
    assert [path.name for path in home.credentials.iterdir()] == ["default"]


def test_key_made_meanwhile_by_other_command_is_kept(home: Home) -> None:
    path = ensure_admin_key(home, "default")
    key = read_key(path)
    _create_key(path, b"late\n")
    assert read_key(path) == key
    assert [path.name for path in home.credentials.iterdir()] == ["default"]


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_read_key_of_empty_file_is_an_error(home: Home, content: bytes) -> None:
    admin_key_path(home, "default").write_bytes(content)
    with pytest.raises(ArealError, match="key"):
        ensure_admin_key(home, "default")


def test_read_key_names_missing_file(home: Home) -> None:
    with pytest.raises(ArealError, match="credentials/default: no such file"):
        read_key(admin_key_path(home, "default"))


def test_forget_admin_key_twice_succeeds(home: Home) -> None:
    path = ensure_admin_key(home, "default")
    forget_admin_key(home, "default")
    forget_admin_key(home, "default")
    assert not path.exists()


def test_admin_key_path_bad_service_name_is_refused(home: Home) -> None:
    with pytest.raises(UsageFault):
        admin_key_path(home, "../objects/serial")
