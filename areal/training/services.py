"""The services of a run: the weight-update gateway beside each trainer, and an inference service where none is given.

The gateway is started beside the trainer, dies with it, and is found by its discovery file. A driver started by hand,
``python driver.py``, that is given no inference service starts one as a job does (``areal train run``): the
configuration names the engine (``rollout.backend``, else ``allocation_mode``) and ``areal inf run`` starts it under
supervision. It is stopped when the driver ends, however it ends; what a killed driver left is removed by the next run
of that name. With ``shutdown_server_on_exit: false`` it serves on, and the next run takes it as it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal import hub
from areal.api.alloc_mode import AllocationMode
from areal.api.cli_args import PPOConfig
from areal.errors import ArealError, TimedOut
from areal.resources.backend import areal_sets
from areal.rollout.controller import ADDRESS
from areal.services.http.process import die_with_parent
from areal.training.run_folder import RunFolder

# -- the weight-update gateway

_START_S = 60.0
_ATTEMPTS = 3
DISCOVERY = "weight_update.json"


@contextlib.contextmanager
def weight_update_gateway(folder: Path, key_file: Path | None, log: Path) -> Iterator[str]:
    """Its address while the block runs. ``folder`` gets the discovery file."""
    for attempt in range(_ATTEMPTS):
        port = free_port()
        process = _start_gateway(port, folder, key_file, log)
        try:
            _wait_ready(process, port, log)
            break
        except BaseException as error:
            _end(process, 10.0)
            if not isinstance(error, ArealError) or attempt == _ATTEMPTS - 1:
                raise
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process, 10.0)


def _start_gateway(port: int, folder: Path, key_file: Path | None, log: Path) -> subprocess.Popen[bytes]:
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
        with contextlib.suppress(OSError), opener.open(f"http://127.0.0.1:{port}/ready", timeout=5.0):
            return
        if time.monotonic() > deadline:
            raise TimedOut(f"the weight-update gateway is not ready after {_START_S:g} s", hint=f"see {log}")
        time.sleep(0.02)
    raise ArealError(f"the weight-update gateway ended with status {process.returncode}", hint=f"see {log}")


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


_log = logging.getLogger(__name__)
_AREAL = (sys.executable, "-m", "areal.cli.main")
_STOP_S = 60.0


@contextlib.contextmanager
def own_service(config: PPOConfig, folder: RunFolder) -> Iterator[None]:
    """While the block runs, ``config.rollout`` names a service that is there: the one that is given, else one of our
    own. Raises ArealError as ``areal inf run`` does."""
    engine = _engine(config)
    if config.rollout.gateway_addr or os.environ.get(ADDRESS) or engine is None:
        yield
        return
    run = f"{config.experiment_name}-{config.trial_name}".lower()
    name = re.sub(r"[^a-z0-9]+", "-", run).strip("-")[:40].strip("-")  # as a resource may be called
    config.rollout.model = config.rollout.model or name
    config.rollout.admin_api_key_file = str(_key_file(folder))
    _log.info("no inference service is given: %s is started, %s", name, engine)
    started = _start_service(config, name, engine)
    with _guarded(name, folder) if config.rollout.shutdown_server_on_exit else contextlib.nullcontext():
        config.rollout.gateway_addr = started
        yield


def _engine(config: PPOConfig) -> str | None:
    """The allocation of its engines; None where nothing lays any out."""
    part = config.rollout.backend or config.allocation_mode
    generates = AllocationMode.from_str(part).gen if part else None
    return None if generates is None or generates.engine == "external" else str(generates)


def _start_service(config: PPOConfig, name: str, engine: str) -> str:
    """Its address, when the model answers."""
    model = ["--model", config.rollout.model, "--backend", engine, "--model-path", _absolute(config.actor.path)]
    model += ["--tokenizer-path", _absolute(config.tokenizer_path)]
    if flags := _flags(config, engine.partition(":")[0]):
        model += ["--engine-args", json.dumps(flags)]
    found = bool(_areal("get", f"inferenceservice/{name}", "-o", "name", missing_is_fine=True))
    if found and config.rollout.shutdown_server_on_exit:
        # Its engines would wait for the weights that the driver before us published last, and nobody has them now.
        _stop_service(name)
        found = False
    how = [] if found else ["--port", str(free_port())]  # a service keeps the one it has
    how += ["--admin-api-key-file", config.rollout.admin_api_key_file, "--timeout", f"{config.rollout.setup_timeout}s"]
    _areal("inf", "run", name, "-d", *how, *model, "-y")
    address: str = json.loads(_areal("get", f"inferenceservice/{name}", "-o", "json"))["status"]["address"]
    return address


def _flags(config: PPOConfig, engine: str) -> dict[str, Any]:
    """Of the engine's section what says something, and is not said by areal itself."""
    section: Mapping[str, Any] = {"sglang": config.sglang, "vllm": config.vllm}.get(engine, {})
    if engine == "embedded":
        section = {"dtype": config.actor.dtype}
    return {
        name: value
        for name, value in section.items()
        if value not in (None, "", [], {}) and not areal_sets(engine, name)
    }


def _stop_service(name: str) -> None:
    """It ends, with its model, and nothing of them stays."""
    _areal("inf", "stop", "--service", name, "-y")


def _areal(*words: str, missing_is_fine: bool = False) -> str:
    """What the command line answers. Raises ArealError with what it says went wrong."""
    ran = subprocess.run([*_AREAL, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode == 0:
        return ran.stdout
    if missing_is_fine and ran.returncode == 4:
        return ""
    why = _said(ran.stderr, "error: ") or ran.stderr.strip()[-500:]
    failure = ArealError(
        f"the run's own inference service, areal {' '.join(words[:2])}: {why}",
        hint=_said(ran.stderr, "hint: ") or "rollout.gateway_addr=http://HOST:PORT names one that is there",
    )
    failure.exit_code = ran.returncode
    raise failure


def _said(output: str, mark: str) -> str:
    """What the last line with this mark says."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line.removeprefix(mark) for line in reversed(lines) if line.startswith(mark)), "")


@contextlib.contextmanager
def _guarded(name: str, folder: RunFolder) -> Iterator[None]:
    """The service ends with the block, or with this process."""
    parent = os.getpid()
    with (folder.logs / "service.log").open("ab") as log:
        guard = subprocess.Popen(
            [*_AREAL, "inf", "run", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: die_with_parent(parent),
            process_group=0,  # Ctrl-C is for the driver: it still has weights to take back
        )
    try:
        yield
    finally:
        try:
            _stop_service(name)
        except ArealError as error:
            _log.warning("the run's service %s was not stopped: %s", name, error.message)
        _end(guard, _STOP_S)


def _key_file(folder: RunFolder) -> Path:
    """Its admin key, made once for a run's folder, 0600."""
    path = folder.root / "service.key"
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path


def _absolute(path: str) -> str:
    """A folder here, or that of the commit which the trainer has of a name on a hub."""
    return str(hub.model_folder(path).absolute())
