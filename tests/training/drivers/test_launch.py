"""Several ranks that fail are reported as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.client.command import free_port
from areal.training.launch import RankError, root_cause

REPOSITORY = Path(__file__).parents[3]
RANKS = """
import os, signal, time
from areal.errors import UsageFault
RANK = os.environ["RANK"]

def wait():
    while True:
        time.sleep(600)

def refused(args):
    raise UsageFault("no such thing", hint="try another")

def broken(args):
    if RANK == "1":
        raise KeyError("answer")
    wait()

def meet(args):
    from areal.training.ranks import join_ranks
    with join_ranks() as ranks:
        print("rank", ranks.rank, "of", ranks.all_gather(os.environ["AREAL_NODE_RANK"]), flush=True)

def killed(args):
    if RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    wait()
"""


def _error(rank: int, at: float, text: str, *, is_consequence: bool = False) -> RankError:
    return RankError(rank, at, text, 1 if is_consequence else 3, is_consequence)


def test_error_names_root_cause_first() -> None:
    lost, first, second = (
        _error(0, 1.0, "closed by peer", is_consequence=True),
        _error(2, 2.0, "nan"),
        _error(1, 3.0, "nan, too"),
    )
    assert root_cause([second, lost, first], (0, 1)) == ("nan", 3)


def test_root_cause_falls_back_to_first_exit() -> None:
    lost = _error(0, 1.0, "closed by peer", is_consequence=True)
    assert root_cause([lost], (1, -9)) == ("error: rank 1 was killed by SIGKILL\n", 1)
    assert root_cause([], (1, 7)) == ("error: rank 1 ended with status 7\n", 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "error", "status", "tracebacks"),
    [
        ("refused", "error: no such thing\nhint: try another\n", 2, 0),
        ("broken", "error: rank 1: KeyError: 'answer'\n", 1, 1),
        ("killed", "error: rank 1 was killed by SIGKILL\n", 1, 0),
    ],
)
def test_failing_ranks_are_reported_once(tmp_path: Path, driver: str, error: str, status: int, tracebacks: int) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    ran = subprocess.run(
        [sys.executable, "-m", "areal.training.launch", "--processes", "2", "--", "--driver", f"ranks:{driver}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == status, ran.stderr
    assert ran.stderr.endswith(error)
    assert ran.stderr.count("Traceback") == tracebacks
    assert ran.stderr.count("error:") == 1


@pytest.mark.slow
def test_launchers_of_two_nodes_make_one_world(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    port = free_port()
    meeting = ("--processes", "1", "--nodes", "2", "--run", "r1", "--port", str(port))
    about = {"AREAL_FIRST_NODE": "127.0.0.1", "AREAL_NODE_ADDRESS": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "areal.training.launch", *meeting, "--", "--driver", "ranks:meet"],
            cwd=tmp_path,
            env={**os.environ, **about, "PYTHONPATH": str(REPOSITORY), "AREAL_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    ended = [(*node.communicate(timeout=200), node.returncode) for node in nodes]
    assert [code for *_, code in ended] == [0, 0], ended
    error = sorted(line for out, *_ in ended for line in out.splitlines() if line.startswith("rank"))
    assert [line.split()[:2] for line in error] == [["rank", "0"], ["rank", "1"]]
    assert all("'0'" in line and "'1'" in line for line in error)
