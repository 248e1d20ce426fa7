"""What is promised when something dies, leaves, comes back or is too slow."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.conftest import CHAT, House, build_house
from tests.services.processes import (
    TERM,
    Answer,
    Process,
    Processes,
    Stream,
    call,
    chat_text,
    engine_calls,
    release,
    script,
    wait_ready,
    wait_until,
)

ANSWER = "Hello there, friend!"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def chat(gateway: Process, key: str, **more: Any) -> Answer:
    return call(gateway.port, "POST", CHAT, {**BODY, **more}, key=key)


def later(work: Any, *args: Any, **kwargs: Any) -> Future[Any]:
    """Run a blocking call beside the test."""
    future: Future[Any] = Future()

    def body() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=body, daemon=True, name="later").start()
    return future


def workers(router: Process, key: str) -> dict[str, dict[str, Any]]:
    return {worker["worker_id"]: worker for worker in router.call("GET", "/workers", key=key).json()["workers"]}


def wait_state(router: Process, key: str, worker_id: str, state: str) -> None:
    wait_until(lambda: workers(router, key)[worker_id]["state"] == state, what=f"{worker_id} {state}")


def configure(house: House, **what: Any) -> None:
    """Change the router's settings and return once the relay goes by them."""
    answer = house.router.call("POST", "/configure", what, key=house.key)
    assert answer.status == 200
    wait_serial(house, answer.json()["serial"])


def drain(house: House, worker_id: str, verb: str = "drain") -> None:
    wait_serial(house, house.router.call("POST", f"/{verb}", {"worker_id": worker_id}, key=house.key).json()["serial"])


def wait_serial(house: House, serial: int) -> None:
    wait_until(
        lambda: house.gateway.call("GET", "/health").json()["table"]["serial"] >= serial, what=f"serial {serial}"
    )


def refuses_connections(process: Process) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", process.port)) == errno.ECONNREFUSED


def routed_models(gateway: Process, key: str) -> list[str]:
    models: list[str] = gateway.call("GET", "/v1/models", key=key).json()["models"]
    return models


@pytest.fixture
def house(processes: Processes, tokenizer: Path) -> House:
    return build_house(processes, tokenizer)


@pytest.fixture
def pair(processes: Processes, tokenizer: Path) -> tuple[House, Process, Process]:
    """A house with a second replica."""
    house = build_house(processes, tokenizer)
    engine = processes.engine(tokenizer)
    proxy = processes.data_proxy(engine, tokenizer)
    processes.register(house.router, house.proxy, proxy)
    return house, engine, proxy


def test_data_proxy_killed_costs_no_other_call(pair: tuple[House, Process, Process]) -> None:
    house, engine, _ = pair
    for each in (house.engine, engine):
        script(each, delay_s=0.005)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(chat, house.gateway, house.key) for _ in range(20)]
        engine_calls(house.engine, until="any", count=3)
        house.proxy.kill()
        answers += [pool.submit(chat, house.gateway, house.key) for _ in range(40)]
        statuses = [answer.result().status for answer in answers]
    assert statuses == [200] * 60  # those that the dead one had begun were done again elsewhere
    wait_state(house.router, house.key, "tiny-0", "dead")
    assert chat(house.gateway, house.key).headers["x-areal-attempts"] == "1"


def test_data_proxy_killed_in_a_stream_is_an_error_event_and_ends_the_engines_work(house: House) -> None:
    script(house.engine, gate=3)
    stream = Stream(house.gateway.port, CHAT, BODY, house.key)
    events = stream.events()
    seen = [next(events)]
    while not chat_text(seen):
        seen.append(next(events))
    house.proxy.kill()
    seen += events
    assert seen[-1]["error"]["code"] == "worker_lost" and seen[-1]["error"]["request_id"]
    assert engine_calls(house.engine, until="cancelled")[0]["ended"] == "cancelled"


