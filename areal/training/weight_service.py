"""The weight-update gateway of a run: started beside the trainer, dead with it, found by its discovery file."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from areal.errors import ArealError, TimedOut
from areal.services.web.options import die_with_parent

_START_S = 60.0
_ATTEMPTS = 3
DISCOVERY = "weight_update.json"


@contextlib.contextmanager
def weight_update_gateway(folder: Path, key_file: Path | None, log: Path) -> Iterator[str]:
    """Its address while the block runs. ``folder`` gets the discovery file."""
    for attempt in range(_ATTEMPTS):
        port = free_port()
        process = _start(port, folder, key_file, log)
        try:
            _wait_ready(process, port, log)
            break
        except BaseException as error:
            _stop(process)
            if not isinstance(error, ArealError) or attempt == _ATTEMPTS - 1:
                raise
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(process)


def _start(port: int, folder: Path, key_file: Path | None, log: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "areal.services.weight_update", "--port", str(port)]
    argv += ["--discovery-file", str(folder / DISCOVERY)]
    if key_file is not None:
        argv += ["--admin-key-file", str(key_file)]
    parent = os.getpid()
    with log.open("ab") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=lambda: die_with_parent(parent),
            process_group=0,  # torchrun tells the whole group of a rank to stop: the rank still has a step to publish
        )


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            opener.open(f"http://127.0.0.1:{port}/ready", timeout=5.0),
        ):
            return
        if time.monotonic() > deadline:
            raise TimedOut(f"the weight-update gateway is not ready after {_START_S:g} s", hint=f"see {log}")
        time.sleep(0.02)
    raise ArealError(f"the weight-update gateway ended with status {process.returncode}", hint=f"see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
