"""The lease with which a data proxy stays registered at its router."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from areal.files import stamp
from areal.http.client import CallFailed, HttpClient
from areal.services.http.service import Service
from areal.services.http.tasks import IDLE_S, happens, until_beat
from areal.wire.bodies import RenewLease
from areal.wire.processes import RegistrationConfig
from areal.wire.routing import DECLARED

_log = logging.getLogger(__name__)
_POLL_S = 1.0  # for changes that the engine watch does not announce
_IDLE_SHARE = 0.4  # of a lease: an idle process renews after this time at the latest
_LATEST_SHARE = 0.8  # of a lease: the longest that a renewal waits for the beat
_RETRY_S = 0.5
_TIMER_SLACK_S = 0.002  # timers fire a little early
RENEWAL_TIMEOUT_S = 5.0  # also the greatest age of the report in a lease when it arrives
_SPREAD_S = 2.0  # over which data proxies take their leases of a new router
_HEAD_BYTES = 512
_URL = re.compile(rb'"url": ?"([^"]+)"')
_URGENT_FIELDS = ("status", "fault", "model", "version", "paused", "max_model_len", "root", "adapters", "journals")


def renewal_s(answer: Mapping[str, Any], *, is_idle: bool) -> float:
    """Return the seconds until the next renewal, from the router's answer to this one. An idle process waits up to
    twice as long, if that is short and the lease is much longer. The answer has no lease length while the health is in
    doubt."""
    usual, lease_s = float(answer["renew_seconds"]), float(answer.get("lease_seconds", 0.0))
    again_s = max(usual, min(2 * usual, IDLE_S, lease_s * _IDLE_SHARE)) if is_idle else usual
    return min(until_beat(again_s), max(again_s, lease_s * _LATEST_SHARE))


class RouterLease:
    """Keeps a data proxy registered at its router by a lease, which is renewed for as long as the process lives.

    The router writes its address into its state file at each start. Reading it from there finds a router that has
    moved, and tells a router that has lost its declarations within seconds which data proxies live. A lease carries the
    body of /ready. Changes of ``_URGENT_FIELDS`` are sent at once, others with the next renewal. An idle process, whose
    report equals the last one, renews its lease less often.
    """

    def __init__(
        self, config: RegistrationConfig, service: Service, http: HttpClient, headers: Mapping[str, str], model: str
    ) -> None:
        self._file = Path(config.router_file)
        self._config = config
        self._model = model
        self._service = service
        self._http = http
        self._headers = headers
        self._registered: bool | None = None
        self._head: tuple[Any, bytes] = (), b""  # the file's stamp when its beginning was read, and that beginning
        self._router = b""  # as it announced itself at the last renewal

    async def run(self) -> None:
        sent: Mapping[str, object] = {}
        while True:
            ready = self._service.readiness()
            is_idle, sent = ready == sent and not ready["in_flight"], ready
            renew_in_s = await self._renew(ready, is_idle)
            await self._wait_for_change(ready, renew_in_s, IDLE_S if is_idle else _POLL_S)

    @cached_property
    def _lease(self) -> dict[str, object]:
        config, address = self._config, self._service.address
        assert address is not None, "a lease is taken by a service that listens"
        lease = RenewLease(
            worker_id=config.worker_id,
            worker_addr=address,
            model=self._model,
            expected=config.expected,
            readiness=config.readiness,
            held=config.held,
        )
        return asdict(lease)

    async def _wait_for_change(self, sent: Mapping[str, object], seconds: float, poll_s: float) -> None:
        """Wait until an urgent field differs from ``sent``, at most ``seconds``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        news = self._service.lifetime.news
        while (left_s := until - loop.time()) > _TIMER_SLACK_S:
            await happens(news, min(left_s, until_beat(poll_s)))
            news.clear()
            if loop.time() >= until - _TIMER_SLACK_S:
                return  # the renewal is due and sends everything
            now = self._service.readiness()
            if any(now.get(name) != sent.get(name) for name in _URGENT_FIELDS):
                return
            if self._announced() != self._router:
                await asyncio.sleep(random.uniform(0.0, min(_SPREAD_S, until - loop.time())))  # not all at once
                return

    def _announced(self) -> bytes:
        """Return the address and epoch of the router in the beginning of its file; the last ones if it has none."""
        try:
            if (identity := stamp(self._file)) != self._head[0]:
                with self._file.open("rb") as file:
                    head = file.read(_HEAD_BYTES).partition(DECLARED.encode())[0]
                self._head = identity, head if _URL.search(head) else self._router
        except OSError:
            return self._router
        return self._head[1]

    async def _renew(self, ready: Mapping[str, object], is_idle: bool) -> float:
        """Renew the lease. Return the seconds until the next renewal."""
        body = orjson.dumps({**ready, **self._lease})
        self._router = self._announced()
        try:
            if (found := _URL.search(self._router)) is None:
                raise ValueError(f"{self._file} names no router")
            url = found[1].decode()
            response = await self._http.fetch(
                "POST", url, "/lease", headers=self._headers, body=body, timeout_s=RENEWAL_TIMEOUT_S
            )
            answer = response.object()
            if response.status != 200:
                raise ValueError(f"the router answers {response.status}")
            registered = bool(answer["registered"])
            if registered is not self._registered:
                _log.info("%s at the router %s", "registered" if registered else "removed: not registered", url)
            self._registered = registered
            return renewal_s(answer, is_idle=is_idle and registered)
        except (OSError, CallFailed, TimeoutError, ValueError, KeyError, TypeError) as error:
            if self._registered is not None:
                _log.warning("not registered at a router: %r", error)
            self._registered = None
            return _RETRY_S
