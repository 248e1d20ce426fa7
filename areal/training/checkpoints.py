"""Checkpoints that are whole or absent: ``step_N`` is written aside, made durable, and then renamed.

``state.json`` in it is what the trainer knows beside the engines' shards: step, version, consumed frontier, timers. A
crash at any moment leaves the checkpoints that were there, and perhaps a ``.tmp`` folder that the next save removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.training.ranks import Ranks

_NAME = re.compile(r"step_(\d+)")
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    folder: Path

    def state(self) -> dict[str, Any]:
        """Raises ArealError where the file is not what was written."""
        path = self.folder / STATE
        try:
            state: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ArealError(
                f"{path} cannot be read: {error}", hint="remove this checkpoint to resume from the one before"
            )
        return state


class Checkpoints:
    """The checkpoints of a run. ``keep`` newest stay; ``keep_every`` also keeps each whose step it divides."""

    def __init__(self, root: Path, *, keep: int = 2, keep_every: int | None = None) -> None:
        self.root = root
        self._keep = keep
        self._keep_every = keep_every

    def all(self) -> list[Checkpoint]:
        """Whole ones, oldest first."""
        if not self.root.is_dir():
            return []
        found = [
            Checkpoint(int(match[1]), path)
            for path in self.root.iterdir()
            if (match := _NAME.fullmatch(path.name)) and (path / STATE).is_file()
        ]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    @contextmanager
    def writing(self, step: int, ranks: Ranks) -> Iterator[tuple[Path, dict[str, Any]]]:
        """A folder for the engines' shards and a dict for the trainer's state; both become the checkpoint ``step`` when
        the block ends well on every rank. Every rank enters it; the first one's dict counts. Raises ArealError where
        the disk refuses; what was half written is removed, for it may have filled the disk."""
        aside = self.root / f"step_{step}.tmp"
        if ranks.is_first:
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
        ranks.together()
        state: dict[str, Any] = {}
        try:
            yield aside, state
            ranks.together()
            if ranks.is_first:
                self._finish(aside, step, state)
        except BaseException as error:
            if ranks.is_first:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError):
                raise ArealError(
                    f"the checkpoint of step {step} cannot be written below {self.root}: {error}",
                    hint="the one before is whole: free space, then areal restart or resume the job",
                ) from error
            raise
        ranks.together()

    def _finish(self, aside: Path, step: int, state: dict[str, Any]) -> None:
        (aside / STATE).write_text(json.dumps(state, indent=1))
        for path in sorted(aside.rglob("*"), reverse=True):
            _flush(path)
        _flush(aside)
        final = self.root / f"step_{step}"
        replaced = self.root / f"step_{step}.old.tmp"
        if final.exists():  # the same step again, after resuming from an older one
            final.rename(replaced)
        aside.rename(final)
        _flush(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        self._remove_old()

    def _remove_old(self) -> None:
        kept = self.all()
        for checkpoint in kept[: -self._keep] if self._keep else []:
            if self._keep_every is None or checkpoint.step % self._keep_every:
                # Renamed first: a half-removed folder must not look like a checkpoint.
                gone = checkpoint.folder.with_suffix(".tmp")
                checkpoint.folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
