"""``areal train watch``: exits 8 when an alert fires, and says it to a URL."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from areal.state.home import Home
from areal.state.records import StoredObject
from tests.cli.conftest import Areal, Spawner


@pytest.fixture
def learn(home: Home, record: Callable[..., StoredObject]) -> Path:
    record("TrainJob", "learn")
    path = home.job_metrics("learn")
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"step": step, "attempt": 1, "loss": 1.0}) + "\n" for step in range(1, 6)))
    return path


def diverge(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"step": 6, "attempt": 1, "loss": "nan"}) + "\n")


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, object]]]]:
    taken: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append({"path": self.path, **json.loads(self.rfile.read(int(self.headers["Content-Length"])))})
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        thread.join()


def test_watch_once_of_healthy_run_exits_0(areal: Areal, learn: Path) -> None:
    found = areal("train", "watch", "learn", "--once")
    assert found.code == 0 and "no alert in learn" in found.err
    assert areal("train", "watch", "learn", "--once", "--json").items == []
    assert areal("train", "watch", "other", "--once").code == 4


def test_watch_of_unreadable_metrics_names_path(areal: Areal, learn: Path) -> None:
    learn.unlink()
    learn.mkdir()
    found = areal("train", "watch", "learn", "--once")
    assert found.code != 0 and f"cannot read the metrics in {learn}" in found.err


def test_watch_exits_8_with_cause_when_alert_fires(
    learn: Path, spawn: Spawner, hook: tuple[str, list[dict[str, object]]]
) -> None:
    url, taken = hook
    watching = spawn("train", "watch", "learn", "--interval", "0.1", "--notify", f"{url}/alerts?x=1").popen
    diverge(learn)
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 8 and "watching learn: ends at the first alert" in err
    assert "loss is NaN at step 6" in out and "cause: a loss or a gradient overflowed" in out
    assert "next:  areal train metrics learn" in out
    assert [(each["path"], each["rule"], each["step"]) for each in taken] == [("/alerts?x=1", "not-finite", 6)]


def test_watch_reports_refusing_hook_and_exits_8(areal: Areal, learn: Path) -> None:
    diverge(learn)
    found = areal("train", "watch", "learn", "--once", "--notify", "http://127.0.0.1:9/the-secret", "--json")
    assert found.code == 8 and "http://127.0.0.1:9 was not notified of not-finite" in found.err
    assert "the-secret" not in found.err
    assert [each["rule"] for each in found.items] == ["not-finite"]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/x",
        "ftp://127.0.0.1/x",
        "example.com",
        "https://",
        "http://127.0.0.1:x",
        "https://user:password@example.com/x",
        "http://127.0.0.1:9/a b",
        "http://127.0.0.1:9/\u00fc",
    ],
)
def test_watch_refuses_plaintext_or_invalid_notify_url(areal: Areal, learn: Path, url: str) -> None:
    found = areal("train", "watch", "learn", "--once", "--notify", url)
    assert found.code == 2 and "--notify" in found.err


def test_watch_exits_8_despite_unresolvable_hook(areal: Areal, learn: Path) -> None:
    diverge(learn)
    found = areal("train", "watch", "learn", "--once", "--notify", f"https://{'a' * 70}.example/x")
    assert found.code == 8 and "was not notified of not-finite" in found.err
