from __future__ import annotations

import stat

import pytest

from areal.errors import ArealError, UsageFault
from areal.state.home import Home, _create_key, admin_key_path, ensure_admin_key, forget_admin_key, read_key

from .support import contents, running


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


def test_ensure_admin_key_by_many_at_once_all_get_the_same(home: Home) -> None:
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


def test_key_that_another_command_made_meanwhile_is_kept(home: Home) -> None:
    path = ensure_admin_key(home, "default")
    key = read_key(path)
    _create_key(path, b"late\n")
    assert read_key(path) == key
    assert [path.name for path in home.credentials.iterdir()] == ["default"]


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_read_key_that_holds_none_is_an_error(home: Home, content: bytes) -> None:
    admin_key_path(home, "default").write_bytes(content)
    with pytest.raises(ArealError, match="key"):
        ensure_admin_key(home, "default")


def test_read_key_absent_names_the_file(home: Home) -> None:
    with pytest.raises(ArealError, match="credentials/default: no such file"):
        read_key(admin_key_path(home, "default"))


def test_forget_admin_key_twice_is_no_error(home: Home) -> None:
    path = ensure_admin_key(home, "default")
    forget_admin_key(home, "default")
    forget_admin_key(home, "default")
    assert not path.exists()


def test_admin_key_path_bad_service_name_is_refused(home: Home) -> None:
    with pytest.raises(UsageFault):
        admin_key_path(home, "../objects/serial")
