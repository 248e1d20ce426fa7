"""Back-pressure, deadlines, drains, hot settings and balance, in a service with two replicas that nothing breaks."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal.client import AsyncInferenceClient, DeadlineExceeded, UnknownName
from tests.services.inference.running_service import ANSWER, CHAT, Service, build_service, later
from tests.services.processes import Processes, chat_text, engine_calls, release, script, wait_until


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Service]:
    processes = Processes(tmp_path_factory.mktemp("standing"))
    yield build_service(processes, tokenizer, replicas=2)
    processes.stop()


@pytest.fixture
def service(shared_service: Service) -> Service:
    shared_service.reset()
    return shared_service


def calls_of_each(service: Service) -> list[int]:
    return [len(engine_calls(engine)) for engine in service.engines]


def test_call_waits_until_worker_is_ready(service: Service) -> None:
    service.tell_router("/drain", worker_id="all")
    waiting = later(service.chat)
    service.wait_queued(1)
    assert not waiting.done()
    service.tell_router("/undrain", worker_id="tiny-1")
    assert waiting.result(30).status == 200
    service.wait_queued(0)


def test_full_queue_is_429(service: Service) -> None:
    service.tell_router("/configure", limits={"max_queued_requests": 3})
    service.tell_router("/drain", worker_id="all")
    waiting = [later(service.chat) for _ in range(3)]
    service.wait_queued(3)
    refused = service.chat()
    assert refused.status == 429 and refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"]
    service.tell_router("/undrain", worker_id="all")
    assert [future.result(30).status for future in waiting] == [200] * 3


def test_waiting_call_is_503_after_deadline(service: Service) -> None:
    service.tell_router("/configure", limits={"request_timeout_seconds": 0.3})
    service.tell_router("/drain", worker_id="all")
    answer = service.chat()
    assert answer.status == 503 and answer.json()["error"]["code"] == "no_worker_available"


def test_call_refused_by_all_workers_is_503_after_deadline(service: Service) -> None:
    for engine in service.engines:
        script(engine, fail=503)
    service.tell_router("/configure", limits={"request_timeout_seconds": 1})
    answer = service.chat()
    assert answer.status == 503 and answer.json()["error"]["code"] == "no_worker_available"
    assert min(calls_of_each(service)) >= 1


def test_call_refused_by_one_worker_is_served_by_other(service: Service) -> None:
    script(service.engines[0], fail=503)
    assert {service.chat().status for _ in range(8)} == {200}


def test_waiting_call_is_404_when_model_is_removed(service: Service) -> None:
    service.register(model="short", expected=1)
    waiting = later(service.chat, model="short")
    service.wait_queued(1)
    service.tell_router("/remove_model", model="short")
    assert waiting.result(30).json()["error"]["code"] == "model_not_found"


MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}),
        ("/v1/responses", {"input": "Hello", "stream": True}),
        ("/rl/start_session", {"task_id": "t"}),
    ],
)
def test_call_to_model_without_replicas_is_503(service: Service, path: str, body: dict[str, Any]) -> None:
    service.register(model="idle", expected=0)
    answer = service.gateway.call("POST", path, {"model": "idle", **body}, key=service.key)
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    error = answer.json()["error"]
    assert error["message"] == "the model 'idle' has no replicas: it is scaled to 0 or suspended"
    assert error["type"] == ("overloaded_error" if "messages" in path else "server_error")
    unknown = service.gateway.call("POST", path, {"model": "nope", **body}, key=service.key)
    assert unknown.status == 404


def test_model_without_replicas_is_unlisted_and_fails_waiters(service: Service) -> None:
    service.register(model="short", expected=1)
    waiting = later(service.chat, model="short")
    service.wait_queued(1)
    service.register(model="short", expected=0)
    assert waiting.result(30).json()["error"]["code"] == "model_has_no_replicas"
    assert service.gateway.call("GET", "/v1/models", key=service.key).json()["models"] == ["tiny"]
    assert service.gateway.call("GET", "/v1/models/short", key=service.key).status == 503
    assert service.gateway.call("GET", "/v1/models/nope", key=service.key).status == 404


def test_silent_call_is_504_and_cancelled_in_engine(service: Service) -> None:
    for engine in service.engines:
        script(engine, gate=0)
    service.tell_router("/configure", limits={"request_timeout_seconds": 0.3})
    answer = service.chat()
    assert answer.status == 504 and answer.json()["error"]["code"] == "progress_timeout"
    worker = next(engine for engine in service.engines if engine_calls(engine))
    assert engine_calls(worker, until="cancelled")
    assert sum(calls_of_each(service)) == 1  # a timeout is never tried again


def test_silent_stream_ends_with_error_event(service: Service) -> None:
    for engine in service.engines:
        script(engine, gate=2)
    service.tell_router("/configure", limits={"request_timeout_seconds": 1})
    events = list(service.stream_chat().events())
    assert chat_text(events) and events[-1]["error"]["code"] == "progress_timeout"


async def test_worker_loss_mid_event_sends_no_partial_event(service: Service) -> None:
    """A worker of its own kind: it answers /ready, and any call with one event and a half."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        else:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            events = b'data: {"choices": []}\n\ndata: {"cho'
            writer.write(head + f"{len(events):x}\r\n".encode() + events + b"\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    async with server:
        worker = {"worker_id": "raw-0", "worker_addr": address}
        await asyncio.to_thread(service.tell_router, "/register_model", model="raw", workers=[worker])
        events = await asyncio.to_thread(lambda: list(service.stream_chat(model="raw").events()))
    assert events[0] == {"choices": []}
    assert [event["error"]["code"] for event in events[1:]] == ["worker_lost"]


def test_slow_answer_with_progress_outlives_the_deadline(service: Service) -> None:
    for engine in service.engines:
        script(engine, token_ids=[70] * 8, delay_s=0.3)
    service.tell_router("/configure", limits={"request_timeout_seconds": 2})
    answer = service.chat()
    assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] * 0.3 > 2


