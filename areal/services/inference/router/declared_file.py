"""What was declared to a router, as a file of its service: the next router goes on from it, and the service's data
proxies read there where their router is.

A file that cannot be read is set aside, never taken for an empty one: the router has to learn then who is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import orjson

from areal.services.http.tasks import until_beat
from areal.services.inference.router.registry import WorkerRegistry

_log = logging.getLogger(__name__)
_PERIOD_S = 1.0
_LEARNING_S = 6.0  # every data proxy that lives has renewed its lease by then


class DeclaredFile:
    """``path`` None: nothing is kept, and a router that starts is told everything."""

    def __init__(self, path: Path | None, registry: WorkerRegistry) -> None:
        self._path = path
        self._registry = registry
        self._written: dict[str, Any] | None = None
        self._serial = -1
        self._url: str | None = None

    def read(self) -> None:
        """Give the registry what is kept. A service that is new has no file, and nothing to be told of."""
        if self._path is None:
            return
        try:
            kept = json.loads(self._path.read_text())
            self._registry.restore(kept["declared"], time.monotonic())
        except FileNotFoundError:
            self._registry.mark_synced()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._path.with_name(f"{self._path.name}.damaged-{time.time():.0f}")
            _log.warning("%s cannot be read (%r) and is set aside as %s", self._path, error, aside.name)
            self._path.rename(aside)
            self._registry.learning = True

    def announce(self, url: str | None) -> None:
        """From now on we listen there."""
        self._url = url
        self.write()

    def write(self) -> None:
        """Where something has changed. Raises OSError."""
        if self._path is None or self._url is None or self._serial == self._registry.serial:
            return
        self._serial = self._registry.serial
        content = {"url": self._url, "declared": self._registry.declared()}
        if content == self._written:
            return
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with aside.open("wb") as file:
            file.write(orjson.dumps(content))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(self._path)
        self._written = content

    async def run(self) -> None:
        """Write what leases have changed; end the time of learning."""
        learnt_at = time.monotonic() + _LEARNING_S
        while True:
            self.write()
            await asyncio.sleep(until_beat(_PERIOD_S))
            if self._registry.learning and time.monotonic() > learnt_at:
                self._registry.mark_synced()
