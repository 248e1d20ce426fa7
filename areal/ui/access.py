"""Who may ask the page's server: the decision over one request's headers. Pure.

Every request, of any method and path, must name a host that this server is reached by (another site's page that
resolves its name to this address does not) and, where a browser states the origin of a call, come from the same one.
What is read from the home needs the token as well, in ``Authorization``: there is no cookie, which a browser would send
by itself.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from typing import NamedTuple

from areal.dataclasses import dataclass
from areal.errors import UsageFault
from areal.resources.addresses import MIN_EXPOSED_KEY, is_loopback, key_fault

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer."""


class AccessRefusal(NamedTuple):
    status: int
    message: str
    hint: str = ""


@dataclass(frozen=True)
class PageAccess:
    """``hosts``: the names by which the server is reached. ``any_address``: it listens on all addresses of the machine,
    so that an IP address is such a name."""

    token: str
    hosts: Collection[str] = _LOOPBACK
    any_address: bool = False

    def refuses(self, headers: AccessHeaders, *, secret: bool) -> AccessRefusal | None:
        """Return why a request is refused; None if it is not. ``secret``: its answer needs the token."""
        if not self._reached_by(headers.host):
            return AccessRefusal(
                403, "the Host header does not name this server", "use the address that `areal ui` printed"
            )
        if headers.origin is not None and not _same_origin(headers.origin, headers.host):
            return AccessRefusal(403, "a page of another origin may not call this server")
        if headers.site not in (None, "same-origin", "none") and secret:
            return AccessRefusal(403, "a page of another site may not call this server")
        if secret and not self._has_token(headers.authorization):
            return AccessRefusal(401, "the token is missing or wrong", "open the address that `areal ui` printed")
        return None

    def _reached_by(self, host: str) -> bool:
        name = host_name(host)
        if name is None:
            return False
        return name in self.hosts or (self.any_address and _is_ip(name))

    def _has_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("utf-8", "surrogateescape"), self.token.encode()
        )


class AccessHeaders(NamedTuple):
    """The headers that decide. ``host`` and ``authorization`` are "" when they are absent, or given twice."""

    host: str
    origin: str | None
    authorization: str
    site: str | None


def access_of(host: str, key: str | None, *, machine: Collection[str] = ()) -> PageAccess:
    """Return the access of a server that listens on ``host``: a fresh token of 128 bits, or ``key``. ``machine``: the
    names of this machine. Raises UsageFault where a key is needed or cannot be used."""
    if key is not None and (fault := key_fault(key.encode(), host)):
        raise UsageFault(f"the key cannot be used: {fault}")
    if not is_loopback(host) and key is None:
        raise UsageFault(
            f"--host {host} is reached by other machines, and needs a key",
            hint=f"add --key-file FILE with {MIN_EXPOSED_KEY} characters or more, or reach loopback by an SSH tunnel",
        )
    everywhere = host in ("", "0.0.0.0", "::")
    names = {host.lower().strip("[]"), *_LOOPBACK, *(name.lower() for name in (machine if everywhere else ()))}
    return PageAccess(key or secrets.token_urlsafe(16), frozenset(names - {"", "0.0.0.0", "::"}), everywhere)


_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


def host_name(host: str) -> str | None:
    """Return the name in a ``Host`` header, in lower case, without port and brackets; None if it is malformed."""
    match = _HOST.fullmatch(host)
    return (match["ipv6"] or match["name"]).lower() if match is not None else None


def _same_origin(origin: str, host: str) -> bool:
    """Return whether the origin is that of the request's own host. Any scheme: a proxy may add TLS."""
    scheme, found, rest = origin.partition("://")
    return bool(found) and scheme in ("http", "https") and rest.lower() == host.lower()


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
