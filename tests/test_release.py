"""``tools/release.py``: what it refuses, and that two builds of one tree are the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from areal.client.command import free_port
from tests.test_documentation import blocks, lines_of_areal
from tools import release

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://example.org/us/areal"


def git(folder: Path, *words: str) -> str:
    given = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder))
    return subprocess.run(["git", *given, *words], check=True, capture_output=True, text=True).stdout


def listed() -> list[str]:
    """The files of this repository, as they are now."""
    words = ["git", "-C", str(ROOT), "ls-files", "-zco", "--exclude-standard"]
    done = subprocess.run(words, capture_output=True, check=True)
    return [name for name in done.stdout.decode().split("\0") if name]


def working_tree(folder: Path) -> Path:
    """A copy of them."""
    for name in listed():
        file, copy = ROOT / name, folder / name
        if file.is_symlink() or file.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy, follow_symlinks=False)
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project with the files that a release reads."""
    for name, value in (("GIT_AUTHOR_NAME", "a"), ("GIT_AUTHOR_EMAIL", "a@b"), ("GIT_COMMITTER_NAME", "a")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GIT_COMMITTER_EMAIL", "a@b")
    root = tmp_path / "project"
    (root / "areal").mkdir(parents=True)
    (root / "areal" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "data.txt").write_text("data")
    (root / "areal" / "data.txt").symlink_to("../data.txt")
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0 - 2026-01-01\n\n- first\n")
    (root / "README.md").write_text(
        "[page](docs/a.md#b), ![picture](docs/p.png), [out](https://example.org/), [top](#top)\n"
    )
    (root / "LICENSE").write_text("text")
    (root / "constraints.txt").write_text("click==8.5.1\nPy_Test==9.0\n")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "arealctl"\ndynamic = ["version"]\nreadme = "README.md"\nlicense = "Apache-2.0"\n'
        'dependencies = ["click>=8"]\n[project.optional-dependencies]\ndev = ["py.test>=8", "arealctl[more]"]\n'
        'more = ["rare"]\n'
        '[tool.setuptools.dynamic]\nversion = { attr = "areal.__version__" }\n[tool.setuptools]\npackages = ["areal"]\n'
        '[tool.setuptools.package-data]\nareal = ["data.txt"]\n'
    )
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def test_release_sets_version_builds_commits_and_tags(project: Path, tmp_path: Path) -> None:
    made = release.release(project, "0.2.0", "2026-02-03", REPOSITORY, tmp_path / "out")
    assert [file.name for file in made] == [
        "arealctl-0.2.0-py3-none-any.whl",
        "arealctl-0.2.0.tar.gz",
        "arealctl-0.2.0.cdx.json",
        "SHA256SUMS",
    ]
    assert (project / "areal" / "__init__.py").read_text() == '__version__ = "0.2.0"\n'
    assert "## Unreleased\n\n## 0.2.0 - 2026-02-03\n\n- new\n\n## 0.1.0" in (project / "CHANGELOG.md").read_text()
    assert git(project, "status", "--porcelain") == "" and git(project, "describe").strip() == "v0.2.0"
    for line in made[3].read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    with zipfile.ZipFile(made[0]) as wheel:
        metadata = wheel.read("arealctl-0.2.0.dist-info/METADATA").decode()
        assert wheel.read("areal/data.txt") == b"data"
    assert f"[page]({REPOSITORY}/blob/v0.2.0/docs/a.md#b), ![picture]({REPOSITORY}/raw/v0.2.0/docs/p.png)" in metadata
    assert "[out](https://example.org/), [top](#top)" in metadata
    assert f"Project-URL: Changelog, {REPOSITORY}/blob/v0.2.0/CHANGELOG.md" in metadata
    with tarfile.open(made[1]) as sdist:
        assert sdist.extractfile("arealctl-0.2.0/areal/data.txt").read() == b"data"  # type: ignore[union-attr]
    bom = json.loads(made[2].read_text())
    assert bom["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": release._sha256(made[0])}]
    assert {each["name"]: (each.get("version"), each["scope"]) for each in bom["components"]} == {
        "click": ("8.5.1", "required"),
        "py-test": ("9.0", "optional"),
        "rare": (None, "optional"),
    }


def test_rebuild_of_tag_gives_same_bytes(project: Path, tmp_path: Path) -> None:
    made = release.release(project, "0.2.0", "2026-02-03", REPOSITORY, tmp_path / "out")
    clone = tmp_path / "elsewhere" / "clone"
    git(tmp_path, "clone", "-q", str(project), str(clone))
    before = os.umask(0o077)
    try:
        again = release.rebuild(clone, "v0.2.0", REPOSITORY, tmp_path / "again")
    finally:
        os.umask(before)
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in made]


def test_documented_release_command_makes_files(project: Path) -> None:
    (project / "tools").mkdir()
    shutil.copy(release.__file__, project / "tools")
    (project / ".gitignore").write_text("/dist/\n")
    git(project, "add", ".")
    git(project, "commit", "-qm", "tools")
    page = blocks(ROOT / "CONTRIBUTING.md")
    (command,) = [text for mark, _, text in page if mark == "runs: tests/test_release.py"]
    script = f'python() {{ {sys.executable} "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", script], cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "git push origin HEAD v0.2.0" in done.stderr and git(project, "describe").strip() == "v0.2.0"
    assert [Path(line).name for line in done.stdout.splitlines()] == sorted(
        (each.name for each in (project / "dist").iterdir()),
        key=lambda name: (name == "SHA256SUMS", ".cdx" in name, ".tar" in name),
    )


