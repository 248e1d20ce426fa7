"""A WebSocket caller that can also send what no caller should."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, Pong, TextMessage

Frame = dict[str, Any]
HANDSHAKE = {
    "Host": "localhost",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
ACCEPTED = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


class Caller:
    """``status`` and ``head``: the answer to the handshake. Receiving raises EOFError at the connection's end."""

    def __init__(
        self, port: int, path: str = "/ws", key: str | None = None, headers: Mapping[str, str | None] | None = None
    ) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        fields: dict[str, str | None] = {**HANDSHAKE, **(headers or {})}
        fields |= {"Authorization": f"Bearer {key}"} if key is not None else {}
        lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
        self.socket.sendall("\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode())
        data = b""
        while b"\r\n\r\n" not in data:
            part = self.socket.recv(65536)
            assert part, data
            data += part
        head, _, rest = data.partition(b"\r\n\r\n")
        self.head = head.decode()
        self.status = int(self.head.split(" ")[1])
        self._frames = Connection(ConnectionType.CLIENT)
        if self.status == 101:
            self._frames.receive_data(rest)
        self.pongs = 0
        self.closed: int | None = None  # the code

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: object) -> None:
        """In one write, so that they arrive together."""
        self.socket.sendall(b"".join(self._frames.send(TextMessage(data=json.dumps(frame))) for frame in frames))

    def text(self, text: str) -> None:
        self.socket.sendall(self._frames.send(TextMessage(data=text)))

    def ping(self) -> None:
        self.socket.sendall(self._frames.send(Ping(b"hello")))

    def raw(self, opcode: int, payload: bytes = b"", *, first: int = 0x80, mask: bool = True) -> None:
        """One frame of these very bits. ``first``: those beside the opcode."""
        length = len(payload)
        if length < 126:
            size = bytes([length])
        else:
            size = b"\x7e" + length.to_bytes(2, "big") if length < 2**16 else b"\x7f" + length.to_bytes(8, "big")
        size = bytes([size[0] | (0x80 if mask else 0)]) + size[1:]
        key = os.urandom(4) if mask else b""
        data = bytes(byte ^ key[place % 4] for place, byte in enumerate(payload)) if mask else payload
        self.socket.sendall(bytes([first | opcode]) + size + key + data)

    def frames(self) -> Iterator[Frame]:
        """Until the connection is closed."""
        text = ""
        while True:
            for event in self._frames.events():
                match event:
                    case TextMessage():
                        text += event.data
                        if event.message_finished:
                            yield json.loads(text)
                            text = ""
                    case Pong():
                        self.pongs += 1
                    case Ping():
                        self.socket.sendall(self._frames.send(event.response()))
                    case CloseConnection():
                        self.closed = int(event.code)
                        return
            data = self.socket.recv(65536)
            if not data:
                return
            self._frames.receive_data(data)

    def next(self) -> Frame:
        return next(self.frames())

    def answer(self, frame_id: object, status: str | None = None) -> Frame:
        """The answer to a request, with what came before it left out."""
        for frame in self.frames():
            wanted = status is None or frame["payload"].get("status") == status
            if frame["type"] == "res" and frame["id"] == frame_id and wanted:
                return frame
        raise EOFError(f"closed with {self.closed}")

    def answer_any(self) -> Frame:
        """The next answer, to whatever request."""
        return next(frame for frame in self.frames() if frame["type"] == "res")

    def close_code(self) -> int | None:
        """Of the connection that the other side ends now."""
        list(self.frames())
        assert self.socket.recv(1) == b"" or self.closed is not None
        return self.closed

    def agent(self, frame_id: object, message: str, session: str | None = None, **params: Any) -> None:
        named = {"sessionKey": session} if session is not None else {}
        self.send({"type": "req", "id": frame_id, "method": "agent", "params": {"message": message, **named, **params}})
