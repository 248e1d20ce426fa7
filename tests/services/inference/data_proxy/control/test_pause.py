"""Pauses and versions through the gateway, against a real embedded engine with the example model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.data_proxy.control.houses import (
    COMPLETIONS,
    EXAMPLE,
    LONG,
    MODEL,
    RealHouse,
    build_real_house,
)
from tests.services.inference.houses import later
from tests.services.processes import Processes, Stream, wait_until

IDLE_S = 0.5


@pytest.fixture(scope="module")
def job_status(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHouse]:
    processes = Processes(tmp_path_factory.mktemp("real"))
    house = build_real_house(processes)
    limits = {"limits": {"request_timeout_seconds": IDLE_S}}
    assert house.router.call("POST", "/configure", limits, key=house.key).status == 200

    def limited() -> bool:
        table = house.gateway.call("GET", "/health").json()["table"]
        return bool(table["limits"]["request_timeout_seconds"] == IDLE_S)

    wait_until(limited, what="the deadline holds")
    yield house
    processes.stop()


@pytest.fixture
def house(job_status: RealHouse) -> Iterator[RealHouse]:
    job_status.control("/set_version/all", {"version": 0, "force": True})
    yield job_status
    job_status.control("/continue_generation/all")


def read_all(stream: Stream) -> list[Any]:
    try:
        return list(stream.events())
    finally:
        stream.close()


def versions_of(events: list[Any]) -> list[int]:
    return [version for event in events[:-1] for choice in event["choices"] for version in choice.get("versions", ())]


def paused_in_the_middle(house: RealHouse) -> Future[list[Any]]:
    """A stream that has some of its tokens and is held still."""
    for _ in range(20):
        house.control("/pause_generation/all")
        before = house.tokens()
        events = later(lambda: read_all(house.stream()))
        wait_until(lambda: _engine_holds(house, 1), what="the engine has the request")
        house.control("/continue_generation/all")
        house.control("/pause_generation/all")
        if 0 < house.tokens() - before < LONG["max_tokens"]:
            return events
        house.control("/continue_generation/all")
        events.result(30)
    raise AssertionError("never caught a stream in the middle")


def _engine_holds(house: RealHouse, count: int) -> bool:
    stats = house.engine.call("GET", "/stats", key=house.key).json()
    return bool(stats["running"] + stats["waiting"] == count)


def test_pause_in_the_middle_holds_the_stream_longer_than_the_deadline_and_it_ends_whole(house: RealHouse) -> None:
    events = paused_in_the_middle(house)
    tokens = house.tokens()
    with pytest.raises(TimeoutError):  # held still, and not late: the deadline passes several times
        events.result(IDLE_S * 4)
    assert house.tokens() == tokens
    house.control("/continue_generation/all")
    got = events.result(30)
    assert got[-1] == "[DONE]" and not any("error" in event for event in got[:-1])
    assert len(versions_of(got)) == LONG["max_tokens"]


def test_tokens_keep_the_version_that_sampled_them_across_a_weight_load(house: RealHouse) -> None:
    events = paused_in_the_middle(house)
    load = {"path": str(EXAMPLE), "version": 3}
    assert house.engine.call("POST", "/load_weights", load, key=house.key).status == 200
    house.control("/continue_generation/all")
    versions = versions_of(events.result(30))
    assert versions == sorted(versions) and set(versions) == {0, 3} and len(versions) == LONG["max_tokens"]


def test_set_version_while_paused_stamps_what_follows(house: RealHouse) -> None:
    events = paused_in_the_middle(house)
    answer = house.ask("POST", "/set_version/all", {"version": 9})
    assert (answer.status, answer.json()["version"]) == (200, 9)
    house.control("/continue_generation/all")
    assert set(versions_of(events.result(30))) == {0, 9}
    assert house.ask("GET", "/get_version/all").json()["version"] == 9
    wait_until(lambda: house.workers()[0]["version"] == 9, what="the router learns the version")


def test_call_that_comes_during_a_pause_waits_and_is_answered_after_it(house: RealHouse) -> None:
    house.control("/pause_generation/all")
    wait_until(lambda: house.workers()[0]["paused"], what="the router learns of the pause")
    assert house.workers()[0]["state"] == "ready"
    waiting = later(house.ask, "POST", COMPLETIONS, {**LONG, "max_tokens": 4})
    with pytest.raises(TimeoutError):
        waiting.result(IDLE_S * 3)
    house.control("/continue_generation/all")
    assert waiting.result(30).status == 200


def test_controls_are_idempotent_and_name_the_worker(house: RealHouse) -> None:
    for path in ("/pause_generation", "/pause_generation", "/continue_generation", "/continue_generation"):
        (result,) = house.control(f"{path}/{MODEL}-0")
        assert result["worker_addr"] == house.proxy.url and result["status"] == 200


def test_released_memory_takes_no_calls_until_it_is_resumed(house: RealHouse) -> None:
    before = house.ask("POST", COMPLETIONS, {**LONG, "max_tokens": 4, "seed": 1}).json()["choices"]
    for _ in range(2):
        (result,) = house.control("/release_memory_occupation/all")
        assert (result["status"], result["ok"]) == (200, True)
    refused = house.proxy.call("POST", COMPLETIONS, {**LONG, "max_tokens": 4}, key=house.processes.key)
    assert (refused.status, refused.json()["error"]["code"]) == (503, "memory_released")
    house.control("/resume_memory_occupation/all")
    again = {**LONG, "max_tokens": 4, "seed": 1}
    assert (
        wait_until(lambda: (answer := house.ask("POST", COMPLETIONS, again)).status == 200 and answer).json()["choices"]
        == before
    )


def test_response_format_that_the_engine_has_not_got_is_400_and_says_why(house: RealHouse) -> None:
    answer = house.ask("POST", COMPLETIONS, {**LONG, "response_format": {"type": "json_object"}})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "response_format")
    assert "no grammars" in error["message"] and "tokenizer.json" in error["message"]


def test_answer_that_the_context_has_no_room_for_is_400(house: RealHouse) -> None:
    answer = house.ask("POST", COMPLETIONS, {**LONG, "max_tokens": 123})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert house.ask("POST", COMPLETIONS, {**LONG, "max_tokens": 122}).status == 200


def test_models_say_their_context_and_where_they_come_from(house: RealHouse) -> None:
    (listed,) = house.ask("GET", "/v1/models").json()["data"]
    assert (listed["max_model_len"], Path(listed["root"])) == (128, EXAMPLE)
    assert house.ask("GET", f"/v1/models/{MODEL}").json() == listed


@pytest.mark.parametrize("version", [None, -1, "3", 1.5, True, 2**63])
def test_version_that_is_none_is_refused_before_any_worker_is_asked(house: RealHouse, version: Any) -> None:
    for process in (house.gateway, house.proxy):
        path = "/set_version/all" if process is house.gateway else "/set_version"
        answer = process.call("POST", path, {"version": version}, key=house.processes.key)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "version")
    assert house.ask("GET", "/get_version/all").json()["version"] == 0


def test_version_only_grows_unless_it_is_forced(house: RealHouse) -> None:
    assert house.ask("POST", "/set_version/all", {"version": 5}).status == 200
    assert house.ask("POST", "/set_version/all", {"version": 5}).status == 200
    for process, path in ((house.gateway, "/set_version/all"), (house.proxy, "/set_version")):
        answer = process.call("POST", path, {"version": 4}, key=house.processes.key)
        assert (answer.status, answer.json()["error"]["code"]) == (409, "version_not_growing")
    assert house.ask("POST", "/set_version/all", {"version": 0, "force": "yes"}).status == 400
    assert house.ask("GET", "/get_version/all").json()["version"] == 5
    assert house.ask("POST", "/set_version/all", {"version": 0, "force": True}).status == 200
    assert house.ask("GET", "/get_version/all").json()["version"] == 0


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation", "/weights/release"])
def test_control_with_a_body_that_is_no_object_is_400_and_reaches_no_worker(house: RealHouse, path: str) -> None:
    answer = house.ask("POST", f"{path}/all", [1])
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_unknown_worker_is_404_and_no_key_is_401(house: RealHouse) -> None:
    assert house.ask("POST", "/pause_generation/nobody", {}).status == 404
    assert house.ask("GET", "/get_version/nobody").status == 404
    for process in (house.gateway, house.proxy):
        path = "/pause_generation/all" if process is house.gateway else "/pause_generation"
        assert process.call("POST", path, {}).status == 401
        assert process.call("POST", path, {}, key="wrong").status == 403
