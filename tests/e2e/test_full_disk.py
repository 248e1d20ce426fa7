"""A disk that is full under ``$AREAL_HOME``: what callers get as 507 is in the status, in the plan and in what apply
says, and goes away by itself once there is room."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import Box, make_box, tear_down

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Box]:
    """A box whose home is a disk of 48 MiB."""
    box = make_box(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root, to mount a small disk")
    box = replace(box, home=disk / "home")
    try:
        yield box
    finally:
        (box.home.parent / "filler").unlink(missing_ok=True)
        try:
            tear_down(box)
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def filled(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass


def ready_condition(box: Box, ref: str) -> tuple[str, str, str]:
    status = json.loads(box.ok("get", ref, "-o", "json").out)["status"]
    condition = next(each for each in status["conditions"] if each["type"] == "Ready")
    return status["phase"], condition["reason"], condition["message"]


def test_full_disk_is_a_condition_and_clears_by_itself(small: Box) -> None:
    manifest = small.manifest()
    small.ok("apply", "-f", manifest)
    assert small.chat("1234").isdigit()
    filled(small.home.parent)

    deadline = time.monotonic() + 60
    while True:  # the last blocks of the journal's file take some calls
        assert time.monotonic() < deadline
        try:
            small.chat("1234")
        except urllib.error.HTTPError as error:
            assert error.code == 507, error.read()
            break

    phase, reason, message = ready_condition(small, "model/reverse")
    assert (phase, reason) == ("Degraded", "NotRecording")
    assert "data-proxy/0: calls are refused, since they cannot be recorded: " in message
    assert "free space under $AREAL_HOME" in message
    assert "NotRecording" not in small.ok("get").out and "Degraded" in small.ok("get").out
    drift = small.areal("diff", "--drift")
    assert drift.code == 1 and "calls are refused, since they cannot be recorded" in drift.out
    assert small.areal("inf", "status").code == 1

    (small.home.parent / "filler").unlink()
    small.ok("wait", "model/reverse", "--for", "ready", "--timeout", "1m")
    assert small.chat("1234").isdigit()
    assert small.areal("diff", "--drift").code == 0
