"""The work of a command, counted and not timed: processes started, files written, connections made."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Spawner
from tests.e2e.conftest import Box, served  # noqa: F401 - fixtures

OBJECTS = 25

COUNT = """
import json, os, sys
sys.argv[0] = 'areal'
STARTS = ('subprocess.Popen', 'os.posix_spawn', 'os.fork', 'os.forkpty', 'os.exec', 'os.spawn', 'os.system')
CHANGES = ('os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'os.link', 'os.symlink', 'os.truncate', 'os.chmod')
seen = []
def hook(event, args):
    if event in STARTS:
        seen.append(['start', str(args[0])])
    elif event in CHANGES:
        seen.append(['write', f'{event} {args[0]}'])
    elif event == 'open' and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if str(args[0]) != os.devnull:
            seen.append(['write', f'open {args[0]}'])
    elif event == 'socket.connect':
        seen.append(['connect', args[1][1] if isinstance(args[1], tuple) else str(args[1])])
sys.dont_write_bytecode = True
sys.addaudithook(hook)
from areal.cli.main import run
code = run()
sys.stderr.write('\\n' + json.dumps([code, seen]))
"""


@dataclass
class Work:
    """What a command did to the world."""

    code: int
    out: str
    err: str
    started: list[str]
    written: list[str]
    connected: Counter[int | str]


def counted(spawn: Spawner, *words: str, **env: Any) -> Work:
    result = spawn(*words, code=COUNT, **env).finish(120)
    err, _, last = result.err.rpartition("\n")
    code, seen = json.loads(last)
    of = {kind: [what for each, what in seen if each == kind] for kind in ("start", "write", "connect")}
    return Work(code, result.out, err, of["start"], of["write"], Counter(of["connect"]))


def engine_python(folder: Path) -> str:
    """An interpreter with an engine, as far as a question for its version and its help goes. It notes the latter."""
    folder.mkdir()
    help_text = "\n".join(f"  --flag-{number} VALUE" for number in range(30))
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo 1.2.3; echo {folder}/packages; exit; fi\n'
        f"echo >> {folder}/asked\ncat <<END\n{help_text}\nEND\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def manifest(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "areal.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def specs(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each kind with each setting that somebody or something has to be asked about."""
    (folder / "weights").mkdir(parents=True)
    (folder / "job.yaml").write_text("trainer: {type: sft}\n")
    weights = {"backend": "embedded", "path": str(folder / "weights")}
    vllm = {"backend": "vllm", "path": "org/name", "engineArgs": {"flag-3": 1}}
    sglang = {**vllm, "backend": "sglang:d2t2"}
    first = {"AREAL_ENGINE_PYTHON": engine_python(folder / "first")}
    second = {"AREAL_ENGINE_PYTHON": engine_python(folder / "second")}
    return {
        "service": ("InferenceService", {"suspend": True}),
        "embedded": ("Model", weights),
        "embedded-args": ("Model", {**weights, "engineArgs": {"threads": 1}}),
        "vllm": ("Model", {**vllm, "env": first}),
        "sglang": ("Model", {**sglang, "env": second}),
        "mute": ("Model", {**sglang, "env": {"AREAL_ENGINE_PYTHON": "/bin/false"}}),
        "absent": ("Model", {**vllm, "env": {"AREAL_ENGINE_PYTHON": "/nowhere/python"}}),
        "here": ("Model", vllm),
        "here-too": ("Model", sglang),
        "lora": ("Model", {"backend": "vllm", "path": "org/name", "lora": {"a": "org/adapter"}}),
        "external": ("Model", {"external": {"url": "http://127.0.0.1:9/v1", "apiKeyFrom": {"env": "PROVIDER_KEY"}}}),
        "job": ("TrainJob", {"config": str(folder / "job.yaml"), "suspend": True}),
        "job-inline": ("TrainJob", {"config": {"trainer": {"type": "sft"}}, "overrides": ["seed=3"], "suspend": True}),
    }


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Many objects of each sort, and as many models inline in one service, all recorded; the environment."""
    shared_memory = Path("/dev/shm")  # nothing is asserted of the disk, and each object is made durable
    folder = tmp_path_factory.mktemp("work")
    home = Path(tempfile.mkdtemp(dir=shared_memory)) if shared_memory.is_dir() else folder / "home"
    items = [manifest("InferenceService", "default", {"suspend": True})]
    for name, (kind, spec) in specs(folder / "files").items():
        items += [manifest(kind, f"{name}-{number}", spec) for number in range(OBJECTS)]
    inline = {"backend": "vllm", "path": "org/name", "engineArgs": {"flag-3": 1}}
    models = [{"name": f"inline-{number}", **inline} for number in range(OBJECTS)]
    items.append(manifest("InferenceService", "inline", {"suspend": True, "models": models}))
    file = folder / "manifests.yaml"
    file.write_text("\n---\n".join(json.dumps(item) for item in items))
    spawner = Spawner()
    env = {"AREAL_HOME": str(home), "HOME": str(folder)}
    first = counted(spawner, "apply", "-f", str(file), "-q", PROVIDER_KEY="k", **env)  # only what begins needs it
    assert first.code == 0, first.err
    assert first.started != [] and len(first.started) < 20, first.started  # not one for each object
    yield file, env
    shutil.rmtree(home)


@pytest.mark.parametrize(
    "words",
    [
        ("apply", "-q", "-f"),
        ("diff", "-f"),
        ("apply", "--dry-run", "-f"),
        ("apply", "--dry-run=client", "-f"),
        ("diff", "--drift"),
        ("validate", "-f"),
        ("get",),
        ("get", "models", "-o", "json"),
        ("inf", "models", "--service", "inline"),
    ],
    ids=" ".join,
)
def test_command_without_changes_starts_and_writes_nothing(
    words: tuple[str, ...], applied: tuple[Path, dict[str, str]], spawn: Spawner
) -> None:
    file, env = applied
    did = counted(spawn, *words, *([str(file)] if words[-1] == "-f" else []), **env)
    assert (did.code, did.started, did.written, did.connected) == (0, [], [], Counter()), did.err[-500:]


def test_engine_is_queried_again_after_import_folder_changes(
    applied: tuple[Path, dict[str, str]], spawn: Spawner
) -> None:
    file, env = applied
    engine = file.parent / "files" / "first"
    (engine / "packages" / "vllm-1.2.4.dist-info").mkdir(parents=True)
    (engine / "python").write_text((engine / "python").read_text().replace("1.2.3", "1.2.4"))
    did = counted(spawn, "diff", "-f", str(file), **env)
    assert did.code == 0 and {Path(word).parent.name for word in did.started} == {"first"}
    assert len((engine / "asked").read_text().splitlines()) == 2


@pytest.mark.extended
def test_apply_without_changes_asks_each_process_once(served: Box, spawn: Spawner) -> None:  # noqa: F811
    env = {**served.env, "AREAL_HOME": str(served.home)}
    ports = {int(row["url"].rpartition(":")[2]): name for name, row in served.processes().items()}
    did = counted(spawn, "apply", "-q", "-f", served.manifest(), **env)
    assert (did.code, did.started, did.written) == (0, [], []), did.err[-500:]
    asked = {ports[port]: count for port, count in did.connected.items() if port in ports}
    assert asked == {"router/0": 2, "gateway/0": 1, "data-proxy/0": 1, "engine/0": 1}  # the router: its table, too
    assert set(did.connected) <= set(ports)
