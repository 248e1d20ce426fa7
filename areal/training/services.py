"""The services of a run: a weight-update gateway beside its trainer, and an inference service where none is given.

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
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from areal import hub
from areal.api.alloc_mode import AllocationMode
from areal.api.cli_args import PPOConfig
from areal.api.engine_api import TrainEngine
from areal.client.command import AREAL, free_port, run_areal
from areal.client.http import AdminClient
from areal.errors import ArealError, TimedOut, UsageFault
from areal.files import replace_file
from areal.resources.addresses import base_url
from areal.resources.backend import engine_arguments
from areal.rollout.controller import ADDRESS, ServiceAddress
from areal.runtime.backends.base import NODE_ADDRESS_VARIABLE
from areal.services.http.auth import load_admin_key
from areal.services.http.process import die_with_parent
from areal.services.weight_update.publisher import Delivery, TrainerPair, WeightPublisher, serve_endpoint
from areal.services.weight_update.staging import copy_model, open_publisher, probe
from areal.training.run_folder import RunFolder, config_files
from areal.wire.fields import write_fields
from areal.wire.processes import WeightUpdateConfig

_log = logging.getLogger(__name__)

# -- the weight-update gateway

DISCOVERY = "weight_update.json"
_START_S = 60.0
_ATTEMPTS = 3
_END_S = 10.0


def own_address() -> str:
    """Where this process is called by others: the address of its node in a cluster, else loopback."""
    return os.environ.get(NODE_ADDRESS_VARIABLE) or "127.0.0.1"


@contextlib.contextmanager
def weight_update_gateway(folder: Path, key_file: Path | None, log: Path) -> Iterator[str]:
    """Its address while the block runs. ``folder`` gets the discovery file; the configuration lies beside ``log``."""
    for attempt in range(_ATTEMPTS):
        config = WeightUpdateConfig(
            host=own_address(),
            port=free_port(),
            discovery_file=str(folder / DISCOVERY),
            admin_key_file=str(key_file) if key_file is not None else None,
        )
        file = log.with_suffix(".config.json")
        replace_file(file, json.dumps(write_fields(config), indent=1).encode() + b"\n")
        address = base_url(config.host, config.port)
        process = _start([sys.executable, "-m", "areal.services.weight_update", "--config", str(file)], log)
        try:
            _wait_ready(process, address, log)
            break
        except BaseException as error:
            _end(process, _END_S)
            if not isinstance(error, ArealError) or attempt == _ATTEMPTS - 1:
                raise
    try:
        yield address
    finally:
        _end(process, _END_S)


def _start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A process that ends with this one. It has a group of its own: Ctrl-C and torchrun's signals are for the trainer,
    which still has a step to publish, or weights to take back."""
    parent = os.getpid()
    with log.open("ab") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=lambda: die_with_parent(parent),
            process_group=0,
        )


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if AdminClient(address).get("/ready")[0] == 200:
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


# -- publication of the trainer's weights

_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_PROBED_EVERY = 25  # updates; the first one always


@contextlib.contextmanager
def connect_pair(
    mode: str, folder: RunFolder, model_folder: str, service: ServiceAddress, current_address: Callable[[], str]
) -> Iterator[TrainerPair]:
    """``service``: with the model that is trained. ``current_address`` gives it now. Used by the first rank."""
    key = service.key
    if service.model is None:
        raise UsageFault("which of the service's models is trained is not said", hint="rollout.model=NAME")
    files = config_files(hub.model_folder(model_folder))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    publisher = open_publisher(mode, folder.root / "weights", files, device, own_address())
    with contextlib.ExitStack() as stack:
        key_file = stack.enter_context(_admin_key_file(folder, key))
        admin = load_admin_key(str(key_file)) if key_file is not None else None
        stack.callback(publisher.remove)
        gateway = stack.enter_context(weight_update_gateway(folder.root, key_file, folder.logs / "weight_update.log"))
        endpoint = stack.enter_context(serve_endpoint({"actor": publisher}, admin, own_address()))
        inference = {"inference_gateway_url": current_address(), "model": service.model}
        pair = TrainerPair("actor", mode, gateway, endpoint, inference, publisher, key, current_address)
        pair.connect()
        stack.callback(_disconnect, pair, publisher, files, folder)
        yield pair


