"""A home of its own, a free gateway port and the real command line; whatever was started is gone afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal.client.command import free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "reverse_digits" / "model"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Box:
    """One user's machine: a home, a port, manifests in a folder."""

    home: Path
    folder: Path
    port: int
    env: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"  # of the gateway
    prefix: tuple[str, ...] = ()  # the command line's own

    def start(self, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "areal.cli", *args],
            env={**os.environ, "AREAL_HOME": str(self.home), "OMP_NUM_THREADS": "1", **self.env, **(env or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def areal(self, *args: str, env: dict[str, str] | None = None, timeout: float = 270) -> Result:
        process = self.start(*args, env=env)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Result(process.returncode, out, err)

    def ok(self, *args: str) -> Result:
        result = self.areal(*args)
        assert result.code == 0, f"areal {' '.join(args)} -> {result.code}\n{result.text}"
        return result

    def write(self, text: str, name: str = "manifest.yaml") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def manifest(self, *, service: str = "", model: str = "", name: str = "manifest.yaml") -> str:
        """The quickstart's shape on this box's port; ``service`` and ``model`` are further lines of each spec."""
        return self.write(
            "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\nspec:\n"
            f"  gateway: {{port: {self.port}}}\n{_indented(service)}"
            "---\napiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: reverse}\nspec:\n"
            f"  backend: embedded:d1\n  path: {MODEL}\n{_indented(model)}",
            name,
        )

    def processes(self) -> dict[str, dict[str, Any]]:
        """Running processes by "component/replica"."""
        rows = json.loads(self.ok("get", "processes", "-o", "json").out)
        items = rows["items"] if isinstance(rows, dict) else rows
        return {f"{r['component']}/{r['replica']}": r for r in items if r["state"] == "running"}

    def phase(self, ref: str) -> str:
        """What `get` says of an object; "" where there is none."""
        found = self.areal("get", ref, "-o", "jsonpath={.status.phase}")
        return found.out.strip() if found.code == 0 else ""

    def pids(self) -> dict[str, int]:
        return {name: row["pid"] for name, row in self.processes().items()}

    @property
    def key(self) -> str:
        return (self.home / "credentials" / "default").read_text().strip()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def chat(self, text: str, model: str = "reverse") -> str:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    def files(self) -> dict[str, tuple[int, int]]:
        """Every file and folder of the home with its time and size: what a command that changes nothing leaves."""
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in [self.home, *self.home.rglob("*")]}

    def living(self) -> list[int]:
        """Processes that belong to this home, whatever the records say."""
        marker = b"AREAL_RUN_UID"
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(self.home).encode() in command or (marker in environ and str(self.home).encode() in environ):
                found.append(int(entry.name))
        return found


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


# torch's cache; what vLLM leaves: its store, and sockets
_NOT_OURS = re.compile(r"torchinductor_|vllm_dist_|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


def make_box(tmp: Path) -> Box:
    folder = tmp / "work"
    folder.mkdir()
    # Not below ``tmp``: sockets of the standard library's pools go there, whose paths may have 107 characters.
    return Box(tmp / "home", folder, free_port(), {"TMPDIR": tempfile.mkdtemp(prefix="box-")})


def is_end_of_job(pid: int) -> bool:
    """Whether the process is the command of a job's end, which is short and no part of the job's run."""
    with contextlib.suppress(OSError):
        return b"\0job-end\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def tear_down(box: Box) -> None:
    names = [f"{path.parent.parent.name}/{path.parent.name}" for path in box.home.glob("objects/*/*/object.json")]
    if names:
        box.areal("delete", *names, "--yes", "--cascade", "--grace", "1", timeout=60)
    if box.living():
        box.areal("doctor", "--fix", "--yes", timeout=60)
    deadline = time.monotonic() + 20
    while any(map(is_end_of_job, box.living())) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = box.living()
    for pid in left:
        os.kill(pid, 9)
    assert not left, f"processes were left behind: {left}"
    temporary = Path(box.env["TMPDIR"])
    files = [path.name for path in temporary.iterdir() if not _NOT_OURS.match(path.name)]
    shutil.rmtree(temporary)
    assert not files, f"files were left behind in /tmp: {files}"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = make_box(tmp_path)
    yield made
    tear_down(made)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A service with two replicas."""
    made = make_box(tmp_path_factory.mktemp("two"))
    made.ok("apply", "-f", made.manifest(model="replicas: 2"))
    yield made
    tear_down(made)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """One service with the quickstart model, shared by the tests of a module that leave it as they found it."""
    made = make_box(tmp_path_factory.mktemp("served"))
    made.ok("apply", "-f", made.manifest())
    yield made
    tear_down(made)
