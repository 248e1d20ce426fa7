"""What every test may rely on, wherever the suite is started from."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cluster.slurm import slurm_cluster  # noqa: F401

# Before torch is imported: two threads in each of the processes that share the cores are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Engines and trainers of the tests compute on the CPU, but with `CUDA_VISIBLE_DEVICES=0 pytest ...`.
if Path("/dev/nvidiactl").exists():
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# The tests start hundreds of processes: without bytecode on disk, each compiles every module that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A script's `pytest &` begins with these ignored, and so would every command that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# `--hypothesis-profile=default`: a busy machine is no failure of a property.
settings.register_profile("default", settings.get_profile("default"), deadline=None)

# The default suite's: always the same examples, fewer than `--hypothesis-profile=default` tries.
settings.register_profile("ci", settings.get_profile("ci"), max_examples=50)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes the long files, those of whole services, go first: what starts last is waited for alone."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/e2e/"))
