from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from areal.http.client import HttpReply
from tests.services.simulation.machine import AgentSessionMachine, ModelSessionMachine, SessionMachine
from tests.services.simulation.service import SimulatedService

KINDS = [AgentSessionMachine, ModelSessionMachine]


def _run(machine: type[SessionMachine], examples: int) -> None:
    health = list(HealthCheck)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=health
        ),
    )


@pytest.mark.parametrize("machine", KINDS)
def test_session_is_never_lost_restarted_or_served_twice(machine: type[SessionMachine]) -> None:
    _run(machine, 8)


@pytest.mark.extended
@pytest.mark.parametrize("machine", KINDS)
def test_session_is_never_lost_or_duplicated_in_long_runs(machine: type[SessionMachine]) -> None:
    _run(machine, 150)


@pytest.fixture
def model() -> Iterator[SimulatedService]:
    """A model with one replica."""
    service = SimulatedService(agents=False)
    service.add_replica("a")
    yield service
    service.close()


def start(service: SimulatedService, **more: str) -> dict[str, str]:
    """A new session's id and key."""
    reply = service.call("POST", "/rl/start_session", {"task_id": "task", **more})
    assert reply is not None and reply.status == 201, reply
    session: dict[str, str] = reply.object()["sessions"][0]
    return session


def turn(service: SimulatedService, session: dict[str, str], timeout_s: float = 60.0) -> HttpReply | None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {session['session_api_key']}"}
    return service.call("POST", "/v1/chat/completions", body, headers, timeout_s=timeout_s)


def orphans(service: SimulatedService) -> list[str]:
    reply = service.call("GET", "/table", base=service.router.url)
    assert reply is not None
    found: list[str] = reply.object()["models"]["tiny"]["orphans"]
    return found


def test_session_is_refused_while_model_has_no_replicas(model: SimulatedService) -> None:
    session = start(model, api_key="callers-key")
    model.remove_replica("a")
    model.loop.run_for(1.0)
    reply = turn(model, session, timeout_s=5.0)
    assert reply is not None and reply.status == 503 and b"model_has_no_replicas" in reply.body, reply
    model.add_replica("b")
    reply = turn(model, session)
    assert reply is not None and reply.status == 200, reply


def test_session_of_removed_replica_is_found_with_late_reports(
    model: SimulatedService,
) -> None:
    start(model)  # so that the next one starts at the other replica
    model.loop.run_for(10.0)
    model.loop.cut.add(frozenset(("router", "a")))
    model.loop.run_for(2.5)  # a report without the new journal is on its way
    model.add_replica("b")
    session = start(model)
    model.remove_replica("b")
    model.loop.cut.clear()
    for _ in range(50):
        reply = model.call("GET", f"/rl/sessions/{session['session_id']}", timeout_s=60.0)
        assert reply is not None and reply.status == 200, reply and reply.body
        model.loop.run_for(0.1)


def test_key_of_moving_session_is_in_use(model: SimulatedService) -> None:
    model.add_replica("b")
    model.loop.run_for(3.0)
    keys = [f"callers-key-{number}" for number in range(8)]
    for key in keys:
        start(model, api_key=key)
    for uid in "ab":
        model.command("/drain", {"worker_id": uid})
        for key in keys:  # half of them are at this replica
            reply = model.call("POST", "/rl/start_session", {"task_id": "task", "api_key": key})
            assert reply is not None and (reply.status, reply.error()["code"]) == (409, "api_key_in_use"), reply
        model.command("/undrain", {"worker_id": uid})
        model.loop.run_for(10.0)


def test_router_killed_while_learning_relearns_workers(model: SimulatedService) -> None:
    session = start(model, api_key="callers-key")
    model.kill(model.replicas["a"])
    for damage in (True, False):
        model.kill(model.router)
        if damage:
            model.router_file.write_text("{")
        model.start_router()
        model.loop.run_for(0.5)
    model.start_replica("a")
    reply = turn(model, session)
    assert reply is not None and reply.status == 200, reply
