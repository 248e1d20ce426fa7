"""HTTP by hand: requests that no client would send, and callers that no client is like."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import BinaryIO

from tests.services.processes import Process

TIMEOUT_S = 60.0


def dial(front: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", front.port), timeout=TIMEOUT_S)


def request(path: str, headers: Mapping[str, str | bytes], body: bytes = b"", method: str = "POST") -> bytes:
    """With a Host and, unless given, a Content-Length."""
    lines = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
    head = [f"{method} {path} HTTP/1.1".encode("latin-1")]
    for name, value in lines.items():
        if value != "":
            head.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode("utf-8")))
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def reported(front: Process, sent: bytes) -> str:
    """What comes back for these bytes, in words."""
    with contextlib.closing(dial(front)) as sock:
        with contextlib.suppress(OSError):  # it may be refused before it is all there
            sock.sendall(sent)
        return read_answer(sock.makefile("rb"))


def read_answer(reader: BinaryIO) -> str:
    """Status and error code of the next answer; how the connection ended where there is none."""
    try:
        status, body = _answer(reader)
    except OSError:
        return "connection reset"
    if not status:
        return "connection closed"
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return f"{status} `{json.loads(body)['error']['code']}`"
    return status


def _answer(reader: BinaryIO) -> tuple[str, bytes]:
    first, length = reader.readline(), 0
    while (line := reader.readline().strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line[15:])
    return (first.split(b" ", 2)[1].decode(), reader.read(length)) if first else ("", b"")
