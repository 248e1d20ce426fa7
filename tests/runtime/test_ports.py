from __future__ import annotations

import os
import socket
from contextlib import ExitStack

from areal.runtime.leases import ports_of


def test_ports_of_a_process_are_those_it_listens_on() -> None:
    before = set(ports_of(os.getpid()))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        bound = {server.getsockname()[1], six.getsockname()[1]}
        with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
            found = set(ports_of(os.getpid()))
            assert client.getsockname()[1] not in found

    assert found - before == bound


def test_ports_of_nobody_are_none() -> None:
    assert ports_of(2**22 + 1) == ()


def test_ports_are_found_in_a_table_of_many_pages() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(500)]
        bound = {server.getsockname()[1] for server in servers}
        assert bound <= set(ports_of(os.getpid()))
