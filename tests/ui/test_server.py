"""The page's server as a process: who may ask, what it answers, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from areal.cli.ui import page_url
from areal.errors import UsageFault
from areal.state.home import Home
from areal.state.records import StoredObject
from areal.ui.access import AccessHeaders, PageAccess, access_of, host_name
from areal.ui.server import _THREADS, STATIC, PageServer, to_json
from areal.ui.views import VIEWS, ViewContext, reader_of
from tests.ui.conftest import Page, eventually

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
Record = Callable[..., StoredObject]


def test_view_without_the_token_is_401_and_with_it_200(page: Page, record: Record) -> None:
    record("Model", "qwen", {"path": "/m"})
    assert page.ask("/api/home", {})[0].status == 401
    assert page.ask("/api/home", {"Authorization": "Bearer wrong"})[0].status == 401
    assert page.ask("/api/home", {"Authorization": f"Basic {page.token}"})[0].status == 401
    assert [row["ref"] for row in page.read("home")["objects"]] == ["Model/qwen"]


def test_page_files_need_no_token_and_have_strict_policy(page: Page) -> None:
    for path in ("/", "/object/model/qwen", "/static/app.js", "/static/vendor/preact/standalone.module.js"):
        response, body = page.ask(path, {})
        assert response.status == 200 and body
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert not [name for name in response.headers if name.lower().startswith("access-control")]
        assert "Set-Cookie" not in response.headers


@pytest.mark.parametrize("method", METHODS)
def test_foreign_or_unauthenticated_request_is_refused(page: Page, method: str) -> None:
    own, token = page.host, {"Authorization": f"Bearer {page.token}"}
    refused = [
        {**token, "Host": "evil.example"},
        {**token, "Host": f"evil.example:{own.rpartition(':')[2]}"},
        {**token, "Host": ""},
        {**token, "Host": own, "Origin": "http://evil.example"},
        {**token, "Host": own, "Origin": "null"},
        {**token, "Host": own, "Origin": f"http://{own}.evil.example"},
        {**token, "Host": own, "Sec-Fetch-Site": "cross-site"},
        {"Host": own},
    ]
    for headers in refused:
        response, _ = page.ask("/api/home", headers, method=method)
        assert response.status in (401, 403) or (method == "BREW" and response.status == 501), headers
        assert response.headers["Content-Security-Policy"]
    allowed, _ = page.ask("/api/home", {**token, "Host": own, "Origin": f"http://{own}"}, method=method)
    assert allowed.status == {"GET": 200, "HEAD": 200, "POST": 400, "BREW": 501}.get(method, 405)


@pytest.mark.parametrize("method", ("GET", "HEAD", "POST", "OPTIONS"))
def test_static_files_are_refused_for_a_foreign_host_or_origin(page: Page, method: str) -> None:
    assert page.ask("/", {"Host": "evil.example"}, method=method)[0].status == 403
    assert page.ask("/static/app.js", {"Origin": "http://evil.example"}, method=method)[0].status == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:9", "[::1]:80", "LOCALHOST:1"])
def test_loopback_names_reach_server_through_tunnel(host: str) -> None:
    rules = access_of("127.0.0.1", None)
    given = AccessHeaders(host, f"http://{host}", f"Bearer {rules.token}", "same-origin")
    assert rules.refuses(given, secret=True) is None


@pytest.mark.parametrize("host", ["", "a@localhost", "localhost/x", "localhost:port", "[::1", "localhost#", "\u3000"])
def test_malformed_hosts_are_refused(host: str) -> None:
    assert PageAccess("t").refuses(AccessHeaders(host, None, "Bearer t", None), secret=True) is not None
    assert host_name(host) != "localhost"


def test_public_address_requires_key_of_16_characters(serve: Callable[..., Page], tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="needs a key"):
        access_of("0.0.0.0", None)
    with pytest.raises(UsageFault, match="15 characters"):
        access_of("0.0.0.0", "k" * 15)
    (tmp_path / "key").write_text("k" * 16 + "\n")
    page = serve("--host", "0.0.0.0", "--key-file", str(tmp_path / "key"))
    assert page.token == "k" * 16
    assert page.ask("/api/home", {"Host": "10.1.2.3:80", "Authorization": f"Bearer {page.token}"})[0].status == 200
    assert page.ask("/api/home", {"Host": socket.gethostname(), "Authorization": "Bearer x"})[0].status == 401
    assert page.ask("/api/home", {"Host": "evil.example", "Authorization": f"Bearer {page.token}"})[0].status == 403


def test_tokens_are_random_with_128_bits() -> None:
    one, other = access_of("127.0.0.1", None).token, access_of("127.0.0.1", None).token
    assert one != other and len(one) >= 22


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/..%2f..%2fcontext.py"]
)
def test_paths_outside_static_folder_are_404(page: Page, path: str) -> None:
    response, body = page.ask(path, {})
    assert response.status == 404 and b"import" not in body


def test_impossible_paths_reveal_no_local_path(page: Page) -> None:
    response, body = page.ask(f"/static/{'a' * 300}", {})
    assert response.status == 404 and str(STATIC).encode() not in body
    assert _raw(page, f"GET http://[/ HTTP/1.1\r\nHost: {page.host}\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["/api/nothing", "/api/home"])
@pytest.mark.parametrize("length", ["{0}", "{0:05000d}", "-1", "1000000000000"])
def test_body_is_never_parsed_as_request(page: Page, path: str, length: str) -> None:
    body = f"GET /static/app.css HTTP/1.1\r\nHost: {page.host}\r\n\r\n"
    head = f"Host: {page.host}\r\nAuthorization: Bearer {page.token}\r\nContent-Length: {length.format(len(body))}"
    answers = _raw(page, f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n{body}")
    assert answers.count(b"HTTP/1.1 ") == 1 and answers.split()[1] in (b"400", b"404")


def test_invalid_object_names_are_refused(page: Page) -> None:
    for view, parameter in (("job", "name"), ("step", "name"), ("compare", "jobs")):
        for name in ("\0", "../../etc", "a/b"):
            assert page.failure(view, **{parameter: name})[0] == 400, (view, name)


def test_fault_of_view_is_an_event_of_its_stream(page: Page) -> None:
    with _stream(page, "plan%3Fpath%3D%2500") as stream:
        answer = stream.makefile("rb")
        first = _event(answer)
    assert first["watch"] == "plan?path=%00" and "null byte" in first["marks"]["unreadable"]


def test_aborted_streams_leave_no_thread_or_connection(page: Page) -> None:
    process = psutil.Process(page.popen.pid)
    page.read("alerts")
    before = process.num_fds()
    for _ in range(3):
        for _ in range(60):
            with _stream(page, "alerts%3F") as stream:
                _event(stream.makefile("rb"))
        eventually(lambda: process.num_fds() <= before, 8)
    eventually(lambda: process.num_threads() <= 2, 8)


def _raw(page: Page, text: str) -> bytes:
    """All that the server sends to a client that then closes its end."""
    name, _, port = page.host.rpartition(":")
    with socket.create_connection((name, int(port)), timeout=30) as connection:
        connection.sendall(text.encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


def _stream(page: Page, watch: str) -> socket.socket:
    name, _, port = page.host.rpartition(":")
    connection = socket.create_connection((name, int(port)), timeout=30)
    head = f"GET /api/changes?watch={watch} HTTP/1.1\r\nHost: {page.host}\r\nAuthorization: Bearer {page.token}"
    connection.sendall(f"{head}\r\n\r\n".encode())
    return connection


@pytest.mark.parametrize("key", ["a+b/c=d&e%41#f?g", "-._~" * 4])
def test_page_address_contains_any_key(key: str) -> None:
    fragment = urlsplit(page_url("127.0.0.1", 1, key)).fragment
    assert parse_qs(fragment) == {"token": [key]}


def test_unknown_view_and_object_are_reported(page: Page) -> None:
    assert page.failure("nothing") == (404, {"type": "NotFound", "message": "there is no view 'nothing'", "hint": ""})
    status, error = page.failure("object", kind="model", name="absent")
    assert status == 404 and "absent" in error["message"]
    assert page.failure("object", kind="model")[0] == 400


def test_ctrl_c_leaves_no_process_no_port_and_no_file(page: Page, home: Home) -> None:
    before = sorted(str(path) for path in home.root.rglob("*"))
    assert page.read("home")["objects"] == []
    process = psutil.Process(page.popen.pid)
    assert process.children(recursive=True) == []
    page.popen.send_signal(signal.SIGINT)
    assert page.popen.wait(10) == 130
    assert sorted(str(path) for path in home.root.rglob("*")) == before
    name, _, port = page.host.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((name, int(port)), timeout=5)


def test_change_of_an_object_reaches_an_open_stream(page: Page, record: Record) -> None:
    with _stream(page, "home%3F") as stream:
        answer = stream.makefile("rb")
        first = _event(answer)
        record("Model", "qwen", {"path": "/m"})
        while (changed := _event(answer))["marks"].get("files") is None:
            pass
    assert first["watch"] == changed["watch"] == "home?"
    assert changed["marks"]["files"] != first["marks"]["files"]


def _event(lines: Any) -> Any:
    for line in lines:
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended")


def test_non_finite_numbers_and_surrogates_give_valid_json() -> None:
    document = {"a": [float("nan"), float("-inf"), 1.5], "b": {"c": float("inf")}, "text": "\ud800<script>"}
    assert json.loads(to_json(document)) == {
        "a": ["NaN", "-Infinity", 1.5],
        "b": {"c": "Infinity"},
        "text": "\ud800<script>",
    }


def test_vendored_files_match_manifest_hashes() -> None:
    vendor = STATIC / "vendor"
    manifest = json.loads((vendor / "manifest.json").read_text())
    code = {str(path.relative_to(vendor)) for path in vendor.rglob("*") if path.suffix in (".js", ".css")}
    assert code == set(manifest)
    for name, entry in manifest.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert entry["version"] and entry["license"] and list((vendor / name).parent.glob("LICENSE*"))


def test_every_view_has_a_reader() -> None:
    assert all(reader_of(name) is not None for name in VIEWS)


def test_unfinished_connections_block_no_authenticated_caller(page: Page) -> None:
    name, _, port = page.host.rpartition(":")
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection((name, int(port)), 30)) for _ in range(_THREADS + 8)]
        for connection in held:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /api/home HTTP/1.1\r\n")
        for _ in range(3):
            assert page.ask("/api/home", {"Authorization": f"Bearer {page.token}"})[0].status == 200


def test_failed_thread_start_frees_connection_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with PageServer("127.0.0.1", 0, ViewContext(Home(tmp_path)), access_of("127.0.0.1", None)) as server:
        free = server._free._value
        with monkeypatch.context() as machine, socket.create_connection(("127.0.0.1", server.server_port), 5):
            machine.setattr(threading.Thread, "start", refuse)
            server.handle_request()
        assert (server._free._value, server._unproven) == (free, {})


def test_plan_of_other_file_quotes_nothing_of_it(page: Page, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("hunter2: [")
    status, error = page.failure("plan", path=str(secret))
    assert status == 400 and "hunter2" not in str(error)
