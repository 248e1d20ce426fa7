"""The admin key of a service, the access that each route requires, and the addresses that require a key.

The access levels: HEALTH (health, ready: open to everyone, since Kubernetes sends no key), METRICS (open on loopback,
otherwise the admin key), INFERENCE (the admin key), SESSION (the admin key, or any key that the handler recognizes),
SOCKET (the admin key, or no key: the handler then asks for it) and ADMIN. A missing or malformed key is answered 401. A
wrong key is answered 401 on INFERENCE and SESSION routes, where it can only be an unknown session key, and 403
elsewhere.

Without a key (loopback only), a Host or Origin with a name other than localhost is refused: a foreign web page must not
reach the service through a browser on this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from areal.errors import UsageFault
from areal.resources.addresses import is_loopback, key_fault
from areal.services.http.errors import ApiError

_log = logging.getLogger(__name__)


class AdminKey:
    """The service's only admin key. Its ``repr`` hides it.

    Keys are compared as bytes, in constant time: ``compare_digest`` on str raises for a non-ASCII character, which
    would turn a 401 into a 500.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "AdminKey(...)"

    def fault(self, host: str) -> str | None:
        """Return why a service on ``host`` cannot use this key, or None if it can."""
        return key_fault(self._secret, host)

    def matches(self, presented: bytes) -> bool:
        return hmac.compare_digest(self._secret, presented)

    def bearer(self) -> dict[str, str]:
        """Return the header for calls to another component of the same service."""
        return {"Authorization": "Bearer " + self._secret.decode("ascii")}


def load_admin_key(path: str | None) -> AdminKey | None:
    """Return the key in the file, or None if no file is given. Raises UsageFault if it cannot serve as a key."""
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
    """Raise UsageFault for an address that other machines can reach without an unguessable key. There is no default
    key."""
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


class Access(Enum):
    HEALTH = "health"
    METRICS = "metrics"
    INFERENCE = "inference"
    SESSION = "session"
    SOCKET = "socket"
    ADMIN = "admin"


def presented_key(headers: Mapping[str, str]) -> bytes:
    """Return the caller's key. Raises 401 if it is missing or malformed."""
    authorization = headers.get("Authorization")
    if authorization is not None:
        scheme, _, text = authorization.partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text:
            raise _unauthenticated("the Authorization header must read: Bearer <key>", "malformed_api_key")
    else:
        text = headers.get("x-api-key", "").strip()
        if not text:
            raise _unauthenticated("no API key: send Authorization: Bearer <key>, or x-api-key", "missing_api_key")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise _unauthenticated("the API key has characters that no key has", "malformed_api_key")
    return text.encode("ascii")


def unknown_key() -> ApiError:
    return _unauthenticated("unknown API key", "invalid_api_key")


def _unauthenticated(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


class Authenticator:
    """Decides whether a request may pass."""

    def __init__(self, key: AdminKey | None, *, loopback: bool) -> None:
        self.key = key
        self._loopback = loopback

    def check(self, headers: Mapping[str, str], access: Access) -> bool:
        """Return whether the caller presented the admin key. On a SESSION route the handler checks any other key.
        Raises ApiError (401, 403) for a request that may not pass."""
        if self.key is None:
            _refuse_foreign_pages(headers)
            return False
        if access is Access.HEALTH or (access is Access.METRICS and self._loopback):
            return False
        if access is Access.SOCKET and "Authorization" not in headers and "x-api-key" not in headers:
            return False
        if self.key.matches(presented_key(headers)):
            return True
        if access is Access.SESSION:
            return False
        if access is Access.INFERENCE:
            raise unknown_key()
        raise ApiError(403, "this route needs the admin key", code="admin_key_required")

    def sees_details(self, headers: Mapping[str, str]) -> bool:
        """Return whether a HEALTH route may show this caller more than the state: on loopback, or with the admin
        key."""
        if self.key is None or self._loopback:
            return True
        try:
            return self.key.matches(presented_key(headers))
        except ApiError:
            return False


def _refuse_foreign_pages(headers: Mapping[str, str]) -> None:
    """Refuse requests of foreign web pages: a page could resolve its name to this machine, or post to it."""
    host, origin = headers.get("Host", ""), headers.get("Origin")
    if not _is_this_machine(host):
        message = f"host {host!r} is not allowed: without an admin key only localhost or an address is"
        raise ApiError(403, message, code="host_not_allowed")
    if origin is not None and not _is_this_machine(origin.partition("://")[2]):
        message = f"origin {origin!r} is not allowed: without an admin key only pages of this machine may call"
        raise ApiError(403, message, code="origin_not_allowed")


def _is_this_machine(authority: str) -> bool:
    """Return whether DNS cannot change what the name refers to: it is localhost or an address."""
    name = authority.rpartition("]")[0].lstrip("[") if authority.startswith("[") else authority.split(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
