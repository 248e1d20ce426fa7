"""The commands of pages, in the order in which a reader runs them, in a home and on ports of their own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.e2e.conftest import ROOT, Box, box, free_port  # noqa: F401 - fixture
from tests.test_documentation import blocks, commands

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def run_page(
    box: Box,  # noqa: F811
    page: str,
    *,
    instead: Mapping[str, str],
    after: Mapping[str, str] | None = None,
) -> list[str]:
    """The output of each block of ``page``, run in one shell. ``instead``: texts to replace. ``after``: commands of the
    test, each after the line that has its key."""
    user = box.home.parent / "user"
    user.mkdir()
    (user / ".areal").symlink_to(box.home)
    script = [f'areal() {{ {shlex.quote(sys.executable)} -P -m areal.cli "$@"; }}']
    script += ['must_be() { [ "$1" = "$2" ] || { echo "exit status $2: $3" >&2; exit 9; }; }']
    for mark, language, text in blocks(ROOT / page):
        if not mark.startswith("runs: tests/e2e/test_pages.py"):
            continue
        for line in commands(language, text):
            for old, new in instead.items():
                line = line.replace(old, new)
            status = 1 if re.match("areal diff ", line) else 0
            script += [line, f"must_be {status} $? {shlex.quote(line)}"]
            script += [command for key, command in (after or {}).items() if key in line]
        script.append("printf '\\0'")
    env = {**os.environ, "AREAL_HOME": str(box.home), "HOME": str(user), "OMP_NUM_THREADS": "1", **box.env}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=box.folder, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout.split("\0")[:-1]


def short(folder: str, port: int, steps: int) -> str:
    return (
        f"sed -i 's/port: 8080/port: {port}/' {folder}/quickstart.yaml && "
        f"sed -i 's/^total_train_steps: .*/total_train_steps: {steps}/' {folder}/examples/reverse_digits/grpo.yaml"
    )


def test_commands_of_the_quickstart_do_what_the_page_shows(box: Box) -> None:  # noqa: F811
    outputs = run_page(
        box,
        "docs/quickstart.md",
        instead={"localhost:8080": f"localhost:{box.port}"},
        after={"areal init quickstart q": short("q", box.port, 5)},
    )
    whole = "".join(outputs)
    for shown in ("model/reverse created: Ready", "trainjob/learn created: Running", "trainjob/learn met: completed"):
        assert shown in whole
    assert "~ Model/reverse configure (rolling update), decided by spec.engineArgs.max-batch-size" in whole
    assert "(not set) -> 16  (ROLL)" in whole and "killed by SIGKILL" in whole
    assert '"reverse"' in whole, "the list of models"
    assert box.living() == []


def test_first_workflow_trains_as_its_page_shows(box: Box) -> None:  # noqa: F811
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "first-workflow.md").read_text(), re.M | re.S)
    (box.folder / "first.py").write_text(code)
    (box.folder / "examples").symlink_to(ROOT / "examples")
    outputs = run_page(box, "docs/first-workflow.md", instead={"total_train_steps=60": "total_train_steps=3"})
    assert "reward" in outputs[0]
    assert box.living() == []


def test_commands_of_the_agents_page_hold_and_export_a_conversation(box: Box) -> None:  # noqa: F811
    agents = free_port()
    for name in ("agents.yaml", "agents"):
        (box.folder / "manifests").mkdir(exist_ok=True)
        (box.folder / "manifests" / name).symlink_to(ROOT / "manifests" / name)
    (box.folder / "examples").symlink_to(ROOT / "examples")
    ports = f" --set inferenceservice/default:spec.gateway.port={box.port}"
    ports += f" --set agentservice/reverser:spec.gateway.port={agents}"
    outputs = run_page(
        box,
        "docs/agents.md",
        instead={
            "-f manifests/agents.yaml": "-f manifests/agents.yaml" + ports,
            "--session SESSION": '--session "$(areal agent sessions list -o name | head -1)"',
            "localhost:8090": f"localhost:{agents}",
        },
    )
    assert (box.folder / "rows.json").stat().st_size > 100
    assert '"trajectory_ready":true' in outputs[1]
