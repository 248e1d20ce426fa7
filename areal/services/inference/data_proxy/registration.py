"""Keeps a data proxy registered at its router: a lease, renewed for as long as the process lives.

The router's address is read from the service's file, which each router writes when it starts: one that moved is found
again. A lease says what /ready says; a change of that is told at once, the rest when the router wants to hear again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from areal.errors import UsageFault
from areal.services.web.client import CallFailed, HttpClient
from areal.services.web.service import Service
from areal.services.web.tasks import until_beat

_log = logging.getLogger(__name__)
_LOOK_S = 1.0  # for what is no news of the engine
_AGAIN_S = 0.5
_RINGS_EARLY_S = 0.002  # a timer
_TIMEOUT_S = 5.0
_TOLD_AT_ONCE = ("status", "fault", "model", "version", "paused", "max_model_len", "root", "adapters", "journals")


@dataclass(frozen=True)
class RegistrationOptions:
    """``router_file``: where the router says how it is reached. ``expected`` replicas make the model's pool, which is
    probed as ``readiness`` says, until somebody declares it otherwise. ``held``: no calls before that."""

    router_file: str
    worker_id: str
    expected: int = 1
    readiness: Mapping[str, Any] = field(default_factory=dict)
    held: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> RegistrationOptions | None:
        """Raises UsageFault."""
        if args.registration is None:
            return None
        try:
            return cls(**json.loads(args.registration))
        except (ValueError, TypeError) as error:
            raise UsageFault(f"--registration is not understood: {error}") from error


class Registration:
    def __init__(
        self, options: RegistrationOptions, service: Service, http: HttpClient, headers: Mapping[str, str], model: str
    ) -> None:
        self._file = Path(options.router_file)
        self._about = {name: value for name, value in asdict(options).items() if name != "router_file"}
        self._about["model"] = model
        self._service = service
        self._http = http
        self._headers = {**headers, "Content-Type": "application/json"}
        self._registered: bool | None = None

    async def run(self) -> None:
        while True:
            ready = self._service.readiness()
            again_s = await self._renew(ready)
            await self._changed(ready, again_s)

    async def _changed(self, told: Mapping[str, Any], seconds: float) -> None:
        """Return when what was ``told`` is no longer so, or after ``seconds``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        news = self._service.lifetime.news
        while (left_s := until - loop.time()) > _RINGS_EARLY_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, until_beat(_LOOK_S))):
                    await news.wait()
            news.clear()
            if loop.time() >= until - _RINGS_EARLY_S:
                return  # all of it is told anyway
            now = self._service.readiness()
            if any(now.get(name) != told.get(name) for name in _TOLD_AT_ONCE):
                return

    async def _renew(self, ready: Mapping[str, Any]) -> float:
        """In how many seconds to come again."""
        body = orjson.dumps({**ready, **self._about, "worker_addr": self._service.address})
        try:
            url = json.loads(self._file.read_text())["url"]
            said = await self._http.fetch("POST", url, "/lease", headers=self._headers, body=body, timeout_s=_TIMEOUT_S)
            answer = said.object()
            if said.status != 200:
                raise ValueError(f"the router answers {said.status}")
            self._note(bool(answer["registered"]), url)
            return until_beat(float(answer["renew_seconds"]))
        except (OSError, CallFailed, TimeoutError, ValueError, KeyError, TypeError) as error:
            if self._registered is not None:
                _log.warning("not registered at a router: %r", error)
            self._registered = None
            return _AGAIN_S

    def _note(self, registered: bool, url: str) -> None:
        if registered is not self._registered:
            _log.info("%s at the router %s", "registered" if registered else "removed: not registered", url)
        self._registered = registered
