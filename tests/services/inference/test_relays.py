"""Several relay processes on one port, and how processes start or refuse to."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from areal.services.inference.gateway.__main__ import make_folder, shared_folder
from tests.services.inference.running_service import CHAT, Service, build_service
from tests.services.processes import (
    TERM,
    Process,
    Processes,
    Stream,
    call,
    chat_text,
    release,
    script,
    wait_until,
)
from tests.services.scripted_api import scripted_api

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def service(processes: Processes, tokenizer: Path) -> Service:
    return build_service(processes, tokenizer, "--relays", "2")


def relay_pids(gateway: Process, count: int = 2) -> set[int]:
    """The pids that answer on the port, once there are ``count`` of them."""
    seen: set[int] = set()

    def found() -> bool:
        seen.add(gateway.call("GET", "/health").json()["pid"])
        return len(seen) >= count

    wait_until(found, what=f"{count} relays")
    return seen


def test_relays_share_the_port_and_all_follow_the_router(service: Service, processes: Processes) -> None:
    pids = relay_pids(service.gateway)
    assert pids <= {child.pid for child in psutil.Process(service.gateway.popen.pid).children()}
    assert {service.chat().status for _ in range(20)} == {200}
    processes.register(service.router, service.proxy, model="second")
    assert {service.gateway.call("GET", "/v1/models/second", key=service.key).status for _ in range(3)} <= {200, 404}
    for pid in pids:
        wait_until(lambda pid=pid: _lists(service, pid, "second"), what=f"relay {pid} lists it")


def _lists(service: Service, pid: int, model: str) -> bool:
    """Whether the relay ``pid`` lists the model; asked over one connection, which stays with one relay."""
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", service.gateway.port, timeout=30)
    try:
        connection.request("GET", "/health")
        if json.loads(connection.getresponse().read())["pid"] != pid:
            return False
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {service.key}"})
        return model in json.loads(connection.getresponse().read())["models"]
    finally:
        connection.close()


def test_killed_relay_is_replaced_while_others_serve(service: Service) -> None:
    victim = min(relay_pids(service.gateway))
    os.kill(victim, 9)
    service.gateway.wait_log(r"relay \d ended with -9")
    wait_until(lambda: service.chat().status == 200, what="served")
    assert victim not in relay_pids(service.gateway)


def test_relay_metrics_are_summed(service: Service) -> None:
    relay_pids(service.gateway)
    for _ in range(12):
        assert service.chat().status == 200

    def added_up() -> bool:
        text = service.gateway.call("GET", "/metrics").body.decode()
        return 'areal_http_requests_total{route="/v1/chat/completions",status="200"} 12.0' in text

    wait_until(added_up, what="the last one is counted, which it is once it is answered")
    assert all(added_up() for _ in range(4)), "whichever relay is asked"


def test_killed_relay_drops_its_gauges(service: Service) -> None:
    script(service.engine, gate=1)
    stream = service.stream_chat()
    next(stream.events())
    assert b"areal_http_in_flight 1.0" in service.gateway.call("GET", "/metrics").body
    for pid in relay_pids(service.gateway):
        os.kill(pid, 9)
    wait_until(lambda: b"areal_http_in_flight 0.0" in service.gateway.call("GET", "/metrics").body, what="forgotten")
    stream.close()


def test_relays_drain_together_and_the_supervisor_exits_0(service: Service) -> None:
    script(service.engine, gate=2)
    streams = [Stream(service.gateway.port, CHAT, BODY, service.key) for _ in range(4)]
    for stream in streams:
        next(stream.events())
    pids = relay_pids(service.gateway)
    service.gateway.signal(TERM)
    service.gateway.wait_log("drains")
    release(service.engine)
    texts = [chat_text(list(stream.events())) for stream in streams]
    assert texts == ["Hello there, friend!"] * 4
    for stream in streams:
        stream.close()
    assert service.gateway.wait() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.extended
def test_killed_supervisor_takes_relays_and_folder_along(
    processes: Processes, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept := tmp_path / "files").mkdir()
    monkeypatch.setenv("TMPDIR", str(kept))
    gateway = build_service(processes, tokenizer, "--relays", "2").gateway
    pids = relay_pids(gateway)
    assert list(kept.iterdir())
    gateway.kill()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="relays gone")
    assert not list(kept.iterdir())


def test_folder_of_killed_gateway_is_removed_by_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, living = make_folder(), make_folder()
    for folder in (abandoned, living):
        os.utime(folder, (1, 1))
    with shared_folder(living):
        young = make_folder()
        assert set(tmp_path.iterdir()) == {living, young}
    assert set(tmp_path.iterdir()) == {young}


def test_relay_metrics_live_in_run_folder_and_start_empty(
    processes: Processes, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run := tmp_path / "run").mkdir()
    (run / "metrics").mkdir()
    (run / "metrics" / "counter_1.db").write_bytes(b"of one that was killed")
    monkeypatch.setenv("AREAL_RUN_DIR", str(run))
    gateway = build_service(processes, tokenizer, "--relays", "2").gateway
    relay_pids(gateway)
    assert (run / "metrics").is_dir() and not (run / "metrics" / "counter_1.db").exists()
    gateway.signal(TERM)
    assert gateway.wait() == 0
    assert not list(run.iterdir())


def test_supervisor_killed_while_starting_relays_leaves_none(service: Service) -> None:
    supervisor = psutil.Process(service.gateway.popen.pid)
    before = relay_pids(service.gateway)
    for pid in before:
        os.kill(pid, 9)
    fresh = wait_until(lambda: [c for c in supervisor.children() if c.pid not in before], what="a relay begins")
    service.gateway.kill()
    wait_until(lambda: not any(child.is_running() for child in fresh), what="relays gone")


@pytest.mark.extended
def test_successor_on_same_port_loses_no_call(service: Service, processes: Processes) -> None:
    port = str(service.gateway.port)
    successor = processes.gateway(service.router, "--port", port)
    service.gateway.signal(TERM)
    assert service.gateway.wait() == 0
    assert successor.port == service.gateway.port
    assert [service.chat().status for _ in range(10)] == [200] * 10


def test_idle_router_and_gateway_stay_within_sixty_megabytes(processes: Processes) -> None:
    router = processes.router()
    gateway = processes.gateway(router)
    for process in (router, gateway):
        assert psutil.Process(process.popen.pid).memory_info().rss < 60e6


ROUTER = ("-m", "areal.services.inference.router")
GATEWAY = ("-m", "areal.services.inference.gateway", "--router-url", "http://127.0.0.1:9")
WEIGHT_UPDATE = ("-m", "areal.services.weight_update")
DATA_PROXY = (
    *("-m", "areal.services.inference.data_proxy", "--model", "m", "--engine", "embedded"),
    *("--engine-url", "http://127.0.0.1:9"),
)


@pytest.mark.parametrize("argv", [ROUTER, GATEWAY, (*GATEWAY, "--relays", "2"), DATA_PROXY])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_public_bind_without_key_fails_to_start(processes: Processes, argv: tuple[str, ...], host: str) -> None:
    process = processes.spawn(*argv, "--port", "0", "--host", host)
    assert process.wait() == 2
    assert "without an admin key" in process.wait_log("error: .*")[0]
    process.wait_log("hint: .*--admin-key-file")


@pytest.mark.parametrize("argv", [ROUTER, GATEWAY, (*GATEWAY, "--relays", "2"), DATA_PROXY, WEIGHT_UPDATE])
def test_public_bind_with_short_key_fails_to_start(processes: Processes, argv: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcde\n")
    process = processes.spawn(*argv, "--port", "0", "--host", "0.0.0.0", "--admin-key-file", str(file))
    assert process.wait() == 2
    assert "15 characters" in process.wait_log("error: .*")[0]


def test_public_bind_protects_metrics_but_not_health(processes: Processes) -> None:
    router = processes.router("--host", "0.0.0.0")
    for path in ("/health", "/ready"):
        assert router.call("GET", path).status == 200
        assert router.call("GET", path, key="wrong").status == 200
        assert "in_flight" not in router.call("GET", path).json()
        assert "in_flight" in router.call("GET", path, key=processes.key).json()
    assert router.call("GET", "/metrics").status == 401
    assert router.call("GET", "/metrics", key=processes.key).status == 200


def test_taken_port_is_reported(processes: Processes) -> None:
    router = processes.router()
    second = processes.spawn(*ROUTER, "--port", str(router.port))
    assert second.wait() == 1
    second.wait_log(f"error: cannot listen on 127.0.0.1:{router.port}: Address already in use")


def test_supervisor_reports_port_held_by_other_program(processes: Processes) -> None:
    router = processes.router()
    gateway = processes.spawn(*GATEWAY, "--relays", "2", "--port", str(router.port))
    assert gateway.wait() == 1
    gateway.wait_log("error: cannot listen on")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "needs --tokenizer-path"),
        (("--tokenizer-path", "/nowhere"), "no tokenizer.json in /nowhere"),
        (("--tokenizer-path", "/nowhere", "--admin-key-file", "/none"), "cannot read the admin key file /none"),
    ],
)
def test_misconfigured_data_proxy_exits_with_reason(processes: Processes, flags: tuple[str, ...], message: str) -> None:
    process = processes.spawn(*DATA_PROXY, "--port", "0", *flags)
    assert process.wait() == 2
    process.wait_log(message)


def test_relay_without_router_is_alive_but_not_ready(processes: Processes) -> None:
    gateway = processes.spawn(*GATEWAY, "--port", "0", "--admin-key-file", str(processes.key_file))
    gateway.port = int(gateway.wait_log(r"listens on \S+ port (\d+)")[1])
    assert gateway.call("GET", "/health").status == 200
    ready = gateway.call("GET", "/ready")
    assert ready.status == 503 and "routing table" in ready.json()["reason"]
    answer = call(gateway.port, "POST", CHAT, BODY, key=processes.key)
    assert answer.status == 503 and answer.json()["error"]["code"] == "no_routing_table"


async def test_relay_asks_router_before_unknown_model_404(processes: Processes) -> None:
    """A router whose watch is out of order, but whose table can be fetched."""
    async with scripted_api() as api:
        worker = {"id": "w", "addr": api.url, "state": "ready"}
        models = {"tiny": {"workers": [worker], "expected": 1, "external": False, "created": 0}}
        table = {"epoch": "e", "serial": 1, "synced": True, "strategy": "auto", "limits": {}, "models": models}
        api.replies["GET /table"] = (200, table)
        api.replies[f"POST {CHAT}"] = (200, {"answer": 42})
        gateway = await asyncio.to_thread(lambda: processes.service("gateway", "--router-url", api.url))
        answer = await asyncio.to_thread(call, gateway.port, "POST", CHAT, BODY, key=processes.key)
        unknown = await asyncio.to_thread(call, gateway.port, "POST", CHAT, {**BODY, "model": "x"}, key=processes.key)
    assert answer.json() == {"answer": 42}
    assert unknown.status == 404


async def test_slow_stream_reader_slows_its_worker(processes: Processes) -> None:
    event = b"data: " + b"x" * 65526 + b"\n\n"
    events, written = 1024, 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(events):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as worker, scripted_api() as api:
        addr = f"http://127.0.0.1:{worker.sockets[0].getsockname()[1]}"
        entry = {"id": "w", "addr": addr, "state": "ready"}
        models = {"tiny": {"workers": [entry], "expected": 1, "external": False, "created": 0}}
        table = {"epoch": "e", "serial": 1, "synced": True, "strategy": "auto", "limits": {}, "models": models}
        api.replies["GET /table"] = (200, table)
        gateway = await asyncio.to_thread(lambda: processes.service("gateway", "--router-url", api.url))
        stream = await asyncio.to_thread(Stream, gateway.port, CHAT, BODY, processes.key)
        before = -1
        while before != written:  # until the worker is stuck
            before = written
            await asyncio.sleep(0.2)
        assert written < events / 2
        assert len(await asyncio.to_thread(stream.response.read)) == len(event) * events
        stream.close()


def test_loopback_services_work_without_key(processes: Processes, tokenizer: Path) -> None:
    engine = processes.engine(tokenizer)
    router = processes.service("router", "--health-period", "0.2", keyed=False)
    flags = ("--model", "tiny", "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", str(tokenizer))
    proxy = processes.service("data_proxy", *flags, keyed=False)
    gateway = processes.service("gateway", "--router-url", router.url, keyed=False)
    wait_until(lambda: proxy.call("GET", "/ready").status == 200)
    processes.register(router, proxy)
    assert call(gateway.port, "POST", CHAT, BODY).status == 200
    assert call(gateway.port, "POST", CHAT, BODY, headers={"Host": "evil.example"}).status == 403
