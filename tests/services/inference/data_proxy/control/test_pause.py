"""Pauses and versions through the gateway, against a real embedded engine with the example model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.data_proxy.control.embedded_service import (
    COMPLETIONS,
    EXAMPLE,
    LONG,
    MODEL,
    EmbeddedService,
    build_embedded_service,
)
from tests.services.inference.running_service import later
from tests.services.processes import Processes, Stream, wait_until

IDLE_S = 0.5


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    processes = Processes(tmp_path_factory.mktemp("real"))
    service = build_embedded_service(processes)
    limits = {"limits": {"request_timeout_seconds": IDLE_S}}
    assert service.router.call("POST", "/configure", limits, key=service.key).status == 200

    def limited() -> bool:
        table = service.gateway.call("GET", "/health").json()["table"]
        return bool(table["limits"]["request_timeout_seconds"] == IDLE_S)

    wait_until(limited, what="the deadline holds")
    yield service
    processes.stop()


@pytest.fixture
def service(shared_service: EmbeddedService) -> Iterator[EmbeddedService]:
    shared_service.control("/set_version/all", {"version": 0, "force": True})
    yield shared_service
    shared_service.control("/continue_generation/all")


def read_all(stream: Stream) -> list[Any]:
    try:
        return list(stream.events())
    finally:
        stream.close()


def versions_of(events: list[Any]) -> list[int]:
    return [version for event in events[:-1] for choice in event["choices"] for version in choice.get("versions", ())]


def paused_in_the_middle(service: EmbeddedService) -> Future[list[Any]]:
    """A stream that has some of its tokens and is held still."""
    for _ in range(20):
        service.control("/pause_generation/all")
        before = service.tokens()
        events = later(lambda: read_all(service.stream()))
        wait_until(lambda: _engine_holds(service, 1), what="the engine has the request")
        service.control("/continue_generation/all")
        service.control("/pause_generation/all")
        if 0 < service.tokens() - before < LONG["max_tokens"]:
            return events
        service.control("/continue_generation/all")
        events.result(30)
    raise AssertionError("never caught a stream in the middle")


def _engine_holds(service: EmbeddedService, count: int) -> bool:
    stats = service.engine.call("GET", "/stats", key=service.key).json()
    return bool(stats["running"] + stats["waiting"] == count)


def test_paused_stream_outlives_deadline_and_completes(
    service: EmbeddedService,
) -> None:
    events = paused_in_the_middle(service)
    tokens = service.tokens()
    with pytest.raises(TimeoutError):  # held still, and not late: the deadline passes several times
        events.result(IDLE_S * 4)
    assert service.tokens() == tokens
    service.control("/continue_generation/all")
    got = events.result(30)
    assert got[-1] == "[DONE]" and not any("error" in event for event in got[:-1])
    assert len(versions_of(got)) == LONG["max_tokens"]


def test_tokens_keep_sampled_version_across_weight_load(service: EmbeddedService) -> None:
    events = paused_in_the_middle(service)
    load = {"path": str(EXAMPLE), "version": 3}
    assert service.engine.call("POST", "/load_weights", load, key=service.key).status == 200
    service.control("/continue_generation/all")
    versions = versions_of(events.result(30))
    assert versions == sorted(versions) and set(versions) == {0, 3} and len(versions) == LONG["max_tokens"]


def test_set_version_while_paused_stamps_later_tokens(service: EmbeddedService) -> None:
    events = paused_in_the_middle(service)
    answer = service.ask("POST", "/set_version/all", {"version": 9})
    assert (answer.status, answer.json()["version"]) == (200, 9)
    service.control("/continue_generation/all")
    assert set(versions_of(events.result(30))) == {0, 9}
    assert service.ask("GET", "/get_version/all").json()["version"] == 9
    wait_until(lambda: service.workers()[0]["version"] == 9, what="the router learns the version")


def test_call_during_pause_waits_for_resume(service: EmbeddedService) -> None:
    service.control("/pause_generation/all")
    wait_until(lambda: service.workers()[0]["paused"], what="the router learns of the pause")
    assert service.workers()[0]["state"] == "ready"
    waiting = later(service.ask, "POST", COMPLETIONS, {**LONG, "max_tokens": 4})
    with pytest.raises(TimeoutError):
        waiting.result(IDLE_S * 3)
    service.control("/continue_generation/all")
    assert waiting.result(30).status == 200


def test_controls_are_idempotent_and_name_the_worker(service: EmbeddedService) -> None:
    for path in ("/pause_generation", "/pause_generation", "/continue_generation", "/continue_generation"):
        (result,) = service.control(f"{path}/{MODEL}-0")
        assert result["worker_addr"] == service.proxy.url and result["status"] == 200


def test_released_memory_takes_no_calls_until_resume(service: EmbeddedService) -> None:
    before = service.ask("POST", COMPLETIONS, {**LONG, "max_tokens": 4, "seed": 1}).json()["choices"]
    for _ in range(2):
        (result,) = service.control("/release_memory_occupation/all")
        assert (result["status"], result["ok"]) == (200, True)
    refused = service.proxy.call("POST", COMPLETIONS, {**LONG, "max_tokens": 4}, key=service.processes.key)
    assert (refused.status, refused.json()["error"]["code"]) == (503, "memory_released")
    service.control("/resume_memory_occupation/all")
    again = {**LONG, "max_tokens": 4, "seed": 1}
    assert (
        wait_until(lambda: (answer := service.ask("POST", COMPLETIONS, again)).status == 200 and answer).json()[
            "choices"
        ]
        == before
    )


def test_response_format_without_tokens_in_vocabulary_is_400(service: EmbeddedService) -> None:
    asked = {**LONG, "ignore_eos": False, "response_format": {"type": "json_object"}}
    answer = service.ask("POST", COMPLETIONS, asked)
    assert (answer.status, "this model has no tokens" in answer.json()["error"]["message"]) == (400, True), answer.body


def test_answer_matches_the_regular_expression_of_the_call(service: EmbeddedService) -> None:
    answer = service.ask("POST", COMPLETIONS, {**LONG, "ignore_eos": False, "guided_regex": "[0-3]{3}=[4-9]"})
    assert re.fullmatch("[0-3]{3}=[4-9]", answer.json()["choices"][0]["text"]), answer.body


def test_max_tokens_beyond_context_is_400(service: EmbeddedService) -> None:
    answer = service.ask("POST", COMPLETIONS, {**LONG, "max_tokens": 123})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert service.ask("POST", COMPLETIONS, {**LONG, "max_tokens": 122}).status == 200


def test_models_list_context_length_and_root(service: EmbeddedService) -> None:
    (listed,) = service.ask("GET", "/v1/models").json()["data"]
    assert (listed["max_model_len"], Path(listed["root"])) == (128, EXAMPLE)
    assert service.ask("GET", f"/v1/models/{MODEL}").json() == listed


@pytest.mark.parametrize("version", [None, -1, "3", 1.5, True, 2**63])
def test_invalid_version_is_refused_before_reaching_workers(service: EmbeddedService, version: Any) -> None:
    for process in (service.gateway, service.proxy):
        path = "/set_version/all" if process is service.gateway else "/set_version"
        answer = process.call("POST", path, {"version": version}, key=service.processes.key)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "version")
    assert service.ask("GET", "/get_version/all").json()["version"] == 0


def test_version_only_grows_unless_it_is_forced(service: EmbeddedService) -> None:
    assert service.ask("POST", "/set_version/all", {"version": 5}).status == 200
    assert service.ask("POST", "/set_version/all", {"version": 5}).status == 200
    for process, path in ((service.gateway, "/set_version/all"), (service.proxy, "/set_version")):
        answer = process.call("POST", path, {"version": 4}, key=service.processes.key)
        assert (answer.status, answer.json()["error"]["code"]) == (409, "version_not_growing")
    assert service.ask("POST", "/set_version/all", {"version": 0, "force": "yes"}).status == 400
    for process, path in ((service.gateway, "/set_version/all"), (service.proxy, "/set_version")):
        forced, named = {"version": 0, "force": True}, {"Idempotency-Key": "k"}
        answer = process.call("POST", path, forced, key=service.processes.key, headers=named)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert service.ask("GET", "/get_version/all").json()["version"] == 5
    assert service.ask("POST", "/set_version/all", {"version": 0, "force": True}).status == 200
    assert service.ask("GET", "/get_version/all").json()["version"] == 0


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation", "/weights/release", "/drain"])
def test_control_with_non_object_body_is_400(service: EmbeddedService, path: str) -> None:
    answer = service.ask("POST", f"{path}/all", [1])
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_unknown_worker_is_404_and_no_key_is_401(service: EmbeddedService) -> None:
    assert service.ask("POST", "/pause_generation/absent", {}).status == 404
    assert service.ask("GET", "/get_version/absent").status == 404
    for process in (service.gateway, service.proxy):
        path = "/pause_generation/all" if process is service.gateway else "/pause_generation"
        assert process.call("POST", path, {}).status == 401
        assert process.call("POST", path, {}, key="wrong").status == 403
