"""The admin key of a service, and the binds that need one. Standard library only."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import stat
from pathlib import Path

from areal.errors import UsageFault

_log = logging.getLogger(__name__)


class AdminKey:
    """The service's one admin key. Never printed.

    Compared as bytes in constant time: ``compare_digest`` on str raises for a non-ASCII character, which would turn
    a 401 into a 500.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "AdminKey(...)"

    def matches(self, presented: bytes) -> bool:
        return hmac.compare_digest(self._secret, presented)

    def bearer(self) -> dict[str, str]:
        """The header with which we call another component of the same service."""
        return {"Authorization": "Bearer " + self._secret.decode("ascii")}


def load_admin_key(path: str | None) -> AdminKey | None:
    """The key in the file, or None where no file is named. Raises UsageFault when it cannot serve as a key."""
    if path is None:
        return None
    file = Path(path)
    try:
        secret = file.read_bytes().strip()
        mode = file.stat().st_mode
    except OSError as error:
        raise UsageFault(f"cannot read the admin key file {path}: {error.strerror}") from error
    if not secret:
        raise UsageFault(f"the admin key file {path} is empty", hint="write a long random key into it")
    if not secret.isascii() or any(byte <= 32 or byte == 127 for byte in secret):
        raise UsageFault(f"the admin key file {path} must hold one line of printable ASCII without spaces")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning("the admin key file %s is open to other users: chmod 600 %s", path, path)
    return AdminKey(secret)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_bind(host: str, key: AdminKey | None) -> None:
    """A bind that other machines can reach needs a key; there is no default one."""
    if key is None and not is_loopback(host):
        raise UsageFault(
            f"refusing to listen on {host} without an admin key: other machines could use this service",
            hint="pass --admin-key-file PATH, or listen on 127.0.0.1",
        )
