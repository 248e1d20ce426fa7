from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal.resources.kinds import Ref
from areal.state.home import Home, ensure_admin_key
from areal.state.journal import Transaction
from areal.state.locks import holder, lock_objects
from areal.state.objects import ObjectStore
from areal.state.upkeep import (
    defects,
    exposed,
    filesystem,
    leftovers,
    locks_hold_between_machines,
    may_span_machines,
    set_aside,
    sweep,
    tighten,
)

from .support import QWEN, an_object, contents, run, running


def test_healthy_home_has_nothing_to_report(store: ObjectStore) -> None:
    store.put(store.add_revision(an_object()))
    ensure_admin_key(store.home, "default")
    transaction = Transaction.open(store.home, "apply")
    with lock_objects(store.home, [QWEN]) as held:
        held.announce()
        before = contents(store.home.root)
        assert defects(store.home) == ()
        assert leftovers(store.home) == ()
        assert exposed(store.home) == ()
        assert contents(store.home.root) == before
    transaction.commit()


def test_absent_home_has_nothing_to_report(home: Home) -> None:
    absent = Home(home.root / "absent")
    assert (defects(absent), leftovers(absent), exposed(absent), sweep(absent)) == ((), (), (), ())
    assert not absent.root.exists()


def test_damaged_files_are_found_and_repaired(store: ObjectStore) -> None:
    for replicas in (1, 2):
        store.put(store.add_revision(an_object(replicas=replicas)))
    folder = store.home.object_folder(QWEN)
    for path in (folder / "object.json", folder / "revisions" / "2.json", store.home.objects / "serial"):
        path.write_bytes(b"torn")
    found = defects(store.home)
    assert [defect.ref for defect in found] == [None, QWEN, None]
    for defect in found:
        if defect.ref is None:
            kept = set_aside(store.home, defect)
            assert kept is not None
            assert kept.read_bytes() == b"torn"
    restored = store.restore(QWEN)
    assert restored.spec == {"replicas": 1}
    assert defects(store.home) == ()


def test_crash_leftovers_are_swept_except_recent_writes(store: ObjectStore) -> None:
    store.put(an_object())
    home = store.home
    run('store.put(StoredObject("Model", "qwen", "new"))', home, AREAL_CRASH_AT="write-synced")
    run('store.put(StoredObject("Model", "late", "new"))', home, AREAL_CRASH_AT="write-synced")
    old = min(home.objects.glob(".serial.tmp-*"))
    os.utime(old, (1, 1))
    run('store.delete(Ref("Model", "qwen"))', home, AREAL_CRASH_AT="delete-after")
    found = leftovers(home)
    assert [path.name.split("-")[0] for path in found] == [".serial.tmp", ".trash"]
    assert sweep(home) == found
    assert leftovers(home) == ()
    assert len(list(home.objects.glob(".serial.tmp-*"))) == 1


def test_legacy_lock_holders_are_swept(store: ObjectStore) -> None:
    store.put(an_object())
    old = store.home.locks / "model" / "qwen.holder.json"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text("{}")
    assert leftovers(store.home) == sweep(store.home) == (old,)


def test_killed_command_leaves_no_holder_or_leftover(store: ObjectStore) -> None:
    store.put(an_object())
    code = """
    with lock_objects(home, [Ref("Model", "qwen")]) as held:
        held.announce()
        print("held", flush=True)
        sys.stdin.read()
    """
    with running(code, store.home) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert leftovers(store.home) == ()
        process.kill()
        process.wait()
    assert sweep(store.home) == ()
    assert holder(store.home, Ref("Model", "qwen")) is None


def test_world_readable_files_are_found_and_tightened(home: Home) -> None:
    key = ensure_admin_key(home, "default")
    key.chmod(0o644)
    home.runs.chmod(0o755)
    secret, config = (home.runs / "r1" / name for name in ("secret.json", "config.json"))
    secret.parent.mkdir(mode=0o700)
    for file, mode in ((secret, 0o640), (config, 0o644)):
        file.write_text("{}")
        file.chmod(mode)
    assert dict(exposed(home)) == {home.runs: 0o755, key: 0o644, secret: 0o640}
    for path, _ in exposed(home):
        tighten(path)
    assert exposed(home) == ()


def test_filesystem_is_known_before_the_home_exists(home: Home) -> None:
    assert filesystem(home) == filesystem(Home(home.root / "absent"))
    kind, options = filesystem(Home(Path("/proc/x")))
    assert kind == "proc" and "rw" in options


@pytest.mark.parametrize(
    ("kind", "options", "hold"),
    [
        ("nfs4", "rw,vers=4.2,local_lock=none", True),
        ("nfs", "rw,vers=3,local_lock=none", True),
        ("nfs", "rw,nolock,local_lock=all", False),
        ("nfs", "rw,local_lock=flock", False),
        ("nfs", "rw,local_lock=posix", True),
        ("lustre", "rw,flock,lazystatfs", True),
        ("lustre", "rw,localflock", False),
        ("lustre", "rw", None),
        ("fuse.sshfs", "rw", None),
        ("ext4", "rw", None),
    ],
)
def test_mount_options_decide_lock_support_across_machines(kind: str, options: str, hold: bool | None) -> None:
    assert locks_hold_between_machines(kind, options.split(",")) is hold


def test_partly_removed_object_is_a_leftover(store: ObjectStore) -> None:
    store.put(store.add_revision(an_object()))
    run('store.delete(Ref("Model", "qwen"))', store.home, AREAL_CRASH_AT="delete-after")
    assert defects(store.home) == ()
    assert [path.name.startswith(".trash") for path in leftovers(store.home)] == [True]
    sweep(store.home)
    assert leftovers(store.home) == ()


@pytest.mark.parametrize("kind", ["nfs4", "virtiofs", "fuse", "fuse.sshfs", "fuse.juicefs"])
def test_other_machines_may_have_a_network_file_system(kind: str) -> None:
    assert may_span_machines(kind)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs"])
def test_other_machines_have_no_local_file_system(kind: str) -> None:
    assert not may_span_machines(kind)
