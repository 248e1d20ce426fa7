"""action.yml, .pre-commit-hooks.yaml and what this repository itself uses: their steps, as GitHub and pre-commit run
them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
MODEL = """apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: m%s}
spec: {backend: embedded:d1, path: model%s}
"""
ON_SLURM = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {scheduler: {type: slurm}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: m}
spec: {backend: vllm, path: org/name, resources: {gpus: 1}}
"""
SERVICE = "---\napiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "manifests" / "team a").mkdir(parents=True)
    (tmp_path / "manifests" / "team a" / "m.yaml").write_text(MODEL % ("", "") + SERVICE)
    (tmp_path / "model").mkdir()
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(folder / "absent"), "PYTHONPATH": str(ROOT)}


def run_action(folder: Path, **inputs: str) -> tuple[int, str, str, str]:
    """The check step's exit status, its log, its outputs and the job's summary."""
    given = {name: str(spec["default"]) for name, spec in ACTION["inputs"].items()} | inputs
    (step,) = (step for step in ACTION["runs"]["steps"] if step.get("id") == "check")
    env = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda named: given[named[1]], value)
        for name, value in step["env"].items()
    }
    files = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    for file in files.values():
        Path(file).write_text("")
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(
        command, cwd=folder, env={**environment(folder), **files, **env}, capture_output=True, text=True, timeout=120
    )
    output, summary = (Path(file).read_text() for file in files.values())
    return done.returncode, done.stdout + done.stderr, output, summary


def test_action_shows_the_plan_of_valid_manifests(folder: Path) -> None:
    code, _, outputs, summary = run_action(folder, files="manifests", diff="true")
    assert (code, outputs) == (0, "changed=true\n")
    assert "| `Model/m` | create |" in summary


def test_action_annotates_every_fault_and_fails(folder: Path) -> None:
    (folder / "manifests" / "b,ad.yaml").write_text(MODEL % ("2", ", replicsa: 1, engineArgs: 7"))
    code, log, *_ = run_action(folder, files="manifests\n\nmanifests/team a/m.yaml", diff="true")
    assert code == 3
    assert "::error file=manifests/b%2Cad.yaml,line=4,col=" in log
    assert "unknown field" in log and "expected a map" in log


def test_action_annotates_more_faults_than_fit_one_argument(folder: Path) -> None:
    item = "---\napiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: m%d}\nspec: {no_such_field: 1}\n"
    (folder / "manifests" / "many.yaml").write_text("".join(item % number for number in range(2000)))

    code, log, *_ = run_action(folder, files="manifests/many.yaml")

    assert code == 3
    assert log.count("::error ") >= 2000


def test_action_takes_an_overlay_with_a_profile(folder: Path) -> None:
    overlay: dict[str, Any] = {"apiVersion": "areal.dev/v1alpha1", "kind": "Overlay", "bases": ["m.yaml"]}
    overlay["profiles"] = {"big": {"namePrefix": "big-"}}
    (folder / "manifests" / "team a" / "areal.overlay.yaml").write_text(yaml.safe_dump(overlay))
    code, log, *_ = run_action(folder, overlay="manifests/team a", profile="big", diff="true", recursive="false")
    assert code == 0 and "Model/big-m" in log


def test_action_without_the_clusters_commands_assumes_capacity(folder: Path) -> None:
    (folder / "manifests" / "team a" / "m.yaml").write_text(ON_SLURM)
    code, _, outputs, summary = run_action(folder, files="manifests", diff="true")
    assert (code, outputs) == (0, "changed=true\n") and "| `Model/m` | create |" in summary
    code, log, outputs, _ = run_action(folder, files="manifests", diff="true", **{"assume-capacity": "false"})
    assert code == 10 and outputs == "" and "--assume-capacity" in log


def test_failing_diff_fails_action_and_hook(folder: Path) -> None:
    home = folder / "absent" / ".areal"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text("defaults: {output: wide\n")
    code, log, outputs, _ = run_action(folder, files="manifests", diff="true")
    assert code == 70 and outputs == "" and "config.yaml" in log
    assert run_hook(folder, "areal-diff").returncode != 0


def test_action_without_files_fails_with_the_usage(folder: Path) -> None:
    code, log, *_ = run_action(folder)
    assert code == 2 and "no manifests: neither -f nor -k is given" in log and "Traceback" not in log


def test_action_passes_inputs_only_by_environment() -> None:
    assert not [step["name"] for step in ACTION["runs"]["steps"] if "${{" in step["run"]]


def run_hook(folder: Path, name: str, *args: str) -> subprocess.CompletedProcess[str]:
    (hook,) = (hook for hook in HOOKS if hook["id"] == name)
    words = [*shlex.split(hook["entry"]), *(args or hook["args"])]
    return subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120)


def test_hooks_pass_valid_manifests_and_fail_the_others(folder: Path) -> None:
    assert run_hook(folder, "areal-validate").returncode == 0
    planned = run_hook(folder, "areal-diff")
    assert planned.returncode == 0 and "Model/m create" in planned.stdout
    (folder / "manifests" / "bad.yaml").write_text(MODEL % ("2", ", replicsa: 1"))
    for name in ("areal-validate", "areal-diff"):
        found = run_hook(folder, name)
        assert found.returncode != 0 and "manifests/bad.yaml:4:" in found.stderr
    assert run_hook(folder, "areal-validate", "-f", "manifests/team a/m.yaml").returncode == 0


def test_workflow_matches_clean_clone_checks() -> None:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = {name: [step.get("run") for step in job["steps"]] for name, job in workflow["jobs"].items()}
    assert "bash .ci/run" in steps["test"]
    (build,) = (run for run in steps["site"] if run and "mkdocs build" in run)
    assert "--strict" in build and "mkdocs build --quiet --strict" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("file", ["bug.yml", "feature.yml"])
def test_issue_template_asks_for_doctor_output(file: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / file).read_text())
    assert "areal doctor" in next(part["attributes"]["label"] for part in form["body"] if part["id"] == "doctor")


def test_every_page_is_in_site_map_once() -> None:
    site: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (overview, *sections) = site["nav"]
    listed = [page for section in sections for pages in section.values() for each in pages for page in each.values()]
    listed += overview.values()
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


@pytest.mark.extended
def test_repository_passes_its_hooks() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert len(repo["hooks"]) == 6
    for hook in repo["hooks"]:
        words = [*shlex.split(hook["entry"]), *(["areal/errors.py"] if hook.get("types") else [])]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
