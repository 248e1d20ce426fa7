"""Ready means our own component, on its own port, answering; a death while it starts is reported at once."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import NotFound, TargetFailed, TimedOut
from areal.reconcilers.execute import kick
from areal.reconcilers.plan import Op, Verb
from areal.runtime.backends.base import Phase, RunSpec
from areal.runtime.backends.local import LocalBackend
from areal.runtime.exchange import LivenessCheck, parse, split_url
from areal.runtime.leases import port_owner
from areal.runtime.probes import (
    NoAnswer,
    ProbeFailed,
    ProbeRequest,
    ProbeResponse,
    http_get,
    http_get_all,
    wait_ready,
)

from .conftest import Spawn
from .support import HTTP_COMPONENT, NEVER, kill_until_backoff, python, run_spec, until

Treat = Callable[[socket.socket], None]
Serve = Callable[[Treat], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that treats each connection with the given function, in a thread of its own."""
    servers: list[socket.socket] = []

    def start(treat: Treat) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def loop() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        treat(connection)
                    except OSError:
                        continue

        threading.Thread(target=loop, name="probe-server", daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def answering(text: str) -> Treat:
    def treat(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(text.encode())

    return treat


OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
SICK = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


def test_http_get_returns_status_and_body(serve: Serve) -> None:
    assert http_get(serve(answering(OK)), 10) == ProbeResponse(200, b"hi")


def test_http_get_sends_path_query_and_headers(serve: Serve) -> None:
    seen: list[bytes] = []

    def treat(connection: socket.socket) -> None:
        seen.append(connection.recv(65536))
        connection.sendall(OK.encode())

    http_get(serve(treat) + "/a?b=c", 10, {"Authorization": "Bearer k"})

    assert seen[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in seen[0]


def test_http_get_ignores_proxies_in_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    assert http_get(serve(answering(OK)), 10).status == 200


@pytest.mark.parametrize("text", ["not http at all\r\n\r\n", "", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"])
def test_http_get_of_a_broken_answer_is_unreachable(serve: Serve, text: str) -> None:
    with pytest.raises(ProbeFailed):
        http_get(serve(answering(text)), 10)


def test_http_get_of_a_closed_port_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(ProbeFailed, match="refused"):
        http_get(f"http://127.0.0.1:{port}/", 10)


def test_http_get_has_one_deadline_for_dripping_peer(serve: Serve) -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b"x")
            time.sleep(0.02)

    with pytest.raises(ProbeFailed, match=r"no answer within 0\.3 s"):
        http_get(serve(drip), 0.3)


def test_http_get_all_is_concurrent_under_one_deadline(serve: Serve) -> None:
    """A process that is stopped: the kernel takes the connection, and no answer comes."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=1000) as stopped,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        silent, closed = (f"http://127.0.0.1:{server.getsockname()[1]}/" for server in (stopped, gone))
        gone.close()
        live = serve(answering(OK))
        began = time.monotonic()
        answers = http_get_all([ProbeRequest(url) for url in [silent] * 600 + [live, closed, "ftp://x", live]], 0.5)
        took_s = time.monotonic() - began

    assert took_s < 20  # 600 deadlines one after the other are 300
    assert all(isinstance(answer, NoAnswer) for answer in answers[:600])
    assert [type(answer) for answer in answers[601:603]] == [ProbeFailed, ProbeFailed]


def test_http_get_all_answers_in_order(serve: Serve) -> None:
    texts = [f"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{number:03}" for number in range(300)]
    urls = [serve(answering(text)) for text in texts[:20]]

    answers = http_get_all([ProbeRequest(url) for url in urls * 15], 30)

    assert [answer.body for answer in answers if isinstance(answer, ProbeResponse)] == [
        b"%03d" % n for n in range(20)
    ] * 15


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_http_get_all_exceeds_open_file_limit(serve: Serve) -> None:
    url = serve(answering(OK))
    answers = http_get_all([ProbeRequest(url)] * 700, 30)
    assert {type(answer) for answer in answers} == {ProbeResponse}


@pytest.mark.usefixtures("few_files")
def test_http_get_all_reaches_peers_behind_silent_ones(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as stopped:
        silent, live = f"http://127.0.0.1:{stopped.getsockname()[1]}/", serve(answering(OK))
        answers = http_get_all([ProbeRequest(url) for url in [silent] * 250 + [live] * 3], 0.5)
    assert [type(answer) for answer in answers] == [NoAnswer] * 250 + [ProbeResponse] * 3


WHOLE = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.0 503 No\r\ncontent-length:5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
)


@pytest.mark.parametrize("data", WHOLE)
def test_truncated_answer_is_incomplete_or_cut_off(data: bytes) -> None:
    whole = parse(data, ended=True, most_bytes=99)
    assert whole is not None and whole[1] == b"hello"
    for end in range(data.rindex(b"o") + 1):
        assert parse(data[:end], ended=False, most_bytes=99) is None
        with pytest.raises(ValueError, match=r"cut off|not HTTP"):
            parse(data[:end], ended=True, most_bytes=99)


@given(st.sampled_from((b"", b"HTTP/1.1 200 OK\r\n", *WHOLE)), st.integers(0, 80), st.binary())
def test_any_bytes_parse_to_answer_or_none(start: bytes, kept: int, more: bytes) -> None:
    with contextlib.suppress(ValueError):
        found = parse(start[:kept] + more, ended=True, most_bytes=99)
        assert found is None or 100 <= found[0] <= 999


def test_answer_without_a_length_ends_with_the_connection() -> None:
    assert parse(b"HTTP/1.1 200 OK\r\n\r\nhel", ended=False, most_bytes=99) is None
    assert parse(b"HTTP/1.1 200 OK\r\n\r\nhello", ended=True, most_bytes=99) == (200, b"hello")


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "file:///etc/passwd", "127.0.0.1:80", "http://"])
def test_http_get_of_non_http_url_is_refused(url: str) -> None:
    with pytest.raises(ProbeFailed, match="not an http"):
        http_get(url, 1)


@pytest.mark.parametrize(("body", "pid"), [(b'{"pid": 7}', 7), (b"[]", None), (b"\xff", None), (b"{}", None)])
def test_answer_json_is_object_or_empty(body: bytes, pid: int | None) -> None:
    assert ProbeResponse(200, body).json().get("pid") == pid


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://127.0.0.1:80/health", ("127.0.0.1", 80, "127.0.0.1:80", "/health")),
        ("http://[::1]:8080", ("::1", 8080, "[::1]:8080", "/")),
        ("http://host/a/b?c=d", ("host", 80, "host", "/a/b?c=d")),
        ("http://[::1]/x", ("::1", 80, "[::1]", "/x")),
    ],
)
def test_split_url_names_host_port_and_path(url: str, parts: tuple[str, int, str, str]) -> None:
    assert split_url(url) == parts


def liveness(url: str, threshold: int = 2) -> LivenessCheck:
    return LivenessCheck({"url": url + "/health", "period_s": 1.0, "timeout_s": 5.0, "failure_threshold": threshold})


def probe_once(probe: LivenessCheck) -> None:
    """One whole probe, as the shim's loop drives it, on a clock of its own."""
    start = probe.due
    probe.tick(start)
    while (interest := probe.interest) is not None:
        poller = select.poll()
        poller.register(*interest)
        assert poller.poll(10_000)
        probe.on_ready(start)


def test_liveness_after_first_answer_fails_at_threshold(serve: Serve) -> None:
    answers = [OK, SICK, SICK]
    probe = liveness(serve(lambda connection: answering(answers.pop(0))(connection)))

    verdicts = []
    for _ in range(3):
        probe_once(probe)
        verdicts.append(probe.failed)

    assert verdicts == [False, False, True]


def test_liveness_counts_only_consecutive_failures(serve: Serve) -> None:
    answers = [OK, SICK, OK, SICK, OK]
    probe = liveness(serve(lambda connection: answering(answers.pop(0))(connection)))

    for _ in range(5):
        probe_once(probe)
        assert not probe.failed


def test_liveness_before_the_first_answer_never_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    probe = liveness(f"http://127.0.0.1:{port}")

    for _ in range(10):
        probe_once(probe)

    assert not probe.failed


def test_liveness_of_a_new_component_starts_over(serve: Serve) -> None:
    answers = [OK, SICK, SICK]
    probe = liveness(serve(lambda connection: answering(answers.pop(0))(connection)))
    for _ in range(3):
        probe_once(probe)

    probe.restart(100.0)

    assert not probe.failed
    assert probe.due == 101.0


def test_liveness_of_a_silent_component_runs_out_of_patience(serve: Serve) -> None:
    release = threading.Event()

    def hang(connection: socket.socket) -> None:
        release.wait(60)

    treatments: list[Treat] = [answering(OK), hang]
    probe = liveness(serve(lambda connection: treatments.pop(0)(connection)), threshold=1)
    probe_once(probe)

    probe.tick(probe.due)
    assert probe.interest is not None
    probe.tick(probe.due)

    assert probe.failed
    assert probe.interest is None
    release.set()


def served(local: LocalBackend, uid: str = "r1", **changes: object) -> RunSpec:
    (port,) = local.claim_ports(1, owner="Model/qwen")
    argv = (sys.executable, "-c", HTTP_COMPONENT, str(port))
    return run_spec(uid, argv=argv, ports=(port,), url=f"http://127.0.0.1:{port}", **changes)


def test_wait_ready_returns_when_the_component_answers(local: LocalBackend) -> None:
    started = local.start(served(local))
    waits: list[float] = []

    state = wait_ready(local, "r1", timeout_s=30, on_wait=lambda state, elapsed_s: waits.append(elapsed_s))

    assert state == started
    assert waits == sorted(waits)


def test_wait_ready_without_url_needs_only_running_process(local: LocalBackend) -> None:
    local.start(run_spec())

    assert wait_ready(local, "r1", timeout_s=30).phase is Phase.RUNNING


def test_wait_ready_fails_at_once_and_quotes_dead_component(local: LocalBackend) -> None:
    local.start(served(local))
    local.stop("r1")
    spec = run_spec(
        "r2",
        argv=python("print('loading'); raise ValueError('no such model')"),
        url="http://127.0.0.1:9",
    )
    local.start(spec)

    with pytest.raises(TargetFailed) as caught:
        wait_ready(local, "r2", timeout_s=1000)

    assert caught.value.message == "Model/qwen: engine[0] failed: exited 1: ValueError: no such model"
    assert "ValueError: no such model" in (caught.value.detail or "")
    assert caught.value.hint == "areal logs Model/qwen -c engine -r 0"


def test_long_traceback_is_quoted_once(local: LocalBackend) -> None:
    calls = "".join(f"def f{n}(): f{n + 1}()\n" for n in range(30))
    failing = f"import atexit; atexit.register(print, 'after')\n{calls}def f30(): 1 / 0\nf0()"
    local.start(run_spec("r2", argv=python(failing), url="http://127.0.0.1:9"))

    with pytest.raises(TargetFailed) as caught:
        wait_ready(local, "r2", timeout_s=1000)

    detail = caught.value.detail or ""
    assert detail.count("ZeroDivisionError") == detail.count("last lines of the log:\nafter") == 1, detail
    assert detail.count(" in f30") == 1


def test_wait_ready_ends_with_companion_run(local: LocalBackend) -> None:
    local.start(served(local))
    ended = "import time; time.sleep(0.3); print('RuntimeError: Unsupported: head_dim=16'); raise SystemExit(0)"
    local.start(run_spec("r2", argv=python(ended)))

    with pytest.raises(TargetFailed, match=r"failed: exited 0: RuntimeError: Unsupported: head_dim=16$"):
        wait_ready(local, "r1", path="/unready", timeout_s=30, beside="r2")


def test_wait_ready_past_deadline_reports_missing_part(local: LocalBackend) -> None:
    local.start(served(local))
    wait_ready(local, "r1", timeout_s=30)

    with pytest.raises(TimedOut, match="/missing answers 404"):
        wait_ready(local, "r1", path="/missing", timeout_s=0.05)
    with pytest.raises(TimedOut, match=r"/unready answers 503 \(no key\)"):
        wait_ready(local, "r1", path="/unready", timeout_s=0.05)


@pytest.fixture
def impostor(local: LocalBackend, spawn: Spawn) -> str:
    """Somebody else's server: its URL."""
    (port,) = local.claim_ports(1, owner="Model/other")
    spawn([sys.executable, "-c", HTTP_COMPONENT, str(port)], stdout=subprocess.DEVNULL)
    until(lambda: port_owner(port), "the impostor to listen")
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("path", "why"),
    [("/ready", r"another process \(pid \d+\) still answers on its port"), ("/plain", r"port \d+ belongs to pid \d+")],
)
def test_wait_ready_rejects_answer_of_other_process(local: LocalBackend, impostor: str, path: str, why: str) -> None:
    local.start(run_spec(url=impostor))

    with pytest.raises(TimedOut, match=why):
        wait_ready(local, "r1", path=path, timeout_s=0.2)


def test_wait_ready_accepts_answer_without_pid_on_own_port(local: LocalBackend) -> None:
    local.start(served(local))

    assert wait_ready(local, "r1", path="/plain", timeout_s=30).phase is Phase.RUNNING


def test_wait_ready_of_a_stopped_run_fails(local: LocalBackend) -> None:
    local.start(run_spec(restart=NEVER))
    local.stop("r1")

    with pytest.raises(TargetFailed):
        wait_ready(local, "r1", timeout_s=1000)
    with pytest.raises(NotFound):
        wait_ready(local, "absent", timeout_s=1000)


def test_wait_ready_stops_when_interrupted(local: LocalBackend) -> None:
    local.start(run_spec(url="http://127.0.0.1:9"))
    interrupted = threading.Event()
    interrupted.set()

    with pytest.raises(KeyboardInterrupt):
        wait_ready(local, "r1", timeout_s=1000, interrupted=interrupted)


def test_wait_after_kick_ignores_earlier_death(local: LocalBackend) -> None:
    """A supervisor on a busy machine takes seconds to start the component again: longer than it was once waited for."""
    local.start(run_spec())
    state = kill_until_backoff(lambda: local.observe(["r1"])["r1"])
    assert state.shim_pid is not None
    os.kill(state.shim_pid, signal.SIGSTOP)
    slow = threading.Timer(2.5, os.kill, (state.shim_pid, signal.SIGCONT))
    slow.start()
    events: list[str] = []
    context: Any = SimpleNamespace(
        ctx=SimpleNamespace(interrupted=threading.Event()),
        backend=local,
        state=lambda uid: local.observe([uid])[uid],
        report=lambda op, text: None,
        event=lambda ref, kind, reason, text: events.append(reason),
    )
    kick(context, Op(1, Verb.KICK, "Model/m", "engine/0", "process-died", run="r1"), 0)
    assert wait_ready(local, "r1", timeout_s=30).phase is Phase.RUNNING
    assert events == ["Restarted"]
