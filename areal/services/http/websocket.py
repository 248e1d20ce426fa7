"""WebSocket connections with text messages: ``accept`` answers a request with one.

wsproto reads and writes the frames. A protocol violation closes the connection with the protocol's code for it.
https://www.rfc-editor.org/rfc/rfc6455
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections import deque

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.extensions import Extension
from wsproto.frame_protocol import CloseReason, FrameDecoder, FrameProtocol, Opcode, RsvBits
from wsproto.utilities import generate_accept_token

from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import Request, ServerConnection, encode_head

NORMAL, GOING_AWAY, TEXT_ONLY, TOO_LARGE, TRY_AGAIN_LATER = 1000, 1001, 1003, 1009, 1013
_VERSION = "13"
_MOST_WAITING = 16  # unreceived messages at which reading pauses
_MOST_WAITING_BYTES = 256 * 1024
_FIRST_BYTES = 8 * 1024
_SLICE_BYTES = 4096  # parsed at once: up to 700 frames, about 40 ms
_PING_S = 30.0
_SILENCE_S = 75.0


def accept(request: Request, most_bytes: int, *, trusted: bool = True) -> WebSocket:
    """Answer ``request`` with a WebSocket whose messages have at most ``most_bytes``. If the caller is not ``trusted``,
    its first message has at most 8 KiB, and the connection ends at once with the handler. Raises 400, and 426 for a
    request for anything other than a WebSocket."""
    if request.upgrade.lower() != b"websocket" or request.headers.get("Sec-WebSocket-Version") != _VERSION:
        headers = {"Upgrade": "websocket", "Sec-WebSocket-Version": _VERSION}
        message = f"this is a WebSocket of version {_VERSION}"
        raise ApiError(426, message, code="upgrade_required", headers=headers)
    key = request.headers.get("Sec-WebSocket-Key", "")
    try:
        valid = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        valid = False
    if not valid:
        raise bad_field("Sec-WebSocket-Key", "must be 16 bytes of base64")
    framing = "Upgrade: websocket\r\nConnection: Upgrade\r\n"
    head = encode_head(101, {"Sec-WebSocket-Accept": generate_accept_token(key.encode()).decode()}, framing)
    socket = WebSocket(request.connection, most_bytes, trusted=trusted)
    request.connection.upgrade(request, head, socket)
    return socket


class WebSocket:
    """``leaving``: the server drains. No more messages are received; those received may still be answered.
    ``lingers``: the handler trusts the caller."""

    def __init__(self, connection: ServerConnection, most_bytes: int, *, trusted: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._most_bytes = most_bytes
        self._first_bytes: int | None = None if trusted else 0  # received, until the first message of a stranger
        self.lingers = trusted
        self._limit = _FrameLimit(most_bytes if trusted else _FIRST_BYTES)
        self._protocol = Connection(ConnectionType.SERVER, extensions=[self._limit])
        self._parts: list[str] = []
        self._size = 0  # bytes of the parts
        self._unparsed = bytearray()
        self._messages: deque[tuple[str, int]] = deque()  # with their bytes
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._sending = asyncio.Lock()
        self._last_input_at = self._loop.time()
        self._pinged = False
        self.leaving = False

    async def receive(self) -> str | None:
        """Return the next message, or None after the last one."""
        while not self._messages:
            if self._ended:
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, size = self._messages.popleft()
        self._waiting_bytes -= size
        self._connection.budget.give(size)
        self._hold_input()
        return message

    def _hold_input(self) -> None:
        full = len(self._messages) >= _MOST_WAITING or self._waiting_bytes >= _MOST_WAITING_BYTES
        self._connection.hold_input(full or bool(self._unparsed))

    async def send(self, text: str) -> None:
        """Send a message once the caller keeps up. Raises ConnectionResetError if the connection has ended."""
        if not self._connection.writable:
            async with self._sending:
                await self._connection.wait_writable()
        if self._protocol.state is not ConnectionState.OPEN:
            raise ConnectionResetError("the WebSocket is closed")
        self._connection.write_raw(self._protocol.send(TextMessage(data=text)))

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Send the close frame, unless it was sent. The handler's return ends the connection."""
        if self._protocol.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            self._send_control(CloseConnection(code=code, reason=reason))
        self._end()

    def _send_control(self, event: Event) -> None:
        with contextlib.suppress(ConnectionResetError):  # the caller has left
            self._connection.write_raw(self._protocol.send(event))

    def _end(self) -> None:
        self._ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the connection.

    def received(self, data: bytes) -> None:
        self._last_input_at, self._pinged = self._loop.time(), False
        is_parsing = bool(self._unparsed)
        self._unparsed += data
        if not is_parsing:
            self._parse()

    def _parse(self) -> None:
        """Parse a slice of the input, and the next one later: many small frames do not hold up other callers."""
        data = bytes(self._unparsed[:_SLICE_BYTES])
        del self._unparsed[:_SLICE_BYTES]
        if data and self._protocol.state is ConnectionState.OPEN:
            self._protocol.receive_data(data)
            for event in self._protocol.events():
                self._handle(event)
                if self._protocol.state is not ConnectionState.OPEN:
                    break
        if self._first_bytes is not None:
            self._first_bytes += len(data)
            if self._first_bytes > 2 * _FIRST_BYTES:  # frames without an end, or without content
                self._refuse_size(_FIRST_BYTES)
        if self._protocol.state is not ConnectionState.OPEN:  # input of a closing one is discarded
            self._unparsed.clear()
        elif self._unparsed and self._connection.has_left(aborted=True):  # unnoticed while it is held
            self._connection.abort()
        elif self._unparsed:
            self._loop.call_soon(self._parse)
        self._hold_input()

    def _handle(self, event: Event) -> None:
        match event:
            case TextMessage():
                self._handle_text(event.data, whole=event.message_finished)
            case BytesMessage():
                self.close(TEXT_ONLY, "only text is understood")
            case Ping():
                if self._connection.writable:
                    self._send_control(event.response())
            case CloseConnection(code=CloseReason.MESSAGE_TOO_BIG):
                self._refuse_size(self._size + self._limit.left)
            case CloseConnection():  # from the caller, or for a malformed frame
                self.close(event.code, event.reason or "")

    def _handle_text(self, text: str, *, whole: bool) -> None:
        count = len(text) if text.isascii() else len(text.encode())
        try:
            self._connection.budget.take(count, self._size + count)
        except ApiError as error:
            self.close(TRY_AGAIN_LATER, error.message)
            return
        self._size += count
        self._limit.left -= count
        if text:
            self._parts.append(text)
        if not whole or self._ended:
            return
        self._messages.append(("".join(self._parts), self._size))
        self._waiting_bytes += self._size
        self._parts.clear()
        self._size, self._first_bytes, self._limit.left = 0, None, self._most_bytes
        self._hold_input()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _refuse_size(self, most: int) -> None:
        self.close(TOO_LARGE, f"a message has at most {most} bytes")

    def _drop_messages(self) -> None:
        self._connection.budget.give(self._waiting_bytes)
        self._waiting_bytes = 0
        self._messages.clear()

    def lost(self) -> None:
        """Free the received data after the connection has ended."""
        self._drop_messages()
        self._connection.budget.give(self._size)
        self._size = 0
        self._parts.clear()
        self._unparsed.clear()
        self._end()

    def go_away(self) -> None:
        self.leaving = True
        self._drop_messages()
        self._end()

    def is_gone(self, now: float) -> bool:
        """Return whether the caller has been silent for too long. A ping is sent before that."""
        silent_s = now - self._last_input_at
        if silent_s > _PING_S and not self._pinged and self._protocol.state is ConnectionState.OPEN:
            self._pinged = True
            self._send_control(Ping())
        return silent_s > _SILENCE_S


class _FrameLimit(Extension):
    """Refuses a frame by the size in its header, before its content arrives. ``left``: the bytes that the message may
    still have."""

    def __init__(self, left: int) -> None:
        self.left = left

    def enabled(self) -> bool:
        return True

    def offer(self) -> bool:
        return False

    def frame_inbound_header(
        self, proto: FrameDecoder | FrameProtocol, opcode: Opcode, rsv: RsvBits, payload_length: int
    ) -> CloseReason | RsvBits:
        fits = opcode.iscontrol() or payload_length <= self.left
        return RsvBits(False, False, False) if fits else CloseReason.MESSAGE_TOO_BIG
