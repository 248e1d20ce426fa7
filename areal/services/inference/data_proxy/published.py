"""The weights that this model's workers are to serve: those that a trainer published last, not those that an engine
starts with.

What was published is kept as a file beside the model's journals, so that it survives every process: a data proxy that
starts, and one whose engine was started again, is *behind* until its engine has that version, and neither ready nor
serving meanwhile. Weights that lie in a folder it takes by itself; others it has from the weight-update gateway of the
trainer, which it asks. Weights of another base model are none of ours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from areal.services.inference.engines.base import EngineError
from areal.services.inference.recording.folder import PUBLISHED
from areal.services.web.client import CallFailed, HttpClient
from areal.services.web.tasks import until_beat

if TYPE_CHECKING:
    from areal.services.inference.data_proxy.control import EngineControl
    from areal.services.inference.data_proxy.engine_watch import EngineWatch
    from areal.services.inference.engines.base import TokenEngine

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_AGAIN_S = 1.0
_OWN = ""  # the pair of the weights that an engine starts with
_JOIN_S = 1800.0  # as long as a transfer may take, and one that runs before it


@dataclass(frozen=True)
class Published:
    """``path``: the folder of the weights, where they lie in one. ``gateway``: who carries them while the trainer
    lives. ``base``: what the engine was started with."""

    pair: str
    version: int
    path: str | None = None
    gateway: str | None = None
    base: str | None = None

    @classmethod
    def read(cls, text: str) -> Published | None:
        """None for what is no record: a file of another release must not keep a model from serving."""
        try:
            given = json.loads(text)
            return cls(
                str(given["pair"]), int(given["version"]), given.get("path"), given.get("gateway"), given.get("base")
            )
        except (ValueError, KeyError, TypeError):
            return None


class Standing:
    """What is published, and whether our engine has it. ``base`` and the file's folder are None where nothing is
    kept: then only this process remembers."""

    def __init__(self, watch: EngineWatch, folder: Path | None, base: str | None) -> None:
        self._watch = watch
        self.file = folder / PUBLISHED if folder is not None else None
        self._base = base
        self._stamp: tuple[int, int] | None = None
        # Pair and version, and how often the engine was lost by then. Two: what an update brings counts from its commit
        # on, and what was there counts until then.
        self._taken: deque[tuple[str, int, int]] = deque(maxlen=2)
        self.published: Published | None = None
        self._doubted: int | None = None  # how often the engine was lost when its weights were last doubted
        self.obstacle = ""  # why it was not brought to what is published the last time
        self.look()

    def look(self) -> None:
        """Read the file again where it is another one: any data proxy of the model writes it."""
        if self.file is None:
            return
        try:
            found = self.file.stat()
            stamp = found.st_ino, found.st_mtime_ns
            if stamp == self._stamp:
                return
            record = Published.read(self.file.read_text())
        except OSError:
            stamp, record = None, None
        self._stamp = stamp
        self.published = record if record is not None and record.base == self._base else None

    def took(self, pair: str, version: int) -> None:
        """Our engine has these weights, until it is lost."""
        self._doubted = None
        now = pair, version, self._watch.losses
        if now not in self._taken:
            self._taken.append(now)

    def doubt(self) -> None:
        """Our engine has weights that nobody serves: it is behind until it has taken what is published, or where that
        is nothing, its own ones."""
        self._taken.clear()
        self._doubted = self._watch.losses

    @property
    def behind(self) -> Published | None:
        """What our engine lacks. A version that the engine tells of itself counts, but for 0, which is a fresh
        engine's too."""
        is_doubted = self._doubted == self._watch.losses
        record = self.published or (Published(_OWN, 0, self._base, None, self._base) if is_doubted else None)
        if record is None or (record.pair, record.version, self._watch.losses) in self._taken:
            return None
        state = self._watch.state
        if not is_doubted and state.not_ready is None and state.version == record.version > 0:
            self.took(record.pair, record.version)
            return None
        return record

    @property
    def reason(self) -> str | None:
        """Why nothing is served just now."""
        if (record := self.behind) is None:
            return None
        if record.pair == _OWN:
            return f"an update failed, the engine goes back to its own weights. {self.obstacle}".rstrip()
        said = f"version {record.version} of the pair {record.pair!r} is published, and the engine does not have it yet"
        return f"{said}: {self.obstacle}" if self.obstacle else said

    def commit(self, record: Published) -> None:
        """Every worker has it: this is what the model serves from now on. Raises OSError."""
        self._write(record)
        self.took(record.pair, record.version)

    def end(self, pair: str, left: Mapping[str, Any] | None) -> None:
        """The trainer is done. What it leaves in a folder serves on; else an engine that starts serves what it
        has. Raises OSError."""
        record = self.published
        if record is None or record.pair != pair:
            return
        path = left.get("path") if left is not None and left.get("version") == record.version else None
        if isinstance(path, str) and Path(path).is_dir():
            self._write(Published(pair, record.version, path, None, record.base))
        else:
            self.published, self._stamp = None, None
            if self.file is not None:
                self.file.unlink(missing_ok=True)

    def of(self, pair: str, version: int, path: str | None, gateway: str | None) -> Published:
        return Published(pair, version, path, gateway, self._base)

    def _write(self, record: Published) -> None:
        self.published = record
        if self.file is None:
            return
        aside = self.file.with_name(f".{PUBLISHED}.{os.getpid()}")
        aside.write_text(json.dumps(asdict(record)))
        aside.rename(self.file)
        self.look()