def test_engine_that_dies_before_its_first_token_is_done_again_elsewhere(pair: tuple[House, Process, Process]) -> None:
    house, engine, _ = pair
    script(house.engine, cut_after=0)
    script(engine, cut_after=0)
    answer = chat(house.gateway, house.key)
    assert answer.status == 502 and answer.headers["x-areal-attempts"] == "2"  # once, not for ever
    script(engine, cut_after=None)
    answers = [chat(house.gateway, house.key) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6


def test_engine_that_dies_in_a_stream_is_an_error_event(house: House) -> None:
    script(house.engine, die_after=4)
    events = list(Stream(house.gateway.port, CHAT, BODY, house.key).events())
    assert events[-1]["error"]["code"] == "engine_failed"
    assert chat_text(events)
    wait_state(house.router, house.key, "tiny-0", "dead")


def test_call_waits_for_a_worker_and_is_served_when_one_comes(house: House, processes: Processes) -> None:
    drain(house, "tiny-0")
    waiting = later(chat, house.gateway, house.key)
    wait_until(lambda: b"areal_gateway_queued 1.0" in house.gateway.call("GET", "/metrics").body, what="queued")
    assert not waiting.done()
    drain(house, "tiny-0", "undrain")
    assert waiting.result(30).status == 200


def test_queue_full_is_429_and_below_it_nothing_is_shed(house: House) -> None:
    configure(house, limits={"max_queued_requests": 3})
    drain(house, "tiny-0")
    waiting = [later(chat, house.gateway, house.key) for _ in range(3)]
    wait_until(lambda: b"areal_gateway_queued 3.0" in house.gateway.call("GET", "/metrics").body, what="queued")
    refused = chat(house.gateway, house.key)
    assert refused.status == 429 and refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"]
    drain(house, "tiny-0", "undrain")
    assert [future.result(30).status for future in waiting] == [200] * 3


def test_call_that_waits_in_vain_is_503_after_the_deadline(house: House) -> None:
    configure(house, limits={"request_timeout_seconds": 0.3})
    drain(house, "tiny-0")
    answer = chat(house.gateway, house.key)
    assert answer.status == 503 and answer.json()["error"]["code"] == "no_worker_available"


def test_silence_longer_than_the_deadline_is_504_and_ends_the_engines_work(house: House) -> None:
    script(house.engine, gate=0)
    configure(house, limits={"request_timeout_seconds": 0.3})
    answer = chat(house.gateway, house.key)
    assert answer.status == 504 and answer.json()["error"]["code"] == "progress_timeout"
    assert engine_calls(house.engine, until="cancelled")


def test_slow_answer_with_progress_outlives_the_deadline(house: House) -> None:
    configure(house, limits={"request_timeout_seconds": 2})
    script(house.engine, token_ids=[70] * 8, delay_s=0.3)
    answer = chat(house.gateway, house.key)
    assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] * 0.3 > 2


def test_limit_changed_while_running_holds_for_the_next_call(house: House) -> None:
    assert chat(house.gateway, house.key).status == 200
    configure(house, limits={"max_body_bytes": 20})
    assert chat(house.gateway, house.key).status == 413


def test_strategy_changed_while_running_holds_for_the_next_call(pair: tuple[House, Process, Process]) -> None:
    house, engine, _ = pair

    def shares() -> list[int]:
        for each in (house.engine, engine):
            script(each, reset=True)
        assert [chat(house.gateway, house.key).status for _ in range(6)] == [200] * 6
        return [len(engine_calls(each)) for each in (house.engine, engine)]

    configure(house, strategy="prefix")
    assert sorted(shares()) == [0, 6]
    configure(house, strategy="round_robin")
    assert shares() == [3, 3]


def test_worker_drained_gets_no_new_calls_and_finishes_what_it_has(pair: tuple[House, Process, Process]) -> None:
    house, engine, _ = pair
    drain(house, "tiny-1")
    script(house.engine, gate=2)
    stream = Stream(house.gateway.port, CHAT, BODY, house.key)
    events = stream.events()
    seen = [next(events)]
    answer = house.gateway.call("POST", "/drain/tiny-0", key=house.key)
    assert answer.status == 200 and answer.json()["workers"][0]["state"] == "draining"
    drain(house, "tiny-1", "undrain")
    assert [chat(house.gateway, house.key).status for _ in range(4)] == [200] * 4
    assert (len(engine_calls(house.engine)), len(engine_calls(engine))) == (1, 4)
    release(house.engine)
    seen += events
    assert seen[-1] == "[DONE]" and chat_text(seen) == ANSWER


@pytest.mark.parametrize("which", ["proxy", "gateway"])
def test_sigterm_finishes_running_streams_and_exits_0(house: House, which: str) -> None:
    process: Process = getattr(house, which)
    script(house.engine, gate=2)
    stream = Stream(house.gateway.port, CHAT, BODY, house.key)
    events = stream.events()
    seen = [next(events)]
    process.signal(TERM)
    process.wait_log("drains 1 requests")
    wait_until(lambda: refuses_connections(process), what="the listener is closed")
    release(house.engine)
    seen += events
    assert seen[-1] == "[DONE]" and chat_text(seen) == ANSWER
    stream.close()
    assert process.wait() == 0


def test_sigterm_with_nothing_to_do_exits_0_at_once(house: House) -> None:
    for process in (house.gateway, house.proxy, house.router):
        process.signal(TERM)
        assert process.wait() == 0


