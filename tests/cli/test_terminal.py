"""What others wrote (models, engines, gateways, logs, names, errors) is spelled on a terminal and never obeyed; data is
exact."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.cli.main import run
from areal.resources.kinds import Ref
from areal.runtime.backends.base import RunSpec
from areal.runtime.backends.local import LocalBackend
from areal.state.events import EventLog
from areal.state.home import Home
from areal.terminal import ESCAPE, Screen, safe, spelled
from tests.cli.conftest import Areal, Result, serving
from tests.runtime.support import NEVER

HOSTILE = "x\x1b[31mred\x1b]0;title\x07\x9b2J\u202egnp.exe\r\x7f\x08y"
_OBEYED = "\x1b\x9b\u202e\x07\x08\x7f"


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Areal:
    """``areal`` with a terminal on both streams, and without colours: whatever escape comes out is someone else's."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")

    def call(*words: str) -> Result:
        out, err = TerminalStream(), TerminalStream()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = run(list(words))
        return Result(code, out.getvalue(), err.getvalue())

    return call


WORKERS = {"worker_id": HOSTILE, "worker_addr": HOSTILE, "model": HOSTILE, "state": "dead", "fault": HOSTILE}


def chunk(delta: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, **more}]}).encode() + b"\n\n"


LOGPROBS = {"content": [{"token": HOSTILE, "logprob": -0.5}]}
ANSWERS: dict[str, tuple[int, bytes]] = {
    "/ready": (503, json.dumps({"reason": HOSTILE}).encode()),
    "/v1/models": (200, json.dumps({"data": [{"id": HOSTILE, "owned_by": HOSTILE}]}).encode()),
    "/workers": (200, json.dumps({"workers": [WORKERS, {**WORKERS, "state": "ready"}]}).encode()),
}


