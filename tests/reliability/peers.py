"""A peer that says it is well, and treats every call badly: sockets and bytes, no HTTP library."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

_SELF = {"status": "ready", "version": 0, "max_model_len": 4096, "in_flight": 0, "paused": False}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nContent-Length: 5000\r\n\r\n"

# What it does with a call: what it sends, and whether it then stays, leaves, or breaks the connection.
MANNERS: dict[str, tuple[bytes, str]] = {
    "accepts and never answers": (b"", "stay"),
    "closes the connection without a response": (b"", "leave"),
    "resets the connection": (b"", "reset"),
    "sends half a status line and keeps the connection open": (b"HTTP/1.", "stay"),
    "sends headers and no body": (_HEAD, "stay"),
    "sends half a body and closes the connection": (_HEAD + b'{"index": 0, "token', "leave"),
    "sends half a body and resets the connection": (_HEAD + b'{"index": 0, "token', "reset"),
    "speaks another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", "leave"),
    "sends an invalid status": (b"HTTP/1.1 999999 Fine\r\n\r\n", "leave"),
    "sends 10 MB of headers": (b"HTTP/1.1 200 OK\r\n" + b"x-a: bbbbbbbbbbbbbbbbb\r\n" * 430_000, "leave"),
}


class Peer:
    """Listens until ``close``. GET is answered well, anything else by its manners."""

    def __init__(self, manners: str) -> None:
        self._words, self._then = MANNERS[manners]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._open: list[socket.socket] = []
        self.calls = 0
        threading.Thread(target=self._accept, daemon=True, name=f"peer-{self.port}").start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="peer").start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                length = 0
                while (header := reader.readline().strip().lower()) != b"":
                    if header.startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                reader.read(length)
                if line.startswith(b"GET ") or b"/abort" in line:
                    connection.sendall(_answer(_SELF))
                elif not self._misbehave(connection):
                    return

    def _misbehave(self, connection: socket.socket) -> bool:
        """False when that was all."""
        self.calls += 1
        connection.sendall(self._words)
        if self._then == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return self._then == "stay"


def _answer(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


@contextlib.contextmanager
def peer(manners: str) -> Iterator[Peer]:
    opened = Peer(manners)
    try:
        yield opened
    finally:
        opened.close()
