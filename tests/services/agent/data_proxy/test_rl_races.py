"""Starts, exports and drains that overlap, before a scripted inference service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import orjson
import pytest

from areal.http.client import HttpClient
from areal.services.agent.data_proxy.inference import CallNames, RlSessions
from areal.services.agent.data_proxy.journal import AgentJournal, SessionEntry, open_agent_journal
from areal.services.http.errors import ApiError
from areal.services.journal.store import JournalStore, open_journal_store
from areal.wire.agents import ExportSession
from areal.wire.processes import InferenceAccess
from tests.services.agent.data_proxy.pair import start_pair
from tests.services.inference.running_service import in_thread
from tests.services.processes import Processes
from tests.services.scripted_api import ScriptedApi, scripted_api

START = "POST /rl/start_session"
EXPORT = "POST /export_trajectories"
END = "POST /rl/end_session"
REMOVED = {"rows": [], "removed": True}


@dataclass
class Held:
    """A hook that holds a call until ``release`` is set."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> None:
        self.reached.set()
        await self.release.wait()


def started(number: int) -> tuple[int, dict[str, Any]]:
    return 201, {"sessions": [{"session_api_key": f"sk-{number}", "session_id": f"rl-{number}"}]}


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with scripted_api() as api:
        api.replies |= {START: started(0), EXPORT: (200, REMOVED), END: (200, {})}
        numbers = count(1)

        async def next_number() -> None:
            api.replies[START] = started(next(numbers))

        api.hooks[START] = next_number
        yield api


@pytest.fixture
async def rl(api: ScriptedApi) -> AsyncIterator[RlSessions]:
    http = HttpClient()
    yield RlSessions(http, InferenceAccess(addr=api.url, model="tiny"))
    http.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[JournalStore[AgentJournal]]:
    store = await open_journal_store(tmp_path, "pair", open_agent_journal)
    yield store
    await store.close()


@pytest.fixture
async def session(store: JournalStore[AgentJournal], rl: RlSessions) -> SessionEntry:
    entry, _ = await store.own.start("mine", {}, await rl.start({}))
    return entry


def ended(api: ScriptedApi) -> list[str]:
    """Keys of the RL sessions that were ended."""
    return [headers["Authorization"].removeprefix("Bearer ") for route, _, headers in api.got if route == END]


async def test_turn_waits_for_export_and_gets_unexported_rl_session(
    rl: RlSessions, session: SessionEntry, api: ScriptedApi
) -> None:
    """The inference service has removed the first one already when the turn begins."""
    first, held = session.inference, Held()
    session.checked_at = asyncio.get_running_loop().time()
    api.hooks[EXPORT] = held
    export = asyncio.create_task(rl.export(session, ExportSession(), CallNames("r")), name="export")
    await asyncio.wait_for(held.reached.wait(), 20)
    turn = asyncio.create_task(rl.prepare(session), name="turn")
    await asyncio.sleep(0.05)
    assert not turn.done() and session.inference == first
    held.release.set()
    assert (await export).status == 200 and session.exported == first
    replaced = await turn
    assert replaced is not None and replaced["reason"] == "it was exported"
    assert session.inference not in (None, first)
    await rl.end(session.inference, session.exported)
    assert session.inference is not None and ended(api) == [session.inference.api_key]


async def test_concurrent_exports_of_session_are_serialised(
    rl: RlSessions, session: SessionEntry, api: ScriptedApi
) -> None:
    held = Held()
    api.hooks[EXPORT] = held
    exporting = [rl.export(session, ExportSession(), CallNames(f"r{number}")) for number in range(2)]
    exports = [asyncio.create_task(each, name="export") for each in exporting]
    await asyncio.wait_for(held.reached.wait(), 20)
    assert len(api.bodies(EXPORT)) == 1
    api.replies[EXPORT] = (404, {"error": {"code": "session_not_found", "message": "gone"}})
    held.release.set()
    refusals = [each for each in await asyncio.gather(*exports, return_exceptions=True) if isinstance(each, ApiError)]
    assert [each.status for each in refusals] == [409, 409]
    assert session.exporting is None


async def test_session_started_during_drain_keeps_rl_session(
    api: ScriptedApi, processes: Processes, tmp_path: Path
) -> None:
    access = orjson.dumps({"addr": api.url, "admin_key_file": str(processes.key_file), "model": "tiny"}).decode()
    pair = await in_thread(start_pair, processes, tmp_path / "state", "--inference", access)
    held = Held()
    api.hooks[START] = held
    start = asyncio.create_task(in_thread(pair.call, "POST", "/rl/start_session", {"api_key": "mine"}), name="start")
    await asyncio.wait_for(held.reached.wait(), 20)
    (tag,) = (await in_thread(pair.call, "GET", "/ready")).json()["journals"]
    assert (await in_thread(pair.call, "POST", "/drain", {})).json()["journals"] == [tag]
    held.release.set()
    answer = await start
    assert (answer.status, answer.json()["journal"]) == (201, tag)
    assert ended(api) == []