class CatchingUp:
    """Brings our engine to what is published, for as long as it is behind."""

    def __init__(
        self,
        standing: Standing,
        engine: TokenEngine,
        control: EngineControl,
        http: HttpClient,
        headers: Mapping[str, str],
        address: Callable[[], str | None],
        model: str,
    ) -> None:
        self._standing = standing
        self._engine = engine
        self._control = control
        self._http = http
        self._headers = {**headers, "Content-Type": "application/json"}
        self._address = address
        self._model = model

    async def run(self) -> None:
        while True:
            self._standing.look()
            record = self._standing.behind
            failed = await self._catch_up(record) if record is not None and self._control.engine_is_there else ""
            said, self._standing.obstacle = self._standing.obstacle, failed
            if failed and failed != said:
                _log.warning("not serving: %s", self._standing.reason)
            await asyncio.sleep(_AGAIN_S if failed else until_beat(_LOOK_S))

    async def _catch_up(self, record: Published) -> str:
        """Why it failed; "" when our engine has it, or the next look will tell."""
        if record.path is not None and await asyncio.to_thread(Path(record.path).is_dir):
            return await self._load(record, record.path)
        if record.gateway is not None:
            return await self._ask(record, record.gateway)
        if record.pair == _OWN:
            return f"They cannot be loaded again from {record.path}: the next update brings others"
        self._standing.took(record.pair, record.version)  # its trainer is done, and somebody took what it had left
        said = "version %d of the pair %r is not in %s any more: the model serves its own weights"
        _log.warning(said, record.version, record.pair, record.path)
        return ""

    async def _load(self, record: Published, path: str) -> str:
        async def load() -> None:
            if self._standing.behind == record:  # else an update came meanwhile
                await self._engine.load_weights(path, record.version)
                self._standing.took(record.pair, record.version)

        try:
            await self._control.swapped(load)
        except EngineError as error:
            return str(error)
        _log.info("took version %d of the pair %r from %s", record.version, record.pair, path)
        return ""

    async def _ask(self, record: Published, gateway: str) -> str:
        body = orjson.dumps({"pair_name": record.pair, "worker_addr": self._address()})
        try:
            said = await self._http.fetch("POST", gateway, "/join", headers=self._headers, body=body, timeout_s=_JOIN_S)
        except (CallFailed, TimeoutError) as error:
            _log.debug("%s: %r", gateway, error)
            hint = f"start the trainer again, or `areal weight-update release --model {self._model}`"
            return f"the trainer's weight-update gateway at {gateway} does not answer: {hint}"
        if said.status == 200:
            return ""
        with suppress(KeyError, TypeError, ValueError):
            return str(said.object()["error"]["message"])
        return f"{gateway}/join answered {said.status}"
