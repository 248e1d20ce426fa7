"""The ports that commands and the SDK choose for services that they start."""

import socket

import pytest

from areal.client import command
from areal.errors import ArealError
from areal.runtime.leases import FIRST_PORT, LAST_PORT


def test_free_ports_are_distinct_and_outside_the_automatic_range() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        low, high = map(int, file.read().split())
    ports = [command.free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert not [port for port in ports if FIRST_PORT <= port <= LAST_PORT or 10_002 <= port <= 19_999]
    assert low < 32_768 or not [port for port in ports if low <= port <= high]


def test_free_port_skips_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(command, "_PORTS", range(port, port + 1))
        with pytest.raises(ArealError, match=f"none of the ports {port} to {port} is free"):
            command.free_port()
