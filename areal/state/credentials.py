"""Generated keys: one file a service, 0600 in a 0700 folder. No default key exists."""

from __future__ import annotations

import base64
import contextlib
import os
from pathlib import Path

from areal.errors import ArealError
from areal.resources.kinds import check_name
from areal.state.files import explain, make_folder, sync_folder, write_all
from areal.state.home import Home

_KEY_BYTES = 32


def admin_key_path(home: Home, service: str) -> Path:
    """Where the admin key of a service is, or will be."""
    return home.credentials / check_name(service)


def ensure_admin_key(home: Home, service: str) -> Path:
    """The path of the service's key, generated the first time. Of two commands at once, both get the same key."""
    path = admin_key_path(home, service)
    if not path.exists():
        _create(path, base64.urlsafe_b64encode(os.urandom(_KEY_BYTES)).rstrip(b"=") + b"\n")
    read_key(path)
    return path


def read_key(path: Path) -> str:
    """The key in a file. Raises ArealError when there is none to be had."""
    try:
        key = path.read_text("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ArealError(f"{path} does not hold a key: it is not text") from error
    except OSError as error:
        raise explain(error, path, "read the key in") from error
    if not key:
        raise ArealError(f"{path} holds no key: it is empty", hint=f"remove it to have a new key generated: rm {path}")
    return key


def forget_admin_key(home: Home, service: str) -> None:
    """Remove the service's key; nothing happens when there is none."""
    path = admin_key_path(home, service)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, path, "remove") from error


def _create(path: Path, content: bytes) -> None:
    """Write and link into place: unlike a rename, a link never replaces the key that another command made first."""
    temp = path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        make_folder(path.parent)
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, content)
            os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(temp, path)
        finally:
            os.close(fd)
            temp.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise explain(error, path, "write") from error
