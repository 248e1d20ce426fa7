"""``python -m areal.reconcilers.job_end HOME TrainJob/NAME``: run when a driver ends that an earlier version started.
Newer versions run ``background``."""

from __future__ import annotations

import sys
from pathlib import Path

from areal.reconcilers.background import end_job
from areal.resources.kinds import parse_ref
from areal.state.home import Home

if __name__ == "__main__":
    home, job = sys.argv[1:]
    sys.exit(end_job(Home(Path(home)), parse_ref(job)))