def test_call_queued_in_busy_engine_does_not_time_out(service: Service) -> None:
    """Only one replica, whose engine holds one call and goes on with another: it is busy, not stuck."""
    service.tell_router("/drain", worker_id="tiny-1")
    service.tell_router("/configure", limits={"request_timeout_seconds": 1})
    script(service.engine, gate=0)
    held = later(service.chat)
    assert engine_calls(service.engine, until="any")
    script(service.engine, gate=None, token_ids=[70] * 12, delay_s=0.2)
    busy = service.chat()
    assert busy.status == 200 and busy.json()["usage"]["completion_tokens"] * 0.2 > 1
    release(service.engine)
    assert held.result(30).status == 200


def test_changed_limit_applies_to_next_call(service: Service) -> None:
    service.tell_router("/configure", limits={"max_body_bytes": 20})
    assert service.chat().status == 413


def test_changed_strategy_applies_to_next_call(service: Service) -> None:
    service.tell_router("/configure", strategy="prefix")
    assert [service.chat().status for _ in range(6)] == [200] * 6
    assert sorted(calls_of_each(service)) == [0, 6]
    service.tell_router("/configure", strategy="round_robin")
    for engine in service.engines:
        script(engine, reset=True)
    assert [service.chat().status for _ in range(6)] == [200] * 6
    assert calls_of_each(service) == [3, 3]


def test_drained_worker_finishes_running_calls_only(service: Service) -> None:
    service.tell_router("/drain", worker_id="tiny-1")
    script(service.engine, gate=2)
    stream = service.stream_chat()
    events = stream.events()
    seen = [next(events)]
    answer = service.gateway.call("POST", "/drain/tiny-0", key=service.key)
    assert answer.status == 200 and answer.json()["workers"][0]["state"] == "draining"
    service.tell_router("/undrain", worker_id="tiny-1")
    assert [service.chat().status for _ in range(4)] == [200] * 4
    assert calls_of_each(service) == [1, 4]
    release(service.engine)
    seen += events
    assert seen[-1] == "[DONE]" and chat_text(seen) == ANSWER


@pytest.mark.parametrize("streamed", [False, True])
def test_caller_disconnect_cancels_engine_call(service: Service, streamed: bool) -> None:
    service.tell_router("/drain", worker_id="tiny-1")
    script(service.engine, gate=2)
    if streamed:
        stream = service.stream_chat()
        next(stream.events())
        stream.close()
    else:
        connection = http.client.HTTPConnection("127.0.0.1", service.gateway.port)
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
        connection.request("POST", CHAT, body, {"Authorization": f"Bearer {service.key}"})
        engine_calls(service.engine, until="any")
        connection.close()
    assert engine_calls(service.engine, until="cancelled")[0]["ended"] == "cancelled"
    wait_until(lambda: service.proxy.call("GET", "/health").json()["in_flight"] == 0, what="nothing in flight")


