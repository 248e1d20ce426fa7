"""A release in one command: ``python tools/release.py VERSION``.

It sets the version and the section of CHANGELOG.md, builds ``dist/`` (wheel, sdist, SBOM in CycloneDX JSON,
SHA256SUMS), commits and tags. Nothing is pushed or uploaded. It refuses a dirty tree, a version that exists, and an
empty section.

The files are built from the committed tree, in a folder of its own, with the date of the release for every time stamp:
``python tools/release.py --rebuild TAG`` gives the same bytes on another machine with the same setuptools.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
LEAST_SETUPTOOLS = "77"  # licenses as SPDX expressions
_BUILD = "import sys; from setuptools import build_meta as b; o = sys.argv[1]; b.build_sdist(o); b.build_wheel(o)"


class Refused(Exception):
    """The release cannot be made; nothing was changed."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="the new version, as 0.2.0")
    parser.add_argument("--rebuild", metavar="TAG", help="build the files of a release again; change nothing")
    parser.add_argument("--repository", metavar="URL", help="where the source is read [default: the remote origin]")
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "dist")
    parser.add_argument("--date", metavar="DATE", default=datetime.datetime.now(datetime.UTC).date().isoformat())
    given = parser.parse_args(argv)
    if bool(given.version) == bool(given.rebuild):
        parser.error("give a version, or --rebuild TAG")
    try:
        repository = given.repository or origin(ROOT)
        if given.rebuild:
            made = rebuild(ROOT, given.rebuild, repository, given.out)
        else:
            made = release(ROOT, given.version, given.date, repository, given.out)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    print(*(f"{file}" for file in made), sep="\n")
    if given.version:
        print(f"next: git push origin HEAD v{given.version}, then upload the wheel and the sdist", file=sys.stderr)
    return 0


def release(root: Path, version: str, date: str, repository: str, out: Path) -> list[Path]:
    """Build, then commit and tag; a build that fails leaves the tree as it was."""
    files = {name: (root / name).read_text(encoding="utf-8") for name in ("areal/__init__.py", "CHANGELOG.md")}
    check(root, version, files["areal/__init__.py"])
    changed = {
        "areal/__init__.py": re.sub(
            r'^__version__ = ".*"$', f'__version__ = "{version}"', files["areal/__init__.py"], flags=re.M
        ),
        "CHANGELOG.md": with_section(files["CHANGELOG.md"], version, date),
    }
    try:
        for name, text in changed.items():
            (root / name).write_text(text, encoding="utf-8")
        git(root, "add", *changed)
        made = _built(root, git(root, "write-tree"), date, repository, out)
        git(root, "commit", "--quiet", "--message", f"chore: release {version}")
    except BaseException:
        git(root, "checkout", "--quiet", "HEAD", "--", *changed)
        raise
    git(root, "tag", "--annotate", f"v{version}", "--message", f"areal {version}")
    return made


def rebuild(root: Path, tag: str, repository: str, out: Path) -> list[Path]:
    if subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--quiet", "--verify", f"{tag}^{{tree}}"], capture_output=True
    ).returncode:
        raise Refused(f"there is no tag {tag}")
    version = tag.removeprefix("v")
    found = re.search(rf"^## {re.escape(version)} - (\S+)$", git(root, "show", f"{tag}:CHANGELOG.md"), re.M)
    if found is None:
        raise Refused(f"CHANGELOG.md of {tag} has no section `## {version} - DATE`")
    return _built(root, tag, found[1], repository, out)