@pytest.mark.parametrize(
    ("version", "change", "why"),
    [
        ("0.2", "", "tag"),
        ("new", "", "is not a version"),
        ("0.2.0-rc1", "", "is written '0.2.0rc1'"),
        ("0.0.9", "", "is not later than 0.1.0"),
        ("0.2.0", "dirty", "not committed"),
        ("0.2.0", "no section", "nothing under"),
        ("0.2.0", "no build", "the build failed"),
    ],
)
def test_impossible_release_changes_nothing(project: Path, tmp_path: Path, version: str, change: str, why: str) -> None:
    if why == "tag":
        git(project, "tag", "v0.2")
    if change == "dirty":
        (project / "new.txt").write_text("")
    elif change:
        name = "CHANGELOG.md" if change == "no section" else "pyproject.toml"
        text = (project / name).read_text()
        (project / name).write_text(text.replace("- new\n", "").replace("[project]\n", "[project]\nno_such = 1\n"))
        git(project, "commit", "-qam", change)
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD"), git(project, "tag")
    with pytest.raises(release.Refused, match=why):
        release.release(project, version, "2026-02-03", REPOSITORY, tmp_path / "out")
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD"), git(project, "tag")) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("url", ["git@example.org:us/areal.git", "ssh://git@example.org/us/areal", f"{REPOSITORY}.git"])
def test_repository_is_the_page_of_the_remote(project: Path, url: str) -> None:
    git(project, "remote", "add", "origin", url)
    assert release.origin(project) == REPOSITORY


def test_release_without_a_repository_asks_for_one(project: Path) -> None:
    with pytest.raises(release.Refused, match="--repository"):
        release.origin(project)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("release")
    return release.build(working_tree(folder / "source"), "2026-02-03", REPOSITORY, folder / "out")


@pytest.mark.extended
def test_wheel_and_sdist_contain_user_files(built: list[Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        metadata = next(wheel.read(name).decode() for name in names if name.endswith("/METADATA"))
    with tarfile.open(built[1]) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    tree = {name for name in listed() if name.startswith("areal/") and (ROOT / name).is_file()}
    tree -= {"areal/runtime/ruff.toml"}
    assert tree - names == set() and tree - packed == set()
    assert {"areal/dashboards/areal-training.json", "areal/quickstart/model/model.safetensors"} <= names
    assert {"areal/examples/gsm8k/model/model.safetensors", "areal/examples/tldr/pairs/train.jsonl"} <= names
    assert not {name.partition("/")[0] for name in names} - {"areal", metadata_folder(names)}
    assert re.findall(r"\]\((?!https://)[^)#]+\)", metadata) == [], "links that lead nowhere from an index"


def metadata_folder(names: set[str]) -> str:
    (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    return folder


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """An environment outside of the repository with the wheel, and this one's packages but for areal."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [each for each in sys.path if Path(each).name.endswith("-packages") and not Path(each, "areal").exists()]
    (site / "zz_dependencies.pth").write_text("".join(f"{each}\n" for each in ours))
    pip = [
        str(folder / "bin" / "pip"),
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--no-cache-dir",
    ]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    return folder


@pytest.mark.extended
@pytest.mark.timeout(280)
def test_wheel_alone_goes_from_init_to_trained_model(built: list[Path], tmp_path: Path) -> None:
    environment = fresh_environment(tmp_path / "environment", built[0])
    port, home = free_port(), tmp_path / "home"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"AREAL_HOME": str(home), "OMP_NUM_THREADS": "1", "TMPDIR": tempfile.mkdtemp(prefix="whl-")}

    def areal(*words: str) -> str:
        command = [str(environment / "bin" / "areal"), *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    folder = tmp_path / "work"
    folder.mkdir()
    init, apply = lines_of_areal(ROOT / "README.md", "tests/test_release.py")
    assert init == ["init", "quickstart", "q"]
    areal(*init)
    folder = folder / "q"
    try:
        applied = areal(
            *(*apply, "--set", f"inferenceservice/default:spec.gateway.port={port}"),
            *("--set", 'trainjob/learn:spec.overrides=["total_train_steps=3"]'),
        )
        assert f"inferenceservice/default created: Ready at http://127.0.0.1:{port}" in applied
        commands = {
            Path(f"/proc/{row['pid']}/cmdline").read_text()
            for row in json.loads(areal("get", "processes", "-o", "json"))["items"]
        }
        assert commands and all(each.startswith(str(environment)) for each in commands), "the wheel's own environment"
        areal("wait", "trainjob/learn", "--for", "completed", "--timeout", "180s")
        assert areal("inf", "chat", "-m", "1234", "--temperature", "0").strip().isdigit()
    finally:
        areal("delete", "inferenceservice/default", "--cascade", "--yes")
    assert areal("get", "-o", "name") == ""
    areal("init", "dashboards", "grafana")
    assert len(list((folder / "grafana").iterdir())) == 3
    shutil.rmtree(env["TMPDIR"])
