"""Where a reward without a session goes: to the conversation in which the human spoke last."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from areal.http.headers import Headers
from areal.services.inference.gateway.sessions import HitlSessions, WorkerReply


class Table:
    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(0)


class Journals:
    """Data proxies whose answers were written down: a list a question, the last one for ever."""

    def __init__(self, *answers: Sequence[Mapping[str, Any]]) -> None:
        self._answers = [*answers]
        self.asked = 0

    async def each(self, path: str, headers: Mapping[str, str], timeout_s: float, model: str | None) -> dict[str, Any]:
        found = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        return {str(n): WorkerReply(200, Headers({}), json.dumps(answer).encode()) for n, answer in enumerate(found)}

    def away(self, answers: Mapping[str, WorkerReply], model: str | None) -> list[str]:
        return []


def answer(tag: str, spoke_at: float, journals: str = "", elsewhere: str = "") -> dict[str, Any]:
    reported = {"session_id": f"hitl-{tag}", "spoke_at": spoke_at}
    return {**reported, "journals": (journals or tag).split(), "elsewhere": elsewhere.split()}


async def session(journals: Journals) -> str:
    return await HitlSessions(Table(), journals).session(None, {})  # type: ignore[arg-type]


async def test_latest_answering_session_is_chosen() -> None:
    journals = Journals([answer("a", 1.0, elsewhere="b"), answer("b", 2.0, elsewhere="a")])
    assert await session(journals) == "hitl-b"
    assert journals.asked == 1


async def test_journal_known_to_one_data_proxy_is_waited_for() -> None:
    """Its own data proxy was killed before the router had heard of it."""
    alone = [answer("a", 1.0, elsewhere="b")]
    journals = Journals(alone, alone, [answer("b", 2.0, journals="a b")])
    assert await session(journals) == "hitl-b"
    assert journals.asked == 3
