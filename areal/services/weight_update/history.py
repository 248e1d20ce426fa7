"""The history of updates as a file beside the gateway's discovery file: a JSON line each, the newest megabyte of them.

It outlives the gateway, so that what each replica served when can be shown after a job has ended.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from areal.files import append_line, replace_file
from areal.services.weight_update.pairs import Pair

_MOST_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class UpdateHistory:
    """``path`` None: nothing is written. A file that cannot be written fails no update."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def note(
        self,
        pair: Pair,
        version: int,
        began: float,
        *,
        replicas: Mapping[str, float | None],
        joined: bool = False,
        size: int | None = None,
        error: str | None = None,
    ) -> None:
        """``began``: seconds since the epoch. ``replicas``: address -> the pause of its engine in ms; None where it did
        not take the version."""
        if self._path is None:
            return
        entry = {
            "began": round(began, 3),
            "at": round(time.time(), 3),
            "pair": pair.name,
            "model": pair.model,
            "mode": pair.mode.value,
            "version": version,
            "joined": joined,
            "bytes": size,
            "replicas": dict(replicas),
            "error": error,
        }
        try:
            append_line(str(self._path), json.dumps(entry).encode() + b"\n")
            if self._path.stat().st_size > _MOST_BYTES:
                kept = self._path.read_bytes()[-_MOST_BYTES // 2 :]
                replace_file(self._path, kept[kept.index(b"\n") + 1 :])
        except (OSError, ValueError) as failure:
            _log.warning("the history of updates is not written: %s", failure)
