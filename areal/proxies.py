"""The environment of processes that must reach services of their own machine although an HTTP proxy is configured."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from collections.abc import Mapping


def loopback_without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``no_proxy`` in both spellings with loopback added to the existing values. Otherwise the clients of agents
    and jobs would send calls to loopback through the proxy."""
    spellings = ("NO_PROXY", "no_proxy")
    hosts = [host.strip() for name in spellings for host in env.get(name, "").split(",")]
    if "*" in hosts:  # clients know it alone only
        return dict.fromkeys(spellings, "*")
    listed = ",".join(dict.fromkeys([*filter(None, hosts), "127.0.0.1", "localhost", "::1"]))
    return dict.fromkeys(spellings, listed)
