"""Running ``areal``: in this process for what it prints, in one of its own for what only a process can show."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal.cli.main import run
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject

REPOSITORY = Path(__file__).resolve().parents[2]
AREAL = "import sys; sys.argv[0] = 'areal'; from areal.cli.main import main; sys.exit(main())"


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def items(self) -> list[Any]:
        """Of a list as JSON."""
        document = self.json
        assert document["kind"] == "List"
        return list(document["items"])

    @property
    def rows(self) -> list[list[str]]:
        """The lines of a table, split at its columns' gaps."""
        return [line.split() for line in self.out.splitlines()]


Areal = Callable[..., Result]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AREAL_", "_AREAL", "NO_COLOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AREAL_HOME", str(tmp_path / "home"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def areal(capsys: pytest.CaptureFixture[str]) -> Areal:
    """``areal("get", "models")``: exit status, stdout, stderr. Neither is a terminal."""

    def call(*words: str) -> Result:
        capsys.readouterr()
        code = run(list(words))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), name="server of a test", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Process:
    """``areal`` as a process of its own, with real streams and signals."""

    popen: subprocess.Popen[str]

    def finish(self, timeout_s: float = 60) -> Result:
        out, err = self.popen.communicate(timeout=timeout_s)
        return Result(self.popen.returncode, out, err)


@dataclass
class Spawner:
    started: list[Process] = field(default_factory=list)

    def __call__(self, *words: str, code: str = AREAL, stdin: int | None = subprocess.DEVNULL, **env: str) -> Process:
        popen = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        )
        self.started.append(Process(popen))
        return self.started[-1]


@pytest.fixture
def spawn() -> Iterator[Spawner]:
    spawner = Spawner()
    yield spawner
    for process in spawner.started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.communicate()


@pytest.fixture
def record(home: Home) -> Callable[..., StoredObject]:
    return recorder(home)


def recorder(home: Home) -> Callable[..., StoredObject]:
    """Record an object as an apply does, without its processes."""
    store = ObjectStore(home)

    def put(kind: str, name: str, spec: dict[str, Any] | None = None, **fields: Any) -> StoredObject:
        layer = Layer("apply", spec or {}, {"file": "service.yaml", "line": 3, "sha256": "0"}, "ann@desk", time.time())
        obj = StoredObject(kind, name, f"uid-{kind}-{name}", layers=(layer,), created_at=time.time(), **fields)
        accepted = store.add_revision(obj)
        store.put(accepted)
        return accepted

    return put


_PATIENCE_S = 5.0


class Typist:
    """A person at a terminal."""

    def __init__(self, home: Path, *words: str, **env: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ.update({"AREAL_HOME": str(home), "PYTHONPATH": str(REPOSITORY), "TERM": "dumb", **env})
            os.execv(sys.executable, [sys.executable, "-m", "areal.cli", *words])
        self.seen = ""
        self._read = 0  # what comes after it has not been waited for yet, though it may have arrived

    def until(self, text: str, timeout_s: float = 60, again: str = "") -> str:
        """What is printed up to and with ``text``. ``again`` is typed once more where nothing comes for a while: a
        signal that finds Python on its way into readline is noticed with the next key only."""
        deadline = time.monotonic() + timeout_s
        patience = time.monotonic() + _PATIENCE_S
        start = self._read
        while text not in self.seen[start:]:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen!r}"
            if again and time.monotonic() > patience:
                self.type(again)
                patience = time.monotonic() + _PATIENCE_S
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 4096).decode("utf-8", "replace").replace("\r\n", "\n")
        self._read = self.seen.index(text, start) + len(text)
        return self.seen[start : self._read]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def has_echo(self) -> bool:
        """Whether the terminal is as a shell has it: it shows keys, and gives lines."""
        wanted = termios.ECHO | termios.ICANON
        return bool(termios.tcgetattr(self._fd)[3] & wanted == wanted)

    def code(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)
