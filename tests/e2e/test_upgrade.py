"""A home and processes of an earlier commit, taken over by this one: nothing restarts, everything still works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Box

BEFORE = {
    "packages rearranged": "d218cc02ee296e079466bba82bfddcfc127ce6c1",
    "first restart at once": "5fd65c0fc31f03299a2d347ce3cbf478e4ef22bc",
    "shared values of manifests": "0ea3d210",
}


@pytest.fixture(params=list(BEFORE.values()), ids=list(BEFORE))
def before(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tree of the earlier commit. Its dependencies are those of this one."""
    folder = tmp_path / "before"
    folder.mkdir()
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout != "false\n":
        pytest.skip("this is no clone with its history")
    archive = subprocess.run([*git, "archive", request.param, "areal"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@pytest.mark.slow
def test_service_of_earlier_commit_is_healed_rolled_and_deleted(box: Box, before: Path) -> None:
    manifest = box.manifest()
    first = box.areal("apply", "-f", manifest, "--yes", env={"PYTHONPATH": str(before)})
    assert first.code == 0, first.text
    pids = box.pids()
    assert str(before).encode() in Path(f"/proc/{pids['gateway/0']}/environ").read_bytes()

    box.ok("diff", "-f", manifest)
    box.ok("diff", "--drift")
    box.ok("apply", "-f", manifest, "--yes")
    assert box.pids() == pids
    assert box.chat("1234")

    os.kill(pids["engine/0"], signal.SIGKILL)
    box.ok("apply", "-f", manifest, "--yes")
    healed = box.pids()
    assert healed["engine/0"] != pids["engine/0"]
    assert healed["gateway/0"] == pids["gateway/0"]
    assert box.chat("1234")

    box.ok("restart", "model/reverse")
    assert box.pids()["data-proxy/0"] != pids["data-proxy/0"]
    assert box.chat("1234")
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []


@pytest.mark.slow
def test_driver_of_earlier_commit_is_followed_to_its_end(box: Box) -> None:
    home = str(box.home)
    box.ok("get")
    ends = [["areal.reconcilers.job_end", home], ["areal.reconcilers.background", home, "job-end"]]
    done = [
        subprocess.run([sys.executable, "-m", *end, "TrainJob/none"], capture_output=True, text=True) for end in ends
    ]
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 2
