"""``areal ui`` as a process over a home of the test's own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from areal.state.home import Home
from tests.cli.conftest import Spawner, clean_environment, home, record, spawn  # noqa: F401 - fixtures
from tests.e2e.conftest import Box

_ADDRESS = re.compile(r"http://(?P<host>[^/]+)/#token=(?P<token>\S+)")


@dataclass
class Page:
    """A server of the page. ``get`` asks with the token unless other headers are given."""

    popen: subprocess.Popen[str]
    host: str
    token: str

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def ask(
        self, path: str, headers: dict[str, str] | None = None, *, method: str = "GET", body: bytes | None = None
    ) -> tuple[HTTPResponse, bytes]:
        name, _, port = self.host.rpartition(":")
        connection = HTTPConnection(name.strip("[]"), int(port), timeout=30)
        try:
            sent = {"Authorization": f"Bearer {self.token}"} if headers is None else headers
            connection.putrequest(method, path, skip_host="Host" in sent)
            for header, value in sent.items():
                connection.putheader(header, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    def read(self, view: str, **query: str) -> Any:
        """The document of a view, which must be there."""
        response, body = self.ask(f"/api/{view}?{urlencode(query)}")
        assert response.status == 200, body
        return json.loads(body)

    def failure(self, view: str, **query: str) -> tuple[int, dict[str, str]]:
        response, body = self.ask(f"/api/{view}?{urlencode(query)}")
        return response.status, json.loads(body)["error"]


def opened(popen: subprocess.Popen[str]) -> Page:
    """The page of a server that starts, once it prints its address."""
    assert popen.stdout is not None
    line = popen.stdout.readline()
    match = _ADDRESS.search(line)
    assert match, line or popen.communicate()[1]
    return Page(popen, match["host"], match["token"])


@pytest.fixture
def serve(spawn: Spawner, home: Home) -> Iterator[Callable[..., Page]]:  # noqa: F811
    """``serve(*flags)`` starts the server and waits for its address."""

    def start(*flags: str) -> Page:
        return opened(spawn("ui", *flags, "--home", str(home.root)).popen)

    yield start


@contextmanager
def page_of(box: Box, *flags: str) -> Iterator[Page]:
    """The page over the home of an end-to-end test."""
    popen = box.start("ui", *flags)
    yield opened(popen)
    popen.send_signal(signal.SIGINT)
    popen.communicate(timeout=20)


@pytest.fixture
def page(serve: Callable[..., Page]) -> Page:
    return serve()


NOISY = """
import pathlib, sys, time
def main(argv):
    folder = pathlib.Path(argv[-1])
    print("WARNING before the attempt")
    for number in range(2500):
        print(f"INFO line {number}")
    print("\\x1b[31mERROR red <script>document.title = 'owned'</script>\\x1b[0m")
    print("long " + "W" * 20000, flush=True)
    while True:
        if (folder / "say").exists():
            print((folder / "say").read_text(), flush=True)
            (folder / "say").unlink()
        time.sleep(0.02)
"""


@dataclass
class Job:
    """A running job called ``noisy``, whose driver prints what it is given."""

    folder: Path
    spawn: Spawner

    def say(self, text: str) -> None:
        (self.folder / "draft").write_text(text)
        (self.folder / "draft").rename(self.folder / "say")

    def areal(self, *words: str) -> str:
        result = self.spawn(*words).finish()
        assert result.code == 0, result.err
        return result.out


@pytest.fixture
def job(spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:  # noqa: F811
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    running = Job(tmp_path, spawn)
    running.areal("train", "start", "--driver", "noisy:main", "--name", "noisy", str(tmp_path))
    yield running
    running.areal("delete", "trainjob/noisy", "--yes", "--grace", "0s")


def eventually(check: Callable[[], Any], within_s: float = 30.0) -> Any:
    """What ``check`` returns once it is true."""
    deadline = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
    return found
