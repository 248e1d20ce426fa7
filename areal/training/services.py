"""The services of a run: a weight-update gateway beside its trainer, and an inference service if none is configured.

The gateway is a child process of the trainer, ends with it, and is found by its discovery file. A driver started by
hand (``python driver.py``) without an inference service starts one as a job does (``areal train run``): ``areal inf
run`` with the engine of ``rollout.backend`` or else ``allocation_mode``. The service is stopped when the driver ends;
the next run of that name removes one that a killed driver left. With ``shutdown_server_on_exit: false`` it keeps
serving, and the next run uses it.
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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from areal import hub
from areal.api.alloc_mode import AllocationMode
from areal.api.cli_args import PPOConfig
from areal.api.engine_api import TrainEngine
from areal.client.command import AREAL, free_port, run_areal
from areal.client.gateway import NoResponse, ServiceClient
from areal.errors import ArealError, TimedOut, UsageFault
from areal.files import replace_file
from areal.installation import module_argv
from areal.resources.addresses import base_url
from areal.resources.backend import engine_arguments
from areal.rollout.controller import ADDRESS, ServiceAddress
from areal.runtime.backends.base import NODE_ADDRESS_VARIABLE
from areal.services.http.auth import load_admin_key
from areal.services.http.process import die_with_parent
from areal.services.weight_update.publisher import TrainerPair, WeightPublisher, serve_endpoint
from areal.services.weight_update.staging import copy_model, open_publisher, probe
from areal.training.run_folder import RunFolder, config_files
from areal.wire.bodies import UpdateResult
from areal.wire.fields import write_fields
from areal.wire.notes import OWNER_VARIABLE
from areal.wire.processes import WEIGHT_UPDATE_FILE, WeightUpdateConfig

_log = logging.getLogger(__name__)

_START_S = 60.0  # for the weight-update gateway
_ATTEMPTS = 3  # another process may take its port
_END_S = 10.0
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_PROBE_INTERVAL = 25  # updates; the first is always verified
_SERVICE = "the run's own inference service"
_HINT = "rollout.gateway_addr=http://HOST:PORT names one that is there"
_STOP_S = 60.0  # for the run's own service


def own_address() -> str:
    """Return the address at which other processes reach this one: that of its node in a cluster, otherwise loopback."""
    return os.environ.get(NODE_ADDRESS_VARIABLE) or "127.0.0.1"


@contextlib.contextmanager
def weight_update_gateway(folder: Path, key_file: Path | None, log: Path) -> Iterator[str]:
    """Run a gateway and yield its address. The discovery file is written to ``folder``, its configuration beside
    ``log``."""
    for attempt in range(_ATTEMPTS):
        config = WeightUpdateConfig(
            host=own_address(),
            port=free_port(),
            discovery_file=str(folder / WEIGHT_UPDATE_FILE),
            admin_key_file=str(key_file) if key_file is not None else None,
            writer=os.environ.get(OWNER_VARIABLE, str(folder)),
        )
        file = log.with_suffix(".config.json")
        replace_file(file, json.dumps(write_fields(config), indent=1).encode() + b"\n")
        address = base_url(config.host, config.port)
        process = _start(module_argv("areal.services.weight_update", "--config", str(file)), log)
        try:
            _wait_ready(process, address, log)
            break
        except BaseException as error:
            _terminate(process, _END_S)
            if not isinstance(error, ArealError) or attempt == _ATTEMPTS - 1:
                raise
    try:
        yield address
    finally:
        _terminate(process, _END_S)


def _start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Return a process that ends with this one. It has its own process group: Ctrl-C and torchrun's signals must reach
    only the trainer, which may still publish a step or disconnect."""
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
        with contextlib.suppress(NoResponse):
            if ServiceClient(address).ask("GET", "/ready")[0] == 200:
                return
        if time.monotonic() > deadline:
            raise TimedOut(f"the weight-update gateway is not ready after {_START_S:g} s", hint=f"see {log}")
        time.sleep(0.02)
    raise ArealError(f"the weight-update gateway ended with status {process.returncode}", hint=f"see {log}")