def test_sigterm_twice_ends_at_once(house: House) -> None:
    script(house.engine, gate=2)
    stream = Stream(house.gateway.port, CHAT, BODY, house.key)
    next(stream.events())
    house.gateway.signal(TERM)
    house.gateway.wait_log("drains 1 requests")
    house.gateway.signal(TERM)
    assert house.gateway.wait() == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_caller_that_goes_away_ends_the_engines_work(house: House, streamed: bool) -> None:
    script(house.engine, gate=2)
    if streamed:
        stream = Stream(house.gateway.port, CHAT, BODY, house.key)
        next(stream.events())
        stream.close()
    else:
        import http.client
        import json

        connection = http.client.HTTPConnection("127.0.0.1", house.gateway.port)
        connection.request("POST", CHAT, json.dumps(BODY), {"Authorization": f"Bearer {house.key}"})
        engine_calls(house.engine, until="any")
        connection.close()
    assert engine_calls(house.engine, until="cancelled")[0]["ended"] == "cancelled"
    wait_until(lambda: house.proxy.call("GET", "/health").json()["in_flight"] == 0, what="nothing in flight")


def test_router_gone_leaves_the_relay_serving(house: House) -> None:
    house.router.kill()
    house.gateway.wait_log("lost the router")
    assert chat(house.gateway, house.key).status == 200
    assert house.gateway.call("GET", "/ready").status == 200
    assert house.gateway.call("GET", "/workers", key=house.key).status == 502


def test_router_restarted_empty_takes_nothing_from_the_relay_until_it_is_synced(
    house: House, processes: Processes
) -> None:
    port = house.router.port
    house.router.kill()
    again = processes.spawn(
        *("-m", "areal.services.inference.router", "--port", str(port), "--admin-key-file", str(processes.key_file))
    )
    again.port = port
    wait_ready(again)
    before = again.call("GET", "/table", key=house.key).json()
    assert before["models"] == {} and before["synced"] is False
    again.call("POST", "/register_model", {"model": "other", "workers": []}, key=house.key)
    processes.register(again, house.proxy, model="new")
    wait_until(lambda: "new" in routed_models(house.gateway, house.key), what="the new epoch is followed")
    assert set(routed_models(house.gateway, house.key)) == {"new", "tiny"}
    assert chat(house.gateway, house.key).status == 200
    again.call("POST", "/synced", {}, key=house.key)
    wait_until(lambda: routed_models(house.gateway, house.key) == ["new"], what="synced")
    assert chat(house.gateway, house.key).status == 404


def test_model_registered_a_moment_ago_is_never_unknown(house: House, processes: Processes) -> None:
    for number in range(5):
        processes.register(house.router, house.proxy, model=f"m{number}")
        answer = chat(house.gateway, house.key, model=f"m{number}")
        assert answer.json()["error"]["message"].endswith("here is 'tiny'")  # the data proxy's 404, not the relay's


def test_pool_short_of_its_expected_replicas_is_not_published_and_its_calls_wait(
    house: House, processes: Processes, tokenizer: Path
) -> None:
    processes.register(house.router, house.proxy, expected=2)
    wait_until(lambda: routed_models(house.gateway, house.key) == [], what="unlisted")
    waiting = later(chat, house.gateway, house.key)
    second = processes.data_proxy(house.engine, tokenizer)
    assert not waiting.done()
    processes.register(house.router, house.proxy, second, expected=2)
    assert waiting.result(30).status == 200
    assert routed_models(house.gateway, house.key) == ["tiny"]


def test_data_proxy_that_comes_back_at_its_address_is_used_again(
    house: House, processes: Processes, tokenizer: Path
) -> None:
    port = house.proxy.port
    house.proxy.kill()
    wait_state(house.router, house.key, "tiny-0", "dead")
    waiting = later(chat, house.gateway, house.key)
    processes.data_proxy(house.engine, tokenizer, "--port", str(port))
    assert waiting.result(60).status == 200
    assert workers(house.router, house.key)["tiny-0"]["state"] == "ready"


def test_engine_not_ready_makes_its_data_proxy_not_ready_with_the_reason(house: House) -> None:
    script(house.engine, ready=False)
    wait_until(lambda: house.proxy.call("GET", "/ready").status == 503, what="not ready")
    assert "engine" in house.proxy.call("GET", "/ready").json()["reason"]
    assert house.proxy.call("GET", "/health").status == 200
    wait_state(house.router, house.key, "tiny-0", "dead")
    script(house.engine, ready=True)
    wait_state(house.router, house.key, "tiny-0", "ready")


def test_many_calls_at_once_all_answer(pair: tuple[House, Process, Process]) -> None:
    house, engine, _ = pair
    for each in (house.engine, engine):
        script(each, flush=5)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: chat(house.gateway, house.key).status, range(256)))
    assert answers == [200] * 256
    shares = [len(engine_calls(each)) for each in (house.engine, engine)]
    assert min(shares) > 256 / 5  # balanced, if not evenly
