"""The command's standard streams may be closed, full, or left by their reader: what changes something goes on and ends
with its own status, what reads says that its output is lost."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from areal.state.events import EventLog
from areal.state.home import Home
from areal.state.records import StoredObject
from tests.e2e.conftest import Box, box  # noqa: F401 - a fixture

AREAL = f"{shlex.quote(sys.executable)} -P -m areal.cli"


def shell(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'areal() {{ {AREAL} "$@"; }}\n{script}'],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ("areal get -o json >&-", 1, "error: cannot write to standard output: Bad file descriptor\n"),
        ("areal get -o json > /dev/full", 1, "error: cannot write to standard output: No space left on device\n"),
        ("areal --version > /dev/full", 1, "error: cannot write to standard output: No space left on device\n"),
        ("areal --help >&-", 1, "error: cannot write to standard output: Bad file descriptor\n"),
        ("areal version >&-", 1, "error: cannot write to standard output: Bad file descriptor\n"),
        ("areal diff --drift >&-", 70, "error: cannot write to standard output: Bad file descriptor\n"),
        ("areal get >&- 2>/dev/null", 0, ""),  # nothing to print: nothing is lost (as in coreutils)
        ("areal get -o json 2>&- >/dev/null", 0, ""),
        ("areal get nosuch 2>/dev/full", 4, ""),
        ("areal get nosuch 2>&-", 4, ""),
        ("areal get nosuch <&- >&- 2>&-", 4, ""),
        ("areal schema model | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("areal explain model 2>&1 >/dev/full | cat", 0, ""),
    ],
)
def test_closed_reader_sets_exit_status(script: str, code: int, message: str, unbuffered: str) -> None:
    found = shell(script, PYTHONUNBUFFERED=unbuffered)

    assert (found.returncode, found.stderr) == (code, message)


@pytest.mark.parametrize(
    "streams",
    [
        "2>&1 | head -1",
        "> /dev/full 2>&1",
        *(
            pytest.param(each, marks=pytest.mark.extended)
            for each in ("2>&1 | true", ">&- 2>&-", "2>/dev/full", "<&- >&- 2>&-")
        ),
    ],
)
def test_mutating_command_outlives_its_reader(
    box: Box,  # noqa: F811
    streams: str,
) -> None:
    manifest = shlex.quote(
        box.write(
            "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"
            f"spec: {{gateway: {{port: {box.port}}}}}\n"
        )
    )
    env = {"AREAL_HOME": str(box.home), "TMPDIR": box.env["TMPDIR"]}

    applied = shell(f"areal apply -f {manifest} -v {streams}; exit ${{PIPESTATUS[0]}}", **env)

    assert applied.returncode == 0, applied.stderr
    assert box.phase("inf/default") == "Ready"
    deleted = shell(f"areal delete inf/default --yes {streams}; exit ${{PIPESTATUS[0]}}", **env)
    assert deleted.returncode == 0, deleted.stderr
    assert json.loads(box.ok("get", "-o", "json").out)["items"] == []


@pytest.mark.parametrize("command", ["get -w", "events -w"])
def test_watch_ends_with_its_reader_without_events(record: Callable[..., StoredObject], command: str) -> None:
    record("InferenceService", "default", {"suspend": True})

    found = shell(f"timeout 30 {AREAL} {command} | head -1; exit ${{PIPESTATUS[0]}}")

    assert found.returncode == 141 and len(found.stdout.splitlines()) == 1, found.stderr


@pytest.mark.parametrize("command", ["get inf -w", "inf status --watch --interval 1s", "events -w"])
@pytest.mark.parametrize(
    ("output", "begin"),
    [
        ("json", '{"'),
        ("jsonl", '{"'),
        ("yaml", "---"),
        ("name", "inferenceservice/default"),
        ("jsonpath={.status.phase}{.phase}{.reason}!", "Suspended!"),
    ],
)
def test_each_document_of_a_watch_has_the_chosen_format(
    record: Callable[..., StoredObject], home: Home, command: str, output: str, begin: str
) -> None:
    item = record("InferenceService", "default", {"suspend": True})
    EventLog(home).record(item.ref, "Normal", "Suspended", "by hand", actor="tester")

    found = shell(f"timeout 30 {AREAL} {command} -o '{output}' | head -1")

    assert found.stdout.strip().lower().startswith(begin.lower()), found.stderr


def test_failing_command_keeps_its_status_without_reader(tmp_path: Path) -> None:
    found = shell(f"areal apply -f {tmp_path}/none.yaml > /dev/full 2>&1", AREAL_HOME=str(tmp_path / "home"))

    assert found.returncode == 3


def test_deleted_working_directory_is_named(tmp_path: Path, record: Callable[..., StoredObject]) -> None:
    record("InferenceService", "default", {"suspend": True})
    file = tmp_path / "m.yaml"
    file.write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: a}\nspec: {suspend: true}\n"
    )
    gone = tmp_path / "gone"

    def there(words: str) -> subprocess.CompletedProcess[str]:
        return shell(f"mkdir {gone} && cd {gone} && rmdir {gone} && areal {words}")

    applied = there(f"apply -f {file}")
    assert applied.returncode == 2
    assert applied.stderr.splitlines()[0] == f"error: the working folder {gone} is gone"
    for words in ("get", "describe inf/default", "history inf/default", "reconcile", "events"):
        found = there(words)
        assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C"}, {"LC_ALL": "", "LANG": ""}, {"PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}]
)
def test_lone_surrogate_in_answer_is_printed_escaped(locale: dict[str, str], tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(
                {"choices": [{"message": {"content": "half \ud83d é"}, "finish_reason": "stop"}]}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, name="server of a test", daemon=True).start()
    key = tmp_path / "key"
    key.write_text("k" * 32)
    words = f"inf chat --gateway http://127.0.0.1:{server.server_port} --api-key-file {key} --model m --no-stream"
    try:
        found = shell(f"areal {words} -m $'what \\xff is'", **locale)
    finally:
        server.shutdown()
        server.server_close()

    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("half \\ud83d ")
    assert len(asked) == 1