def _terminate(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def connect_pair(
    mode: str, folder: RunFolder, model_folder: str, service: ServiceAddress, current_address: Callable[[], str]
) -> Iterator[TrainerPair]:
    """Connect the trainer to ``service``, on the first rank. ``current_address`` returns its present address."""
    key = service.key
    if service.model is None:
        raise UsageFault("no setting names which of the service's models is trained", hint="rollout.model=NAME")
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
    """Disconnect, and keep the served weights as a folder, for engines that start after the trainer has ended."""
    file = publisher.staged_file(pair.delivered) if pair.delivered is not None else None
    if file is None:  # nothing was delivered, or a failed update has replaced the staged version
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
    """Yield the key as a file with mode 0600, for child processes."""
    if key is None:
        yield None
        return
    path = folder.logs / "admin.key"
    replace_file(path, key.encode(), mode=0o600)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def publish(
    engine: TrainEngine, pair: TrainerPair | None, version: int, sample: torch.Tensor | None
) -> UpdateResult | None:
    """Publish the engine's weights as ``version``. Every rank calls it, because all take part in gathering; the first
    has the ``pair`` and gets the result. ``sample`` [T]: tokens for which the engines must return the trainer's
    log-probabilities."""
    check = None
    if sample is not None:
        check = probe(engine.next_token_logprobs(sample), sample, _TOLERANCES[engine.dtype])
    weights = engine.named_tensors(engine.dtype)
    if pair is None:
        for _ in weights:
            pass
        return None
    return pair.publish(version, weights, check)


def is_probed(version: int, first: int) -> bool:
    """Return whether the update to ``version`` is verified; ``first`` is the run's first."""
    return version == first or version % _PROBE_INTERVAL == 0


@contextlib.contextmanager
def own_service(config: PPOConfig, folder: RunFolder) -> Iterator[None]:
    """Start an inference service for the block if none is configured, and set it in ``config.rollout``. Raises
    ArealError as ``areal inf run`` does."""
    engine = _engine_allocation(config)
    if config.rollout.gateway_addr or os.environ.get(ADDRESS) or engine is None:
        yield
        return
    run = f"{config.experiment_name}-{config.trial_name}".lower()
    name = re.sub(r"[^a-z0-9]+", "-", run).strip("-")[:40].strip("-")  # a valid resource name
    config.rollout.model = config.rollout.model or name
    config.rollout.admin_api_key_file = str(_key_file(folder))
    _log.info("no inference service is given: %s is started, %s", name, engine)
    started = _start_service(config, name, engine)
    with _supervised(name, folder) if config.rollout.shutdown_server_on_exit else contextlib.nullcontext():
        config.rollout.gateway_addr = started
        yield


def _engine_allocation(config: PPOConfig) -> str | None:
    """Return the allocation of the service's engines; None if none is configured."""
    part = config.rollout.backend or config.allocation_mode
    generates = AllocationMode.from_str(part).gen if part else None
    return None if generates is None or generates.engine == "external" else str(generates)


def _start_service(config: PPOConfig, name: str, engine: str) -> str:
    """Start the service and wait for the model. Returns the address."""
    model = ["--model", config.rollout.model, "--backend", engine]
    for flag, path in (("--model-path", config.actor.path), ("--tokenizer-path", config.tokenizer_path)):
        model += [flag, str(hub.model_folder(path).absolute())]  # of a hub id: the trainer's commit
    kind = engine.partition(":")[0]
    section: Mapping[str, object] = {"sglang": config.sglang, "vllm": config.vllm}.get(kind, {})
    if arguments := engine_arguments(kind, section, config.actor.dtype):
        model += ["--engine-args", json.dumps(arguments)]
    found = bool(_areal("get", f"inferenceservice/{name}", "-o", "name", absent=True))
    if found and config.rollout.shutdown_server_on_exit:
        # Its engines would wait for the last weights of the previous driver, which no longer exist.
        _areal("inf", "stop", "--service", name, "-y")
        found = False
    flags = [] if found else ["--port", str(free_port())]  # an existing service keeps its port
    flags += [
        "--admin-api-key-file",
        config.rollout.admin_api_key_file,
        "--timeout",
        f"{config.rollout.setup_timeout}s",
    ]
    _areal("inf", "run", name, "-d", *flags, *model, "-y")
    return json.loads(_areal("get", f"inferenceservice/{name}", "-o", "json"))["status"]["address"]


def _areal(*words: str, absent: bool = False) -> str:
    return run_areal(*words, what=_SERVICE, hint=_HINT, absent=absent)


@contextlib.contextmanager
def _supervised(name: str, folder: RunFolder) -> Iterator[None]:
    """Stop the service when the block or this process ends."""
    guard = _start([*AREAL, "inf", "run", name], folder.logs / "service.log")
    try:
        yield
    finally:
        try:
            _areal("inf", "stop", "--service", name, "-y")
        except ArealError as error:
            _log.warning("the run's service %s was not stopped: %s", name, error.message)
        _terminate(guard, _STOP_S)


def _key_file(folder: RunFolder) -> Path:
    """Return the service's admin key file with mode 0600, created once for a run folder."""
    path = folder.root / "service.key"
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(32))
    return path
