"""``python -m areal.training.launch --processes N -- ARGS``: N ranks of ``python -m areal.training ARGS``, by torchrun.

``--nodes M --run ID --port PORT``: as many on each of M nodes, which meet at the first one's address
(``$AREAL_FIRST_NODE``) by torchrun's c10d. Each node has a launcher of its own.

Where one fails, the others fail at it, in their next collective, and torchrun adds a traceback of its own. A user is
told one cause, with its exit status, as of a run of one process: ranks leave notes of what they would have said, and
the launcher says the first that is no consequence of another.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from areal.runtime.backends.base import FIRST_NODE_VARIABLE, NODE_ADDRESS_VARIABLE, NODE_RANK_VARIABLE

_NOTES = "AREAL_RANK_NOTES"
_SIOCGIFADDR = 0x8915
_MEET_S = 1800  # until all nodes are there
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


def _rendezvous(nodes: int, run: str, port: int, environ: Mapping[str, str]) -> list[str]:
    """torchrun's flags. The first node hosts the store; the ranks of every node listen at its own address."""
    first, here = environ[FIRST_NODE_VARIABLE], environ[NODE_ADDRESS_VARIABLE]
    at = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    hosts = int(environ.get(NODE_RANK_VARIABLE, "0") == "0")
    about = ["--rdzv-backend=c10d", f"--rdzv-endpoint={at}", f"--rdzv-id={run}", f"--local-addr={here}"]
    return [f"--nnodes={nodes}", *about, f"--rdzv-conf=is_host={hosts},join_timeout={_MEET_S},read_timeout={_MEET_S}"]


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24]) == address:
                    return name
    return None


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    ours = words.index("--")
    parser = argparse.ArgumentParser(prog="python -m areal.training.launch")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--run", default="")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args(words[:ours])
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of torchrun, in this process: it tells what the exception says
    nowhere = f"--log-dir={os.devnull}"  # the ranks write to our log: a folder of theirs would stay empty, in /tmp
    if given.nodes > 1 and (name := interface_of(os.environ[NODE_ADDRESS_VARIABLE])) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # a node's name need not lead to that address
            os.environ.setdefault(variable, name)
    meeting = ["--standalone"] if given.nodes == 1 else _rendezvous(given.nodes, given.run, given.port, os.environ)
    words = [*meeting, f"--nproc-per-node={given.processes}", nowhere, "-m", "areal.training", *words[ours + 1 :]]
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
