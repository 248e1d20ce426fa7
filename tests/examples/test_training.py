"""Examples as their READMEs start them, in a fresh home, for a few steps; and the errors of data and rewards that are
wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Box, box  # noqa: F401 - fixture

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

SHORT = {
    "gsm8k": ("values.steps=2", "values.prompts=4", "values.data.test=train.jsonl"),
    "vision": ("values.steps=2", "values.prompts=4"),
    "tldr": (
        "values.sft.steps=2",
        "values.rw.steps=2",
        "values.dpo.steps=2",
        "values.ppo.steps=2",
        "values.ppo.batch=8",
    ),
}
JOBS = {"gsm8k": ["gsm8k-grpo"], "vision": ["vision-grpo"], "tldr": ["tldr-sft", "tldr-rw", "tldr-ppo", "tldr-dpo"]}


def command_of(readme: Path) -> str:
    """The first block of commands."""
    found = re.search(r"^```sh\n(.*?)^```", readme.read_text(), re.M | re.S)
    assert found is not None
    return found[1]


def shell(box: Box, folder: Path, command: str, settings: tuple[str, ...]) -> subprocess.CompletedProcess[str]:  # noqa: F811
    """The command, by a shell in which `areal apply` is short and has the box's port."""
    given = " ".join(f"--set {shlex.quote(each)}" for each in settings)
    port = f"--set inferenceservice/default:spec.gateway.port={box.port}"
    areal = (
        f'areal() {{ local more=; if [ "$1" = apply ]; then more={shlex.quote(given)}; '
        f'if grep -qrs --include=*.yaml "kind: InferenceService" "$3"; then more="$more {port}"; fi; fi; '
        f'{shlex.quote(sys.executable)} -P -m areal.cli "$@" $more; }}; '
    )
    env = {**os.environ, "AREAL_HOME": str(box.home), "OMP_NUM_THREADS": "1", **box.env}
    return subprocess.run(
        ["bash", "-c", areal + command], cwd=folder, env=env, capture_output=True, text=True, timeout=560
    )


@pytest.mark.parametrize("example", SHORT)
def test_command_of_the_readme_trains_in_a_fresh_home(box: Box, example: str) -> None:  # noqa: F811
    box.ok("init", "example", example)
    folder = box.folder / example
    done = shell(box, folder, command_of(folder / "README.md"), SHORT[example])
    assert done.returncode == 0, done.stdout + done.stderr
    for job in JOBS[example]:
        lines = (box.home / "jobs" / job / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == 2, job


def test_raising_reward_names_row_and_others_are_trained(box: Box) -> None:  # noqa: F811
    box.ok("init", "example", "gsm8k")
    folder = box.folder / "gsm8k"
    rows = (folder / "train.jsonl").read_text().splitlines()[:24]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    asked = json.loads(rows[16])["question"]
    reward = (folder / "reward.py").read_text()
    raises = f"    if {asked!r} in prompt:\n        raise ValueError('row 17 has no number')\n    return math_verify"
    (folder / "reward.py").write_text(reward.replace("    return math_verify", raises))
    settings = ("values.steps=6", "values.prompts=8", "values.samples=2", "values.data.test=train.jsonl")
    done = shell(box, folder, command_of(folder / "README.md"), settings)
    assert done.returncode == 0, done.stdout + done.stderr
    log = box.ok("logs", "trainjob/gsm8k-grpo", "-n", "2000").text
    named = [line for line in log.splitlines() if "row 17 has no number" in line]
    assert named, log
    failures = next(box.home.rglob("failures.jsonl")).read_text()
    assert "row 17 has no number" in failures


def test_data_without_reward_column_is_refused_before_start(box: Box) -> None:  # noqa: F811
    box.ok("init", "example", "gsm8k")
    folder = box.folder / "gsm8k"
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(json.dumps({"question": row["question"]}) + "\n" for row in rows))
    settings = (*SHORT["gsm8k"], "trainjob/gsm8k-grpo:spec.restart.policy=Never")
    done = shell(box, folder, command_of(folder / "README.md"), settings)
    assert done.returncode == 3
    assert "train.jsonl:1: the reward right_number" in done.stderr
    assert "missing a required argument: 'answer'" in done.stderr
    assert not box.home.joinpath("objects").exists() and not box.processes()
