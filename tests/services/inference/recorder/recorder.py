"""A process that records until it is killed: after each acknowledgement it prints what was acknowledged."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.services.inference.recorder.support import Calls, journal_in, start


async def main(path: Path) -> None:
    journal = await journal_in(path)
    calls = Calls()
    sessions = [(await start(journal))[0] for _ in range(4)]

    async def one(session: int) -> None:
        while True:
            call = calls.tokens([session, calls.count], [1, 2, 3])
            await journal.record(session, call)
            print("turn", session, call.answer_id, flush=True)
            if calls.count % 5 == 0:
                answered = await journal.reward(session, 0.5)
                print("reward", session, answered.interaction_id, flush=True)

    await asyncio.gather(*(one(session) for session in sessions))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
