"""The SDK's agent clients against an agent service whose model calls are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.client import (
    AgentClient,
    AsyncAgentClient,
    CallerError,
    DeadlineExceeded,
    NotReady,
    RetryPolicy,
    ServiceError,
    StateConflict,
    Unauthorized,
    UnknownName,
    Unreachable,
    response_text,
)
from tests.client.conftest import Place
from tests.services.agent.whole import WholeService, start_agents
from tests.services.processes import REPOSITORY, engine_calls, wait_until

ONCE = RetryPolicy(attempts=1)


@pytest.fixture(scope="module")
def agents(shared_place: Place, tmp_path_factory: pytest.TempPathFactory) -> WholeService:
    """Its processes end with those of the place that it records at."""
    return start_agents(shared_place.processes, tmp_path_factory.mktemp("agents"), shared_place.proxy)


@pytest.fixture
def client(agents: WholeService, place: Place) -> Iterator[AgentClient]:
    with AgentClient(agents.url, agents.key, timeout_s=20) as client:
        yield client


@pytest.fixture
async def aclient(agents: WholeService, place: Place) -> AsyncIterator[AsyncAgentClient]:
    async with AsyncAgentClient(agents.url, agents.key, timeout_s=20) as client:
        yield client


def shown(agents: WholeService, session: str) -> dict[str, Any]:
    found: dict[str, Any] = agents.gateway.call("GET", f"/sessions/{session}", key=agents.key).json()
    return found


def test_turn_is_answered_and_session_continues(client: AgentClient) -> None:
    session = client.start_session(metadata={"user": "ann"})
    assert response_text(session.respond("hello there")) == "hello there"
    assert response_text(session.respond("history")) == "2"
    shown = session.show()
    assert (shown["session_key"], shown["turns"], shown["metadata"]) == (session.key, 2, {"user": "ann"})
    assert [message["role"] for message in shown["history"]] == ["user", "assistant"] * 2
    assert session.key in [each["session_key"] for each in client.sessions(page=1)]
    session.close()
    with pytest.raises(UnknownName):
        session.show()


def test_response_contains_tool_calls_and_results(client: AgentClient) -> None:
    response = client.start_session().respond("weather")
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["message", "mcp_call", "message"]
    assert response["output"][1]["name"] == "weather"


def test_streamed_turn_comes_in_pieces(client: AgentClient) -> None:
    with client.start_session().stream("one two") as events:
        found = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert found == ["one", " two"]


@pytest.mark.parametrize("key", ["a/b", "..", "%2F", "ключ", " spaces ", "x" * 1000, "a?b#c"])
def test_session_key_with_special_characters_is_accepted(client: AgentClient, key: str) -> None:
    session = client.start_session(key)
    assert session.key == key
    session.respond("hello")
    assert session.show()["turns"] == 1
    session.close()


def test_failing_agent_is_service_error_with_its_message(client: AgentClient) -> None:
    session = client.start_session()
    with pytest.raises(ServiceError, match="is to fail") as caught:
        session.respond("fail")
    assert caught.value.code == "agent_failed"
    with pytest.raises(ServiceError, match="is to fail"), session.stream("fail") as events:
        list(events)
    assert response_text(session.respond("history")) == "0"


def test_repeated_turn_with_one_idempotency_key_runs_once(client: AgentClient) -> None:
    session = client.start_session()
    first = session.respond("hello", idempotency_key="once")
    assert session.respond("hello", idempotency_key="once")["output"] == first["output"]
    assert session.show()["turns"] == 1
    with pytest.raises(StateConflict):
        session.respond("other", idempotency_key="once")


def test_cancel_ends_running_turn(client: AgentClient) -> None:
    session = client.start_session()
    with session.stream("wait") as events:
        next(event for event in events if event["type"] == "response.output_text.delta")
        assert session.cancel()
        with pytest.raises(ServiceError, match="cancelled"):
            list(events)
    assert not session.cancel()


async def test_cancelled_call_cancels_its_turn(aclient: AsyncAgentClient, agents: WholeService) -> None:
    session = await aclient.start_session()
    call = asyncio.create_task(session.respond("wait"))
    await asyncio.to_thread(wait_until, lambda: shown(agents, session.key)["state"] == "running")
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    assert (await session.show())["recorded_turns"][-1]["outcome"] == "cancelled"


async def test_cancelled_waiting_call_keeps_running_turn(aclient: AsyncAgentClient, agents: WholeService) -> None:
    session = await aclient.start_session()
    async with session.stream("wait") as events:
        await anext(events)
        call = asyncio.create_task(session.respond("hello"))
        await asyncio.to_thread(wait_until, lambda: shown(agents, session.key)["waiting"] == 1)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        now = await session.show()
        assert (now["state"], now["waiting"], now["turns"]) == ("running", 0, 0)


async def test_timed_out_call_cancels_turn_unless_keyed(aclient: AsyncAgentClient) -> None:
    session = await aclient.start_session()
    with pytest.raises(DeadlineExceeded):
        await session.respond("wait", timeout_s=1.0)
    assert [turn["outcome"] for turn in (await session.show())["recorded_turns"]] == ["cancelled"]
    with pytest.raises(DeadlineExceeded):
        await session.respond("wait", timeout_s=1.0, idempotency_key="mine")
    assert (await session.show())["state"] == "running"
    assert await session.cancel(idempotency_key="mine")


async def test_call_to_unreachable_server_is_not_cancelled_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with AsyncAgentClient(address, "key", retry=ONCE) as client:
        with pytest.raises(Unreachable) as caught:
            await asyncio.wait_for(client.session("s").respond("hello", timeout_s=1.0), 3.0)
        assert "areal get" in str(caught.value.hint), "of any service"


async def test_abandoned_stream_cancels_its_turn(aclient: AsyncAgentClient, agents: WholeService) -> None:
    session = await aclient.start_session()
    async with session.stream("wait") as events:
        await anext(events)
    await asyncio.to_thread(wait_until, lambda: shown(agents, session.key)["turns"] == 1)
    assert (await session.show())["recorded_turns"][-1]["outcome"] == "cancelled"


async def test_rewarded_episode_exports_engine_output(aclient: AsyncAgentClient, place: Place) -> None:
    session = await aclient.start_session(metadata={"task_id": "math-1"})
    assert session.inference_session_id is not None and session.inference_session_id.startswith("math-1")
    with pytest.raises(NotReady):
        await session.respond("model")
        await session.export()
    rewarded = await session.reward(1.0)
    assert rewarded.trajectory_ready and rewarded.interaction_count == 1
    rows = await session.export()
    seen = engine_calls(place.engine)[-1]["body"]["input_ids"]
    assert rows.columns["input_ids"][0, : len(seen)].tolist() == seen
    assert rows.columns["rewards"].tolist() == [1.0]


def test_unknown_session_and_wrong_key_have_typed_errors(client: AgentClient, agents: WholeService) -> None:
    absent = client.session("absent")
    for call in (absent.show, absent.cancel, absent.close, lambda: absent.reward(1.0), absent.export):
        with pytest.raises(UnknownName):
            call()
    with AgentClient(agents.url, "wrong", retry=ONCE) as stranger, pytest.raises(Unauthorized):
        stranger.start_session()


def test_reward_without_model_call_is_caller_error(client: AgentClient) -> None:
    session = client.start_session()
    session.respond("hello")
    with pytest.raises(CallerError) as caught:
        session.reward(1.0)
    assert caught.value.status == 400


def test_page_example_runs_as_printed(agents: WholeService, place: Place, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "sdk.md").read_text(encoding="utf-8")
    (block,) = (
        each for each in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "import AgentClient" in each
    )
    script = tmp_path / "example.py"
    script.write_text(block.replace("http://127.0.0.1:8090", agents.url).replace('"1234"', '"model"'))
    keys = tmp_path / ".areal" / "credentials"
    keys.mkdir(parents=True)
    (keys / "agentservice.default").write_text(agents.key, encoding="ascii")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, str(script)]
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "response.completed" in ran.stdout
