"""Processes of an agent service that stop or are lost while sessions go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.agent.gateway.conftest import NAME, AgentService, build
from tests.services.inference.running_service import later
from tests.services.processes import Processes, wait_until


@pytest.fixture
def two(processes: Processes, tmp_path: Path) -> AgentService:
    return build(processes, tmp_path / "state", 2)


def user_texts(service: AgentService, session: str) -> list[str]:
    shown = service.call("GET", f"/sessions/{session}")
    assert shown.status == 200, shown.body
    return [message["content"] for message in shown.json()["history"] if message["role"] == "user"]


def holder(service: AgentService, session: str) -> int:
    """The number of the pair that has the session."""
    answers = [proxy.call("GET", f"/session/{session}", key=service.key).status for proxy in service.proxies]
    return answers.index(200)


def tell_router(service: AgentService, path: str, number: int) -> None:
    answer = service.router.call("POST", path, {"worker_id": f"{NAME}-{number}"}, key=service.key)
    assert answer.status == 200, answer.body


def test_drained_pair_finishes_turn_and_hands_over_history(two: AgentService) -> None:
    two.respond("one", "moved")
    before = holder(two, "moved")
    turn = later(two.respond, "wait", "moved")
    two.wait_running(1)
    tell_router(two, "/drain", before)
    following = later(two.respond, "three", "moved", stream=False)
    two.release()
    assert turn.result(20).status == 200
    assert following.result(20).status == 200
    assert user_texts(two, "moved") == ["one", "wait", "three"]
    wait_until(lambda: holder(two, "moved") == 1 - before, what="the session moves")
    assert two.respond("four", "moved").status == 200
    assert two.call("POST", "/sessions", {}).status == 201


def test_lost_pair_is_adopted_without_affecting_others(two: AgentService) -> None:
    keys = [f"session-{number}" for number in range(8)]
    for key in keys:
        two.respond("one", key)
    lost = holder(two, keys[0])
    others = [key for key in keys if holder(two, key) != lost]
    two.proxies[lost].kill()
    assert [two.respond("two", key).status for key in others] == [200] * len(others)
    assert {two.respond("two", key).status for key in keys if key not in others} == {200}
    assert [user_texts(two, key) for key in keys] == [["one", "two"]] * 8


def test_session_restarted_by_other_relay_is_found(two: AgentService) -> None:
    """What the other relay does is done at the router and the data proxy here."""
    two.respond("one", "again")
    before = holder(two, "again")
    (tag,) = two.proxies[before].call("GET", "/ready").json()["journals"]
    assert two.proxies[before].call("POST", "/session/again/close", {}, key=two.key).status == 200
    tell_router(two, "/drain", before)
    wait_until(lambda: tag not in two.router.call("GET", "/table", key=two.key).body.decode(), what="the journal goes")
    body = {"api_key": "again", "model": NAME, "reopen": True}
    wait_until(lambda: two.router.call("POST", "/register_session", body, key=two.key).status == 201, what="a start")
    assert user_texts(two, "again") == []
    while (answer := two.respond("two", "again")).status == 503:  # as long as a busy machine hides the other pair
        assert answer.json()["error"]["code"] == "session_moving"
    assert answer.status == 200
    assert user_texts(two, "again") == ["two"]


def test_existing_sessions_survive_lost_router(own: AgentService) -> None:
    made = own.call("POST", "/sessions", {}).json()["session_key"]
    for key in (made, "chosen"):
        own.respond("one", key)
    own.router.kill()
    for key in (made, "chosen"):
        assert own.respond("two", key).status == 200
        assert user_texts(own, key) == ["one", "two"]


def test_call_waiting_for_lost_last_pair_is_retryable_503(own: AgentService) -> None:
    own.respond("one", "paused")
    own.proxies[0].kill()
    waits = [later(own.respond, "two", "paused"), later(own.call, "GET", "/sessions/paused")]
    wait_until(lambda: "areal_gateway_queued 2" in own.call("GET", "/metrics").body.decode(), what="both wait")
    assert own.router.call("POST", "/remove_model", {"name": NAME}, key=own.key).status == 200
    for answer in (wait.result(20) for wait in waits):
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_worker_available")
        assert answer.headers["retry-after"]


def test_lost_worker_fails_only_its_turn(own: AgentService) -> None:
    turn = later(own.respond, "wait", "lost")
    own.wait_running(1)
    own.workers[0].kill()
    failed = turn.result(20)
    assert (failed.status, failed.json()["error"]["code"]) == (502, "worker_lost")
    assert user_texts(own, "lost") == []
    shown = own.call("GET", "/sessions/lost").json()
    assert [turn["outcome"] for turn in shown["recorded_turns"]] == ["infra"]


@pytest.mark.extended
def test_turn_blocked_by_other_turn_is_infra_failure(own: AgentService) -> None:
    own.call("POST", "/sessions", {"session_key": "waits"})
    configured = own.proxies[0].call("POST", "/configure", {"turn_timeout": 8}, key=own.key)
    assert configured.status == 200
    waits = later(own.respond, "wait", "waits")
    own.wait_running(1)
    blocks = later(own.respond, "block", "blocks")
    for turn, code in ((blocks, "agent_failed"), (waits, "worker_lost")):
        error = turn.result(30).json()["error"]
        assert error["code"] == code
        assert "the worker is not ready: the agent blocks its event loop" in error["message"]


def test_stopped_gateway_completes_its_streams(own: AgentService) -> None:
    events = own.stream("wait", "ending").events()
    assert any(event["type"] == "response.output_text.delta" for event in events)
    own.gateway.signal(15)
    own.release()
    assert [event["type"] for event in events][-1] == "response.completed"
    assert own.gateway.wait() == 0
