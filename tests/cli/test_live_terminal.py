"""The live view on a real terminal: what is shown, and that the terminal is given back however the view ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject
from tests.cli.conftest import Typist, serving

BACK = "\x1b[?1049l"
CODES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


@pytest.fixture
def person(home: Home, record: Callable[..., StoredObject]) -> Callable[..., Typist]:
    record("InferenceService", "default")
    record("Model", "qwen", {"inferenceService": "default", "backend": "mock"})

    def start(*words: str, **env: str) -> Typist:
        return Typist(home.root, *words, **{"TERM": "xterm", **env})

    return start


def ended(typist: Typist, code: int) -> None:
    """The view is left, the terminal as before, and the exit status ``code``."""
    typist.until(BACK)
    assert typist.has_echo()
    assert typist.code() == code


def test_live_view_shows_objects_and_restores_terminal(person: Callable[..., Typist]) -> None:
    typist = person("get", "-w")
    typist.until("model/qwen")
    assert not typist.has_echo()
    typist.type("j\r")
    typist.until("describe model/qwen")
    typist.until("spec.backend")
    typist.type("\x1b")
    typist.until("Objects 2")
    typist.type("/infer\r")
    typist.until("1/2")
    typist.type("\t")
    typist.until("[Processes 0]")
    typist.type("q")
    ended(typist, 0)


def test_live_view_survives_deleted_object(person: Callable[..., Typist], home: Home) -> None:
    typist = person("get", "-w")
    typist.until("model/qwen")
    typist.type("j")
    typist.until("> model/qwen")
    store = ObjectStore(home)
    (model,) = store.list("Model")
    store.delete(model.ref)
    typist.until("model/qwen is gone")
    typist.type("q")
    ended(typist, 0)


def test_live_view_follows_terminal_resize(person: Callable[..., Typist]) -> None:
    typist = person("get", "-w")
    typist.resize(100, 30)
    typist.until("\x1b[30;1H")
    typist.resize(40, 10)
    typist.until("\x1b[2J")
    lines = re.split(r"\x1b\[\d+;1H", typist.until("\x1b[10;1H"))
    assert len(lines) == 11 and all(len(CODES.sub("", line)) <= 40 for line in lines)
    typist.type("q")
    ended(typist, 0)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_live_view_restores_terminal_on_signal(person: Callable[..., Typist], number: int, code: int) -> None:
    typist = person("get", "-w")
    typist.until("model/qwen")
    typist.signal(number)
    ended(typist, code)


def test_live_view_restores_terminal_on_suspend(person: Callable[..., Typist]) -> None:
    typist = person("get", "-w")
    typist.until("model/qwen")
    typist.signal(signal.SIGTSTP)
    typist.until(BACK)
    for _ in range(2):  # a second one finds the terminal taken already
        typist.signal(signal.SIGCONT)
        typist.until("\x1b[?1049h")
        typist.until("model/qwen")
        assert not typist.has_echo()
    typist.type("q")
    ended(typist, 0)


def test_live_view_of_blocked_terminal_ends_on_signal(person: Callable[..., Typist]) -> None:
    typist = person("get", "-w")
    typist.until("model/qwen")
    for _ in range(400):  # a screen each; no one reads them
        typist.type("?\x0c\x1b[A")
    typist.signal(signal.SIGTERM)
    typist.until(BACK, again="")
    assert typist.has_echo() and typist.code() == -signal.SIGTERM


def test_live_view_accepts_keys_while_gateway_hangs(person: Callable[..., Typist], tmp_path: Path) -> None:
    hangs = threading.Event()
    goes_on = threading.Event()

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if hangs.is_set():
                goes_on.wait(30)
            body = {"/v1/models": b'{"data": [{"id": "qwen"}]}', "/workers": b'{"workers": []}'}.get(self.path, b"{}")
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "key").write_text("k" * 20)
    with serving(Gateway) as url:
        typist = person("get", "-w", "--gateway", url, "--api-key-file", str(tmp_path / "key"))
        typist.until("model/qwen")
        hangs.set()
        typist.until("ago")  # the last read is old: the present one hangs
        typist.type("/model\r")
        typist.until("1/")
        typist.type("l")
        typist.until("a gateway shows no logs")
        typist.type("q")
        ended(typist, 0)
        goes_on.set()


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": ""}])
def test_watch_on_dumb_terminal_prints_lines(person: Callable[..., Typist], env: dict[str, str]) -> None:
    typist = person("get", "-w", **env)
    assert "\x1b[?1049h" not in typist.until("model/qwen")
    typist.signal(signal.SIGINT)
    assert typist.code() == 130


def test_live_view_without_colours_marks_the_selected_row(person: Callable[..., Typist]) -> None:
    typist = person("get", "-w", NO_COLOR="1")
    shown = typist.until("> inferenceservice/default")
    typist.type("q")
    ended(typist, 0)
    assert not re.search(r"\x1b\[[1-9][0-9;]*m", shown + typist.seen)


def test_live_view_of_unknown_name_is_an_error(person: Callable[..., Typist]) -> None:
    typist = person("get", "model/nope", "-w")
    typist.until("nope")
    assert typist.code() == 4 and "\x1b[?1049h" not in typist.seen


def test_watch_into_a_pipe_prints_lines(person: Callable[..., Typist], home: Home) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "areal.cli", "--home", str(home.root), "get", "-w"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["NAME", "READY", "STATUS", "ADDRESS", "AGE"]
        process.terminate()


def test_top_on_a_terminal_shows_processes_first(person: Callable[..., Typist], home: Home) -> None:
    typist = person("top", "-w")
    typist.until("[Processes 0]")
    typist.type("\t")
    typist.until("model/qwen")
    typist.type("q")
    ended(typist, 0)
