"""The commands of pages as a reader pastes them: in the page's order, in a home, a folder and on ports of their own.

What a page shows of an output is compared with the output: line by line, any number for a number, anything for `...`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from areal.client.command import free_port
from tests.e2e.conftest import ROOT, Box, box  # noqa: F401 - fixture
from tests.test_documentation import blocks, commands
from tests.test_installation import metadata_of

Block = tuple[str, str, str]  # of tests.test_documentation.blocks


def marked(page: str) -> list[Block]:
    """The blocks of ``page`` that this file runs."""
    return [block for block in blocks(ROOT / page) if block[0] == "runs: tests/e2e/test_pages.py"]


def run_blocks(
    blocks: Sequence[Block],
    home: Path,
    folder: Path,
    *,
    instead: Mapping[str, str],
    after: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    status: Mapping[str, int] | None = None,
    timeout_s: float = 580.0,
) -> list[str]:
    """Run ``blocks`` in one shell. Return the output of each.

    ``instead``: texts to replace. ``after``: commands of the test, each after the line that has its key. ``status``:
    the exit status of lines that begin with its key, 0 for all others.
    """
    user = home.parent / "user"
    user.mkdir()
    (user / ".areal").symlink_to(home)
    shown = []
    script = [f'areal() {{ {shlex.quote(sys.executable)} -P -m areal.cli "$@"; }}']
    script += ['must_be() { [ "$1" = "$2" ] || { echo "exit status $2: $3"; exit 9; }; }']
    for _, language, text in blocks:
        for old, new in instead.items():
            text = text.replace(old, new)
        for line in commands(language, text):
            expected = next((code for key, code in (status or {}).items() if line.startswith(key)), 0)
            script += [line, f"must_be {expected} $? {shlex.quote(line)}"]
            script += [command for key, command in (after or {}).items() if key in line]
        script.append("printf '\\0'")
        shown.append(text if language == "console" else "")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # not a function: `$!` is the process
    environ = {**os.environ, "PATH": path, "AREAL_HOME": str(home), "HOME": str(user), "OMP_NUM_THREADS": "1"}
    environ |= env or {}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    outputs = done.stdout.split("\0")[:-1]
    for text, output in zip(shown, outputs, strict=True):
        assert missing(text, output) == [], output
    return outputs


def missing(shown: str, output: str) -> list[str]:
    """The lines that ``shown`` has and ``output`` does not have, in this order."""
    lines, absent = iter(output.splitlines()), []
    joined = shown.replace("\\\n", " ").splitlines()
    for line in (line for line in joined if line.strip(" .") and not line.startswith("$ ")):
        number = re.sub(r"\d+(?:\\\.\d+)?", lambda _: r"-?\d+(?:\.\d+)?", re.escape(line))
        blank = r"(?:\\ )+"
        pattern = re.sub(blank, lambda _: r"\s+", number.replace(r"\.\.\.", ".*"))
        if not any(re.fullmatch(pattern, each.strip() if not line.startswith(" ") else each) for each in lines):
            absent.append(line)
            lines = iter(())
    return absent


def run_page(box: Box, page: str, *, instead: Mapping[str, str], after: Mapping[str, str] | None = None) -> list[str]:  # noqa: F811
    return run_blocks(marked(page), box.home, box.folder, instead=instead, after=after, env=box.env)


def test_output_differing_from_page_is_found() -> None:
    shown = "$ areal x \\\n  y\nmodel/a: Ready at http://h:8080\n  one  two\n...\nlast\n"
    assert missing(shown, "model/a: Ready at http://h:9\n  one     two\nmore\nlast\n") == []
    assert missing(shown, "model/a: Failed at http://h:9\n  one two\nlast\n")[0].startswith("model/a")
    assert missing(shown, "  one two\nmodel/a: Ready at http://h:9\nlast\n") == ["  one  two", "last"]


def test_manifest_page_faults_are_reported_as_shown(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata:\n  name: default\nspec:\n"
        '  gatway: {}\n  gateway:\n    port: 8080\n  limits: {maxBodyBytes: "yes"}\n'
    )
    page = marked("docs/manifests.md")
    run_blocks(page, tmp_path / "home", tmp_path, instead={}, status={"areal validate": 3})


def test_other_areal_is_named_as_install_page_shows(tmp_path: Path) -> None:
    packages = metadata_of(tmp_path / "packages", "areal")
    instead = {
        "/opt/env/lib/python3.11/site-packages": str(packages),
        "'arealctl'": "...",
    }  # from where it was installed
    env = {"PYTHONPATH": f"{packages}:{ROOT}"}
    run_blocks(
        marked("docs/install.md"), tmp_path / "home", tmp_path, instead=instead, env=env, status={"areal doctor": 1}
    )


def test_unit_and_dockerfile_of_the_deployment_page_are_written(tmp_path: Path) -> None:
    init = ("", "sh", "areal init quickstart .\n")
    run_blocks([init, *marked("docs/deployment.md")], tmp_path / "home", tmp_path, instead={})
    assert (tmp_path / "user/.config/systemd/user/areal.service").is_file() and (tmp_path / "Dockerfile").is_file()


def short(folder: str, port: int, steps: int) -> str:
    return (
        f"sed -i 's/port: 8080/port: {port}/' {folder}/quickstart.yaml && "
        f"sed -i -e 's/^total_train_steps: .*/total_train_steps: {steps}/' -e 's/freq_steps: 350/freq_steps: {steps}/'"
        f" {folder}/examples/reverse_digits/grpo.yaml"
    )


# They go on from the quickstart: its service, its job, its folder.
AFTER_THE_QUICKSTART = (
    "docs/sessions.md",
    "docs/inference.md",
    "docs/training.md",
    "docs/evaluation.md",
    "docs/jobs.md",
    "examples/reverse_digits/README.md",
)


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_quickstart_page_commands_work_as_shown(box: Box) -> None:  # noqa: F811
    *first, last = marked("docs/quickstart.md")
    between = [block for page in AFTER_THE_QUICKSTART for block in marked(page)]
    assert len(between) >= len(AFTER_THE_QUICKSTART)
    outputs = run_blocks(
        [*first, *between, last],
        box.home,
        box.folder,
        instead={
            "localhost:8080": f"localhost:{box.port}",
            "127.0.0.1:8080": f"127.0.0.1:{box.port}",
            "learn@350": "learn@5",
            "8083": str(free_port()),
            "total_train_steps=20": "total_train_steps=2",
            "--max-tokens 8": "--max-tokens 8 --limit 10",
            "/home/ann/.areal": str(box.home),
        },
        after={
            "areal init quickstart q": short("q", box.port, 5),
            "kill -9": "sleep 1",  # a supervisor on a loaded machine may have to wait for its turn
        },
        env=box.env,
        status={"areal diff ": 1, "areal eval --fail-under": 8},  # of a model that has learned five steps
    )
    whole = "".join(outputs)
    assert "killed by SIGKILL" in whole and '"reverse"' in whole, "the event, and the list of models"
    assert '"trajectory_ready":true' in whole and '"rewards":[1.0]' in whole, "the session of curl"
    assert (box.folder / "q" / "eval.html").stat().st_size > 1000 and (box.folder / "q" / "rollouts.html").is_file()
    assert box.living() == []


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_first_workflow_page_trains_as_shown(box: Box) -> None:  # noqa: F811
    reward, agent = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "first-workflow.md").read_text(), re.M | re.S)
    box.ok("init", "quickstart", ".")
    (box.folder / "mine.py").write_text(reward)
    (box.folder / "first.py").write_text(agent)
    outputs = run_page(box, "docs/first-workflow.md", instead={"total_train_steps=60": "total_train_steps=3"})
    assert all("reward/mean" in output for output in outputs)
    assert box.living() == []


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_agents_page_commands_export_conversation(box: Box) -> None:  # noqa: F811
    agents = free_port()
    box.ok("init", "quickstart", ".")
    ports = f" --set inferenceservice/default:spec.gateway.port={box.port}"
    ports += f" --set agentservice/reverser:spec.gateway.port={agents}"
    outputs = run_page(
        box,
        "docs/agents.md",
        instead={
            "-f agents.yaml": "-f agents.yaml" + ports,
            "--session SESSION": '--session "$(areal agent sessions list -o name | head -1)"',
            "localhost:8090": f"localhost:{agents}",
        },
    )
    assert (box.folder / "rows.json").stat().st_size > 100
    assert '"trajectory_ready":true' in outputs[1]
