"""Who may call what.

Routes are HEALTH (health, ready: open to everyone, since Kubernetes sends no key), METRICS (open on loopback, else the
admin key), CALLER (the admin key), SESSION (the admin key or any other, of which the handler knows whose it is) or
ADMIN. A missing or malformed key is 401; a wrong one is 403 on an ADMIN or METRICS route and 401 elsewhere, where it
can only be an unknown session key.

Without a key (loopback only) a Host or Origin that is a name other than localhost is refused, so
that a web page elsewhere cannot reach the service through somebody's browser.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from enum import Enum

from areal.services.web.errors import ApiError
from areal.services.web.keys import AdminKey


class Access(Enum):
    HEALTH = "health"
    METRICS = "metrics"
    CALLER = "caller"
    SESSION = "session"
    ADMIN = "admin"


def presented_key(headers: Mapping[str, str]) -> bytes:
    """The caller's key. Raises 401 when there is none, or it is malformed."""
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


class Gatekeeper:
    """Decides whether one request may pass. Raises ApiError (401, 403) when it may not."""

    def __init__(self, key: AdminKey | None, *, loopback: bool) -> None:
        self.key = key
        self._loopback = loopback

    def check(self, headers: Mapping[str, str], access: Access) -> bool:
        """Whether the admin key was seen; where it is False and the route is a SESSION's, its handler knows more."""
        if self.key is None:
            _refuse_foreign_pages(headers)
            return False
        if access is Access.HEALTH or (access is Access.METRICS and self._loopback):
            return False
        if self.key.matches(presented_key(headers)):
            return True
        if access is Access.SESSION:
            return False
        if access is Access.CALLER:
            raise unknown_key()
        raise ApiError(403, "this route needs the admin key", code="admin_key_required")

    def sees_details(self, headers: Mapping[str, str]) -> bool:
        """Whether the caller of a HEALTH route is told more than the state: on loopback, or with the admin key."""
        if self.key is None or self._loopback:
            return True
        try:
            return self.key.matches(presented_key(headers))
        except ApiError:
            return False


def _refuse_foreign_pages(headers: Mapping[str, str]) -> None:
    """Without a key a browser is the danger: a page elsewhere could name us in its DNS, or just post to us."""
    host, origin = headers.get("Host", ""), headers.get("Origin")
    if not _is_this_machine(host):
        message = f"host {host!r} is not allowed: without an admin key only localhost or an address is"
        raise ApiError(403, message, code="host_not_allowed")
    if origin is not None and not _is_this_machine(origin.partition("://")[2]):
        message = f"origin {origin!r} is not allowed: without an admin key only pages of this machine may call"
        raise ApiError(403, message, code="origin_not_allowed")


def _is_this_machine(authority: str) -> bool:
    """A name that DNS cannot give to somebody else: localhost, or an address."""
    name = authority.rpartition("]")[0].lstrip("[") if authority.startswith("[") else authority.split(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
