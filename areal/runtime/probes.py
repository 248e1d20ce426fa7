"""Probe components over HTTP, many at once, within one deadline and never through a proxy.

Non-blocking sockets in one loop, standard library only: ``areal get`` probes a home's processes with it and stays
light, and a thousand stopped processes cost one deadline, not a thousand. Sockets, logs and leases are imported on use.
"""

from __future__ import annotations

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
    from areal.runtime.exchange import HttpExchange

MOST_BYTES = 1 << 20
_AT_ONCE = 2048
_FILES_LEFT = 128  # of the process's limit, for whatever else it has open
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_PAUSE_SHARE = 0.03  # of the time waited so far: a short start is noticed at once, and a long one costs little
_PROBE_TIMEOUT_S = 5.0
_QUOTED_LINES = 20


class ProbeFailed(Exception):
    """A probe without a complete answer: refused, cut off, not HTTP, or too late."""


class NoAnswer(ProbeFailed):
    """The deadline passed; the process may still be alive."""


@dataclass(frozen=True)
class ProbeRequest:
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeResponse:
    status: int
    body: bytes  # at most ``most_bytes`` of it

    def json(self) -> dict[str, Any]:
        """Return the JSON object in the body; {} if there is none."""

        try:
            found = parse_json(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def http_get(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> ProbeResponse:
    """Get ``url``. The deadline covers the whole exchange, so that a peer that trickles bytes cannot block us."""
    (answer,) = http_get_all([ProbeRequest(url, headers or {})], timeout_s)
    if isinstance(answer, ProbeFailed):
        raise answer
    return answer


def http_get_all(
    requests: Sequence[ProbeRequest], timeout_s: float, *, most_bytes: int = MOST_BYTES
) -> list[ProbeResponse | ProbeFailed]:
    """Return the answers, in order, each within ``timeout_s`` of its request; the time that this process itself needs
    does not count. At most ``_AT_ONCE`` requests run at once, fewer if the limit on open files is low. If none has
    answered for two timeouts, the requests not yet sent count as silent, too."""
    if not requests:
        return []
    import selectors

    from areal.runtime.exchange import HttpExchange

    exchanges = [HttpExchange(request.url, request.headers, most_bytes) for request in requests]
    waiting, asked = deque(exchanges), deque[tuple[float, HttpExchange]]()
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
                exchange.step()
                if exchange.has_ended:
                    selector.unregister(peer)
                    exchange.close()
                    open_now -= 1
                    quiet_from = seen
                elif exchange.sent and key.events == selectors.EVENT_WRITE:
                    selector.modify(peer, selectors.EVENT_READ, key.data)
            while asked and (asked[0][1].has_ended or asked[0][0] <= seen):
                late = asked.popleft()[1]
                if late.peer is not None:
                    selector.unregister(late.peer)
                    late.close()
                    open_now -= 1
            if seen - quiet_from >= 2 * timeout_s:
                break
    return [_result(exchange, timeout_s) for exchange in exchanges]


def _result(exchange: HttpExchange, timeout_s: float) -> ProbeResponse | ProbeFailed:
    exchange.close()
    if exchange.answer is not None:
        return ProbeResponse(*exchange.answer)
    failure = exchange.failure
    return ProbeFailed(failure) if failure else NoAnswer(f"{exchange.url}: no answer within {timeout_s:g} s")


# Ready means: the run's own component lives, a process of its session owns the port, and its probe answers 200. An
# answer of another process on the same port does not count. A component that dies while it starts fails the wait at
# once, with its first exception and the last lines of its log.


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
    """Return the run's state once it is ready. ``on_wait`` is called between tries with the seconds waited so far;
    ``accept`` decides whether a probe's answer is good. ``beside``: a run that this one waits for.

    Raises TargetFailed if one of the two has died since, TimedOut, and KeyboardInterrupt once ``interrupted`` is set.
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
    """Return a note about a process that a signal or its scheduler has stopped, or ""."""
    held = state.reason or f"pid {state.pid} is stopped by a signal (kill -CONT {state.pid})"
    return f"; {held}" if state.halted else ""


def failure(backend: RunControl, state: RunState) -> TargetFailed:
    """Return the error for a run that died, with its end, its first exception and its last lines."""
    from areal.runtime import causes

    ended, paths = state.death or str(state.phase), backend.log_paths(state.spec.uid)
    cause, last = causes.first_exception(paths), _last_lines(backend, state)
    detail = last
    if cause and cause not in last:
        since = last.rpartition(cause.splitlines()[-1])[2].strip("\n")  # the end of the traceback stands above it
        detail = f"{cause}\n\nlast lines of the log:\n{since}" if since else cause
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
    """Return why the run is not ready yet; "" if it is."""
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
    return _wrong_responder(state, response)


def _wrong_responder(state: RunState, response: ProbeResponse) -> str:
    """Return a message if another process of this machine answered: another listener, or one that shares the port."""
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
        return f"port {port} belongs to {port_owner(port) or 'no process'}"
    return ""
