"""``areal generate``: a unit as systemd reads it, a Dockerfile as far as it can be read without an engine, and both of
their commands run for real."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.state.home import Home
from tests.cli.conftest import REPOSITORY, Areal
from tests.e2e.conftest import Box, box  # noqa: F401 - fixture

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
ODD = 'ho me %h $HOME "x" \\n'
SERVICE = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\nspec: %s\n"


def words(line: str, *, expands: bool) -> list[str]:
    """A line of a unit as systemd reads it."""
    found = [word.replace("%%", "%") for word in shlex.split(line)]
    return [word.replace("$$", "$") for word in found] if expands else found


def parse(unit: str) -> tuple[list[str], dict[str, str]]:
    """ExecStart and the environment of a unit."""
    (command,) = re.findall(r"(?m)^ExecStart=(.*)$", unit)
    lines = [words(line, expands=False)[0] for line in re.findall(r"(?m)^Environment=(.*)$", unit)]
    return words(command, expands=True), {name: value for name, _, value in (line.partition("=") for line in lines)}


@needs_systemd
@pytest.mark.parametrize("scope", ["--user", "--system"])
def test_systemd_accepts_unit_for_any_home_path(areal: Areal, tmp_path: Path, scope: str) -> None:
    home, unit = tmp_path / ODD, tmp_path / "areal.service"
    flags = ["--system"] if scope == "--system" else []
    assert areal("--home", str(home), "generate", "systemd", *flags, "--out", str(unit)).code == 0
    command = ["systemd-analyze", "verify", "--man=no", scope, str(unit)]
    env = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    checked = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "areal.service" in line]) == (0, [])
    start, environment = parse(unit.read_text())
    assert environment["AREAL_HOME"] == str(home)
    assert start[:5] == [sys.executable, "-P", "-m", "areal.cli", "reconcile"]


def test_unit_applies_manifests_by_absolute_path(areal: Areal, tmp_path: Path) -> None:
    found = areal("generate", "systemd", "-f", "a $b.yaml", "-R", "--set", "spec.x=%s", "--profile", "big")
    start, _ = parse(found.out)
    here = str(Path.cwd() / "a $b.yaml")
    assert start[4:] == f"apply|-f|{here}|-R|--set|spec.x=%s|--profile|big|--yes|--timeout|1h".split("|")


def test_unit_names_secrets_without_values(
    areal: Areal, home: Home, record: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    record("InferenceService", "default", {"auth": {"adminKeyFrom": {"env": "ADMIN"}}})
    record("Model", "m", {"envFrom": {"HF_TOKEN": {"env": "TOKEN"}}, "env": {"A": "b"}})
    monkeypatch.setenv("ADMIN", "sk-1")
    found = areal("generate", "systemd")
    assert "ADMIN, TOKEN must be set where services start: --env-file" in found.err
    assert "sk-1" not in found.out
    refused = areal("generate", "systemd", "--env", "ADMIN")
    assert refused.code == 2 and "spec.auth.adminKeyFrom.env takes a secret from it" in refused.err
    given = areal("generate", "systemd", "--env-file", "/etc/areal env", "--env", 'X=a "b" $c %d')
    assert "EnvironmentFile=/etc/areal env\n" in given.out and "must be set" not in given.err
    assert parse(given.out)[1]["X"] == 'a "b" $c %d'


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["systemd", "--env", "1=2"], "is not NAME or NAME=VALUE"),
        (["systemd", "--env", "NOT_SET_AT_ALL"], "NOT_SET_AT_ALL is not set here"),
        (["systemd", "--env", "A=b\nc"], "control character"),
        (["systemd", "--run-as", "absent-name"], "no user absent-name"),
        (["systemd", "-f", "-"], "cannot read stdin"),
        (["systemd", "-f", "x.yaml", "model/m"], "do not go with KIND/NAME"),
        (["docker"], "no manifests"),
    ],
)
def test_rejects_invalid_generate_flags(areal: Areal, flags: list[str], message: str) -> None:
    found = areal("generate", *flags)
    assert found.code == 2 and message in found.err


def test_existing_file_is_kept_without_force(areal: Areal, tmp_path: Path) -> None:
    out = tmp_path / "areal.service"
    out.write_text("mine")
    assert areal("generate", "systemd", "--out", str(out)).code == 5
    assert areal("generate", "systemd", "--out", str(out), "--force").code == 0
    assert "[Service]" in out.read_text()


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    lines = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("manifest", ["manifests/agents.yaml", "manifests/quickstart.yaml"])
def test_dockerfile_installs_needs_of_manifests(areal: Areal, manifest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    found = areal("generate", "docker", "-f", manifest, "--env", "A=b $c")
    steps = instructions(found.out)
    known = {"FROM", "RUN", "USER", "WORKDIR", "ENV", "VOLUME", "COPY", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known and steps[0][0] == "FROM"
    (extras,) = re.findall(r"whl\)\[(.*)\]\"", found.out)
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(declared) and "embedded" in extras
    assert ("EXPOSE", "8080 8090" if "agents" in manifest else "8080") in steps
    assert 'A="b \\$c"' in found.out
    shell, option, script = json.loads(dict(steps)["CMD"])
    assert (shell, option) == ("sh", "-c")
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0
    for rest in (rest for name, rest in steps if name == "RUN"):
        assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0
    assert "reached inside the container only" in found.err


def test_dockerfile_warns_of_loopback_gateway(areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text(SERVICE % "{gateway: {host: 127.0.0.2}}")
    monkeypatch.chdir(tmp_path)
    assert "reached inside the container only" in areal("generate", "docker", "-f", "a.yaml").err


def test_dockerfile_warns_of_cluster_requirements(areal: Areal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    found = areal("generate", "docker", "-f", "manifests/slurm/service.yaml")
    assert found.code == 0 and "inside the container" not in found.err
    assert "InferenceService/default runs on slurm, which needs the image's home and Python under the same" in found.err


def test_manifest_outside_image_folder_is_refused(
    areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "a.yaml").write_text(SERVICE % "{}")
    monkeypatch.chdir(tmp_path / "in")
    found = areal("generate", "docker", "-f", "../a.yaml")
    assert found.code == 2 and "is outside of" in found.err


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ({}, "RUN pip install --no-cache-dir 'arealctl[serve]'"),
        (
            {"url": "https://example.org/a.whl"},
            "RUN pip install --no-cache-dir 'arealctl[serve] @ https://example.org/a.whl'",
        ),
        ({"url": "file:///a%20b/arealctl-1-py3-none-any.whl"}, "COPY arealctl-*.whl /tmp/"),
    ],
)
def test_image_installs_areal_from_its_source(
    areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], written: str
) -> None:
    (tmp_path / "a.yaml").write_text(SERVICE % "{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("areal.installation._recorded", lambda: source)
    found = areal("generate", "docker", "-f", "a.yaml", "--out", "Dockerfile")
    assert written in Path("Dockerfile").read_text().splitlines()
    assert ("'/a b/arealctl-1-py3-none-any.whl'" in found.out + found.err) == written.startswith("COPY")


def test_image_of_uninstalled_areal_needs_requirement(
    areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(SERVICE % "{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("areal.installation._recorded", lambda: None)
    refused = areal("generate", "docker", "-f", "a.yaml")
    assert refused.code == 2 and "--requirement 'arealctl[serve]'" in refused.err
    assert (
        "pip install --no-cache-dir ./areal.whl"
        in areal("generate", "docker", "-f", "a.yaml", "--requirement", "./areal.whl").out
    )


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_services_restart_after_container_and_boot(box: Box) -> None:  # noqa: F811
    box.write(SERVICE % f"{{gateway: {{port: {box.port}}}}}", "my service.yaml")
    dockerfile = box.folder / "Dockerfile"
    box.ok("generate", "docker", "-f", "my service.yaml", "--out", str(dockerfile))
    command = json.loads(dict(instructions(dockerfile.read_text()))["CMD"])
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "AREAL_HOME": str(box.home)}
    container = subprocess.Popen(command, cwd=box.folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert container.stderr is not None
        while "watching every" not in (line := container.stderr.readline()):
            assert line, "the container's command has ended"
        box.ok("wait", "inf/default", "--for", "ready", "--timeout", "2m")
        assert box.processes().keys() == {"gateway/0", "router/0"}
        container.send_signal(signal.SIGTERM)
        container.communicate(timeout=60)
    finally:
        container.kill()
    assert box.processes() == {}
    unit = box.folder / "areal.service"
    box.ok("generate", "systemd", "--out", str(unit))
    start, environment = parse(unit.read_text())
    booted = subprocess.run(start, cwd="/", env=environment, capture_output=True, text=True, timeout=200)
    assert booted.returncode == 0, booted.stderr
    assert box.processes().keys() == {"gateway/0", "router/0"}
