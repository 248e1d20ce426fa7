"""Staging of a version of the weights: in folders that inference workers read, or for a broadcast to them.

``disk`` writes a new folder for each version, renames it into place when it is complete, and keeps the newest two.
``shm`` alternates between two folders in the memory of one machine, so that a folder is never written while a worker
reads it. A worker may compute with the weights in place, without a copy, and holds a lease on the folder; a leased
folder is not written. If both folders are leased (one serves an old version, the other is left from a failed update), a
third folder is created, but never a fourth: the oldest is dropped instead, and its memory is freed once no worker maps
it. ``xccl`` broadcasts from one image in memory.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.dataclasses import dataclass, field
from areal.errors import ArealError
from areal.services.http.errors import ApiError
from areal.services.weight_transfer.group import Sender, open_group, open_store, release
from areal.services.weight_transfer.memory import Image, MemoryFile, TransferProgress, ends, layout_of
from areal.wire.bodies import ProbeOfWeights, PublishedVersion

_FILE = "model.safetensors"
_PROBED_TOKENS = 8
_KEPT = 2
_MOST_IN_MEMORY = 3
_TIMEOUT_S = 300.0  # to form a group, or to send a piece
_CPU = torch.device("cpu")
_STAGED = "staged.safetensors"


def probe(logprobs: Tensor, input_ids: Tensor, tolerance: float) -> ProbeOfWeights:
    """Return a check that an engine computes with these weights: the likeliest tokens after ``input_ids`` [T] and their
    log-probabilities, from ``logprobs`` [V] of a plain forward pass."""
    values, tokens = torch.topk(logprobs.float(), min(_PROBED_TOKENS, logprobs.numel()))
    expected = {str(token): value for token, value in zip(tokens.tolist(), values.tolist(), strict=True)}
    return {"input_ids": input_ids.tolist(), "expected": expected, "tolerance": tolerance}


def copy_model(file: Path, config_files: tuple[Path, ...], folder: Path) -> None:
    """Replace ``folder`` by a model folder with the weights in ``file`` and ``config_files``. After a crash the folder
    is complete or absent. Raises OSError."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700, parents=True)
    shutil.copyfile(file, aside / _FILE)
    _copy_into(aside, config_files)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def _copy_into(folder: Path, files: tuple[Path, ...]) -> None:
    for path in files:
        shutil.copyfile(path, folder / path.name)


def _not_staged(version: int, staged: int | None) -> ApiError:
    has = "nothing" if staged is None else f"version {staged}"
    return ApiError(409, f"version {version} is not staged: the trainer has {has}", code="not_staged")


@dataclass(frozen=True)
class StagedWeights:
    """A version of the weights in a folder. ``probe``: the log-probabilities that an engine must return."""

    version: int
    folder: Path
    bytes: int
    probe: ProbeOfWeights | None = None


@dataclass
class _WeightFolder:
    """A folder in memory. ``version`` is None while it is written, and if that failed."""

    folder: Path
    image: Image
    version: int | None = None


