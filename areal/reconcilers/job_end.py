"""``python -m areal.reconcilers.job_end HOME TrainJob/NAME``: what follows the end of a driver, started by its
supervisor. Whatever fails here is done by the next reconcile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.reconcilers.operations import rest
from areal.resources.kinds import parse_ref
from areal.state.home import Home
from areal.state.locks import HOUSEKEEPING, actor

_LOCK_S = 120.0


def main(argv: Sequence[str]) -> int:
    home, job = argv
    try:
        rest(Context(Home(Path(home)), actor(), f"{HOUSEKEEPING} {job}", lock_timeout_s=_LOCK_S), parse_ref(job))
    except ArealError as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