class Hostile(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._say(*ANSWERS.get(self.path, (500, json.dumps({"error": {"message": HOSTILE}}).encode())))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["messages"][-1]["content"] == "fail":
            self._say(500, json.dumps({"error": {"message": HOSTILE, "request_id": HOSTILE}}).encode())
        elif asked["messages"][-1]["content"] == "proxy":
            self._say(502, f"<html>{HOSTILE}".encode())
        elif asked.get("stream"):
            halves = [
                chunk({"content": HOSTILE[:3]}),
                chunk({"content": HOSTILE[3:]}, logprobs=LOGPROBS if asked.get("logprobs") else None),
            ]
            self._say(200, b"".join([*halves, b"data: [DONE]\n\n"]))
        else:
            whole = {"message": {"content": HOSTILE}, "logprobs": LOGPROBS}
            self._say(200, json.dumps({"choices": [whole]}).encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with serving(Hostile) as url:
        yield url


@pytest.fixture
def hostile_home(home: Home, record: Callable[..., Any], tmp_path: Path) -> None:
    """Objects, events and a log that hold what others wrote."""
    record("InferenceService", "default", {"suspend": True}, annotations={"why": HOSTILE}, labels={"a": HOSTILE})
    found = record("TrainJob", "job", {"config": {"note": HOSTILE}, "suspend": True})
    EventLog(home).record(Ref("InferenceService", "default"), "Warning", "Broken", HOSTILE)
    backend = LocalBackend(home.root, tmp_path / "leases")
    script = f"import sys; sys.stdout.write({HOSTILE!r} + '\\n')"
    for owner, component in (("InferenceService/default", "engine"), (str(found.ref), "driver")):
        uid = f"uid-{component}"
        command = (sys.executable, "-X", "utf8", "-c", script)
        backend.start(RunSpec(uid, owner, component, 0, command, restart=NEVER))
        while not any(b"red" in Path(path).read_bytes() for path in backend.log_paths(uid)):
            time.sleep(0.01)


def lines(shown: Result) -> str:
    return shown.out + shown.err


REMOTE = [
    ("get",), ("get", "-o", "wide"), ("get", "processes"), ("describe", f"model/{HOSTILE}"),
    ("get", f"model/{HOSTILE}"),
    ("inf", "models"), ("inf", "models", "-o", "wide"), ("inf", "status"), ("inf", "ps", "-o", "wide"),
    ("get", "-o", "name"), ("get", "-o", "yaml"), ("get", "-o", "jsonl"),
    ("get", "-o", "jsonpath={.items[1].metadata.name}"),
    ("inf", "chat", "-m", "hello"), ("inf", "chat", "-m", "hello", "--no-stream"),
    ("inf", "chat", "-m", "hello", "--show-logprobs"), ("inf", "chat", "-m", "fail"), ("inf", "chat", "-m", "proxy"),
    ("inf", "sessions", "list"), ("weight-update", "pairs"),
]  # fmt: skip
LOCAL = [
    ("describe", "inf/default"), ("get", "inf", "-o", "wide"), ("get", "inf/default", "--show-origin"),
    ("get", "inf/default", "-o", "manifest"), ("events",), ("events", "inf/default", "-o", "wide"),
    ("logs", "inf/default"), ("train", "logs", "job"), ("train", "status", "job"), ("describe", "job/job"),
    ("get", f"model/{HOSTILE}"), ("get", HOSTILE), ("explain", HOSTILE), (HOSTILE,), ("get", f"--{HOSTILE}"),
    ("get", "-l", HOSTILE), ("get", "-o", HOSTILE), ("apply", "-f", HOSTILE), ("wait", "inf/default", "--for", HOSTILE),
    ("inf", "status", "--gateway", f"http://{HOSTILE}"), ("models", "rm", HOSTILE), ("config", "use-context", HOSTILE),
]  # fmt: skip


@pytest.mark.parametrize("words", REMOTE, ids=str)
def test_remote_control_characters_are_escaped(terminal: Areal, gateway: str, words: tuple[str, ...]) -> None:
    shown = terminal(*words, "--gateway", gateway)
    assert not set(lines(shown)) & set(_OBEYED), lines(shown)
    assert "\\x1b" in lines(shown) or "\\e" in lines(shown) or "\\u001b" in lines(shown), lines(shown)
    assert "unexpected" not in shown.err


def test_recorded_control_characters_are_escaped(terminal: Areal, hostile_home: None) -> None:
    for words in LOCAL:
        shown = terminal(*words)
        assert not set(lines(shown)) & set(_OBEYED), (words, lines(shown))
        assert "unexpected" not in shown.err, (words, shown.err)
    # A log's colours are left out, so that its lines can be read; all else of it is spelled.
    assert "xred\\x1b]0;title\\x07\\x9b2J\\u{202e}gnp.exe\\x0d\\x7f\\x08y\n" in terminal("logs", "inf/default").out


def test_foreign_manifest_is_escaped_in_errors_and_plans(terminal: Areal, tmp_path: Path) -> None:
    head = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\n"
    bad, good = tmp_path / "bad.yaml", tmp_path / "good.yaml"
    bad.write_text(head + 'metadata: {name: "\\e[31mred"}\nspec: {"\\e[2J": 1}\n')
    about = yaml.safe_dump({"name": "good", "annotations": {"why": HOSTILE}})
    good.write_text(f"{head}metadata:\n  {about.strip().replace(chr(10), chr(10) + '  ')}\nspec: {{suspend: true}}\n")
    words: tuple[str, ...]
    for words in (("validate", "-f", str(bad)), ("diff", "-f", str(bad)), ("apply", "-f", str(bad))):
        shown = terminal(*words)
        assert shown.code == 3 and not set(lines(shown)) & set(_OBEYED) and "\\x1b" in shown.err
    for words in (("render", "-f", str(good)), ("diff", "-f", str(good)), ("apply", "-f", str(good), "--yes")):
        shown = terminal(*words)
        assert shown.code in (0, 1) and not set(lines(shown)) & set(_OBEYED), lines(shown)


def test_data_is_exact_and_pages_are_escaped_without_terminal(areal: Areal, gateway: str, hostile_home: None) -> None:
    assert areal("inf", "chat", "-m", "hello", "--gateway", gateway).out == HOSTILE + "\n"
    assert f"{HOSTILE}\n" in areal("logs", "inf/default").out
    words: tuple[str, ...]
    for words in (("get", "-o", "wide"), ("inf", "status"), ("inf", "models"), ("inf", "chat", "-m", "fail")):
        assert not set(lines(areal(*words, "--gateway", gateway))) & set(_OBEYED), words
    for words in (("describe", "inf/default"), ("events",), ("get", "inf", "-o", "wide")):
        assert not set(lines(areal(*words))) & set(_OBEYED), words


def test_json_and_yaml_are_valid_and_escaped(areal: Areal, terminal: Areal, gateway: str) -> None:
    for call in (areal, terminal):
        items = json.loads(call("get", "-o", "json", "--gateway", gateway).out)["items"]
        assert items[1]["metadata"]["name"] == HOSTILE
        assert (
            yaml.safe_load(call("get", "-o", "yaml", "--gateway", gateway).out)["items"][1]["metadata"]["name"]
            == HOSTILE
        )
        talk = json.loads(call("inf", "chat", "-m", "hello", "-o", "json", "--gateway", gateway).out)
        assert talk["message"]["content"] == HOSTILE


def test_lone_surrogate_is_printed(areal: Areal, terminal: Areal, gateway: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(ANSWERS, "/v1/models", (200, b'{"data": [{"id": "m\\ud800"}]}'))
    for call in (areal, terminal):
        found = json.loads(call("get", "-o", "json", "--gateway", gateway).out)
        assert found["items"][1]["metadata"]["name"] == "m\ud800"
        assert "m\\u{d800}" in call("inf", "models", "--gateway", gateway).out


def test_own_colours_are_kept_and_cannot_be_forged(
    terminal: Areal, gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    shown = terminal("inf", "models", "--gateway", gateway)
    assert "\x1b[33mDegraded" in shown.out and shown.out.count("\x1b") == 2
    assert "\x1b[31m" in terminal("get", "nothing").err
    assert ESCAPE not in shown.out and safe(ESCAPE) != ESCAPE


TEXT = st.text(st.characters() | st.sampled_from("\x1b[]m\r\n\u202e\x9b\x07"), max_size=60)


@settings(deadline=None)
@given(TEXT, TEXT)
def test_screen_emits_only_its_own_control_codes(first: str, second: str) -> None:
    stream = io.StringIO(newline="")
    Screen(stream).write(f"{first}{ESCAPE}[2m{second}")
    sent = stream.getvalue()
    assert sent.count("\x1b") == 1 and not [each for each in sent if ord(each) < 32 and each not in "\n\t\x1b"]
    assert spelled(first) == spelled(spelled(first)) or "\\" in spelled(first)
    if first.isascii() and first.isprintable():
        assert sent.startswith(first)
