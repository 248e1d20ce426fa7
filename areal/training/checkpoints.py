"""Atomic checkpoints: ``step_N`` is written under a temporary name, synced, and renamed.

Its ``state.json`` has the trainer's state besides the engines' shards (step, frontier, timers), the size and checksum
of each file, and its own checksum. A crash or a full disk at any moment leaves the existing checkpoints, and perhaps a
``.tmp`` folder that the next save removes. A checkpoint that was damaged later is renamed to ``.torn``, and the
previous one is used."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass
from areal.errors import ArealError
from areal.files import disk_remedy, parse_json
from areal.training.ranks import Ranks

_log = logging.getLogger(__name__)
_FOLDER_NAME = re.compile(r"step_(\d+)")
STATE = "state.json"
_FILES, _CRC = "files", "crc32"
_SHARD_NAME = re.compile(r"__(\d+)_")  # the prefix of a rank's shards
_PART, _BLOCK = 64 << 20, 1 << 20  # bytes of a checksum, of a read
_READERS = 8
_MAX_CHECKPOINTS = 2


class CheckpointFailed(ArealError):
    """A checkpoint could not be written. The existing ones are unchanged."""


@dataclass(frozen=True)
class Checkpoint:
    step: int
    folder: Path

    def state(self) -> dict[str, Any]:
        """Return the trainer's state. Raises ArealError for a damaged file."""
        path = self.folder / STATE
        try:
            state: dict[str, object] = parse_json(path.read_text())
            if state.pop(_CRC) != _crc_of(state):
                raise ValueError("its checksum is another one")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ArealError(
                f"{path} cannot be read: {error}", hint="remove this checkpoint to resume from the one before"
            )
        return state

    def damage(self) -> str | None:
        """Compare all files with their checksums, and return the first difference, if any."""
        try:
            files = self.state()[_FILES]
        except ArealError as error:
            return error.message
        for name, (size, _) in files.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                return f"{path} has {found} of {size} bytes" if found is not None else f"{path} is not there"
        try:
            crcs = _crcs(self.folder / name for name in files)
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror}"
        changed = [name for (name, (_, crc)), found in zip(files.items(), crcs, strict=True) if found != crc]
        return f"{self.folder / changed[0]} has other bytes than were written" if changed else None


class Checkpoints:
    """The checkpoints of a run. Only the newest two are kept."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = [
            Checkpoint(int(match[1]), path)
            for path in self.root.iterdir()
            if (match := _FOLDER_NAME.fullmatch(path.name)) and (path / STATE).is_file()
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def newest_whole(self, before: int | None = None) -> Checkpoint | None:
        """Return the newest undamaged checkpoint before the step ``before``. Damaged ones are set aside."""
        for checkpoint in reversed(self.all()):
            if before is not None and checkpoint.step >= before:
                continue
            if (damage := checkpoint.damage()) is None:
                return checkpoint
            self.set_aside(checkpoint, damage)
        return None

    def set_aside(self, checkpoint: Checkpoint, why: str) -> None:
        """Rename a damaged or unreadable checkpoint to ``.torn``, with a warning."""
        torn = checkpoint.folder.with_suffix(".torn")
        _log.warning("a checkpoint is set aside as %s, the one before it counts: %s", torn, why)
        shutil.rmtree(torn, ignore_errors=True)
        checkpoint.folder.rename(torn)

    @contextmanager
    def writing(self, step: int, ranks: Ranks) -> Iterator[tuple[Path, dict[str, object]]]:
        """Yield a folder for the engines' shards and a dict for the trainer's state (the first rank's is written).
        Every rank enters it; they become the checkpoint ``step`` when the block succeeds on all ranks. Raises
        CheckpointFailed on every rank if a disk is full, or fails."""
        partial = self.root / f"step_{step}.tmp"
        state: dict[str, object] = {}
        try:
            with self._all_or_none(ranks, step):
                if ranks.is_first:
                    self.root.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir()
            with self._all_or_none(ranks, step):
                yield partial, state
            files: dict[str, tuple[int, int]] = {}
            with self._all_or_none(ranks, step):
                files = _checksums(partial, ranks)
            for others in ranks.all_gather(files):
                files |= others
            with self._all_or_none(ranks, step):
                if ranks.is_first:
                    self._finish(partial, step, {**state, _FILES: files})
        except BaseException:
            if ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)  # a partial checkpoint may be what fills the disk
            raise

    @contextmanager
    def _all_or_none(self, ranks: Ranks, step: int) -> Iterator[None]:
        """Raise CheckpointFailed on all ranks if one has a disk error, so that no rank waits for it."""
        failure: OSError | None = None
        try:
            yield
        except OSError as error:
            failure = error
        if ranks.all_max(int(failure is not None)):
            raise CheckpointFailed(
                f"the checkpoint of step {step} cannot be written below {self.root}: {failure or 'a rank failed'}",
                hint=f"the one before is whole: {disk_remedy(failure)}, then areal restart or resume the job",
            ) from failure

    def _finish(self, partial: Path, step: int, state: dict[str, object]) -> None:
        (partial / STATE).write_text(json.dumps({**state, _CRC: _crc_of(json.loads(json.dumps(state)))}, indent=1))
        for path in sorted(partial.rglob("*"), reverse=True):
            _fsync(path)
        _fsync(partial)
        final = self.root / f"step_{step}"
        replaced = self.root / f"step_{step}.old.tmp"
        if final.exists():  # the same step again, after resuming from an older one
            final.rename(replaced)
        partial.rename(final)
        _fsync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.all()[:-_MAX_CHECKPOINTS]:
            removed = old.folder.with_suffix(".tmp")
            old.folder.rename(removed)  # a partially removed folder must not look like a checkpoint
            shutil.rmtree(removed, ignore_errors=True)


def _checksums(folder: Path, ranks: Ranks) -> dict[str, tuple[int, int]]:
    """Return size and checksum by file name, of this rank's shards; for the first rank, of all other files too."""

    def is_own(path: Path) -> bool:
        rank = _SHARD_NAME.match(path.name)
        return (int(rank[1]) % ranks.size if rank else 0) == ranks.rank

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and is_own(path)]
    crcs = _crcs(paths)
    return {str(path.relative_to(folder)): (path.stat().st_size, crc) for path, crc in zip(paths, crcs, strict=True)}


def _crcs(paths: Iterable[Path]) -> list[int]:
    """Return for each file the CRC-32 of the CRC-32s of its parts, which are computed in parallel."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checksum") as readers:
        files = [
            [readers.submit(_crc_of_part, path, begin) for begin in range(0, path.stat().st_size, _PART)]
            for path in paths
        ]
        return [zlib.crc32(b"".join(part.result().to_bytes(4, "little") for part in parts)) for parts in files]


def _crc_of_part(path: Path, begin: int) -> int:
    crc, left, block = 0, _PART, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while left and (size := file.readinto(block)):
            crc, left = zlib.crc32(block[:size], crc), left - size
    return crc


def _crc_of(state: Mapping[str, object]) -> int:
    """Return the checksum of a state that was read from JSON."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
