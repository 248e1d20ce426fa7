"""A service's bind address and its admin key: who can reach it, at which URL, with which key. Standard library only:
the command line and the processes judge alike."""

from __future__ import annotations

import ipaddress

MIN_EXPOSED_KEY = 16  # characters of an admin key where other machines can reach the service


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """Where processes of this machine reach what listens on ``host``: an unspecified address (0.0.0.0, ::) is one to
    listen on, not one to connect to."""
    try:
        address = ipaddress.ip_address(host or "0.0.0.0")
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def key_fault(key: bytes, host: str) -> str | None:
    """Why ``key`` cannot be the admin key of a service that listens on ``host``; None where it can."""
    if not key:
        return "it is empty"
    if not key.isascii() or any(byte <= 32 or byte == 127 for byte in key):
        return "it is not one line of printable ASCII without spaces"
    if len(key) < MIN_EXPOSED_KEY and not is_loopback(host):
        return f"it has {len(key)} characters; on {host or '0.0.0.0'}, which others reach, it needs {MIN_EXPOSED_KEY}"
    return None
