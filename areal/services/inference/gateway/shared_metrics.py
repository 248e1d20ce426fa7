"""The folder in which a gateway's relays add their numbers up: the supervisor and each relay hold it, and who leaves
last removes it. A supervisor that is killed leaves it to its relays.

Where all of them are killed it stays, until the next gateway begins: below the run's own folder where areal runs us,
which goes with the run, else among the temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # the Prometheus client's
_RUN_FOLDER = "AREAL_RUN_DIR"
_PREFIX = "areal-relays-"
_YOUNG_S = 60.0


def make_folder() -> Path:
    run = os.environ.get(_RUN_FOLDER)
    if not run:
        _clear_abandoned(Path(tempfile.gettempdir()))
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    folder = Path(run) / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _clear_abandoned(parent: Path) -> None:
    """Whoever has just made one is about to hold it: a young one is let be."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another's, or gone already
            if time.time() - folder.stat().st_mtime > _YOUNG_S:
                with held(folder):
                    """Who leaves last removes it."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield
    finally:
        with suppress(BlockingIOError):  # not the last
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gives the shared one up in any case
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
