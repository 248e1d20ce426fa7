"""What is promised when something dies, leaves or comes back. Each test has a house of its own."""

from __future__ import annotations

import contextlib
import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.houses import ANSWER, House, build_house, later, refuses_connections
from tests.services.processes import TERM, Process, Processes, chat_text, engine_calls, release, script, wait_until


@pytest.fixture
def house(processes: Processes, tokenizer: Path) -> House:
    return build_house(processes, tokenizer)


def test_data_proxy_killed_costs_no_other_call(processes: Processes, tokenizer: Path) -> None:
    house = build_house(processes, tokenizer, replicas=2)
    for engine in house.engines:
        script(engine, delay_s=0.005)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(house.chat) for _ in range(20)]
        engine_calls(house.engine, until="any", count=3)
        house.proxy.kill()
        answers += [pool.submit(house.chat) for _ in range(40)]
        statuses = [answer.result().status for answer in answers]
    assert statuses == [200] * 60  # those that the dead one had begun were done again elsewhere
    house.wait_state("tiny-0", "dead")
    wait_until(lambda: house.chat().headers["x-areal-attempts"] == "1", what="the relay knows")


def test_data_proxy_killed_in_a_stream_is_an_error_event_and_ends_the_engines_work(house: House) -> None:
    script(house.engine, gate=3)
    events = house.stream_chat().events()
    seen = [next(events)]
    while not chat_text(seen):
        seen.append(next(events))
    house.proxy.kill()
    seen += events
    assert seen[-1]["error"]["code"] == "worker_lost" and seen[-1]["error"]["request_id"]
    assert engine_calls(house.engine, until="cancelled")[0]["ended"] == "cancelled"


def test_data_proxy_that_comes_back_at_its_address_is_used_again(house: House, tokenizer: Path) -> None:
    port = str(house.proxy.port)
    house.proxy.kill()
    house.wait_state("tiny-0", "dead")
    waiting = later(house.chat)
    house.wait_queued(1)
    house.processes.data_proxy(house.engine, tokenizer, "--port", port)
    assert waiting.result(60).status == 200
    house.wait_state("tiny-0", "ready")


def test_engine_that_dies_in_a_stream_is_an_error_event(house: House) -> None:
    script(house.engine, die_after=4)
    events = list(house.stream_chat().events())
    assert events[-1]["error"]["code"] == "engine_failed"
    assert chat_text(events)
    house.wait_state("tiny-0", "dead")


@pytest.mark.parametrize("which", ["proxy", "gateway"])
def test_sigterm_finishes_running_streams_and_exits_0(house: House, which: str) -> None:
    process: Process = getattr(house, which)
    script(house.engine, gate=2)
    stream = house.stream_chat()
    events = stream.events()
    seen = [next(events)]
    process.signal(TERM)
    wait_until(lambda: refuses_connections(process), what="the listener is closed")
    release(house.engine)
    seen += events
    assert seen[-1] == "[DONE]" and chat_text(seen) == ANSWER
    stream.close()
    assert process.wait() == 0


def test_sigterm_with_nothing_to_do_exits_0_at_once(house: House) -> None:
    for process in (house.router, house.gateway, house.proxy):  # the router while it is followed
        process.signal(TERM)
        assert process.wait(20) == 0


def test_sigterm_under_a_storm_of_connections_leaves_none_of_them_hanging(house: House) -> None:
    """While one stream still runs: whoever was accepted is answered or told to go, and so is who never spoke."""

    def storm() -> list[int]:
        answers = []
        while True:
            try:
                answers.append(house.gateway.call("GET", "/ready").status)
            except ConnectionRefusedError:
                return answers
            except (ConnectionError, http.client.BadStatusLine):
                continue

    script(house.engine, gate=2)
    stream = house.stream_chat()
    events = stream.events()
    next(events)
    silent = socket.create_connection(("127.0.0.1", house.gateway.port), timeout=20)
    storms = [later(storm) for _ in range(4)]
    wait_until(lambda: house.gateway.call("GET", "/health").json()["in_flight"] == 1, what="served in the storm")
    house.gateway.signal(TERM)
    assert {status for answers in storms for status in answers.result(20)} <= {200, 503}
    with contextlib.closing(silent):
        assert silent.recv(1) == b""
    release(house.engine)
    assert list(events)[-1] == "[DONE]"
    stream.close()
    assert house.gateway.wait(20) == 0


def test_sigterm_twice_ends_at_once(house: House) -> None:
    script(house.engine, gate=2)
    stream = house.stream_chat()
    next(stream.events())
    house.gateway.signal(TERM)
    house.gateway.wait_log("drains 1 requests")
    house.gateway.signal(TERM)
    assert house.gateway.wait() == 0
    stream.close()


def test_router_gone_leaves_the_relay_serving(house: House) -> None:
    house.router.kill()
    house.gateway.wait_log("lost the router")
    assert house.chat().status == 200
    assert house.gateway.call("GET", "/ready").status == 200
    assert house.gateway.call("GET", "/workers", key=house.key).status == 503


def test_router_restarted_is_told_by_the_relay_what_it_knew(house: House) -> None:
    house.tell_router("/synced")
    house.tell_router("/configure", strategy="prefix", limits={"max_queued_requests": 7})
    before = house.router.call("GET", "/table", key=house.key).json()
    house.router.kill()
    again = house.processes.router("--port", str(house.router.port))

    def table() -> dict[str, Any]:
        told: dict[str, Any] = again.call("GET", "/table", key=house.key).json()
        return told

    wait_until(lambda: table()["synced"], what="it is told")
    after = table()
    assert after.pop("epoch") != before.pop("epoch")
    for told in (before, after):
        told.pop("serial")
        told["models"]["tiny"].pop("created")
    assert after == before
    assert house.chat().status == 200
    assert again.call("POST", "/remove_model", {"model": "tiny"}, key=house.key).status == 200
    wait_until(lambda: house.models() == [], what="from now on it is believed")


def test_router_restarted_that_is_told_otherwise_goes_by_that(house: House) -> None:
    again = house.processes.router()
    house.processes.register(again, house.proxy, model="new")
    kept = house.router.call("GET", "/table", key=house.key).json()
    said = again.call("POST", "/recall", kept, key=house.key)
    assert said.json()["recalled"] is False
    assert list(again.call("GET", "/table", key=house.key).json()["models"]) == ["new"]
