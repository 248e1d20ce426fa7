"""What is promised when something dies, leaves or comes back. Each test has a service of its own."""

from __future__ import annotations

import contextlib
import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.services.inference.running_service import ANSWER, Service, build_service, later, refuses_connections
from tests.services.processes import TERM, Process, Processes, chat_text, engine_calls, release, script, wait_until


@pytest.fixture
def service(processes: Processes, tokenizer: Path) -> Service:
    return build_service(processes, tokenizer)


def test_killed_data_proxy_fails_no_other_call(processes: Processes, tokenizer: Path) -> None:
    service = build_service(processes, tokenizer, replicas=2)
    for engine in service.engines:
        script(engine, delay_s=0.005)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(service.chat) for _ in range(20)]
        engine_calls(service.engine, until="any", count=3)
        service.proxy.kill()
        answers += [pool.submit(service.chat) for _ in range(40)]
        statuses = [answer.result().status for answer in answers]
    assert statuses == [200] * 60  # those that the dead one had begun were done again elsewhere
    service.wait_state("tiny-0", "dead")
    wait_until(lambda: service.chat().headers["x-areal-attempts"] == "1", what="the relay knows")


def test_data_proxy_killed_mid_stream_sends_error_event(service: Service) -> None:
    script(service.engine, gate=3)
    events = service.stream_chat().events()
    seen = [next(events)]
    while not chat_text(seen):
        seen.append(next(events))
    service.proxy.kill()
    seen += events
    assert seen[-1]["error"]["code"] == "worker_lost" and seen[-1]["error"]["request_id"]
    assert engine_calls(service.engine, until="cancelled")[0]["ended"] == "cancelled"


@pytest.mark.extended
def test_data_proxy_restarted_at_its_address_is_used_again(service: Service, tokenizer: Path) -> None:
    port = str(service.proxy.port)
    service.proxy.kill()
    service.wait_state("tiny-0", "dead")
    waiting = later(service.chat)
    service.wait_queued(1)
    service.processes.data_proxy(service.engine, tokenizer, "--port", port)
    assert waiting.result(60).status == 200
    service.wait_state("tiny-0", "ready")


def test_engine_death_mid_stream_sends_error_event(service: Service) -> None:
    script(service.engine, die_after=4)
    events = list(service.stream_chat().events())
    assert events[-1]["error"]["code"] == "engine_failed"
    assert chat_text(events)
    service.wait_state("tiny-0", "dead")


@pytest.mark.parametrize("which", ["proxy", "gateway"])
def test_sigterm_finishes_running_streams_and_exits_0(service: Service, which: str) -> None:
    process: Process = getattr(service, which)
    script(service.engine, gate=2)
    stream = service.stream_chat()
    events = stream.events()
    seen = [next(events)]
    process.signal(TERM)
    wait_until(lambda: refuses_connections(process), what="the listener is closed")
    release(service.engine)
    seen += events
    assert seen[-1] == "[DONE]" and chat_text(seen) == ANSWER
    stream.close()
    assert process.wait() == 0


def test_sigterm_when_idle_exits_0_at_once(service: Service) -> None:
    for process in (service.router, service.gateway, service.proxy):  # the router while it is followed
        process.signal(TERM)
        assert process.wait(20) == 0


def test_sigterm_during_connection_storm_leaves_none_hanging(service: Service) -> None:
    """While one stream still runs: whoever was accepted is answered or told to go, and so is who never spoke."""

    def storm() -> list[int]:
        answers = []
        while True:
            try:
                answers.append(service.gateway.call("GET", "/ready").status)
            except ConnectionRefusedError:
                return answers
            except (ConnectionError, http.client.BadStatusLine):
                continue

    script(service.engine, gate=2)
    stream = service.stream_chat()
    events = stream.events()
    next(events)
    silent = socket.create_connection(("127.0.0.1", service.gateway.port), timeout=20)
    storms = [later(storm) for _ in range(4)]
    wait_until(lambda: service.gateway.call("GET", "/health").json()["in_flight"] == 1, what="served in the storm")
    service.gateway.signal(TERM)
    assert {status for answers in storms for status in answers.result(20)} <= {200, 503}
    with contextlib.closing(silent):
        assert silent.recv(1) == b""
    release(service.engine)
    assert list(events)[-1] == "[DONE]"
    stream.close()
    assert service.gateway.wait(20) == 0


def test_second_sigterm_exits_at_once(service: Service) -> None:
    script(service.engine, gate=2)
    stream = service.stream_chat()
    next(stream.events())
    service.gateway.signal(TERM)
    service.gateway.wait_log("drains 1 requests")
    service.gateway.signal(TERM)
    assert service.gateway.wait() == 0
    stream.close()


def test_gateway_serves_without_router(service: Service) -> None:
    assert service.chat().status == 200  # from here on the gateway's table has the worker
    service.router.kill()
    service.gateway.wait_log("lost the router")
    assert service.chat().status == 200
    assert service.gateway.call("GET", "/ready").status == 200
    assert service.gateway.call("GET", "/workers", key=service.key).status == 503


def test_last_table_is_used_until_new_router_is_synced(service: Service) -> None:
    service.tell_router("/synced")
    assert service.chat().status == 200
    service.router.kill()
    service.gateway.wait_log("lost the router")
    again = service.processes.router("--port", str(service.router.port))
    wait_until(lambda: service.gateway.call("GET", "/health").json()["router_connected"], what="the relay follows it")
    assert again.call("GET", "/models", key=service.key).json()["models"] == []
    assert service.chat().status == 200
    assert again.call("POST", "/synced", {}, key=service.key).status == 200
    wait_until(lambda: service.models() == [], what="the relay goes by the new router's table")