def check(root: Path, version: str, init: str) -> None:
    """Raise Refused where ``version`` cannot be released from ``root``."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise Refused(f"{version!r} is not a version: give one as 0.2.0") from None
    if str(wanted) != version:
        raise Refused(f"{version!r} is written {str(wanted)!r}")
    if dirty := git(root, "status", "--porcelain"):
        raise Refused(f"the tree has changes that are not committed; commit or stash them first:\n{dirty}")
    (current,) = re.findall(r'^__version__ = "(.*)"$', init, re.M)
    tags = git(root, "tag", "--list", "v*").split()
    if f"v{version}" in tags:
        raise Refused(f"the tag v{version} exists; choose a later version")
    if wanted < Version(current) or (wanted == Version(current) and tags):
        raise Refused(f"{version} is not later than {current}, the version of this tree")


def with_section(changelog: str, version: str, date: str) -> str:
    """The changelog with what stands under Unreleased under ``version``. Raise Refused where nothing does."""
    head, mark, rest = changelog.partition("## Unreleased\n")
    section = rest.partition("\n## ")[0]
    if not mark or not section.strip():
        raise Refused("CHANGELOG.md has nothing under `## Unreleased`")
    return f"{head}{mark}\n## {version} - {date}\n{rest}"


def origin(root: Path) -> str:
    """The address of the remote `origin` as a page: https, without `.git`."""
    found = subprocess.run(["git", "-C", str(root), "remote", "get-url", "origin"], capture_output=True, text=True)
    url = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", found.stdout.strip()).removesuffix(".git")
    if not url.startswith("https://"):
        raise Refused("links of the long description lead to the repository: name it by --repository URL")
    return url


def _built(root: Path, tree: str, date: str, repository: str, out: Path) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix="areal-release-") as folder:
        source = Path(folder, "source")
        source.mkdir()
        archive = subprocess.run(["git", "-C", str(root), "archive", tree], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(source, filter="tar")
        return build(source, date, repository, out)


def build(source: Path, date: str, repository: str, out: Path) -> list[Path]:
    """Write wheel, sdist, SBOM and SHA256SUMS of ``source`` into ``out``. ``source`` is changed: give a copy."""
    try:
        builder = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        builder = "0"
    if Version(builder) < Version(LEAST_SETUPTOOLS):
        raise Refused(f"building needs setuptools {LEAST_SETUPTOOLS}: pip install 'setuptools>={LEAST_SETUPTOOLS}'")
    (version,) = re.findall(r'^__version__ = "(.*)"$', (source / "areal/__init__.py").read_text(encoding="utf-8"), re.M)
    _prepare(source, version, repository.rstrip("/"))
    epoch = int(datetime.datetime.fromisoformat(date).replace(tzinfo=datetime.UTC).timestamp())
    made = source.parent / "made"
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(made)], cwd=source, env=env, capture_output=True, text=True, umask=0o022
    )
    if done.returncode:
        raise Refused(f"the build failed:\n{done.stderr[-4000:]}")
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    _without_times(sdist, epoch)
    bom = made / f"{wheel.name.partition('-')[0]}-{version}.cdx.json"
    bom.write_text(json.dumps(sbom(wheel, pins(source), date), indent=2) + "\n", encoding="utf-8")
    sums = made / "SHA256SUMS"
    sums.write_text(
        "".join(f"{_sha256(file)}  {file.name}\n" for file in sorted((sdist, wheel, bom))), encoding="utf-8"
    )
    out.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(file, out)) for file in (wheel, sdist, bom, sums)]


def _prepare(source: Path, version: str, repository: str) -> None:
    """Files in the place of links, with plain modes; URLs of the project; links that lead somewhere from an index."""
    for path in [source, *sorted(source.rglob("*"))]:
        if path.is_symlink():
            target = path.resolve()
            path.unlink()
            (shutil.copytree if target.is_dir() else shutil.copy)(target, path)
    for path in [source, *source.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    readme = source / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), f"v{version}", repository), encoding="utf-8")
    urls = {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/v{version}/docs",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    with (source / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n[project.urls]\n" + "".join(f"{name} = {json.dumps(url)}\n" for name, url in urls.items()))


def absolute(text: str, ref: str, repository: str) -> str:
    """Markdown whose relative links and pictures are those of ``ref`` in ``repository``."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1].startswith("!") else "blob"
        return f"{found[1]}({repository}/{kind}/{ref}/{found[2]})"

    return re.sub(r"(!?\[[^]]*\])\((?!\w+:|#|/)([^)]+)\)", link, text)


def _without_times(sdist: Path, epoch: int) -> None:
    """Write the archive again: members sorted, with one time and no owner."""
    with tarfile.open(sdist) as tar:
        members = [(each, tar.extractfile(each)) for each in sorted(tar.getmembers(), key=lambda each: each.name)]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as again:
            for member, content in members:
                member.mtime, member.pax_headers = epoch, {}
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                again.addfile(member, content)
    sdist.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def pins(source: Path) -> dict[str, str]:
    """The versions of constraints.txt, by normalized name."""
    lines = (source / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [re.match(r"([\w.-]+)==([\w.!+-]+)", line) for line in lines]
    return {_normal(each[1]): each[2] for each in found if each}


def sbom(wheel: Path, tested: Mapping[str, str], date: str) -> dict[str, Any]:
    """CycloneDX 1.6 of a wheel: what it requires, with the versions that it was tested with where they are known."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        described = Parser().parsestr(archive.read(name).decode())
    digest = _sha256(wheel)
    own = f"pkg:pypi/{_normal(described['Name'])}@{described['Version']}"
    required: dict[str, bool] = {}
    for each in map(Requirement, described.get_all("Requires-Dist") or []):
        if _normal(each.name) != _normal(described["Name"]):
            core = each.marker is None or each.marker.evaluate({"extra": ""})
            required[_normal(each.name)] = required.get(_normal(each.name), False) or core
    components = []
    for package, core in sorted(required.items()):
        version = tested.get(package)
        purl = f"pkg:pypi/{package}" + (f"@{version}" if version else "")
        entry = {"type": "library", "bom-ref": purl, "name": package, "purl": purl}
        components.append(
            {**entry, **({"version": version} if version else {}), "scope": "required" if core else "optional"}
        )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(digest[:32], version=4)}",
        "version": 1,
        "metadata": {
            "timestamp": f"{date}T00:00:00Z",
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": described["Name"],
                "version": described["Version"],
                "purl": own,
                "licenses": [{"license": {"id": described["License-Expression"]}}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [each["bom-ref"] for each in components]}],
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
