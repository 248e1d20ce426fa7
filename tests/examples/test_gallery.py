"""The examples of the gallery, as ``areal init example`` writes them: every manifest is planned with every profile."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from areal.cli.main import run
from tests.cli.conftest import Areal, areal, clean_environment  # noqa: F401 - fixtures

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "areal" / "examples").iterdir())
PROFILES = ("cpu", "gpu", "gpu8", "ray", "slurm")
CASES = [
    (example.name, manifest.name, profile)
    for example in EXAMPLES
    for manifest in sorted(example.glob("*.yaml"))
    for profile in PROFILES
]
DIFFERENCES = 1


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every example, where no repository is."""
    folder = tmp_path_factory.mktemp("examples")
    for example in EXAMPLES:
        assert run(["init", "example", example.name, str(folder / example.name)]) == 0
    return folder


@pytest.mark.parametrize(("example", "manifest", "profile"), CASES)
def test_manifest_renders_and_is_valid_with_each_profile(
    areal: Areal,  # noqa: F811
    written: Path,
    monkeypatch: pytest.MonkeyPatch,
    example: str,
    manifest: str,
    profile: str,
) -> None:
    monkeypatch.chdir(written / example)
    rendered = areal("render", "-f", manifest, "--values", f"profiles/{profile}.yaml")
    assert rendered.code == 0 and "${{" not in rendered.out and "kind: TrainJob" in rendered.out, rendered.err


@pytest.mark.extended  # a second each: the configuration is checked in a process of its own
@pytest.mark.parametrize(("example", "manifest", "profile"), CASES)
def test_manifest_is_planned_with_each_profile(
    areal: Areal,  # noqa: F811
    written: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    example: str,
    manifest: str,
    profile: str,
) -> None:
    monkeypatch.chdir(written / example)
    text = Path(manifest).read_text()
    waits = "dependsOn" in text  # for the jobs of other files
    words = ("-f", "." if waits else manifest, "--values", f"profiles/{profile}.yaml")
    for weights in set(re.findall(rf"{tmp_path}/home/jobs/[\w-]+/models/step_\d+", areal("render", *words).out)):
        shutil.copytree("model", weights)  # of an earlier stage
    planned = areal("diff", *words, "--assume-capacity")
    assert planned.code == DIFFERENCES, planned.err
    assert "start TrainJob/" in planned.out
    if waits:
        (job,) = re.findall(r"\{name: ([a-z]+-[a-z]+), dependsOn", text)
        assert re.search(rf"TrainJob/{job} create.*waits for TrainJob/", planned.out), planned.out


def test_example_list_has_names_and_titles(areal: Areal) -> None:  # noqa: F811
    listed = areal("init", "example", "--list", "-o", "json").items
    assert {each["name"] for each in listed} == {example.name for example in EXAMPLES}
    assert all(each["title"] for each in listed)


def test_init_of_example_prints_its_start_command(
    areal: Areal,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    wrote = areal("init", "example", "gsm8k", "my folder")
    assert wrote.err == "wrote my folder; next: cd 'my folder' && areal apply -f grpo.yaml --values profiles/cpu.yaml\n"
    assert "$schema=areal.schema.json" in (tmp_path / "my folder" / "grpo.yaml").read_text()


def test_unknown_example_suggests_nearest(areal: Areal, tmp_path: Path) -> None:  # noqa: F811
    refused = areal("init", "example", "gsm8", str(tmp_path / "here"))
    assert refused.code == 2 and 'did you mean "gsm8k"?' in refused.err
    assert not (tmp_path / "here").exists()


def test_example_refuses_to_overwrite_user_file(areal: Areal, tmp_path: Path) -> None:  # noqa: F811
    mine = tmp_path / "reward.py"
    mine.write_text("mine = True\n")
    refused = areal("init", "example", "gsm8k", str(tmp_path))
    assert refused.code == 5 and str(mine) in refused.err
    assert [each.name for each in tmp_path.iterdir()] == ["reward.py"] and mine.read_text() == "mine = True\n"


@pytest.mark.parametrize("folder", ["n" * 300, "/proc/none", "a-file", "has-model"])
def test_folder_that_cannot_be_written_is_named(
    areal: Areal,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    (tmp_path / "has-model").mkdir()
    (tmp_path / "has-model" / "model").touch()  # where the example has a folder
    refused = areal("init", "example", "gsm8k", folder)
    assert refused.code == 1 and refused.err.startswith(f"error: cannot write {folder}"), refused.err


def test_stage_without_previous_one_is_refused_by_name(
    areal: Areal,  # noqa: F811
    written: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(written / "tldr")
    refused = areal("apply", "-f", "rw.yaml", "--values", "profiles/cpu.yaml")
    assert (
        refused.code == 3 and "TrainJob/tldr-sft does not exist: neither in these manifests nor recorded" in refused.err
    )