@dataclass
class FolderPublisher:
    """The ``WeightPublisher`` of ``disk`` and ``shm``: workers read the weights from folders.

    ``in_memory``: ``root`` has only links to this process's memory. ``config_files`` are copied beside the weights, so
    that any tool can load a folder as a model. The endpoint's threads read ``staged``, which is replaced atomically.
    """

    root: Path
    in_memory: bool
    config_files: tuple[Path, ...] = ()
    staged: StagedWeights | None = None
    _places: list[_WeightFolder] = field(default_factory=list)  # the newest last
    _mark: MemoryFile | None = None

    def offer(self, name: str = "", size: int = 0, group_form: str = "") -> dict[str, Any]:
        """Return the root of the folders, and the name and content of a file there. A worker that reads the same
        content there has access to the same folder."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self.root.glob("v*.tmp"):  # left by a killed trainer, like its mark
            shutil.rmtree(path, ignore_errors=True)
        for path in self.root.glob("mark-*"):
            path.unlink(missing_ok=True)
        mark, word = f"mark-{os.getpid()}", secrets.token_hex(16)
        if self.in_memory:
            self._mark = MemoryFile(self.root / mark, len(word))
            self._mark.map[:] = word.encode()
        else:
            (self.root / mark).write_text(word)
        return {"root": str(self.root), "mark": mark, "word": word}

    def join(self) -> None:
        """Do nothing: each worker has proved at its connection that it reaches the folder."""

    def leave(self) -> None:
        """Do nothing: a folder has no connections."""

    def settle(self) -> None:
        """Do nothing: ``write`` has staged all weights."""

    def send(self, version: int) -> None:
        """Do nothing: workers read the weights themselves."""

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: ProbeOfWeights | None = None) -> None:
        """Stage all weights. Raises ArealError naming an unwritable folder; the earlier version stays published."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder, size = self._to_memory(version, weights) if self.in_memory else self._to_disk(version, weights)
        except OSError as error:
            raise ArealError(f"weights of version {version} cannot be written below {self.root}: {error}") from error
        self.staged = StagedWeights(version, folder, size, probe)

    def _to_disk(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> tuple[Path, int]:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        held = {name: tensor.cpu().contiguous() for name, tensor in weights}
        aside, folder = self.root / f"v{version}.tmp", self.root / f"v{version}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            save_file(held, aside / _FILE, {"format": "pt"})
        except SafetensorError as error:  # the disk is full
            raise OSError(errno.EIO, str(error), str(aside)) from error
        _copy_into(aside, self.config_files)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        names = (path.name[1:] for path in self.root.glob("v*") if path.is_dir())
        others = sorted(int(name) for name in names if name.isdecimal() and int(name) != version)
        for old in others[: -(_KEPT - 1)]:
            shutil.rmtree(self.root / f"v{old}", ignore_errors=True)
        return folder, sum(tensor.nbytes for tensor in held.values())

    def _to_memory(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> tuple[Path, int]:
        place = self._seized()
        if place is None:
            weights = list(weights)
            place = self._new_place(weights)
        place.version = None
        written = set()
        for name, tensor in weights:
            place.image.write(name, tensor)
            written.add(name)
        if missing := place.image.names - written:
            raise ArealError(f"the weights lack {sorted(missing)[0]}, which an earlier version had")
        place.image.unlock()
        place.version = version
        self._places.remove(place)
        self._places.append(place)
        return place.folder, place.image.bytes

    def _seized(self) -> _WeightFolder | None:
        """Lock the oldest folder that is not on lease, for writing; never the newest, which joining workers read. The
        folder stays locked if writing fails, so that no worker reads an incomplete version."""
        newest = self.staged_version
        spares = [place for place in self._places if place.version is None or place.version != newest]
        free = [place for place in spares if place.version is None or place.image.try_lock()]
        for spare in free[1:]:  # more folders were on lease earlier
            self._drop(spare)
        return free[0] if free else None

    def _new_place(self, weights: Iterable[tuple[str, Tensor]]) -> _WeightFolder:
        if len(self._places) >= _MOST_IN_MEMORY:
            self._drop(self._places[0])
        taken = {place.folder.name for place in self._places}
        folder = next(self.root / f"m{n}" for n in range(_MOST_IN_MEMORY) if f"m{n}" not in taken)
        folder.mkdir(exist_ok=True)
        place = _WeightFolder(folder, Image(layout_of(weights), folder / _FILE))
        place.image.try_lock()
        _copy_into(folder, self.config_files)
        self._places.append(place)
        return place

    def _drop(self, place: _WeightFolder) -> None:
        self._places.remove(place)
        place.image.remove()

    @property
    def staged_version(self) -> int | None:
        return None if self.staged is None else self.staged.version

    def staged_file(self, version: int) -> Path | None:
        """Return the file of ``version``, if it is one of the two newest on disk, or still in memory; else None."""
        if self.in_memory:
            return next((place.folder / _FILE for place in self._places if place.version == version), None)
        if self.staged is None or version > self.staged.version:
            return None
        file = self.root / f"v{version}" / _FILE
        return file if file.is_file() else None

    def published(self, version: int) -> PublishedVersion:
        staged = self.staged
        if staged is None or staged.version != version:
            raise _not_staged(version, self.staged_version)
        answer: PublishedVersion = {"source": {"path": str(staged.folder)}, "bytes": staged.bytes}
        return {**answer, "probe": staged.probe} if staged.probe else answer

    def remove(self) -> None:
        for place in list(self._places):
            self._drop(place)
        if self._mark is not None:
            self._mark.remove()
        shutil.rmtree(self.root, ignore_errors=True)


@dataclass
class Rendezvous:
    """A process group with the workers, from its offer to its end."""

    store: Any
    form: str
    size: int
    name: str
    given_up: threading.Event = field(default_factory=threading.Event)
    group: Sender | None = None

    def part(self) -> None:
        """Leave the group and close its connections: the other members would wait on open ones."""
        if (group := self.group) is not None:
            group.leave()
            self.group = None
            held: list[object] = [group]
            del group
            release(held)


class BroadcastPublisher:
    """The ``WeightPublisher`` of ``xccl``. Weights are staged in memory, and broadcast when the workers wait for them.
    A thread copies the rest while the staged part is sent, and the trainer waits for it before it changes the weights.
    ``host``: the address of the rendezvous. ``folder`` has a link to the staged weights. ``device``: the trainer's."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", device: torch.device = _CPU) -> None:
        self._folder = folder
        self._host = host
        self._device = device
        self._rendezvous: Rendezvous | None = None
        self._image: Image | None = None
        self._progress = TransferProgress({})
        self._staging: Future[None] | None = None
        self._copying = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-staging")
        self.staged_version: int | None = None
        self._probe: ProbeOfWeights | None = None

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: ProbeOfWeights | None) -> None:
        held = list(weights)
        layout = layout_of(held)
        if self._image is None or self._image.layout != layout:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._image = Image(layout, self._folder / _STAGED)
        self._progress, self._probe, self.staged_version = TransferProgress(ends(layout)), probe, version
        self._staging = self._copying.submit(_copy, held, self._image, self._progress)

    def settle(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                staging.result()
            except BaseException:
                self.staged_version = None
                raise

    def staged_file(self, version: int) -> Path | None:
        whole = self._image is not None and self.staged_version == version and self._progress.is_whole
        return self._folder / _STAGED if whole else None

    def remove(self) -> None:
        self.leave()
        self._copying.shutdown()
        if self._image is not None:
            self._image.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def offer(self, name: str, size: int, group_form: str) -> dict[str, object]:
        """Open the rendezvous of a process group with ``size`` members."""
        self.leave()
        store = open_store(self._host, 0, size, _TIMEOUT_S)
        self._rendezvous = Rendezvous(store, group_form, size, name)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return {"host": self._host, "port": store.port, "world_size": size, "backend": backend}

    def join(self) -> None:
        """Wait until all workers have joined the group. Raises RuntimeError if one does not join, or if ``leave`` is
        called before, and ApiError 409 without an offer."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            raise ApiError(409, "no process group was offered yet", code="not_connected")
        about = rendezvous.form, rendezvous.store, rendezvous.size, _TIMEOUT_S, rendezvous.name, self._device
        rendezvous.group = open_group(*about, rendezvous.given_up)
        if rendezvous.given_up.is_set():
            rendezvous.part()
            raise RuntimeError("the process group was left while it formed")

    def leave(self) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.given_up.set()
            rendezvous.part()

    def published(self, version: int) -> PublishedVersion:
        image = self._staged(version)
        answer: PublishedVersion = {"source": {"layout": image.layout}, "bytes": image.bytes}
        return {**answer, "probe": self._probe} if self._probe else answer

    def send(self, version: int) -> None:
        """Broadcast the version. Raises ApiError 409 if it is not staged or no group was formed, and RuntimeError if a
        worker is lost or the weights are not staged in time."""
        image, rendezvous = self._staged(version), self._rendezvous
        group = rendezvous.group if rendezvous is not None else None
        if group is None:
            raise ApiError(409, "the process group was not formed", code="not_connected")
        try:
            group.send(image.body, image.tensors, self._progress.wait_for)
            return
        except (RuntimeError, ArealError) as error:
            why = str(error)
        # Raise a new error: the frames of this one would hold the group's connections open, and other members would
        # wait on them.
        held: list[object] = [group]
        del group
        release(held)
        raise RuntimeError(why)

    def _staged(self, version: int) -> Image:
        if self._image is None or self.staged_version != version:
            raise _not_staged(version, self.staged_version)
        return self._image


def open_publisher(
    mode: str, folder: Path, config_files: tuple[Path, ...], device: torch.device = _CPU, host: str = "127.0.0.1"
) -> FolderPublisher | BroadcastPublisher:
    """Return the publisher of ``mode``: disk, shm or xccl. ``host``: the rendezvous address of engines and trainer."""
    if mode == "xccl":
        return BroadcastPublisher(folder, host, device)
    return FolderPublisher(folder, mode == "shm", config_files)


@torch.no_grad()
def _copy(weights: list[tuple[str, Tensor]], image: Image, progress: TransferProgress) -> None:
    try:
        for name, tensor in weights:
            image.write(name, tensor)
            progress.reach(progress.ends[name])
    except BaseException as error:
        progress.fail(str(error) or type(error).__name__)
        raise
