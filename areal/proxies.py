"""The environment of processes whose clients find the services of their own machine behind an HTTP proxy."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from collections.abc import Mapping


def loopback_without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """``no_proxy`` in both spellings with loopback: the clients of agents and jobs would ask the proxy for it. Values
    that are there are kept."""
    spellings = ("NO_PROXY", "no_proxy")
    hosts = [host.strip() for name in spellings for host in env.get(name, "").split(",")]
    if "*" in hosts:  # clients know it alone only
        return dict.fromkeys(spellings, "*")
    listed = ",".join(dict.fromkeys([*filter(None, hosts), "127.0.0.1", "localhost", "::1"]))
    return dict.fromkeys(spellings, listed)
