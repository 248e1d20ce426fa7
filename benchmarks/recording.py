"""What it costs to record an interaction durably, and what an idle session costs.

    python benchmarks/recording.py [--interactions 4000] [--sessions 100000] [--write]

Each interaction has 600 prompt and 200 generated tokens with log-probabilities and versions. ``turns`` go on with the
tokens of the turn before, as an agent's conversation does; ``samples`` are each their own. CPU is that of the whole
process, the fsync's thread included, less that of the same load without recording; a recorded interaction is on disk
when it counts. The last table fills a journal with idle sessions, one interaction each, opens it anew and looks at its
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from areal.services.inference.recorder.journal import SessionJournal, open_journal
from areal.services.inference.recorder.records import ModelCall, TokenSample, digest_conversation
from areal.services.inference.recorder.session import SessionName
from areal.services.journal.keys import request_digest
from areal.services.journal.storage import lock_folder
from areal.wire.processes import Retention
from benchmarks.reporting import header, publish, table

PROMPT, ANSWER = 600, 200
TURNS = 8


async def journal_in(folder: Path) -> SessionJournal:
    held = lock_folder(folder)
    assert held is not None
    return await open_journal(held, Retention())


def call(number: int, prompt: list[int], messages: list[dict[str, Any]]) -> tuple[ModelCall, dict[str, Any]]:
    said = {"role": "assistant", "content": f"answer {number}"}
    asked = digest_conversation(messages)
    output = [(number + place) % 150_000 for place in range(ANSWER)]
    sample = TokenSample(prompt, output, [-0.5] * ANSWER, [1] * ANSWER, "stop", after=asked.after(said))
    return ModelCall(f"chatcmpl-{number}", "m", 0, request_digest(str(number).encode()), [sample], asked), said


@dataclass
class Load:
    """Callers, each with a session of its own, that record one interaction after another."""

    journal: SessionJournal
    left: int
    recording: bool = True
    count: int = 0

    async def run(self, kind: str, concurrency: int) -> float:
        """CPU seconds."""
        cpu = time.process_time()
        work = self.conversation if kind == "turns" else self.samples
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return time.process_time() - cpu

    async def record(self, session: int, made: ModelCall) -> None:
        if self.recording:
            await self.journal.record(session, made)

    async def conversation(self) -> None:
        while self.left > 0:
            _, [started] = await self.journal.start("bench", 1, None, True)
            name = SessionName.parse(started.session_id)
            assert name is not None
            prompt, messages = list(range(PROMPT)), [{"role": "user", "content": "x" * 2000}]
            for _ in range(TURNS):
                if not self._next():
                    break
                made, said = call(self.count, prompt, messages)
                await self.record(name.number, made)
                sample = made.samples[0]
                assert isinstance(sample, TokenSample)
                prompt = [*prompt, *sample.output_ids, *range(50)]
                messages = [*messages, said, {"role": "user", "content": "y" * 200}]

    async def samples(self) -> None:
        _, [started] = await self.journal.start("bench", 1, None, True)
        name = SessionName.parse(started.session_id)
        assert name is not None
        while self._next():
            made, _ = call(self.count, list(range(PROMPT)), [{"role": "user", "content": f"{self.count}" + "x" * 2000}])
            await self.record(name.number, made)

    def _next(self) -> bool:
        self.left -= 1
        self.count += 1
        return self.left >= 0


async def measure(kind: str, concurrency: int, interactions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        journal = await journal_in(Path(folder))
        load = Load(journal, interactions)
        commits, wall = journal.commits.commits, time.perf_counter()
        cpu = await load.run(kind, concurrency)
        wall, commits = time.perf_counter() - wall, journal.commits.commits - commits
        idle_load = Load(journal, interactions, recording=False)
        cpu -= await idle_load.run(kind, concurrency)
        await journal.close()
    return {
        "kind": kind,
        "concurrency": concurrency,
        "cpu_us": round(cpu / interactions * 1e6),
        "wall_us": round(wall / interactions * 1e6),
        "a_commit": round(interactions / commits, 1),
    }


async def idle(sessions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        journal = await journal_in(Path(folder))

        async def one(place: int) -> None:
            _, [started] = await journal.start(f"task-{place}", 1, None, True)
            name = SessionName.parse(started.session_id)
            assert name is not None
            made, _ = call(place, list(range(20)), [{"role": "user", "content": "x"}])
            await journal.record(name.number, made)

        before = resident_bytes()
        for first in range(0, sessions, 1000):
            await asyncio.gather(*(one(first + place) for place in range(min(1000, sessions - first))))
        held = resident_bytes() - before
        await journal.close()
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        started = time.perf_counter()
        journal = await journal_in(Path(folder))
        opened = time.perf_counter() - started
        await journal.close()
    return {
        "sessions": sessions,
        "memory_bytes_a_session": round(held / sessions),
        "disk_bytes_a_session": round(size / sessions),
        "open_ms": round(opened * 1e3, 1),
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interactions", type=int, default=4000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = [
        asyncio.run(measure(kind, concurrency, args.interactions if concurrency > 1 else args.interactions // 8))
        for kind in ("turns", "samples")
        for concurrency in (1, 16, 512)
    ]
    idling = asyncio.run(idle(args.sessions))
    columns = ("kind", "at once", "CPU us", "wall us", "a commit")
    text = table(columns, [list(row.values()) for row in rows])
    text += "\n\n" + table([name.replace("_", " ") for name in idling], [list(idling.values())])
    publish({**header("recording"), "interactions": rows, "idle": idling}, text, args.write)


if __name__ == "__main__":
    main()
