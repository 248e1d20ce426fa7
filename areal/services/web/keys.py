"""The admin key of a service, and the binds that need one. Standard library only."""

from __future__ import annotations

import hmac
import logging
import stat
from pathlib import Path

from areal.errors import UsageFault
from areal.resources.bind import is_loopback, key_fault

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

    def fault(self, host: str) -> str | None:
        """Why a service on ``host`` cannot take this key; None where it can."""
        return key_fault(self._secret, host)

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
    if fault := key_fault(secret, "127.0.0.1"):
        raise UsageFault(f"the admin key file {path} cannot be used: {fault}", hint="openssl rand -hex 32 > FILE")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning("the admin key file %s is open to other users: chmod 600 %s", path, path)
    return AdminKey(secret)


def refuse_open_bind(host: str, key: AdminKey | None) -> None:
    """A bind that other machines can reach needs a key that cannot be guessed; there is no default one."""
    if key is None and not is_loopback(host):
        raise UsageFault(
            f"refusing to listen on {host} without an admin key: other machines could use this service",
            hint="pass --admin-key-file PATH, or listen on 127.0.0.1",
        )
    if key is not None and (fault := key.fault(host)):
        raise UsageFault(
            f"refusing to listen on {host}: the admin key cannot be used: {fault}",
            hint="write a long random key: openssl rand -hex 32",
        )
