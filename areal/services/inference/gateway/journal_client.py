"""Small calls to the data proxy that holds a journal. It is waited for while it is away, or its journal moves.

Only what may be asked twice is asked here: a call whose answer was lost is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from areal.services.inference.gateway.admission import Admission
from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.session_keys import SessionKeys
from areal.services.inference.router.picking import CallKey
from areal.services.inference.router.table import CORDONED, READY, WorkerEntry
from areal.services.web import headers as names
from areal.services.web.client import CallFailed, HttpClient
from areal.services.web.errors import ApiError
from areal.services.web.server import Request

_DEADLINE_S = 120.0
_UNREADY_S = 5.0  # who is not ready may not answer at all
_AGAIN = (421, 503)
_AUTH = ("Authorization", "x-api-key")


@dataclass(frozen=True)
class Said:
    status: int
    body: bytes
    headers: Mapping[str, str]
    journals: tuple[str, ...] = ()
    """Tags of what the data proxy held when it was asked."""

    def object(self) -> dict[str, Any]:
        """The JSON object in the body. Raises ValueError where there is none."""
        return dict(orjson.loads(self.body))

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "application/json")


class JournalClient:
    def __init__(
        self,
        http: HttpClient,
        table: LiveTable,
        admission: Admission,
        keys: SessionKeys,
        admin: Mapping[str, str],
    ) -> None:
        self._http = http
        self._table = table
        self._admission = admission
        self._keys = keys
        self._admin = dict(admin)

    def for_admin(self, request: Request) -> dict[str, str]:
        """The headers of what is asked on behalf of an admin's request."""
        return {**self._admin, names.REQUEST_ID: request.id}

    def for_caller(self, request: Request) -> dict[str, str]:
        """The headers of what is asked with the caller's own key."""
        given = {name: request.headers[name] for name in _AUTH if name in request.headers}
        return {**given, names.REQUEST_ID: request.id}

    async def ask(
        self,
        tag: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout_s: float = _DEADLINE_S,
    ) -> Said:
        """The answer of whoever holds the journal. Raises 404 for a journal of nobody, 503 where its holder stays
        away."""
        if not await self._keys.is_known(tag):
            raise ApiError(404, "no data proxy has this session", code="session_not_found")
        since = asyncio.get_running_loop().time()
        refused: set[str] = set()
        while True:
            model = self._table.model_of_journal(tag)
            if model is None:
                raise ApiError(404, "no data proxy has this session any more", code="session_not_found")
            if not self._table.routable(model, even_suspects=True, journal=tag):
                for worker in self._unready(tag):
                    said = await self._try(worker, method, path, headers, body, min(timeout_s, _UNREADY_S))
                    if said is not None and said.status not in _AGAIN:
                        return said
            worker = await self._admission.worker(model, CallKey(journal=tag), refused, since)
            said = await self._try(worker, method, path, headers, body, timeout_s)
            if said is not None and said.status not in _AGAIN:
                self._table.trust(worker.addr)
                return said
            if said is None or said.status == 503:
                self._table.suspect(worker.addr)
            refused = {worker.addr}

    def _unready(self, tag: str) -> list[WorkerEntry]:
        """Holders of the journal that take no calls now. One whose engine is gone still has what is recorded: rewards
        and exports need no engine."""
        workers = [worker for model in self._table.snapshot.models.values() for worker in model.workers]
        return list({worker.addr: worker for worker in workers if tag in worker.journals}.values())

    async def each(
        self, path: str, headers: Mapping[str, str], timeout_s: float = 10.0, model: str | None = None
    ) -> dict[str, Said]:
        """The answers of the data proxies that record to a GET, by address, as far as they answer."""
        workers = self.keepers(model)
        said = await asyncio.gather(*(self.at(worker, path, headers, timeout_s) for worker in workers))
        return {worker.addr: answer for worker, answer in zip(workers, said, strict=True) if answer is not None}

    def away(self, answers: Mapping[str, Said], model: str | None = None) -> list[str]:
        """Tags of the journals of which these answers do not speak: of data proxies that did not answer, of those that
        none serves, and of those that came to a data proxy after it was asked."""
        models = [each for each in self._table.snapshot.models.values() if model in (None, each.name)]
        known = {tag for each in models for worker in each.workers for tag in worker.journals}
        known |= {tag for each in models for tag in each.orphans}
        return sorted(known - {tag for said in answers.values() for tag in said.journals})

    def keepers(self, model: str | None = None) -> list[WorkerEntry]:
        """Data proxies that record and serve, each once."""
        models = self._table.snapshot.models.values()
        found = {
            worker.addr: worker
            for each in models
            for worker in each.workers
            if worker.state in (READY, CORDONED) and worker.journals and model in (None, each.name)
        }
        return list(found.values())

    async def at(self, worker: WorkerEntry, path: str, headers: Mapping[str, str], timeout_s: float) -> Said | None:
        """This data proxy's answer to a GET; None where it does not answer."""
        return await self._try(worker, "GET", path, headers, None, timeout_s)

    async def _try(
        self,
        worker: WorkerEntry,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Said | None:
        sent = {**headers, "Content-Type": "application/json"}
        try:
            said = await self._http.fetch(
                method, worker.addr, path, headers=sent, body=body or b"", timeout_s=timeout_s
            )
        except (CallFailed, TimeoutError):
            return None
        return Said(said.status, said.body, said.headers, tuple(worker.journals))
