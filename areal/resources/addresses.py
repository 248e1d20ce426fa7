"""Addresses that services listen on, and addresses of external models. Standard library only.

``parse_external_url`` parses the URL of an external API once, strictly. Later code uses the parsed parts and never
parses the text again, so that two parsers cannot disagree about the host. Address spellings that only some parsers
accept (``0x7f.1``, ``2130706433``, ``127.1``, ``0177.0.0.1``) are rejected. The same rules apply to an address in the
URL and to an address that DNS returns; the connection then uses exactly the address that was checked.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata

from areal.dataclasses import dataclass

MIN_EXPOSED_KEY = 16  # minimum characters of an admin key if other machines can reach the service


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """Return the URL at which processes of this machine reach a service on ``host``. An unspecified address (0.0.0.0,
    ::) is replaced by loopback: it can be listened on, but not connected to."""
    try:
        address = ipaddress.ip_address(host or "0.0.0.0")
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def key_fault(key: bytes, host: str) -> str | None:
    """Return why ``key`` is not a valid admin key for a service that listens on ``host``; None if it is valid."""
    if not key:
        return "it is empty"
    if not key.isascii() or any(byte <= 32 or byte == 127 for byte in key):
        return "it is not one line of printable ASCII without spaces"
    if len(key) < MIN_EXPOSED_KEY and not is_loopback(host):
        return f"it has {len(key)} characters; on {host or '0.0.0.0'}, which others reach, it needs {MIN_EXPOSED_KEY}"
    return None


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_PATH = "/v1"
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?P<rest>.*)", re.DOTALL
)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_INVISIBLE = ("Cc", "Cf", "Zs", "Zl", "Zp", "Cs", "Co", "Cn")  # Unicode categories
_DOT_SEGMENT = re.compile(r"(?:\.|%2e){1,2}", re.IGNORECASE)

# Metadata services of clouds, which serve an instance's credentials, outside the link-local range.
_METADATA = {
    ipaddress.ip_address(text)
    for text in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
}
_CARRIER = ipaddress.ip_network("100.64.0.0/10")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class UrlError(ValueError):
    """An invalid URL. ``problem`` is a predicate whose subject is the URL: ``must hold no query and no fragment``.
    ``is_private``: the URL is valid where private addresses are allowed."""

    def __init__(self, problem: str, *, is_private: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.is_private = is_private

    def __str__(self) -> str:
        return self.with_advice("external.allowPrivate")

    def with_advice(self, setting: str) -> str:
        """Return the problem, and the setting by which private addresses are allowed if that would solve it."""
        return f"{self.problem}: set {setting}: true if that is meant" if self.is_private else self.problem


@dataclass(frozen=True)
class ExternalUrl:
    """``host`` is lower case and ASCII, an IPv6 address without brackets; ``path`` has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def address(self) -> IPAddress | None:
        """The host as an IP address; None for a host name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def refusal(self, address: IPAddress, *, allow_private: bool) -> UrlError | None:
        """Return why a connection for this URL must not go to ``address``; None if it may.

        Loopback is allowed if the URL itself says so (``localhost`` or a loopback address), but not for another name
        that resolves to it.
        """
        is_named = address.is_loopback and (self.host == "localhost" or self.address is not None)
        return refusal(address, allow_private=allow_private or is_named)


def parse_external_url(text: str, *, allow_private: bool = False) -> ExternalUrl:
    """Parse the base URL of an external API. Raises UrlError, also for an address that must not be reached."""
    if any(char <= " " or char == "\\" or char == "\x7f" or unicodedata.category(char) in _INVISIBLE for char in text):
        raise UrlError("holds a space, a backslash or a character that does not show")
    match = _URL.fullmatch(text)
    scheme = match["scheme"].lower() if match else ""
    if match is None or scheme not in _PORTS:
        raise UrlError("must begin with http:// or https://")
    if match["rest"]:
        raise UrlError("must hold no query and no fragment")
    if "@" in match["authority"]:
        raise UrlError("must hold no credentials: the key has a place of its own")
    host, port = _authority(match["authority"], _PORTS[scheme])
    segments = match["path"].split("/")
    if any(_DOT_SEGMENT.fullmatch(segment) for segment in segments):
        raise UrlError("must hold no . or .. in its path")
    url = ExternalUrl(scheme, host, port, match["path"].rstrip("/") or DEFAULT_PATH)
    if url.address is not None and (why := url.refusal(url.address, allow_private=allow_private)) is not None:
        raise why
    return url


def check_server_url(text: str) -> None:
    """Check the host of a server's URL, which may be private. Raises UrlError for an address of credentials or of no
    server, and for a spelling that only some parsers take."""
    match = _URL.fullmatch(text)
    if match is not None:
        parse_external_url(f"{match['scheme']}://{match['authority']}", allow_private=True)


def _authority(text: str, default_port: int) -> tuple[str, int]:
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", text)
    if bracketed:
        host, port = _ipv6(bracketed[1]), bracketed[2]
    else:
        name, colon, port = text.partition(":")
        host, port = _name(name), port if colon else None
    if port is None:
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not 0 < int(port) < 65536:
        raise UrlError(f"has the port {port!r}, which is not a number from 1 to 65535")
    return host, int(port)


def _ipv6(text: str) -> str:
    try:
        if "%" in text:
            raise ValueError("zone")
        return str(ipaddress.IPv6Address(text))
    except ValueError as error:
        raise UrlError(f"has [{text}] for a host, which is no IPv6 address") from error


def _name(text: str) -> str:
    """Return a host name or an IPv4 address in its canonical spelling."""
    try:
        # Compatibility forms first: full-width digits are digits, and an ideographic full stop is a dot.
        name = unicodedata.normalize("NFKC", text).replace("\u3002", ".").encode("idna").decode("ascii").lower()
    except UnicodeError as error:
        raise UrlError(f"has the host {text!r}, which is not a name") from error
    name = name.removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise UrlError(f"has the host {text!r}, which is not a name" if text else "names no host")
    if not _NUMERIC.fullmatch(labels[-1]):
        return name
    try:
        return str(ipaddress.IPv4Address(name))
    except ValueError as error:
        raise UrlError(f"has the host {text!r}: write an IPv4 address as four decimal numbers") from error


def refusal(address: IPAddress, *, allow_private: bool) -> UrlError | None:
    """Return why no request may be sent to ``address``; None if it may. The rules for IPv4 addresses also apply to IPv4
    addresses that an IPv6 address embeds."""
    judged = _embedded_ipv4(address) or (address,)
    if any(each.is_link_local or each in _METADATA for each in (address, *judged)):
        reason = "a link-local or metadata address: credentials of machines live there, no model"
        return UrlError(f"leads to {address}, {reason}")
    for each in judged:
        # 0.0.0.0/8 reaches this machine by another name; 240.0.0.0/4 holds the broadcast address.
        is_special = each.version == 4 and (int(each) >> 24 == 0 or int(each) >> 28 == 15)
        is_reserved = each.is_reserved and not each.is_private
        if each.is_unspecified or each.is_multicast or is_special or is_reserved:
            return UrlError(f"leads to {address}, which is no address of a server")
    is_public = all(each.is_global and not (each.version == 4 and each in _CARRIER) for each in judged)
    if not allow_private and not is_public:
        return UrlError(f"leads to {address}, a private address", is_private=True)
    return None


def _embedded_ipv4(address: IPAddress) -> tuple[IPAddress, ...]:
    """Return the IPv4 addresses that an IPv6 address embeds: mapped, compatible, 6to4, Teredo, NAT64."""
    if not isinstance(address, ipaddress.IPv6Address):
        return ()
    found: list[IPAddress] = [each for each in (address.ipv4_mapped, address.sixtofour) if each is not None]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return tuple(found)
