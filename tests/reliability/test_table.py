"""The page says what the tests found: each fault has its row, each row its test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.reliability.faults import PAGE, Fault, Row, read_page
from tests.reliability.table import render

REPOSITORY = Path(__file__).parents[2]


def test_page_has_a_row_for_each_fault_and_no_other() -> None:
    argv = [sys.executable, "-m", "tests.reliability.table", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_page_round_trips() -> None:
    rows = [
        Row(Fault("Part one", "a | b", "in a call"), "502 `x`", "nothing", "served"),
        Row(Fault("Part two", "c", "idle"), "answered", "once", "served"),
    ]
    assert list(read_page(render(rows)).values()) == rows


def test_page_has_enough_faults() -> None:
    assert len(read_page(PAGE.read_text(encoding="utf-8"))) >= 30
