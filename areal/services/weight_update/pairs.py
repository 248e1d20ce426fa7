"""Pairs of a training side and an inference side: their state, the checks on it, and the history of their updates."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass, field
from areal.files import append_line, replace_file
from areal.services.http.errors import ApiError
from areal.wire.bodies import UpdateResult

_MOST_VALUES = 10_000  # values of one pair; a transfer needs a few for each rank
_MOST_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Mode(StrEnum):
    """The transport of weights: a folder that both sides reach, shared memory of one machine, or a process group."""

    DISK = "disk"
    SHM = "shm"
    XCCL = "xccl"


class PairState(StrEnum):
    CONNECTED = "connected"
    UPDATING = "updating"
    FAILED = "failed"  # the last update failed; the next may succeed


@dataclass
class Pair:
    """A training side and an inference side. ``version``: the version that the inference side serves, -1 before the
    first update. With ``inference_gateway`` there are no fixed workers: an update goes to the workers that serve
    ``model`` behind that gateway when it begins."""

    name: str
    mode: Mode
    train: tuple[str, ...]
    inference: tuple[str, ...]
    inference_gateway: str | None = None
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    state: PairState = PairState.CONNECTED
    version: int = -1
    connected: set[str] = field(default_factory=set)  # inference workers that are connected to the pair
    incarnations: dict[str, object] = field(default_factory=dict)  # by worker, if its last operation succeeded
    joining_workers: set[str] = field(default_factory=set)  # inference workers that requested the published version
    synced_version: int | None = None  # a version that a sync transferred before its trainer requested the update
    updated_at: float | None = None
    last: UpdateResult | None = None
    error: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def to_json(self, present: Sequence[Mapping[str, object]] | None = None) -> dict[str, object]:
        """Return the pair as JSON. ``present``: the workers that serve the model now ("url", "state", "version"); if
        None, the workers of the last update are listed."""
        urls = sorted(self.connected) or list(self.inference)
        workers = [{"url": url, "state": None, "version": None} for url in urls] if present is None else list(present)
        return {
            "pair_name": self.name,
            "mode": self.mode.value,
            "train_worker_urls": list(self.train),
            "inference_worker_urls": [worker["url"] for worker in workers],
            "inference_workers": workers,
            "inference_gateway_url": self.inference_gateway,
            "model": self.model,
            "state": self.state.value,
            "version": None if self.version < 0 else self.version,
            "last_update": self.updated_at,
            **{name: getattr(self.last, name, None) for name in ("duration_ms", "paused_ms", "bytes")},
            "error": self.error,
        }

    def succeeded(self, done: UpdateResult) -> None:
        self.state, self.error = PairState.CONNECTED, None
        self.version, self.updated_at, self.last = done.version, time.time(), done

    def failed(self, message: str) -> None:
        self.state, self.error = PairState.FAILED, message


class Pairs:
    """The connected pairs, by name. A name is reserved when its connection begins."""

    def __init__(self) -> None:
        self._pairs: dict[str, Pair] = {}

    def reserve(self, pair: Pair) -> None:
        """Add a pair. Raises 409 if its name is taken."""
        if pair.name in self._pairs:
            message = f"the pair {pair.name!r} is connected already; disconnect it first"
            raise ApiError(409, message, code="pair_exists", param="pair_name")
        self._pairs[pair.name] = pair

    def forget(self, pair: Pair) -> None:
        if self._pairs.get(pair.name) is pair:
            del self._pairs[pair.name]

    def get(self, name: str) -> Pair:
        """Return the pair with this name. Raises 404."""
        pair = self._pairs.get(name)
        if pair is None:
            known = ", ".join(sorted(self._pairs)) or "none"
            message = f"no pair {name!r} is connected; there is: {known}"
            raise ApiError(404, message, code="pair_not_found", param="pair_name")
        return pair

    def all(self) -> list[Pair]:
        return [self._pairs[name] for name in sorted(self._pairs)]


def check_version(pair: Pair, version: int) -> None:
    """Raise 409 if ``version`` is not above the pair's version."""
    if version <= pair.version:
        message = f"pair {pair.name!r} is at version {pair.version}: the next must be above it, got {version}"
        raise ApiError(409, message, code="version_not_growing", param="version")


class PairMetadata:
    """Small values, and sets that serve as barriers, which the two sides of a pair exchange to set up a transfer."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, object]] = {}
        self._sets: dict[str, dict[str, set[str]]] = {}

    def get(self, pair: str, key: str) -> Any:
        """Return the stored value, which may be None. Raises 404."""
        try:
            return self._values[pair][key]
        except KeyError:
            raise ApiError(404, f"pair {pair!r} has no value {key!r}", code="value_not_found") from None

    def put(self, pair: str, key: str, value: Any) -> None:
        values = self._values.setdefault(pair, {})
        if key not in values and len(values) >= _MOST_VALUES:
            raise ApiError(413, f"pair {pair!r} has {_MOST_VALUES} values already", code="too_many_values")
        values[key] = value

    def delete(self, pair: str, key: str) -> bool:
        return self._values.get(pair, {}).pop(key, self) is not self

    def add(self, pair: str, key: str, member: str) -> int:
        """Add ``member`` to a set and return the size of the set. Raises 413 if the set is full."""
        members = self._sets.setdefault(pair, {}).setdefault(key, set())
        if member not in members and len(members) >= _MOST_VALUES:
            raise ApiError(413, f"the set {key!r} has {_MOST_VALUES} members already", code="too_many_values")
        members.add(member)
        return len(members)

    def size(self, pair: str, key: str) -> int:
        return len(self._sets.get(pair, {}).get(key, ()))

    def forget(self, pair: str) -> None:
        self._values.pop(pair, None)
        self._sets.pop(pair, None)


class UpdateHistory:
    """A file beside the gateway's discovery file with one JSON line per update, limited to the newest megabyte. It
    outlives the gateway, so that after a job has ended it still shows which version each replica served at what time.
    ``path`` None: nothing is written. A file that cannot be written fails no update."""

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
        """Append an update. ``began``: seconds since the epoch. ``replicas``: the pause of each engine in ms, by
        address; None for a replica that did not take the version."""
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
