"""Wait until a run is ready, or say at once and in full why it will not be.

Ready means: our own component lives, a process of its session owns the port, and its probe answers 200. Somebody
else's answer on the same port is no answer. A component that dies while it starts fails the wait immediately, with
the first exception and the last lines of its log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from areal.errors import ArealError, NotFound, TargetFailed, TimedOut
from areal.runtime import logs, procfs
from areal.runtime.backends.base import Phase, RunControl, RunState
from areal.runtime.ports import port_owner, session_listens
from areal.runtime.probes import ProbeFailed, ProbeResponse, http_get, http_json_pid

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_PAUSE_SHARE = 0.03  # of the time waited so far: a start of seconds is noticed at once, one of minutes costs little
_PROBE_TIMEOUT_S = 5.0
_QUOTED_LINES = 20
_TERMINAL = frozenset({Phase.CRASHLOOP, Phase.EXITED, Phase.DEAD})


def wait_ready(
    backend: RunControl,
    uid: str,
    *,
    path: str = "/ready",
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    tolerated_restarts: int = 0,
    on_wait: Callable[[RunState, float], None] = lambda state, elapsed_s: None,
    interrupted: threading.Event | None = None,
    accept: Callable[[ProbeResponse], bool] = lambda response: response.status == 200,
) -> RunState:
    """The run's state once it is ready. ``on_wait`` is called between tries with the seconds waited so far;
    ``accept`` judges an answer of the probe.

    Raises TargetFailed when the component died more than ``tolerated_restarts`` times since the wait began,
    TimedOut at the deadline, KeyboardInterrupt once ``interrupted`` is set.
    """
    began = time.monotonic()
    interrupted = interrupted or threading.Event()
    first = _observe(backend, uid)
    pause_s, why = _FIRST_PAUSE_S, "it has not been asked yet"
    while True:
        state = _observe(backend, uid)
        deaths = state.restarts - first.restarts + (state.phase is Phase.BACKOFF)
        if state.phase in _TERMINAL or deaths > tolerated_restarts:
            raise failure(backend, state)
        elapsed_s = time.monotonic() - began
        why = _obstacle(state, path, headers, min(_PROBE_TIMEOUT_S, max(0.1, timeout_s - elapsed_s)), accept)
        if not why:
            return state
        if elapsed_s >= timeout_s:
            raise _too_late(backend, state, timeout_s, why)
        on_wait(state, elapsed_s)
        if interrupted.wait(pause_s):
            raise KeyboardInterrupt
        pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, elapsed_s * _PAUSE_SHARE))


def failure(backend: RunControl, state: RunState) -> TargetFailed:
    """The error for a run that died: what ended it, its first exception, its last lines."""
    spec = state.spec
    ended = state.last_exit.reason if state.last_exit else state.reason or str(state.phase)
    paths = backend.log_paths(spec.uid)
    cause = logs.first_exception(paths)
    last = "\n".join(logs.tail(paths, _QUOTED_LINES))
    detail = f"{cause}\n\nlast lines of the log:\n{last}" if cause and cause not in last else last
    return TargetFailed(
        f"{spec.owner}: {spec.component}[{spec.replica}] failed: {ended}",
        hint=f"areal logs {spec.owner} -c {spec.component} -r {spec.replica}",
        detail=detail,
    )


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
    """Why the run is not ready yet, or nothing."""
    if state.phase is not Phase.RUNNING or state.shim_pid is None:
        return state.reason or f"it is {state.phase}"
    if state.spec.url is None:
        return ""
    try:
        response = http_get(state.spec.url.rstrip("/") + path, timeout_s, headers)
    except ProbeFailed as error:
        return str(error)
    if not accept(response):
        return f"{path} answers {response.status}"
    return _impostor(state, response)


def _impostor(state: RunState, response: ProbeResponse) -> str:
    """Whether somebody else answered: another listener, or the predecessor that shares the port. Nothing of another
    machine's processes can be seen from here."""
    assert state.shim_pid is not None and state.spec.url is not None
    if state.node:
        return ""
    pid = http_json_pid(response)
    if pid is not None:
        stat = procfs.read_stat(pid)
        if stat is None or stat.session != state.shim_pid:
            return f"another process (pid {pid}) still answers on its port"
    port = urlsplit(state.spec.url).port or 80
    if not session_listens(port, state.shim_pid):
        return f"port {port} belongs to {port_owner(port) or 'nobody'}"
    return ""


def _too_late(backend: RunControl, state: RunState, timeout_s: float, why: str) -> ArealError:
    spec = state.spec
    return TimedOut(
        f"{spec.owner}: {spec.component}[{spec.replica}] was not ready within {timeout_s:g} s: {why}",
        hint=f"areal logs {spec.owner} -c {spec.component} -r {spec.replica}",
        detail="\n".join(logs.tail(backend.log_paths(spec.uid), _QUOTED_LINES)),
    )
