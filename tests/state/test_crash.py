from __future__ import annotations

import re
from pathlib import Path

import pytest

import areal
from areal.state.files import CRASH_POINTS
from areal.state.home import Home

from .support import run

PASS_TWICE = """
for name in ("write-before", "write-after", "write-before", "write-after"):
    crash_point(name)
    print(name, flush=True)
"""


def test_unset_crash_point_does_nothing(home: Home) -> None:
    ended = run(PASS_TWICE, home, AREAL_CRASH_AT="")
    assert (ended.returncode, len(ended.stdout.splitlines())) == (0, 4)


@pytest.mark.parametrize(
    ("at", "passed"), [("write-after", 1), ("write-before:2", 2), ("any", 0), ("any:4", 3), ("write-before:3", 4)]
)
def test_crash_point_exits_like_kill(home: Home, at: str, passed: int) -> None:
    ended = run(PASS_TWICE, home, AREAL_CRASH_AT=at)
    assert ended.returncode == (137 if passed < 4 else 0)
    assert len(ended.stdout.splitlines()) == passed


@pytest.mark.parametrize("at", ["write-behind", "write-before:x", "any:0", ":"])
def test_unknown_crash_point_is_an_error(home: Home, at: str) -> None:
    ended = run(PASS_TWICE, home, AREAL_CRASH_AT=at)
    assert ended.returncode == 1
    assert "UsageFault" in ended.stderr


def test_unregistered_crash_point_is_an_error(home: Home) -> None:
    ended = run('crash_point("somewhere")', home, AREAL_CRASH_AT="any:9")
    assert "not registered" in ended.stderr


def test_crash_points_in_code_match_registry() -> None:
    root = Path(areal.__file__).parent
    called = set()
    for folder in ("state", "runtime", "reconcilers"):
        for path in (root / folder).rglob("*.py"):
            called |= set(re.findall(r"crash(?:_point)?\(\s*\"([a-z-]+)\"", path.read_text()))
    assert called == set(CRASH_POINTS)
    assert len(set(CRASH_POINTS)) == len(CRASH_POINTS)
