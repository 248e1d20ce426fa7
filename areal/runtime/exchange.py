"""One HTTP GET over a non-blocking socket, driven by a loop that polls it: the probes', or the shim's for liveness.

Never through a proxy. Imported by the shim: no ``dataclasses``, no ``typing``, no ``urllib``.
"""

from __future__ import annotations

import errno
import os
import select
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_BLOCK = 1 << 16
_MOST_HEAD = 1 << 16
_SEARCH_PERIOD_S = 1.0  # until the first answer: a component that hangs soon after it was ready is judged too


class HttpExchange:
    """A request and its answer. Call ``connect``, then ``step`` whenever ``peer`` is ready: for writing until ``sent``,
    then for reading. The exchange has ended when ``answer`` (status, body) or ``failure`` is set. At most
    ``most_bytes`` of the body are read."""

    def __init__(self, url: str, headers: Mapping[str, str], most_bytes: int) -> None:
        self.peer: socket.socket | None = None
        self.sent = False
        self.answer: tuple[int, bytes] | None = None
        self.failure = ""
        self.url, self._headers, self._most = url, headers, most_bytes
        self._out, self._in = b"", bytearray()

    @property
    def has_ended(self) -> bool:
        return self.answer is not None or bool(self.failure)

    def connect(self) -> socket.socket | None:
        """Connect. Return the socket to poll, or None if ``failure`` is set."""
        try:
            host, port, authority, path = split_url(self.url)
            headers = {"Host": authority, "Accept-Encoding": "identity", "Connection": "close", **self._headers}
            lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
            self._out = "\r\n".join(lines).encode("latin-1")
            family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.peer = socket.socket(family, kind, proto)
            self.peer.setblocking(False)
            error = self.peer.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except (OSError, ValueError, OverflowError) as failure:
            self._fail(failure)
            self.close()
        return self.peer

    def step(self) -> None:
        assert self.peer is not None, "it is connected"
        try:
            if not self.sent:
                error = self.peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                self._out = self._out[self.peer.send(self._out) :]
                self.sent = not self._out
                return
            block = self.peer.recv(_BLOCK)
            self._in += block
            self.answer = parse(bytes(self._in), ended=not block, most_bytes=self._most)
        except BlockingIOError:
            return
        except (OSError, ValueError) as failure:
            self._fail(failure)

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()
            self.peer = None

    def _fail(self, failure: Exception) -> None:
        self.failure = f"{self.url}: {failure or type(failure).__name__}"


def split_url(url: str) -> tuple[str, int, str, str]:
    """Return host, port, authority and path of ``http://host:port/path``. Raises ValueError."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = authority, "80"
    if scheme != "http" or not host or not port.isdecimal():
        raise ValueError("not an http:// URL")
    return host.strip("[]"), int(port), authority, slash + path or "/"


def parse(data: bytes, *, ended: bool, most_bytes: int) -> tuple[int, bytes] | None:
    """Return status and body; None if more bytes must arrive. Raises ValueError for a malformed or cut answer."""
    head, blank, body = data.partition(b"\r\n\r\n")
    if not blank:
        if ended or len(data) > _MOST_HEAD or not b"HTTP/".startswith(data[:5]):
            raise ValueError("the answer was cut off" if data.startswith(b"HTTP/") else "the answer is not HTTP")
        return None
    first, *lines = head.split(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit() or len(words[1]) != 3:
        raise ValueError("the answer is not HTTP")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    status = int(words[1])
    if status < 200 and status != 101:
        return parse(body, ended=ended, most_bytes=most_bytes)
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        content, whole = _unchunked(body)
    else:
        length = headers.get(b"content-length")
        if length is not None and not length.isdigit():
            raise ValueError("the answer is not HTTP")
        expected = 0 if status in (204, 304) else int(length) if length is not None else None
        content = body if expected is None else body[:expected]
        whole = ended if expected is None else len(body) >= expected
    if whole or len(content) >= most_bytes:
        return status, content[:most_bytes]
    if ended:
        raise ValueError("the answer was cut off")
    return None


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    """Return the content of the chunks so far, and whether the last chunk has arrived."""
    pieces: list[bytes] = []
    while True:
        line, end, rest = body.partition(b"\r\n")
        if not end:
            return b"".join(pieces), False
        size = int(line.split(b";")[0], 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(rest[:size])
        if len(rest) < size + 2:
            return b"".join(pieces), False
        body = rest[size + 2 :]


class LivenessCheck:
    """The shim's probe of its component, one exchange at a time: one that hangs delays neither its log nor a stop. It
    is judged only after its first answer: until then it is starting, and who waits for it decides how long.

    Call ``tick`` with the time, and ``on_ready`` when ``interest`` is ready. ``failed``: the component must be ended.
    ``due``: the time of the next ``tick``. ``healthy_since``: its first healthy answer."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._url = str(record["url"])
        self._period_s = float(record["period_s"])
        self._timeout_s = float(record["timeout_s"])
        self._threshold = int(record["failure_threshold"])
        self._exchange: HttpExchange | None = None
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget everything: a new component has started."""
        self._close()
        self._answered_once = False
        self.healthy_since: float | None = None
        self._failures = 0
        self.due = now + min(self._period_s, _SEARCH_PERIOD_S)

    @property
    def failed(self) -> bool:
        return self._answered_once and self._failures >= self._threshold

    @property
    def interest(self) -> tuple[int, int] | None:
        """The descriptor to poll and for what, while a probe is under way."""
        if self._exchange is None or self._exchange.peer is None:
            return None
        return self._exchange.peer.fileno(), select.POLLIN if self._exchange.sent else select.POLLOUT

    def tick(self, now: float) -> None:
        if now < self.due:
            return
        if self._exchange is not None:
            self._settle(False, now)
            return
        self.due = now + self._timeout_s
        self._exchange = HttpExchange(self._url, {}, 0)
        if self._exchange.connect() is None:
            self._settle(False, now)

    def on_ready(self, now: float) -> None:
        if self._exchange is None:
            return
        self._exchange.step()
        if self._exchange.has_ended:
            answer = self._exchange.answer
            self._settle(answer is not None and answer[0] == 200, now)

    def _settle(self, healthy: bool, now: float) -> None:
        self._close()
        self._failures = 0 if healthy else self._failures + 1
        if healthy and not self._answered_once:
            self._answered_once, self.healthy_since = True, now
        self.due = now + (self._period_s if self._answered_once else min(self._period_s, _SEARCH_PERIOD_S))

    def _close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
