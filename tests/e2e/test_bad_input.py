"""Whatever is wrong is reported with its place, and changes nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL, Box, make_box

HEAD = "apiVersion: areal.dev/v1alpha1\n"
SERVICE = HEAD + "kind: InferenceService\nmetadata: {name: default}\nspec: {gateway: {port: 18099}}\n"


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Box]:
    """A box on which nothing is ever started."""
    made = make_box(tmp_path)
    yield made
    Path(made.env["TMPDIR"]).rmdir()


def model(extra: str = "", path: object = MODEL) -> str:
    return f"{HEAD}kind: Model\nmetadata: {{name: m}}\nspec:\n  backend: embedded:d1\n  path: {path}\n{extra}"


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        (SERVICE.replace("gateway:", "gatway:"), ":4:8:", 'did you mean "gateway"'),
        (SERVICE.replace("18099", "high"), ":4:24:", "spec.gateway.port"),
        (SERVICE + "metadata: {name: other}\n", ":5:1:", "metadata"),
        (SERVICE + "---\n" + SERVICE, ":8:18:", "declared twice"),
        (SERVICE.replace("default", "../x"), ":3:18:", "../x"),
        (
            HEAD + "kind: InferenceService\nmetadata: {name: default}\nspec: {}\na: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{c}: &{c} [*{p},*{p},*{p},*{p},*{p},*{p},*{p},*{p}]\n" for p, c in pairwise("abcdefghi")),
            ":",
            "alias",
        ),
        (
            f"{HEAD}kind: InferenceService\nmetadata: {{name: a, dependsOn: [inferenceservice/b]}}\nspec: {{}}\n---\n"
            f"{HEAD}kind: InferenceService\nmetadata: {{name: b, dependsOn: [inferenceservice/a]}}\nspec: {{}}\n",
            ":3:",
            "cycle",
        ),
        (model("  service: nowhere\n"), ":7:12:", "InferenceService/nowhere does not exist"),
        (SERVICE + "---\n" + model(path="./no/such/folder"), ":11:9:", "does not exist"),
    ],
    ids=[
        "unknown-field", "wrong-type", "duplicate-key", "duplicate-object", "name-with-dots", "alias-bomb", "cycle",
        "unknown-reference", "missing-model-folder",
    ],
)  # fmt: skip
def test_bad_manifest_exits_3_with_position_and_changes_nothing(bare: Box, text: str, place: str, says: str) -> None:
    path = bare.write(text)
    result = bare.areal("apply", "-f", path)
    assert result.code == 3, result.text
    assert f"{path}{place}" in result.err
    assert says in result.err
    assert not bare.home.exists()
    assert "Traceback" not in result.text


def test_port_in_use_names_its_owner_and_changes_nothing(bare: Box) -> None:
    with socket.create_server(("127.0.0.1", bare.port)):
        result = bare.areal("apply", "-f", bare.manifest())
    assert result.code == 10, result.text
    assert f"port {bare.port} is in use by pid {os.getpid()}" in result.err
    assert bare.ok("get", "-o", "name").out == ""
    assert bare.living() == []


def test_unwritable_home_is_named(bare: Box) -> None:
    bare.home.write_text("a file, not a folder")
    result = bare.areal("apply", "-f", bare.manifest())
    assert result.code == 1, result.text
    assert str(bare.home) in result.err
    assert "--home" in result.err
    assert "Traceback" not in result.text


@pytest.mark.extended
def test_torn_object_file_is_reported_and_restored_by_doctor(box: Box) -> None:
    box.ok("apply", "-f", box.manifest(service="suspend: true"))
    path = box.home / "objects" / "model" / "reverse" / "object.json"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    looked = box.areal("get")
    assert looked.code == 3
    assert str(path) in looked.err
    applied = box.areal("apply", "-f", box.manifest(service="suspend: true"))
    assert applied.code == 3
    assert str(path) in applied.err
    assert "areal doctor --fix" in applied.err
    assert box.areal("doctor", "--fix", "--yes").code == 0
    assert box.ok("apply", "-f", box.manifest(service="suspend: true")).out.count("unchanged") == 2
    kept = list(box.home.rglob("*quarantine*"))
    assert kept, "the damaged file is kept beside"


def test_component_exiting_at_start_fails_with_last_lines(box: Box) -> None:
    broken = box.folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{ this is not json")
    shutil.copy(MODEL / "tokenizer.json", broken)
    text = Path(box.manifest()).read_text().replace(str(MODEL), str(broken))
    result = box.areal("apply", "-f", box.write(text, "broken.yaml"))
    assert result.code == 8, result.text
    assert "config.json" in result.err
    assert "areal logs" in result.err
    assert "Traceback (most recent call last)" not in result.err.split("  |")[0]


def test_full_disk_changes_nothing_and_leaves_a_usable_home(box: Box) -> None:
    """RLIMIT_FSIZE stands for the full disk: every write past it fails, as ENOSPC would."""
    manifest = box.manifest(service="suspend: true")
    script = (
        "import resource, signal, sys, runpy;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        f"sys.argv = ['areal', 'apply', '-f', {manifest!r}];"
        "runpy.run_module('areal.cli', run_name='__main__')"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "AREAL_HOME": str(box.home), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1, process.stderr
    assert str(box.home) in process.stderr
    assert "Traceback" not in process.stderr
    assert box.ok("get", "-o", "name").out == ""
    box.ok("apply", "-f", manifest)


@pytest.mark.extended
def test_destructive_command_without_terminal_needs_yes(served: Box) -> None:
    result = served.areal("delete", "model/reverse")
    assert result.code == 2
    assert "--yes" in result.err
    assert "engine/0" in served.pids()


def test_unknown_object_kind_or_command_gets_suggestion(served: Box) -> None:
    assert 'did you mean "reverse"' in served.areal("get", "model/revers").err
    assert served.areal("get", "model/revers").code == 4
    assert 'did you mean "models"' in served.areal("get", "modls").err
    assert "apply" in served.areal("aply").err
    assert served.areal("aply").code == 2


@pytest.mark.extended
def test_second_concurrent_apply_names_lock_holder(box: Box) -> None:
    manifest = box.manifest()
    first = box.start("apply", "-f", manifest)
    lock = box.home / "locks" / "inferenceservice.default.lock"  # of its locks the first one names the holder
    while not (lock.exists() and lock.read_bytes()):
        assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGSTOP)  # a busy machine may take longer to start the second than the first takes
    second = box.areal("apply", "-f", manifest)
    first.send_signal(signal.SIGCONT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert second.code == 6, second.text
    assert f"pid {first.pid}" in second.err
    assert "apply" in second.err


@pytest.mark.parametrize(
    ("overrides", "spec", "code", "says"),
    [
        (["actor.backend=fsdp:p2"], "", 3, "actor.backend 'fsdp:p2'"),
        (["actor.backend=megatron:(attn:t2|ffn:t1)"], "", 3, "they share them"),
        (
            ["actor.backend=fsdp:d2"],
            "  resources: {processesPerNode: 4}\n",
            3,
            "resources.processesPerNode makes 4",
        ),
        ([], "  resources: {nodes: 2}\n", 3, "spec.resources.nodes is 2"),
        ([], "  resources: {gpus: 64}\n", 10, "needs 64 GPUs (spec.resources)"),
        (["rollout.backend=embedded:t2"], "", 3, "rollout.backend 'embedded:t2'"),
    ],
)
def test_job_with_impossible_allocation_starts_nothing(
    bare: Box, overrides: list[str], spec: str, code: int, says: str
) -> None:
    bare.write("def main(args): ...\n", "mine.py")  # whose configuration cannot be checked
    config = "{driver: mine.py, actor: {path: " + str(MODEL) + "}, rollout: {max_head_offpolicyness: 1}}"
    text = f"{HEAD}kind: TrainJob\nmetadata: {{name: j}}\nspec:\n  config: {config}\n  overrides: {overrides}\n{spec}"
    result = bare.areal("apply", "-f", bare.write(text))
    assert result.code == code, result.text
    assert says in result.err and "Traceback" not in result.err
    assert not bare.home.exists() or bare.ok("get", "all", "-o", "name").out == ""
    assert bare.living() == []


@pytest.mark.extended
def test_verb_flags_override_default_timeout(box: Box) -> None:
    box.home.mkdir(mode=0o700)
    (box.home / "config.yaml").write_text("defaults: {timeout: 10ms}\n")
    run = ("inf", "run", "-d", "--port", str(box.port))
    late = box.areal(*run)
    assert late.code == 7 and "was not ready within" in late.err, late.text
    box.ok(*run, "--launch-timeout", "60")
