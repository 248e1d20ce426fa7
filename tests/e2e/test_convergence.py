"""Nothing needs a command to finish: whatever is killed, all of it at once too, what shims start again finds itself, and
what nobody starts again needs one `apply`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Box
from tests.e2e.test_trainer_kills import Job, assert_nothing_lost, started, until


def kill_everything(box: Box) -> None:
    """Shims too, as a reboot does: nobody sees another one die."""
    pids = box.living()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    until(lambda: not box.living())


def test_job_goes_on_with_one_apply_after_everything_was_killed(box: Box) -> None:
    job = started(box, "learn", steps=8, mode="shm")
    until(lambda: len(job.notes()) >= 4)
    kill_everything(box)
    box.ok("apply", "-f", str(Path(box.folder / "manifest.yaml")), "--timeout", "120s")
    assert_nothing_lost(job)
