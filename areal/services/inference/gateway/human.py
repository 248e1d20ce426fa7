"""The human in the loop, who has no session's key: each journal has a session of theirs, and a reward is for the one
where they spoke last."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from areal.services.inference.gateway.journal_client import JournalClient
from areal.services.inference.gateway.live_table import LiveTable
from areal.services.web.errors import ApiError

_ASK_S = 5.0
_PATIENCE_S = 30.0
_LOOK_AGAIN_S = 0.5


class Human:
    def __init__(self, table: LiveTable, journals: JournalClient) -> None:
        self._table = table
        self._journals = journals

    async def session(self, model: str | None, headers: Mapping[str, str]) -> str:
        """The id of the session. A journal that is away may be the one: it is waited for. Raises 503."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _PATIENCE_S
        while True:
            answers = await self._journals.each("/rl/human", headers, _ASK_S, model)
            told = [said.object() for said in answers.values() if said.status == 200]
            away = self._journals.away(answers, model)
            if told and not away:
                latest = max(told, key=lambda each: (each["spoke_at"] or 0.0, each["session_id"]))
                return str(latest["session_id"])
            if loop.time() >= deadline:
                message = "it cannot be told where the human spoke last: name the session or the interaction"
                raise ApiError(503, message, code="session_away", headers={"Retry-After": "5"})
            await self._table.changed(_LOOK_AGAIN_S)