def _disconnect(pair: TrainerPair, publisher: WeightPublisher, files: tuple[Path, ...], folder: RunFolder) -> None:
    """Leave the served weights behind as a folder, for engines that start after the trainer has ended."""
    file = publisher.staged_file(pair.delivered) if pair.delivered is not None else None
    if file is None:  # nothing is served, or a failed update has staged another version over it
        pair.disconnect(comes_back=pair.delivered is not None)
        return
    place = folder.root / "served" / f"v{pair.delivered}"
    try:
        copy_model(file, files, place)
    except OSError as error:
        _log.warning("the weights that are served could not be kept: engines that start later serve others: %s", error)
        pair.disconnect()
        return
    pair.disconnect(place)
    for old in place.parent.iterdir():
        if old != place:
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _admin_key_file(folder: RunFolder, key: str | None) -> Iterator[Path | None]:
    """The key as a file of our own, 0600, for the processes that we start."""
    if key is None:
        yield None
        return
    path = folder.logs / "admin.key"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(key)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def publish(
    engine: TrainEngine, pair: TrainerPair | None, version: int, sample: torch.Tensor | None
) -> Delivery | None:
    """Carry the engine's weights over as ``version``. Every rank calls it, for all take part in gathering; the first
    has the ``pair`` and hears the outcome. ``sample`` [T]: tokens over which the engines are compared with us."""
    compared = None
    if sample is not None:
        compared = probe(engine.next_token_logprobs(sample), sample, _TOLERANCES[engine.dtype])
    weights = engine.named_tensors(engine.dtype)
    if pair is None:
        for _ in weights:
            pass
        return None
    return pair.publish(version, weights, compared)


def is_probed(version: int, first: int) -> bool:
    return version == first or version % _PROBED_EVERY == 0


# -- an inference service of the run's own

_WHAT = "the run's own inference service"
_HINT = "rollout.gateway_addr=http://HOST:PORT names one that is there"
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
    with _supervised(name, folder) if config.rollout.shutdown_server_on_exit else contextlib.nullcontext():
        config.rollout.gateway_addr = started
        yield


def _engine(config: PPOConfig) -> str | None:
    """The allocation of its engines; None where nothing lays any out."""
    part = config.rollout.backend or config.allocation_mode
    generates = AllocationMode.from_str(part).gen if part else None
    return None if generates is None or generates.engine == "external" else str(generates)


def _start_service(config: PPOConfig, name: str, engine: str) -> str:
    """Its address, when the model answers."""
    model = ["--model", config.rollout.model, "--backend", engine]
    for flag, path in (("--model-path", config.actor.path), ("--tokenizer-path", config.tokenizer_path)):
        model += [flag, str(hub.model_folder(path).absolute())]  # of a name on a hub: the commit that the trainer has
    kind = engine.partition(":")[0]
    section: Mapping[str, Any] = {"sglang": config.sglang, "vllm": config.vllm}.get(kind, {})
    if arguments := engine_arguments(kind, section, config.actor.dtype):
        model += ["--engine-args", json.dumps(arguments)]
    found = bool(_areal("get", f"inferenceservice/{name}", "-o", "name", absent=True))
    if found and config.rollout.shutdown_server_on_exit:
        # Its engines would wait for the weights that the driver before us published last, and nobody has them now.
        _areal("inf", "stop", "--service", name, "-y")
        found = False
    how = [] if found else ["--port", str(free_port())]  # a service keeps the one it has
    how += ["--admin-api-key-file", config.rollout.admin_api_key_file, "--timeout", f"{config.rollout.setup_timeout}s"]
    _areal("inf", "run", name, "-d", *how, *model, "-y")
    address: str = json.loads(_areal("get", f"inferenceservice/{name}", "-o", "json"))["status"]["address"]
    return address


def _areal(*words: str, absent: bool = False) -> str:
    return run_areal(*words, what=_WHAT, hint=_HINT, absent=absent)


@contextlib.contextmanager
def _supervised(name: str, folder: RunFolder) -> Iterator[None]:
    """The service ends with the block, or with this process."""
    guard = _start([*AREAL, "inf", "run", name], folder.logs / "service.log")
    try:
        yield
    finally:
        try:
            _areal("inf", "stop", "--service", name, "-y")
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
