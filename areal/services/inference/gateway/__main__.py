"""``python -m areal.services.inference.gateway``: one relay process, or a supervisor and ``relays`` of them.

The supervisor starts the relays on one port, restarts dead ones, and forwards signals. The kernel distributes
connections over them (SO_REUSEPORT). The supervisor's own socket is bound but never listens: it reserves the port. The
supervisor imports no web server, so that it stays small.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from areal.dataclasses import dataclass
from areal.installation import module_argv
from areal.services.http.process import ServeOptions, bind, die_with_parent, exit_on_failure, read_config, serve_options
from areal.wire.processes import GatewayConfig

# The metrics folder that a gateway's relays share. The supervisor and each relay hold a shared lock on it, and the last
# process to leave removes it. If all of them are killed, it stays until the next gateway starts. It is in the run's
# folder if there is one, otherwise among the temporary files.

MULTIPROC_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the Prometheus client's
_RUN_FOLDER = "AREAL_RUN_DIR"
_PREFIX = "areal-relays-"
_YOUNG_S = 60.0


def make_folder() -> Path:
    run = os.environ.get(_RUN_FOLDER)
    if not run:
        # A young folder stays: its supervisor is about to lock it.
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # another user's, or gone already
                if time.time() - folder.stat().st_mtime > _YOUNG_S:
                    with shared_folder(folder):
                        pass  # removes it unless it is in use
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    folder = Path(run) / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def shared_folder(folder: Path) -> Iterator[None]:
    """Lock the folder for sharing; the last process to leave removes it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with suppress(BlockingIOError):  # others share it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # releases the shared lock in any case
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


_log = logging.getLogger("areal.services.inference.gateway")

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 5.0
_STEADY_S = 10.0  # a relay that ran this long restarts without a longer backoff


@dataclass
class _GatewayProcess:
    index: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    backoff_s: float = 0.0
    due_at: float = 0.0


class Supervisor:
    """Keeps the relays running. ``run`` returns when all have ended after a stop signal."""

    def __init__(self, argv: Sequence[str], count: int) -> None:
        self._argv = module_argv("areal.services.inference.gateway", *argv)
        self._children = [_GatewayProcess(index) for index in range(count)]
        self._stopping = False

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        while True:
            self._reap()
            if self._stopping and not self._living():
                return
            if not self._stopping:
                now = time.monotonic()
                for child in self._children:
                    if child.process is None and child.due_at <= now:
                        argv = [*self._argv, "--relay-index", str(child.index)]
                        child.process = subprocess.Popen(argv, preexec_fn=partial(_begin_child, os.getpid()))
                        child.started_at = now
                        child.backoff_s = child.backoff_s or _BACKOFF_FIRST_S / 2
            received = signal.sigtimedwait(_SIGNALS, self._sleep_s())
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._stopping = True
                for process in self._living():  # the first signal drains them, a second one stops them
                    process.send_signal(signal.SIGTERM)

    def _living(self) -> list[subprocess.Popen[bytes]]:
        return [child.process for child in self._children if child.process is not None]

    def _reap(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.process is None or (code := child.process.poll()) is None:
                continue
            for file in Path(os.environ[MULTIPROC_VARIABLE]).glob(f"gauge_live*_{child.process.pid}.db"):
                file.unlink(missing_ok=True)  # "live" gauges count running processes only; the counters stay in the sum
            child.process = None
            steady = now - child.started_at >= _STEADY_S
            child.backoff_s = _BACKOFF_FIRST_S if steady else min(child.backoff_s * 2, _BACKOFF_MAX_S)
            child.due_at = now + child.backoff_s
            if not self._stopping:
                _log.warning("relay %d ended with %d; it starts again in %.1f s", child.index, code, child.backoff_s)

    def _sleep_s(self) -> float:
        if self._stopping:
            return 5.0
        waits = [child.due_at - time.monotonic() for child in self._children if child.process is None]
        return max(0.0, min(waits, default=5.0))


def _begin_child(supervisor: int) -> None:
    """Bind the child's life to the supervisor's. Runs in the child before exec."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(supervisor)


def supervise(relays: int, options: ServeOptions, argv: Sequence[str]) -> None:
    """Run ``relays`` relays with one command line until a stop signal. Raises OSError if the port cannot be used."""
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    socket = bind(options.host, options.port, reuse_port=True)
    port = socket.getsockname()[1]
    metrics = make_folder()
    os.environ[MULTIPROC_VARIABLE] = str(metrics)
    with socket, shared_folder(metrics):
        _log.info("%d relays share %s port %d", relays, options.host, port)
        Supervisor([*argv, "--port", str(port)], relays).run()


def main() -> None:
    config = read_config(GatewayConfig, "areal-inference-gateway")
    # The port is always shared: with other relays, and with a successor during a handover.
    options = serve_options(config, reuse_port=True)
    if config.relays > 1 and config.relay_index is None:
        supervise(config.relays, options, sys.argv[1:])
        return
    from areal.services.http.serve import run_service  # the supervisor itself needs no web server
    from areal.services.inference.gateway.app import gateway

    metrics = os.environ.get(MULTIPROC_VARIABLE)
    with shared_folder(Path(metrics)) if metrics else nullcontext():
        run_service(lambda: gateway(config, options), options)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
