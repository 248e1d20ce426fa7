"""``python -m areal.training.launch --processes N -- ARGS``: N ranks of ``python -m areal.training ARGS``, by torchrun.

Where one fails, the others fail at it, in their next collective, and torchrun adds a traceback of its own. A user is
told one cause, with its exit status, as of a run of one process: ranks leave notes of what they would have said, and
the launcher says the first that is no consequence of another.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_NOTES = "AREAL_RANK_NOTES"
_TERMINATED = 128 + signal.SIGTERM
_FAILED = 1


@dataclass(frozen=True)
class Note:
    """``lost``: this rank ended for another did."""

    rank: int
    at: float
    text: str
    status: int
    lost: bool = False


def is_rank() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_quiet_rank() -> bool:
    """Whether another rank logs what is the same on all of them."""
    return is_rank() and os.environ.get("RANK", "0") != "0"


def leave_note(text: str, status: int, *, lost: bool = False) -> bool:
    """Whether there is a launcher that will say ``text``."""
    folder = os.environ.get(_NOTES)
    if folder is None:
        return False
    note = Note(int(os.environ.get("RANK", "0")), time.time(), text, status, lost)
    with suppress(OSError):
        Path(folder, f"{note.rank}.json").write_text(json.dumps(asdict(note)))
        return True
    return False


def cause(notes: Sequence[Note], first: tuple[int, int]) -> tuple[str, int]:
    """What to say and the exit status, of what the ranks said and of the (rank, exit status) that was seen to end
    first."""
    own = sorted((note for note in notes if not note.lost), key=lambda note: note.at)
    if own:
        return own[0].text, own[0].status
    rank, status = first
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"error: rank {rank} {how}\n", status if status > 0 else _FAILED


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    ours = words.index("--")
    parser = argparse.ArgumentParser(prog="python -m areal.training.launch")
    parser.add_argument("--processes", type=int, required=True)
    processes = parser.parse_args(words[:ours]).processes
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of torchrun, in this process: it tells what the exception says
    nowhere = f"--log-dir={os.devnull}"  # the ranks write to our log: a folder of theirs would stay empty, in /tmp
    words = ["--standalone", f"--nproc-per-node={processes}", nowhere, "-m", "areal.training", *words[ours + 1 :]]
    run = os.environ.get("AREAL_RUN_FOLDER", "")
    with tempfile.TemporaryDirectory(prefix=".ranks-", dir=run if Path(run).is_dir() else None) as folder:
        os.environ[_NOTES] = folder
        try:
            torchrun.run(torchrun.parse_args(words))  # type: ignore[no-untyped-call]
        except SignalException:
            sys.stderr.write("stopped\n")
            return _TERMINATED
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            notes = [Note(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
            text, status = cause(notes, (rank, failure.exitcode))
            sys.stderr.write(text)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
