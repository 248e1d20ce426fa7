"""Probe components over HTTP, many at once, within one deadline and never through a proxy.

Non-blocking sockets in one loop and a small parser, standard library only: ``areal get`` probes a home's processes
with it and stays light, and a thousand stopped processes cost one deadline, not a thousand. Logs and leases, which only
the wait for a start reads, are imported there.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal.dataclasses import dataclass, field
from areal.errors import NotFound, TargetFailed, TimedOut
from areal.files import parse_json
from areal.runtime import procfs
from areal.runtime.backends.base import ENDED, Phase, RunControl, RunState

if TYPE_CHECKING:
    import socket

MOST_BYTES = 1 << 20
_BLOCK = 1 << 16
_MOST_HEAD = 1 << 16
_AT_ONCE = 2048
_FILES_LEFT = 128  # of the process's limit, for whatever else it has open


class ProbeFailed(Exception):
    """A probe without a complete answer: refused, cut off, not HTTP, or too late."""


class NoAnswer(ProbeFailed):
    """The deadline passed: the process may still be alive."""


@dataclass(frozen=True)
class ProbeRequest:
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeResponse:
    status: int
    body: bytes  # at most ``most_bytes`` of it

    def json(self) -> dict[str, Any]:
        """The JSON object of the body; {} where it holds none."""

        try:
            found = parse_json(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def http_get(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> ProbeResponse:
    """GET ``url``. A peer that sends a byte now and then cannot hold us: the deadline is for all of it."""
    (answer,) = http_get_all([ProbeRequest(url, headers or {})], timeout_s)
    if isinstance(answer, ProbeFailed):
        raise answer
    return answer


def http_get_all(
    requests: Sequence[ProbeRequest], timeout_s: float, *, most_bytes: int = MOST_BYTES
) -> list[ProbeResponse | ProbeFailed]:
    """The answers, in order, each within ``timeout_s`` of when it was asked for, this process's own work left out. No
    more are asked at once than it may open files, or ``_AT_ONCE``. Where none has answered for two timeouts, those that
    were not asked yet are taken as silent too."""
    if not requests:
        return []
    import selectors

    exchanges = [_Exchange(request, timeout_s, most_bytes) for request in requests]
    waiting, asked = deque(exchanges), deque[tuple[float, _Exchange]]()
    at_once = min(_AT_ONCE, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _FILES_LEFT))
    open_now, quiet_from = 0, time.monotonic()
    with selectors.DefaultSelector() as selector:
        while True:
            while waiting and open_now < at_once:
                exchange = waiting.popleft()
                if (peer := exchange.connect()) is not None:
                    selector.register(peer, selectors.EVENT_WRITE, (exchange, peer))
                    asked.append((time.monotonic() + timeout_s, exchange))
                    open_now += 1
            if not open_now:
                break
            ready = selector.select(max(0.0, asked[0][0] - time.monotonic()))
            seen = time.monotonic()  # answers that arrive while others are read are in time
            for key, _ in ready:
                exchange, peer = key.data
                exchange.step(peer)
                if exchange.answer is not None:
                    selector.unregister(peer)
                    exchange.close()
                    open_now -= 1
                    quiet_from = seen
                elif exchange.sent and key.events == selectors.EVENT_WRITE:
                    selector.modify(peer, selectors.EVENT_READ, key.data)
            while asked and (asked[0][1].answer is not None or asked[0][0] <= seen):
                exchange = asked.popleft()[1]
                if exchange.answer is None and exchange.peer is not None:
                    selector.unregister(exchange.peer)
                    exchange.finish()
                    open_now -= 1
            if seen - quiet_from >= 2 * timeout_s:
                break
    return [exchange.finish() for exchange in exchanges]


class _Exchange:
    """One request and its answer, driven by ``step`` whenever its socket is ready."""

    def __init__(self, request: ProbeRequest, timeout_s: float, most_bytes: int) -> None:
        self.url = request.url
        self.answer: ProbeResponse | ProbeFailed | None = None
        self.sent = False
        self._timeout_s, self._most = timeout_s, most_bytes
        self._out = b""
        self._in = bytearray()
        self._request = request
        self.peer: socket.socket | None = None

    def connect(self) -> socket.socket | None:
        """A socket to wait for; None where ``answer`` already holds the failure."""
        import socket

        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            parts, host, port = urlsplit(""), None, 0
        if parts.scheme != "http" or host is None:
            self.answer = ProbeFailed(f"{self.url}: not an http:// URL")
            return None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": parts.netloc, "Accept-Encoding": "identity", "Connection": "close", **self._request.headers}
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        try:
            self._out = "\r\n".join(lines).encode("latin-1")
            family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.peer = socket.socket(family, kind, proto)
            self.peer.setblocking(False)
            error = self.peer.connect_ex(address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except (OSError, UnicodeError) as failure:
            self._fail(failure)
            self.close()
            return None
        return self.peer

    def step(self, peer: socket.socket) -> None:
        import socket

        try:
            if not self.sent:
                error = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                self._out = self._out[peer.send(self._out) :]
                self.sent = not self._out
                return
            block = peer.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError as failure:
            self._fail(failure)
            return
        self._in += block
        try:
            self.answer = parse(bytes(self._in), ended=not block, most_bytes=self._most)
        except ValueError as fault:
            self.answer = ProbeFailed(f"{self.url}: {fault}")

    def finish(self) -> ProbeResponse | ProbeFailed:
        self.close()
        self.answer = self.answer or NoAnswer(f"{self.url}: no answer within {self._timeout_s:g} s")
        return self.answer

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()

    def _fail(self, failure: Exception) -> None:
        self.answer = ProbeFailed(f"{self.url}: {failure or type(failure).__name__}")


def parse(data: bytes, *, ended: bool, most_bytes: int = MOST_BYTES) -> ProbeResponse | None:
    """The answer in ``data``, or None where more of it has to come. Raises ValueError: it is none, or was cut off."""
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
        return ProbeResponse(status, content[:most_bytes])
    if ended:
        raise ValueError("the answer was cut off")
    return None


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    """The content of the chunks so far, and whether the last one has come."""
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


# Ready means: the run's own component lives, a process of its session owns the port, and its probe answers 200. The
# answer of another process on the same port does not count. A component that dies while it starts fails the wait
# immediately, with the first exception and the last lines of its log.

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_PAUSE_SHARE = 0.03  # of the time waited so far: a start of seconds is noticed at once, one of minutes costs little
_PROBE_TIMEOUT_S = 5.0
_QUOTED_LINES = 20


def wait_ready(
    backend: RunControl,
    uid: str,
    *,
    path: str = "/ready",
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    on_wait: Callable[[RunState, float], None] = lambda state, elapsed_s: None,
    interrupted: threading.Event | None = None,
    accept: Callable[[ProbeResponse], bool] = lambda response: response.status == 200,
    beside: str = "",
) -> RunState:
    """The run's state once it is ready. ``on_wait`` is called between tries with the seconds waited so far;
    ``accept`` judges an answer of the probe. ``beside``: a run that this one waits for.

    Raises TargetFailed when one of the two died since the wait began, TimedOut at the deadline, KeyboardInterrupt once
    ``interrupted`` is set.
    """
    began = time.monotonic()
    interrupted = interrupted or threading.Event()
    uids = (uid, beside) if beside else (uid,)
    restarts = {each: _observe(backend, each).restarts for each in uids}
    pause_s, why = _FIRST_PAUSE_S, "it has not been asked yet"
    while True:
        for each in uids:
            state = _observe(backend, each)
            if state.phase in ENDED or state.phase is Phase.BACKOFF or state.restarts > restarts[each]:
                raise failure(backend, state)
        state = _observe(backend, uid)
        elapsed_s = time.monotonic() - began
        why = _obstacle(state, path, headers, min(_PROBE_TIMEOUT_S, max(0.1, timeout_s - elapsed_s)), accept)
        if not why:
            return state
        if elapsed_s >= timeout_s:
            doing = f" ({stage.stage})" if (stage := backend.stage(uid)) is not None else ""
            late = f"{_name(state)} was not ready within {timeout_s:.3g} s{doing}: {why}{halted_note(state)}"
            raise TimedOut(late, hint=_logs_hint(state), detail=_last_lines(backend, state))
        on_wait(state, elapsed_s)
        if interrupted.wait(pause_s):
            raise KeyboardInterrupt
        pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, elapsed_s * _PAUSE_SHARE))


def halted_note(state: RunState) -> str:
    """The note for a process that a signal or its scheduler has stopped, or ""."""
    held = state.reason or f"pid {state.pid} is stopped by a signal (kill -CONT {state.pid})"
    return f"; {held}" if state.halted else ""


def failure(backend: RunControl, state: RunState) -> TargetFailed:
    """The error for a run that died: its end, its first exception, its last lines."""
    from areal.runtime import causes

    ended, paths = state.death or str(state.phase), backend.log_paths(state.spec.uid)
    cause, last = causes.first_exception(paths), _last_lines(backend, state)
    detail = f"{cause}\n\nlast lines of the log:\n{last}" if cause and cause not in last else last
    line = f": {causes.failing_line(paths)}" if cause else ""
    return TargetFailed(f"{_name(state)} failed: {ended}{line}", hint=_logs_hint(state), detail=detail)


def _name(state: RunState) -> str:
    return f"{state.spec.owner}: {state.spec.component}[{state.spec.replica}]"


def _logs_hint(state: RunState) -> str:
    return f"areal logs {state.spec.owner} -c {state.spec.component} -r {state.spec.replica}"


def _last_lines(backend: RunControl, state: RunState) -> str:
    from areal.runtime import logs

    return "\n".join(logs.tail(backend.log_paths(state.spec.uid), _QUOTED_LINES))


def _observe(backend: RunControl, uid: str) -> RunState:
    state = backend.observe([uid]).get(uid)
    if state is None:
        raise NotFound(f"run {uid} was forgotten while it was waited for")
    return state


def _obstacle(
    state: RunState,
    path: str,
    headers: Mapping[str, str] | None,
    timeout_s: float,
    accept: Callable[[ProbeResponse], bool],
) -> str:
    """The reason that the run is not ready yet; empty when it is."""
    if state.phase is not Phase.RUNNING or state.shim_pid is None:
        return state.reason or f"it is {state.phase}"
    if state.spec.url is None:
        return ""
    try:
        response = http_get(state.spec.url.rstrip("/") + path, timeout_s, headers)
    except ProbeFailed as error:
        return str(error)
    if not accept(response):
        reason = response.json().get("reason")
        return f"{path} answers {response.status}" + (f" ({reason})" if reason else "")
    return _impostor(state, response)


def _impostor(state: RunState, response: ProbeResponse) -> str:
    """Whether somebody else answered: another listener, or the predecessor that shares the port. Nothing of another
    machine's processes can be seen from here."""
    from areal.runtime.leases import port_owner, session_listens

    assert state.shim_pid is not None and state.spec.url is not None
    if state.node:
        return ""
    pid = response.json().get("pid")
    if isinstance(pid, int):
        stat = procfs.read_stat(pid)
        if stat is None or stat.session != state.shim_pid:
            return f"another process (pid {pid}) still answers on its port"
    port = urlsplit(state.spec.url).port or 80
    if not session_listens(port, state.shim_pid):
        return f"port {port} belongs to {port_owner(port) or 'nobody'}"
    return ""
