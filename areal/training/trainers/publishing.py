"""The trainer's way of getting its weights served: a weight-update gateway of its own, and one pair."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from areal import hub
from areal.errors import UsageFault
from areal.services.web.keys import AdminKey, load_admin_key
from areal.training.engines.fsdp import FSDPEngine
from areal.training.engines.fsdp.model import compute_dtype
from areal.training.engines.fsdp.weights import whole_weights
from areal.training.model_folder import config_files
from areal.training.run_folder import RunFolder
from areal.training.weight_service import weight_update_gateway
from areal.training.weights.broadcast import BroadcastOutlet
from areal.training.weights.endpoint import Outlet, serving
from areal.training.weights.folders import Folders, leave, probe
from areal.training.weights.publisher import Delivered, FolderOutlet, Pair

_log = logging.getLogger(__name__)
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_PROBED_EVERY = 25  # updates; the first one always


@contextlib.contextmanager
def connected_pair(
    mode: str, folder: RunFolder, model_folder: str, service: tuple[str, str | None, str | None]
) -> Iterator[Pair]:
    """``service``: the inference gateway's address, its admin key, and the model that is trained. Used by the first
    rank."""
    address, key, model = service
    if model is None:
        raise UsageFault("which of the service's models is trained is not said", hint="rollout.model=NAME")
    files = config_files(hub.model_folder(model_folder))
    outlet = _outlet(mode, folder, files)
    with contextlib.ExitStack() as stack:
        key_file = stack.enter_context(_key_file(folder, key))
        admin = load_admin_key(str(key_file)) if key_file is not None else None
        stack.callback(outlet.remove)
        gateway = stack.enter_context(weight_update_gateway(folder.root, key_file, folder.logs / "weight_update.log"))
        endpoint = stack.enter_context(_endpoint(outlet, admin))
        pair = Pair("actor", mode, gateway, endpoint, {"inference_gateway_url": address, "model": model}, outlet, key)
        pair.connect()
        stack.callback(_part, pair, outlet, files, folder)
        yield pair


def _part(pair: Pair, outlet: Outlet, files: tuple[Path, ...], folder: RunFolder) -> None:
    """What is served stays behind as a folder: engines that start when we are gone go on with it."""
    file = outlet.staged_file(pair.delivered) if pair.delivered is not None else None
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


def _outlet(mode: str, folder: RunFolder, files: tuple[Path, ...]) -> Outlet:
    place = folder.root / "weights"
    if mode == "disk":
        return FolderOutlet(Folders.on_disk(place, files))
    if mode == "shm":
        return FolderOutlet(Folders.in_memory_at(place, files))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return BroadcastOutlet(place, device=device)


def _endpoint(outlet: Outlet, key: AdminKey | None) -> contextlib.AbstractContextManager[str]:
    return serving({"actor": outlet}, key)


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


def publish(engine: FSDPEngine, pair: Pair | None, version: int, sample: torch.Tensor | None) -> Delivered | None:
    """Carry the engine's weights over as ``version``. Every rank calls it, for all take part in gathering; the first
    has the ``pair`` and hears the outcome. ``sample`` [T]: tokens over which the engines are compared with us."""
    weights = whole_weights(engine, compute_dtype(engine.config))
    compared = _probe(engine, sample) if sample is not None else None
    if pair is None:
        for _ in weights:
            pass
        return None
    return pair.publish(version, weights, compared)


def is_probed(version: int, first: int) -> bool:
    return version == first or version % _PROBED_EVERY == 0


@torch.no_grad()
def _probe(engine: FSDPEngine, sample: torch.Tensor) -> dict[str, Any]:
    ids = sample[None].to(engine.ranks.device)
    logits = engine.outputs({"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)})
    logprobs = torch.log_softmax(logits[0, -1].float(), -1).cpu()
    return probe(logprobs, sample, _TOLERANCES[compute_dtype(engine.config)])
