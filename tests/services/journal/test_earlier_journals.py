"""Journals that an earlier commit recorded are read as they are, at the time at which it recorded them."""

from __future__ import annotations

from pathlib import Path

import orjson

from areal.services.agent.data_proxy.journal import open_agent_journal
from areal.services.inference.recorder.journal import open_journal
from areal.services.inference.recorder.records import TokenTurn
from areal.services.journal.storage import JournalFolder, lock_folder
from areal.wire.processes import Retention
from tests.e2e.earlier_home import unpack

RECORDED_AT = 1795973130.0  # later, the sessions would have expired


def only_folder(parent: Path) -> JournalFolder:
    (path,) = parent.iterdir()
    folder = lock_folder(path)
    assert folder is not None
    return folder


async def test_earlier_recorded_session_keeps_tokens_and_reward(tmp_path: Path) -> None:
    unpack(tmp_path)
    folder = only_folder(tmp_path / "home" / "data" / "reverse")
    journal = await open_journal(folder, Retention(), lambda: RECORDED_AT)
    sessions = {each.task: each for each in journal.sessions(-1, 10)}
    assert list(sessions) == ["__hitl__", "rewarded", "open"]
    (trajectory,) = journal.trajectories(sessions["rewarded"].number)
    first, last = (await journal.turns(sessions["rewarded"], trajectory)).turns
    assert isinstance(first, TokenTurn) and isinstance(last, TokenTurn)
    assert first.prompt_ids.tolist() == [1, 5, 6, 7, 8, 14] and first.output_ids.tolist() == [8, 7, 5, 6, 2]
    assert first.versions.tolist() == [0] * 5 and first.reward is None
    assert last.prompt_ids.tolist() == [1, 5, 6, 7, 8, 14, 8, 7, 5, 6, 2, 13, 12, 11, 14]
    assert (last.parent, last.output_ids.tolist(), last.reward) == (first.seq, [2], 0.5)
    await journal.close()


async def test_earlier_agent_session_keeps_conversation(tmp_path: Path) -> None:
    unpack(tmp_path)
    journal = await open_agent_journal(only_folder(tmp_path / "home" / "sessions" / "counter"), lambda: RECORDED_AT)
    (session,) = journal.sessions.values()
    contents = [each["content"] for each in orjson.loads(b"[%b]" % journal.conversation(session))]
    assert contents == ["hello", "one 0 hello", "again", "one 1 again"]
    await journal.close()
