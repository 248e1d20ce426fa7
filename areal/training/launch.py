"""``python -m areal.training.launch --processes N -- ARGS``: N ranks of ``python -m areal.training ARGS``, by torchrun.

``--nodes M --run ID --port PORT``: N ranks on each of M nodes, which rendezvous at the first node's address
(``$AREAL_FIRST_NODE``) by torchrun's c10d. Each node has its own launcher.

If one rank fails, the others fail in their next collective, and torchrun adds a traceback. Ranks therefore write their
errors to files, and the launcher prints only the first error that is not a consequence of another rank's end, and exits
with its status.
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
from pathlib import Path

from areal.dataclasses import asdict, dataclass
from areal.runtime.backends.base import FIRST_NODE_VARIABLE, NODE_ADDRESS_VARIABLE, NODE_RANK_VARIABLE

_ERRORS = "AREAL_RANK_NOTES"
_SIOCGIFADDR = 0x8915
_RENDEZVOUS_S = 1800
TERMINATED = 128 + signal.SIGTERM
FAILED = 1


@dataclass(frozen=True)
class RankError:
    """The error of a rank. ``is_consequence``: the rank ended because another one had ended."""

    rank: int
    at: float
    text: str
    status: int
    is_consequence: bool = False


def is_rank() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_quiet_rank() -> bool:
    """Return whether another rank writes the log lines that all ranks share."""
    return is_rank() and os.environ.get("RANK", "0") != "0"


def report_error(text: str, status: int, *, is_consequence: bool = False) -> bool:
    """Write a rank's error to the file of the launcher. Returns False without a launcher."""
    folder = os.environ.get(_ERRORS)
    if folder is None:
        return False
    error = RankError(int(os.environ.get("RANK", "0")), time.time(), text, status, is_consequence)
    with suppress(OSError):
        Path(folder, f"{error.rank}.json").write_text(json.dumps(asdict(error)))
        return True
    return False


def root_cause(errors: Sequence[RankError], first: tuple[int, int]) -> tuple[str, int]:
    """Return message and exit status of the first error that a rank has reported; if none has, of the first to end."""
    causes = sorted((error for error in errors if not error.is_consequence), key=lambda error: error.at)
    if causes:
        return causes[0].text, causes[0].status
    rank, status = first
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"error: rank {rank} {how}\n", status if status > 0 else FAILED


def _rendezvous(nodes: int, run: str, port: int, environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's flags. The first node hosts the store; ranks listen at the address of their node."""
    first, here = environ[FIRST_NODE_VARIABLE], environ[NODE_ADDRESS_VARIABLE]
    endpoint = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    is_host = int(environ.get(NODE_RANK_VARIABLE, "0") == "0")
    flags = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run}"]
    timeouts = f"join_timeout={_RENDEZVOUS_S},read_timeout={_RENDEZVOUS_S}"
    return [*flags, f"--local-addr={here}", f"--rdzv-conf=is_host={is_host},{timeouts}"]


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address, if found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--")
    parser = argparse.ArgumentParser(prog="python -m areal.training.launch")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--run", default="")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args(words[:end])
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # torchrun's log lines in this process repeat the exception
    log_dir = f"--log-dir={os.devnull}"  # ranks write to this process's log: a folder would stay empty, in /tmp
    if given.nodes > 1 and (name := interface_of(os.environ[NODE_ADDRESS_VARIABLE])) is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # the node's name may resolve to another address
            os.environ.setdefault(variable, name)
    rendezvous = ["--standalone"] if given.nodes == 1 else _rendezvous(given.nodes, given.run, given.port, os.environ)
    words = [*rendezvous, f"--nproc-per-node={given.processes}", log_dir, "-m", "areal.training", *words[end + 1 :]]
    run = os.environ.get("AREAL_RUN_FOLDER", "")
    with tempfile.TemporaryDirectory(prefix=".ranks-", dir=run if Path(run).is_dir() else None) as folder:
        os.environ |= {_ERRORS: folder, "PYTHONSAFEPATH": "1"}  # ranks add the working folder themselves
        try:
            torchrun.run(torchrun.parse_args(words))  # type: ignore[no-untyped-call]
        except SignalException:
            sys.stderr.write("stopped\n")
            return TERMINATED
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            errors = [RankError(**json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
            text, status = root_cause(errors, (rank, failure.exitcode))
            sys.stderr.write(text)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
