"""What the tests of the state share: homes on a fast file system, and real processes that run a few lines of code."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.records import Layer, StoredObject

QWEN = Ref("Model", "qwen")
PRELUDE = """
import os, sys, time
from pathlib import Path
from areal.errors import ArealError, Locked
from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.records import Layer
from areal.state.files import UnreadableFile
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject
from areal.state.files import crash_point
from areal.state.journal import Transaction, orphans
from areal.state.locks import holder, lock_objects
from areal.state.events import EventLog
from areal.state.files import read_json, write_atomic, write_json
home = Home(Path(sys.argv[1]))
store = ObjectStore(home)
"""


def an_object(name: str = "qwen", replicas: int = 1, **fields: object) -> StoredObject:
    layers = (Layer("apply", {"replicas": replicas}, {"file": "m.yaml", "line": 3}, "alice@box", 10.0 + replicas),)
    return StoredObject("Model", name, "uid-" + name, layers=layers, created_at=1.0, **fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def fast_home() -> Iterator[Home]:
    """A home in memory where there is such a place: for tests that make hundreds of them."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Home(Path(folder) / "home").ensure()


def script(code: str, home: Home, *prefix: str) -> list[str]:
    return [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(home.root)]


def run(code: str, home: Home, *prefix: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, to its end. ``prefix`` is a command that starts it."""
    return subprocess.run(
        script(code, home, *prefix), env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


@contextlib.contextmanager
def running(code: str, home: Home, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code``; it speaks on stdout and ends when its stdin does, at the latest with the block."""
    process = subprocess.Popen(
        script(code, home), env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder below ``root`` with its time of change: equal, so nothing was written in between."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *root.rglob("*")]
        if path.exists()
    }


def small_disk(place: Path, then: str = "true") -> list[str]:
    """The prefix of a command that sees a 64 KiB disk at ``place``, prepared by the shell command ``then``."""
    return _in_namespace(f"mount -t tmpfs -o size=64k tmpfs {place} && {then}")


def read_only(place: Path) -> list[str]:
    """The prefix of a command that sees ``place`` read-only."""
    return _in_namespace(f"mount --bind {place} {place} && mount -o remount,bind,ro {place}")


def without_override() -> list[str]:
    """The prefix of a command for which permissions hold, even as root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root without setpriv: permissions cannot be tried")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def _in_namespace(prepare: str) -> list[str]:
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    trial = subprocess.run([*prefix, prepare], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"no mounts here: {trial.stderr.strip()}")
    return [*prefix, prepare + ' && exec "$@"', "sh"]
