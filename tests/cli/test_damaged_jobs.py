"""A job's file of metrics that is damaged: each command shows what is left of it, and says what it could not read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.state.home import Home
from tests.cli.conftest import Areal

GOOD = [
    {"step": step, "attempt": 1, "time": float(step), "reward/mean": step / 4, "time/step": 0.5} for step in (1, 2, 3)
]
LINES = "".join(json.dumps(step) + "\n" for step in GOOD).encode()
COMMANDS = (
    ("train", "metrics", "j"),
    ("train", "metrics", "j", "-o", "json"),
    ("train", "status", "j"),
    ("train", "status", "j", "-o", "json"),
    ("train", "ps", "--all"),
    ("get", "trainjob/j", "-o", "json"),
    ("get", "trainjobs", "-o", "wide"),
    ("describe", "trainjob/j"),
    ("top",),
    ("diff", "--drift"),
)


@pytest.fixture
def metrics(home: Home, record: Callable[..., Any]) -> Path:
    """The file of the metrics of a job that does not run."""
    record("TrainJob", "j", {"driver": "m:f", "workingDir": "/", "suspend": True})
    path = home.job_metrics("j")
    path.parent.mkdir(parents=True)
    path.write_bytes(LINES)
    return path


DAMAGES = {
    "last line cut": LINES + b'{"step": 4, "reward/me',
    "last line without its end": LINES[:-1],
    "line of bytes in the middle": LINES.replace(b'{"step": 2', b'\xff\xfe\x00{"step": 2', 1),
    "zeros at the end": LINES + b"\0" * 4096,
    "bytes alone": bytes(range(256)) * 16,
    "empty": b"",
    "step of another type": LINES
    + b'{"step": "four", "reward/mean": 1}\n{"step": null}\n{"step": [4]}\n{"step": true}\n',
    "metric of another type": LINES + b'{"step": 4, "reward/mean": "high", "time/step": {"a": 1}, "time": []}\n',
    "line that is not an object": LINES + b'[1, 2]\n7\nnull\n"x"\n',
    "numbers out of range": LINES
    + b'{"step": 4, "reward/mean": 1e999, "time/step": -1e400}\n{"step": 1e30}\n{"step": -3}\n',
    "not a number": LINES + b'{"step": 4, "reward/mean": NaN, "time/step": Infinity}\n',
    "deep": LINES + b'{"step": 4, "reward/mean": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
    "long integer": LINES + b'{"step": ' + b"9" * 6000 + b"}\n",
}


def check(areal: Areal, *, steps_left: bool) -> None:
    for words in COMMANDS:
        found = areal(*words)
        assert found.code in (0, 1, 4) and "Traceback" not in found.err and "unexpected" not in found.err, (
            words,
            found,
        )
        if words[-1] == "json" and found.code == 0:
            json.loads(found.out, parse_constant=pytest.fail)
    if steps_left:
        assert areal("train", "metrics", "j").code == 0
        rows = json.loads(areal("train", "metrics", "j", "-o", "json").out)
        (reward,) = [row for row in rows["items"] if row["metric"] == "reward/mean"]
        assert 0.25 in reward["values"], reward


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES)
def test_damaged_metrics_show_remaining_steps(areal: Areal, metrics: Path, content: bytes) -> None:
    metrics.write_bytes(content)
    check(areal, steps_left=content.count(b'"step": 3') > 0)


@pytest.mark.parametrize("kind", ["missing", "folder", "link to nothing", "link to itself"])
def test_missing_metrics_file_fails_no_other_command(areal: Areal, metrics: Path, kind: str) -> None:
    metrics.unlink()
    if kind == "folder":
        metrics.mkdir()
    elif kind != "missing":
        metrics.symlink_to("nothing" if kind == "link to nothing" else metrics.name)
    check(areal, steps_left=False)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(LINES)), st.integers(0, 40), st.binary(max_size=40))
def test_damaged_metrics_crash_no_command(areal: Areal, metrics: Path, at: int, removed: int, put: bytes) -> None:
    metrics.write_bytes(LINES[:at] + put + LINES[at + removed :])
    for words in (COMMANDS[1], COMMANDS[3], COMMANDS[5]):
        found = areal(*words)
        assert found.code in (0, 1, 4) and "unexpected" not in found.err, (words, found)
