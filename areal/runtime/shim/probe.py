"""The liveness probe: one HTTP GET at a time on a non-blocking socket, driven by the shim's own poll loop.

No thread and no blocking call, so a component that hangs can delay neither its log nor a stop. A component is
judged only after it has answered once: until then it is starting, and how long that may take is the business of
whoever waits for it (a model load takes minutes).
"""

from __future__ import annotations

import select
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_SEARCH_PERIOD_S = 1.0  # until the first answer: a component that hangs soon after it was ready is judged too


def split_url(url: str) -> tuple[str, int, str]:
    """``http://host:port/path`` as host, port, path. Only plain HTTP: the component is on this machine."""
    scheme, _, rest = url.partition("://")
    if scheme != "http":
        raise ValueError(f"liveness probe {url!r}: only http:// is supported")
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = authority, "80"
    return host.strip("[]"), int(port), slash + path or "/"


class LivenessCheck:
    """``tick`` with the time, ``on_ready`` when ``fd`` is; ``failed`` says that the component must go.
    ``healthy_since``: its first healthy answer."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._host, self._port, self._path = split_url(str(record["url"]))
        self._period_s = float(record["period_s"])
        self._timeout_s = float(record["timeout_s"])
        self._threshold = int(record["failure_threshold"])
        self._socket: socket.socket | None = None
        self._sent = False
        self._answer = b""
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """A new component: nothing is known about it."""
        self._close()
        self._answered_once = False
        self.healthy_since: float | None = None
        self._failures = 0
        self._due = now + min(self._period_s, _SEARCH_PERIOD_S)

    @property
    def failed(self) -> bool:
        return self._answered_once and self._failures >= self._threshold

    @property
    def due(self) -> float:
        """The time of the next ``tick``: the start of a probe, or its timeout."""
        return self._due

    @property
    def interest(self) -> tuple[int, int] | None:
        """The descriptor to poll and for what, while a probe is under way."""
        if self._socket is None:
            return None
        return self._socket.fileno(), select.POLLIN if self._sent else select.POLLOUT

    def tick(self, now: float) -> None:
        if now < self._due:
            return
        if self._socket is not None:
            self._settle(False, now)
        else:
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._due = now + self._timeout_s
        try:
            family, kind, proto, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, proto)
            self._socket.setblocking(False)
            self._socket.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            self._settle(False, now)

    def on_ready(self, now: float) -> None:
        if self._socket is None:
            return
        try:
            if not self._sent:
                request = f"GET {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n\r\n"
                self._socket.send(request.encode())
                self._sent = True
                return
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            self._settle(False, now)
            return
        self._answer += data
        if b"\r\n" in self._answer or not data:
            fields = self._answer.split(b"\r\n")[0].split()
            self._settle(len(fields) > 1 and fields[0].startswith(b"HTTP/") and fields[1] == b"200", now)

    def _settle(self, healthy: bool, now: float) -> None:
        self._close()
        self._failures = 0 if healthy else self._failures + 1
        if healthy and not self._answered_once:
            self._answered_once, self.healthy_since = True, now
        self._due = now + (self._period_s if self._answered_once else min(self._period_s, _SEARCH_PERIOD_S))

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._sent = False
        self._answer = b""