def test_call_cut_before_first_token_is_retried_once(service: Service) -> None:
    for engine in service.engines:
        script(engine, cut_after=0)
    answer = service.chat()
    assert answer.status == 502 and answer.headers["x-areal-attempts"] == "2"
    script(service.engines[1], cut_after=None)
    assert [service.chat().status for _ in range(6)] == [200] * 6


def test_newly_registered_model_is_never_unknown(service: Service) -> None:
    for number in range(5):
        service.processes.register(service.router, service.proxy, model=f"m{number}")
        error = service.chat(model=f"m{number}").json()["error"]
        assert error["message"].endswith("here is 'tiny'")  # the data proxy's word, not the relay's


def test_incomplete_pool_is_unpublished_and_its_calls_wait(service: Service) -> None:
    service.register(service.proxies[0], expected=2)
    assert service.models() == []
    waiting = later(service.chat)
    service.wait_queued(1)
    service.register(*service.proxies, expected=2)
    assert waiting.result(30).status == 200
    assert service.models() == ["tiny"]


def test_unready_engine_makes_data_proxy_unready_with_reason(service: Service) -> None:
    script(service.engine, ready=False)
    wait_until(lambda: service.proxy.call("GET", "/ready").status == 503, what="not ready")
    assert "engine" in service.proxy.call("GET", "/ready").json()["reason"]
    assert service.proxy.call("GET", "/health").status == 200
    service.wait_state("tiny-0", "dead")
    script(service.engine, ready=True)
    service.wait_state("tiny-0", "ready")


def test_concurrent_calls_are_all_answered_and_shared(service: Service) -> None:
    for engine in service.engines:
        script(engine, flush=5)
    with ThreadPoolExecutor(64) as pool:
        statuses = list(pool.map(lambda _: service.chat().status, range(200)))
    assert statuses == [200] * 200
    assert min(calls_of_each(service)) > 40


def test_busy_worker_gets_fewer_calls(service: Service) -> None:
    service.tell_router("/drain", worker_id="tiny-1")
    script(service.engine, gate=1)
    streams = [service.stream_chat() for _ in range(3)]
    for stream in streams:
        next(stream.events())
    service.tell_router("/undrain", worker_id="tiny-1")
    assert [service.chat().status for _ in range(5)] == [200] * 5
    assert calls_of_each(service) == [3, 5]
    for stream in streams:
        stream.close()


def test_route_returns_target_of_call(service: Service) -> None:
    answer = service.router.call("POST", "/route", {"model": "tiny"}, key=service.key)
    assert answer.json()["worker_addr"] in {proxy.url for proxy in service.proxies}
    assert service.router.call("POST", "/route", {"session_id": "s-aaaaaaaa-1"}, key=service.key).status == 404
    service.tell_router("/drain", worker_id="all")
    assert service.router.call("POST", "/route", {"model": "tiny"}, key=service.key).status == 503


def test_workers_are_listed_with_their_load(service: Service) -> None:
    service.tell_router("/drain", worker_id="tiny-1")
    script(service.engine, gate=1)
    stream = service.stream_chat(max_tokens=100)
    next(stream.events())

    def busy() -> bool:
        workers = service.gateway.call("GET", "/workers", key=service.key).json()["workers"]
        worker = next(worker for worker in workers if worker["worker_id"] == "tiny-0")
        return bool(worker["in_flight"] == 1 and worker["in_flight_tokens"] > 100 and worker["version"] == 0)

    wait_until(busy, what="load reported")
    stream.close()


@pytest.mark.extended
async def test_client_of_missing_model_fails_unless_change_is_pending(processes: Processes, tokenizer: Path) -> None:
    service = build_service(processes, tokenizer)
    async with AsyncInferenceClient(service.gateway.url, service.key, model="tinny") as client:
        with pytest.raises(DeadlineExceeded, match="'tinny' is not served"):  # the router may hear of it yet
            await client.wait_ready(2.0)
        assert service.router.call("POST", "/synced", {}, key=service.key).status == 200
        with pytest.raises(UnknownName) as reported:
            await client.wait_ready(300.0)
        assert str(reported.value).endswith("model 'tinny' is not served; there is ['tiny'] (did you mean \"tiny\"?)")
        engine = processes.engine(tokenizer)
        proxy = processes.data_proxy(engine, tokenizer, model="tinny")
        service.proxy.kill()
        service.wait_state("tiny-0", "dead")
        with pytest.raises(DeadlineExceeded):
            await client.wait_ready(2.0)
        processes.register(service.router, proxy, model="tinny")
        await client.wait_ready(30.0)
