"""A served model, and a front to it that refuses each path's first request as a service does that is restarting."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MODEL = "tiny"


@dataclass(frozen=True)
class Served:
    """``folder`` is the model's, for clients that tokenise."""

    url: str
    key: str
    folder: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    python = os.environ.get("AREAL_SERVER_PYTHON", sys.executable)
    argv = [python, "-m", "tests.clients.serve", str(tmp_path_factory.mktemp("served"))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as popen:
        assert popen.stdin is not None and popen.stdout is not None
        line = popen.stdout.readline()
        assert line, f"{python} serves nothing: AREAL_SERVER_PYTHON must have areal's extras embedded and structured"
        yield Served(**json.loads(line))
        popen.stdin.close()


@pytest.fixture
def flaky(served: Served) -> Iterator[Served]:
    """The same service, but the first request of each path is answered 503."""
    refused: set[str] = set()

    class Front(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path not in refused:
                refused.add(self.path)
                reply = {"message": "the service starts", "type": "server_error", "code": "not_ready", "param": None}
                self._say(503, {"Retry-After": "0", "Content-Type": "application/json"}, json.dumps({"error": reply}))
                return
            connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
            skipped = ("host", "content-length", "connection", "accept-encoding")
            connection.request(
                "POST", self.path, body, {k: v for k, v in self.headers.items() if k.lower() not in skipped}
            )
            answer = connection.getresponse()
            self._say(answer.status, {"Content-Type": answer.headers["Content-Type"]}, answer.read().decode())
            connection.close()

        def _say(self, status: int, headers: dict[str, str], text: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Front)
    threading.Thread(target=server.serve_forever, name="flaky", daemon=True).start()
    yield Served(f"http://127.0.0.1:{server.server_address[1]}", served.key, served.folder)
    server.shutdown()
    server.server_close()
