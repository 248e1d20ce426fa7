"""The trainer's way of getting its weights served: a weight-update gateway of its own, and one pair."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from areal import hub
from areal.api.engine_api import TrainEngine
from areal.errors import UsageFault
from areal.services.http.auth import load_admin_key
from areal.services.weight_update.publisher import Delivery, FolderPublisher, TrainerPair, WeightPublisher, serving
from areal.services.weight_update.staging import BroadcastPublisher, Folders, leave, probe
from areal.training.run_folder import RunFolder, config_files
from areal.training.services import weight_update_gateway

_log = logging.getLogger(__name__)
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_PROBED_EVERY = 25  # updates; the first one always


@contextlib.contextmanager
def connected_pair(
    mode: str, folder: RunFolder, model_folder: str, service: tuple[str, str | None, str | None]
) -> Iterator[TrainerPair]:
    """``service``: the inference gateway's address, its admin key, and the model that is trained. Used by the first
    rank."""
    address, key, model = service
    if model is None:
        raise UsageFault("which of the service's models is trained is not said", hint="rollout.model=NAME")
    files = config_files(hub.model_folder(model_folder))
    publisher = _publisher(mode, folder, files)
    with contextlib.ExitStack() as stack:
        key_file = stack.enter_context(_key_file(folder, key))
        admin = load_admin_key(str(key_file)) if key_file is not None else None
        stack.callback(publisher.remove)
        gateway = stack.enter_context(weight_update_gateway(folder.root, key_file, folder.logs / "weight_update.log"))
        endpoint = stack.enter_context(serving({"actor": publisher}, admin))
        pair = TrainerPair(
            "actor", mode, gateway, endpoint, {"inference_gateway_url": address, "model": model}, publisher, key
        )
        pair.connect()
        stack.callback(_part, pair, publisher, files, folder)
        yield pair


def _part(pair: TrainerPair, publisher: WeightPublisher, files: tuple[Path, ...], folder: RunFolder) -> None:
    """What is served stays behind as a folder: engines that start when we are gone go on with it."""
    file = publisher.staged_file(pair.delivered) if pair.delivered is not None else None
    if file is None:  # nothing is served, or a failed update has staged another version over it
        pair.disconnect(comes_back=pair.delivered is not None)
        return
    place = folder.root / "served" / f"v{pair.delivered}"
    try:
        leave(file, files, place)
    except OSError as error:
        _log.warning("the weights that are served could not be kept: engines that start later serve others: %s", error)
        pair.disconnect()
        return
    pair.disconnect(place)
    for old in place.parent.iterdir():
        if old != place:
            shutil.rmtree(old, ignore_errors=True)


def _publisher(mode: str, folder: RunFolder, files: tuple[Path, ...]) -> WeightPublisher:
    place = folder.root / "weights"
    if mode == "disk":
        return FolderPublisher(Folders.on_disk(place, files))
    if mode == "shm":
        return FolderPublisher(Folders.in_memory_at(place, files))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return BroadcastPublisher(place, device=device)


@contextlib.contextmanager
def _key_file(folder: RunFolder, key: str | None) -> Iterator[Path | None]:
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
