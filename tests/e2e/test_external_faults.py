"""An external endpoint that cannot be used is reported with its cause within the first probe, by every verb."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.conftest import Box

KEY = "sk-right"


class Provider(ThreadingHTTPServer):
    """Takes one key; answers every chat with "hello"."""

    daemon_threads = True
    allow_reuse_address = True
    takes_calls = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):  # a connection each: one that is kept would outlive the server
    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        allowed = self.headers.get("Authorization") == f"Bearer {KEY}"
        allowed &= self.command == "GET" or self.server.takes_calls  # type: ignore[attr-defined]
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "x", "choices": [choice], "data": []} if allowed else {"error": {"message": "no"}})
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = _answer

    def log_message(self, *args: object) -> None:
        return


def serve(port: int = 0) -> Provider:
    server = Provider(("127.0.0.1", port), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), name="provider", daemon=True).start()
    return server


def close(server: Provider) -> None:
    server.shutdown()
    server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    server = serve()
    yield server
    close(server)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A service without models."""
    from tests.e2e.conftest import make_box, tear_down

    made = make_box(tmp_path_factory.mktemp("front"))
    made.ok("inf", "run", "-d", "--port", str(made.port))
    yield made
    tear_down(made)


def manifest(box: Box, name: str, url: str, key: str = "") -> str:
    auth = "  apiKeyFrom: {file: KEYFILE}\n" if key else ""
    text = f"apiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {{name: {name}}}\nspec:\n"
    Path(box.folder / f"{name}.key").write_text(key + "\n")
    key_from = f", apiKeyFrom: {{file: {box.folder / f'{name}.key'}}}" if auth else ""
    return box.write(f"{text}  external: {{url: '{url}', model: gpt{key_from}}}\n", f"{name}.yaml")


def phase_of(box: Box, name: str) -> tuple[str, str]:
    status = json.loads(box.ok("get", f"model/{name}", "-o", "json").out)["status"]
    return status["phase"], status["message"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [("wrong", "sk-wrong", "does not take the key"), ("missing", "", "wants a key"), ("dead", KEY, "does not answer")],
)
def test_apply_and_get_explain_unusable_endpoint_at_once(
    front: Box, provider: Provider, name: str, key: str, expected: str
) -> None:
    url = provider.url if name != "dead" else "http://127.0.0.1:9/v1"
    applied = front.areal("apply", "-f", manifest(front, name, url, key), "--timeout", "250s")
    assert applied.code == 8 and expected in applied.text and "hint: " in applied.text, applied.text
    assert "sk-wrong" not in applied.text
    phase, message = phase_of(front, name)
    assert phase != "Ready" and expected in message
    assert front.areal("wait", f"model/{name}", "--for", "ready", "--timeout", "200s").code == 8
    front.ok("delete", f"model/{name}", "--yes")


@pytest.mark.extended
def test_register_reports_refused_key_at_once(front: Box, provider: Provider) -> None:
    words = ["inf", "register", "--model", "other", "--api-url", provider.url, "--provider-api-key-env", "SOME_KEY"]
    refused = front.areal(*words, "--timeout", "250s", env={"SOME_KEY": "sk-wrong"})
    assert refused.code == 8 and "does not take the key" in refused.text and "sk-wrong" not in refused.text
    unset = front.areal(*words)
    assert unset.code != 0 and "SOME_KEY is not set" in unset.text
    front.ok("delete", "model/other", "--yes", "--ignore-not-found")


@pytest.mark.extended
def test_private_address_is_refused_at_its_field(front: Box) -> None:
    file = manifest(front, "private", "http://10.0.0.1/v1", KEY)
    for verb in ("validate", "diff", "apply"):
        refused = front.areal(verb, "-f", file)
        assert refused.code == 3 and "private.yaml:5" in refused.text and "allowPrivate" in refused.text, refused.text


@pytest.mark.extended
def test_endpoint_refusing_calls_is_degraded_until_one_succeeds(front: Box, provider: Provider) -> None:
    file = manifest(front, "gpt", provider.url, KEY)
    front.ok("apply", "-f", file)
    provider.takes_calls = False
    for _ in range(3):
        assert front.areal("inf", "chat", "-m", "hi", "--model", "gpt").code == 1
    phase, message = phase_of(front, "gpt")
    assert phase == "Degraded" and "refused the key or the account of the last 3 calls" in message
    drifted, applied = front.areal("diff", "--drift"), front.areal("apply", "-f", file, "--timeout", "60s")
    assert drifted.code == 1 and "refused the key" in drifted.out
    assert applied.code == 8 and "external.apiKeyFrom" in applied.err
    provider.takes_calls = True
    assert front.ok("inf", "chat", "-m", "hi", "--model", "gpt", "--no-stream").out == "hello\n"
    front.ok("apply", "-f", file)
    assert phase_of(front, "gpt")[0] == "Ready"
    front.ok("delete", "model/gpt", "--yes")


@pytest.mark.extended
def test_dead_endpoint_is_reported_and_recovers(front: Box) -> None:
    provider = serve()
    file = manifest(front, "gpt", provider.url, KEY)
    front.ok("apply", "-f", file)
    assert phase_of(front, "gpt")[0] == "Ready"
    assert front.ok("inf", "chat", "-m", "hi", "--model", "gpt", "--no-stream").out == "hello\n"
    close(provider)
    first = front.areal("inf", "chat", "-m", "hi", "--model", "gpt", "--timeout", "200s")
    assert first.code == 1 and "does not answer" in first.err, first.text
    front.ok("wait", "model/gpt", "--for", "condition=Ready=False", "--timeout", "60s")
    phase, message = phase_of(front, "gpt")
    assert phase == "Degraded" and "does not answer" in message
    second = front.areal("inf", "chat", "-m", "hi", "--model", "gpt", "--timeout", "200s")
    assert second.code == 1 and "does not answer" in second.err, second.text
    assert front.areal("diff", "--drift").code == 1
    back = serve(provider.server_port)
    front.ok("wait", "model/gpt", "--for", "ready", "--timeout", "60s")
    assert front.ok("inf", "chat", "-m", "hi", "--model", "gpt", "--no-stream").out == "hello\n"
    close(back)
    front.ok("delete", "model/gpt", "--yes")
