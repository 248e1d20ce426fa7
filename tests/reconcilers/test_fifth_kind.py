"""A kind that areal does not have is added by a spec, a controller and one line; every verb knows it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from areal.errors import NotFound
from areal.resources.kinds import KINDS, register, resolve_kind, unregister
from areal.resources.schema import json_schema
from tests.cli.conftest import Areal, areal, clean_environment, home  # noqa: F401 - fixtures
from tests.reconcilers.toy import TOY

AREAL = Path(__file__).parents[2] / "areal"
OWN_MODULES = re.compile(r"reconcilers/kinds/\w+|resources/(kinds|\w*specs?)|cli/(inf/\w+|agent|train|curves)")

pytestmark = pytest.mark.timeout(120)

MANIFEST = """
apiVersion: areal.dev/v1alpha1
kind: Toy
metadata: {name: parrot}
spec: {words: %s, replicas: %d}
"""


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register(TOY)
    yield
    unregister("Toy")


@pytest.fixture
def parrot(areal: Areal, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """The manifest of a Toy that runs."""
    file = tmp_path / "toy.yaml"
    file.write_text(MANIFEST % ("hello", 1))
    applied = areal("apply", "-f", str(file))
    assert applied.code == 0, applied.err
    assert "toy/parrot created" in applied.out.lower()
    yield file
    assert areal("delete", "toy/parrot", "--yes", "--grace", "0", "--ignore-not-found").code == 0


def document(areal: Areal, *words: str) -> dict:  # noqa: F811
    result = areal(*words, "-o", "json")
    assert result.code == 0, result.err
    found: dict = json.loads(result.out)
    return found["items"][0] if "items" in found else found


def words_of(address: str) -> str:
    with urlopen(address, timeout=5) as answer:
        return str(answer.read().decode().strip())


def test_unregistered_kind_is_unknown_again() -> None:
    assert resolve_kind("ty") == "Toy"
    unregister("Toy")
    with pytest.raises(NotFound):
        resolve_kind("toy")
    register(TOY)


def test_kinds_with_same_spelling_are_refused() -> None:
    with pytest.raises(ValueError, match="toy"):
        register(TOY)


def test_applied_object_runs_and_is_shown(areal: Areal, parrot: Path) -> None:  # noqa: F811
    found = document(areal, "get", "toy/parrot")
    assert found["status"]["phase"] == "Ready" and found["status"]["ready"] == "1/1"
    assert words_of(found["status"]["address"]) == "hello"
    assert areal("diff", "-f", str(parrot)).code == 0  # nothing is to be done
    assert areal("get", "ty").rows[1][:3] == ["parrot", "1/1", "Ready"]
    described = document(areal, "describe", "toy/parrot")
    assert [row["component"] for row in described["processes"]] == ["speaker"]
    assert "saying hello" in areal("logs", "toy/parrot").out
    assert areal("wait", "toy/parrot", "--for", "ready", "--timeout", "10").code == 0
    assert "speaker" in areal("get", "processes", "toy/parrot").out


def test_object_can_be_scaled_suspended_restarted_and_deleted(areal: Areal, parrot: Path) -> None:  # noqa: F811
    assert areal("scale", "toy/parrot", "--replicas", "2").code == 0
    assert document(areal, "get", "toy/parrot")["status"]["ready"] == "2/2"
    assert areal("suspend", "toy/parrot").code == 0
    assert document(areal, "get", "toy/parrot")["status"]["phase"] == "Suspended"
    assert areal("resume", "toy/parrot").code == 0
    before = pids(areal)
    assert len(before) == 2
    assert areal("restart", "toy/parrot").code == 0
    assert len(pids(areal)) == 2 and not before & pids(areal)
    assert areal("delete", "toy/parrot", "--yes").code == 0
    assert areal("get", "toy/parrot").code == 4
    assert areal("get", "processes").rows[1:] == []


def pids(areal: Areal) -> set[int]:  # noqa: F811
    return {row["pid"] for row in json.loads(areal("get", "processes", "toy/parrot", "-o", "json").out)["items"]}


def test_change_is_rolled_out_by_its_update_class(areal: Areal, parrot: Path) -> None:  # noqa: F811
    parrot.write_text(MANIFEST % ("bye", 1))
    planned = areal("diff", "-f", str(parrot))
    assert planned.code == 1 and "spec.words: 'hello' -> 'bye'  (ROLL)" in planned.out
    assert areal("apply", "-f", str(parrot)).code == 0
    assert words_of(document(areal, "get", "toy/parrot")["status"]["address"]) == "bye"


def test_immutable_change_needs_replace(areal: Areal, parrot: Path) -> None:  # noqa: F811
    parrot.write_text((MANIFEST % ("hello", 1)).replace("replicas: 1", "maker: zeta"))
    assert areal("apply", "-f", str(parrot)).code == 5
    assert areal("apply", "-f", str(parrot), "--replace", "--yes").code == 0
    assert document(areal, "get", "toy/parrot")["spec"]["maker"] == "zeta"


def test_killed_process_is_drift_and_healed(areal: Areal, parrot: Path) -> None:  # noqa: F811
    (pid,) = pids(areal)
    supervisor = psutil.Process(pid).ppid()
    for each in (supervisor, pid):  # a supervisor that lives starts its process again
        with contextlib.suppress(ProcessLookupError):  # a supervisor's death ends its process
            os.kill(each, signal.SIGKILL)
    until = time.monotonic() + 10
    while "process-died" not in (drift := areal("diff", "--drift")).out and time.monotonic() < until:
        time.sleep(0.05)
    assert drift.code == 1 and "process-died" in drift.out
    assert areal("reconcile").code == 0
    assert document(areal, "get", "toy/parrot")["status"]["phase"] == "Ready"


def test_spec_is_explained_completed_and_checked(areal: Areal, tmp_path: Path) -> None:  # noqa: F811
    assert "What it says." in areal("explain", "toy.spec.words").out
    assert "words: hello" in areal("init", "toy").out
    assert json_schema("Toy")["properties"]["kind"]["const"] == "Toy"
    assert "toys" in areal("get", "kinds").out
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((MANIFEST % ("hello", 1)).replace("words", "wrods"))
    result = areal("validate", "-f", str(wrong))
    assert result.code == 3 and 'did you mean "words"' in result.err + result.out


def test_object_names_of_kind_are_completed(monkeypatch: pytest.MonkeyPatch, areal: Areal, parrot: Path) -> None:  # noqa: F811
    words = {"_AREAL_COMPLETE": "bash_complete", "COMP_WORDS": "areal get toy/", "COMP_CWORD": "2"}
    with monkeypatch.context() as shell:  # over when the fixture deletes the object
        for name, value in words.items():
            shell.setenv(name, value)
        assert "toy/parrot" in areal().out


def test_kinds_are_named_in_their_own_modules_only() -> None:
    names = re.compile(f"({'|'.join(kind for kind in KINDS if kind != 'Toy')})(/.*)?")
    found: dict[str, int] = {}
    for folder in ("reconcilers", "resources", "cli"):
        for file in sorted((AREAL / folder).rglob("*.py")):
            module = file.relative_to(AREAL).with_suffix("").as_posix()
            strings = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
            count = sum(1 for node in strings if isinstance(node.value, str) and names.fullmatch(node.value))
            if count and not OWN_MODULES.fullmatch(module):
                found[module] = count
    assert not found
