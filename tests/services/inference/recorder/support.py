"""Calls and sessions for the recording tests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.services.inference.recorder.changes import read_session
from areal.services.inference.recorder.journal import SessionJournal, open_journal
from areal.services.inference.recorder.records import (
    ConversationDigest,
    ModelCall,
    RecordedTurn,
    TextSample,
    TokenSample,
    TokenTurn,
    digest_conversation,
)
from areal.services.inference.recorder.session import SessionName, TrajectoryPhase
from areal.services.inference.recorder.store import TrajectoryStore
from areal.services.inference.recorder.tables import SessionTables
from areal.services.journal.keys import request_digest
from areal.services.journal.storage import lock_folder, open_reader
from areal.services.journal.store import open_journal_store
from areal.wire.processes import Retention


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Calls:
    """Makes calls with answer ids of their own."""

    count: int = 0
    made: list[ModelCall] = field(default_factory=list)

    def tokens(
        self,
        prompt: Sequence[int],
        output: Sequence[int] = (7,),
        *,
        n: int = 1,
        messages: Sequence[dict[str, Any]] | None = None,
        version: int = 3,
        finish: str = "stop",
        body: bytes | None = None,
        key: bytes | None = None,
    ) -> ModelCall:
        self.count += 1
        asked = digest_conversation(messages) if messages is not None else None
        samples = [
            TokenSample(
                prompt_ids=list(prompt),
                output_ids=[*output, choice],
                logprobs=[-0.5] * (len(output) + 1),
                versions=[version] * (len(output) + 1),
                finish_reason=finish,
                after=asked.after(answer(output, choice)) if asked is not None else None,
            )
            for choice in range(n)
        ]
        return self._call(samples, asked, body, key)

    def text(self, messages: Sequence[dict[str, Any]], response: str) -> ModelCall:
        self.count += 1
        reply = {"role": "assistant", "content": response}
        asked = digest_conversation(messages)
        return self._call([TextSample(list(messages), reply, "stop", asked.after(reply))], asked, None, None)

    def _call(
        self, samples: list[Any], asked: ConversationDigest | None, body: bytes | None, key: bytes | None
    ) -> ModelCall:
        name = f"chatcmpl-{self.count}"
        digest = request_digest(body if body is not None else name.encode())
        call = ModelCall(name, "tiny", 1_700_000_000 + self.count, digest, samples, asked, key)
        self.made.append(call)
        return call


def answer(output: Sequence[int], choice: int = 0) -> dict[str, Any]:
    return {"role": "assistant", "content": " ".join(map(str, [*output, choice]))}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def journal_in(path: Path, clock: Clock | None = None, **retention: Any) -> SessionJournal:
    folder = lock_folder(path)
    assert folder is not None
    return await open_journal(folder, Retention(**retention), clock or Clock())


async def vault_in(root: Path, uid: str = "a", **retention: Any) -> TrajectoryStore:
    return await open_journal_store(root, uid, lambda folder: open_journal(folder, Retention(**retention)))


async def start(journal: SessionJournal, task: str = "task", **more: Any) -> tuple[int, str]:
    """One session: its number and id."""
    _, [started] = await journal.start(task, 1, more.pop("key", None), more.pop("online", True))
    name = SessionName.parse(started.session_id)
    assert name is not None
    return name.number, started.session_id


def turn(seq: int, parent: int | None = None, *, joined: bool = False, reward: float | None = None) -> RecordedTurn:
    return RecordedTurn(seq, f"i{seq}", f"i{seq}", 0, parent, joined, "tiny", "stop", reward, 0.0)


def token_turn(
    seq: int,
    prompt: Sequence[int],
    output: Sequence[int],
    parent: int | None = None,
    *,
    joined: bool = False,
    reward: float | None = None,
    temperature: float = 1.0,
) -> TokenTurn:
    return TokenTurn(
        seq=seq,
        interaction_id=f"i{seq}",
        answer_id=f"i{seq}",
        created=0,
        parent=parent,
        joined=joined,
        model="tiny",
        finish_reason="stop",
        reward=reward,
        at=0.0,
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
        logprobs=array("f", [-0.5] * len(output)),
        versions=array("q", [seq] * len(output)),
        extra={},
        temperature=temperature,
    )


async def state_of(journal: SessionJournal) -> list[Any]:
    """Everything that a caller could find in a journal, to compare."""
    found: list[Any] = []
    for session in journal.sessions(-1, 1000):
        for trajectory in journal.trajectories(session.number):
            turns = await journal.turns(session, trajectory)
            found.append((session, trajectory, turns))
        found.append(session)
    return found


def check_warm(journal: SessionJournal) -> None:
    """What is in memory is what is on disk."""
    tables = SessionTables(open_reader(journal.folder.database), journal.tag)
    for held in journal.cache:
        stored = read_session(tables, held.session.number)
        assert stored is not None
        assert (held.session, held.key, held.last, held.newest) == (
            stored.session,
            stored.key,
            stored.last,
            stored.newest,
        )
        if stored.last is not None and stored.last.phase is TrajectoryPhase.OPEN:
            assert (held.turns, held.completed) == (([], {}) if held.stored else (stored.turns, stored.completed))
    tables.db.close()
