"""Small real components, and ways to wait for what they do."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

from areal.runtime import procfs
from areal.runtime.backends.base import Backend, Phase, RestartPolicy, RunSpec, RunState
from areal.runtime.procfs import RUN_DIR_VARIABLE

T = TypeVar("T")
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NEVER = RestartPolicy("Never")
PATIENCE_S = 120.0

SLEEPER = ("sleep", "1000")

# Answers /health with 200 until the file named by its second argument exists, then hangs.
HTTP_COMPONENT = """
import http.server, json, os, socketserver, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while len(sys.argv) > 2 and os.path.exists(sys.argv[2]):
            time.sleep(0.05)
        print("asked", self.path, flush=True)
        body = b"ok" if self.path == "/plain" else json.dumps({"status": "ok", "pid": os.getpid()}).encode()
        if self.path == "/unready": body = json.dumps({"reason": "no key", "pid": os.getpid()}).encode()
        self.send_response({"/missing": 404, "/unready": 503}.get(self.path, 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
class Server(socketserver.TCPServer):
    allow_reuse_address = True
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# Leaves a grandchild in the session that closed everything, renamed itself and wiped its environment, as engines do.
FORKING_COMPONENT = """
import ctypes, os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        if "setsid" in sys.argv:
            os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        environment = {} if "wipe" in sys.argv else dict(os.environ)
        if "another" in sys.argv:
            environment["AREAL_RUN_DIR"] = sys.argv[1] + ".run"
        script = "echo $$ > %s; exec sleep 1000" % sys.argv[1]
        os.execve("/bin/sh", ["VLLM::EngineCore", "-c", script], environment)
    os._exit(0)
os.wait()
while not (os.path.exists(sys.argv[1]) and os.path.getsize(sys.argv[1])):
    time.sleep(0.005)
print("forked", flush=True)
time.sleep(1000)
"""


def python(source: str, *args: str) -> tuple[str, ...]:
    """A component that starts fast: no site packages."""
    return (sys.executable, "-I", "-S", "-c", source, *args)


def run_spec(uid: str = "r1", argv: tuple[str, ...] = SLEEPER, **changes: object) -> RunSpec:
    fields: dict[str, object] = {"owner": "Model/qwen", "component": "engine", "replica": 0, **changes}
    return RunSpec(uid=uid, argv=argv, **fields)  # type: ignore[arg-type]


def until(condition: Callable[[], T | None], what: str) -> T:
    """The first true value of ``condition``; fails after a patience far longer than it ever takes."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"waited {PATIENCE_S:g} s in vain for: {what}")


def until_phase(backend: Backend, uid: str, *phases: Phase) -> RunState:
    def reached() -> RunState | None:
        state = backend.observe([uid])[uid]
        noticed = state.phase is not Phase.BACKOFF or state.last_exit is not None
        return state if state.phase in phases and noticed else None

    return until(reached, f"run {uid} to be {' or '.join(phases)}")


def kill_until_backoff(observe: Callable[[], RunState]) -> RunState:
    """Kill a component twice: it starts again at once the first time, and after its back-off the second time."""
    for restarts in (0, 1):
        state = until(lambda n=restarts: _running(observe(), n), f"start {restarts + 1}")  # type: ignore[misc]
        os.kill(state.pid or 0, signal.SIGKILL)
    return until(lambda: state if (state := observe()).phase is Phase.BACKOFF and state.restarts else None, "back-off")


def _running(state: RunState, restarts: int) -> RunState | None:
    return state if state.phase is Phase.RUNNING and state.pid and state.restarts == restarts else None


def alive(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.alive


def processes_under(root: object) -> list[int]:
    """Every process that was started for a run of a home below ``root``."""
    prefix = f"{root}/"
    found = (stat.pid for stat in procfs.processes())
    return [pid for pid in found if procfs.environment(pid).get(RUN_DIR_VARIABLE, "").startswith(prefix)]


def log_text(backend: Backend, uid: str) -> str:
    parts = []
    for path in backend.log_paths(uid):
        with open(path, "rb") as file:
            parts.append(file.read().decode())
    return "".join(parts)
