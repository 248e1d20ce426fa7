"""What views keep of files: a job's numbers while a page looks at it, its configuration, and the decoder of its tokens.

A file of many steps takes seconds to read. It is read in the background, in parts; until then its curves are those of
some two thousand of its lines, and say so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from areal.errors import ArealError, NotFound
from areal.files import size_of, stamp
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import MODEL, TRAIN_JOB, Ref, check_name, served_name
from areal.resources.paths import resolve_model_path
from areal.state.home import Home
from areal.state.job_curves import JobCurves
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject
from areal.trajectories.view import TokenDecoder, load_decoder

_AT_ONCE = 6 << 20  # bytes that are read while a page waits
_PART = 1 << 20
_SAMPLED = 1500  # steps
_KEPT = 4  # jobs, and more while their files are smaller together than
_KEPT_BYTES = 256 << 20
_TOKENIZER = "tokenizer.json"
T = TypeVar("T")
_OF_ONE_RUN = ("experiment_name", "trial_name", "fileroot", "nfs_record_root")


class FileMemo(Generic[T]):
    """``load(path)`` for each of the last ``most`` files, called again when the file is another. Thread-safe."""

    def __init__(self, load: Callable[[Path], T], most: int = 256) -> None:
        self._load = load
        self._most = most
        self._known: dict[Path, tuple[tuple[int, int, int] | None, T]] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> T:
        now = stamp(path)
        with self._lock:
            known = self._known.get(path)
        if known is not None and known[0] == now:
            return known[1]
        value = self._load(path)
        with self._lock:
            self._known.pop(path, None)
            self._known[path] = (now, value)
            while len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        return value


class JobNumbers(NamedTuple):
    """``share``: of the file that was read; below 1 the steps are a sample."""

    curves: JobCurves
    share: float


class _Kept:
    """``shown``: what views are given, which later updates leave as it is: several may read at once."""

    def __init__(self, path: Path) -> None:
        self.curves = JobCurves(path)
        self.shown: JobCurves | None = None
        self.lock = threading.Lock()
        self.sampled: tuple[int, JobCurves] | None = None
        self.reader: threading.Thread | None = None

    def read(self) -> JobNumbers:
        size = size_of(self.curves.path)
        if size - self.curves.cursor <= _AT_ONCE and (self.reader is None or not self.reader.is_alive()):
            with self.lock:
                if self.curves.update() or self.shown is None:
                    self.shown, self.sampled = self.curves.snapshot(), None
                return JobNumbers(self.shown, 1.0)
        if self.reader is None or not self.reader.is_alive():
            self.shown = None
            self.reader = threading.Thread(target=self._read_all, name="curves", daemon=True)
            self.reader.start()
        if self.sampled is None or self.sampled[0] != size:
            self.sampled = size, self.curves.sample(_SAMPLED)
        return JobNumbers(self.sampled[1], min(0.99, self.curves.cursor / max(1, size)))

    def _read_all(self) -> None:
        while True:
            with self.lock:
                if not self.curves.update(_PART):
                    return


_entries: dict[Path, _Kept] = {}
_lock = threading.Lock()


def numbers_of(path: Path) -> JobNumbers:
    """Return the numbers of a job by its file. Raises OSError. Those of the last jobs are kept."""
    with _lock:
        entry = _entries.pop(path, None) or _Kept(path)
        _entries[path] = entry
        while len(_entries) > _KEPT and sum(each.curves.cursor for each in _entries.values()) > _KEPT_BYTES:
            del _entries[next(iter(_entries))]
    return entry.read()


def read_mark(path: Path) -> str:
    """Return a cursor that differs while the file grows, and when it has been read."""
    with _lock:
        entry = _entries.get(path)
    reading = entry is not None and entry.reader is not None and entry.reader.is_alive()
    return f"{size_of(path)}{' reading' if reading else ''}"


def job_of(home: Home, name: str) -> StoredObject:
    """Raise NotFound."""
    found = next((job for job in HomeView(home).of_kind(TRAIN_JOB) if job.name == name), None)
    if found is None:
        raise NotFound(f"{Ref(TRAIN_JOB, check_name(name))} is not recorded in this home", hint="areal train ps --all")
    return found


def _load_config(path: Path) -> dict[str, object]:
    from areal.reconcilers.kinds.job_config import read_config

    return read_config(path) if path.is_file() else {}


_configs: FileMemo[dict[str, object]] = FileMemo(_load_config, 8)
_decoders: FileMemo[TokenDecoder] = FileMemo(load_decoder, 2)


def config_of(folder: Path) -> Mapping[str, object]:
    """Return the configuration that a run's driver wrote into its folder; empty before that. Raises ArealError."""
    return _configs.get(folder / "config.yaml")


def compared_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration's values by keys with dots, without names and folders, which differ between any two
    runs."""
    from areal.convert.reading import flat

    return {key: value for key, value in flat(config) if key.rpartition(".")[2] not in _OF_ONE_RUN}


def decoder_of(home: Home, job: StoredObject) -> TokenDecoder | None:
    """Return the decoder of the job's tokenizer; None if it is not on this machine: tokens are shown as ids."""
    try:
        config = config_of(home.jobs / job.name)
        actor = config.get("actor")
        path = config.get("tokenizer_path") or (actor.get("path") if isinstance(actor, dict) else None)
        return decoder_named(home, str(path), job.spec.get("workingDir")) if path else None
    except ArealError:
        return None


def decoder_named(home: Home, path: str, working_dir: str | None = None) -> TokenDecoder | None:
    """Return the decoder of a tokenizer, by its path or a model's name; None if it is not on this machine."""
    folder = tokenizer_here(home, path, working_dir)
    return _decoders.get(folder / _TOKENIZER) if folder is not None else None


def tokenizer_here(home: Home, path: str, working_dir: str | None = None) -> Path | None:
    """Return the folder of a tokenizer by its path or the name that its model is served under."""
    candidates = [Path(str(working_dir or "."), path)]
    mine = (item for item in ObjectStore(home).list(MODEL) if served_name(item.name, item.spec) == path)
    if (found := next(mine, None)) is not None and (own := found.spec.get("tokenizerPath") or found.spec.get("path")):
        source = next((layer.source.get("file") for layer in found.layers if layer.source), None)
        candidates.append(Path(resolve_model_path(str(own), source) or str(own)))
    return next((each for each in candidates if (each / _TOKENIZER).is_file()), None)
