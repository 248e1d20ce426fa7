"""``AgentController``: what its configuration stands for, and episodes in a service that it has started."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import AgentConfig, AgentServiceConfig
from areal.client import AgentController, BlockingAgentController, CallerError, NotReady, response_text
from areal.client.command import run_areal
from areal.client.controller import UnknownSession, run_flags
from areal.client.errors import StateConflict
from areal.errors import ArealError, NotFound, UsageFault
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject
from tests.client.conftest import Place
from tests.services.agent.whole import AGENT, WholeService, start_agents
from tests.services.processes import REPOSITORY, engine_calls, wait_until


def test_configuration_matches_command_flags() -> None:
    config = AgentServiceConfig(
        agent_cls_path="my.agents.MyAgent",
        num_pairs=3,
        inference="default",
        model="tiny",
        setup_timeout=9.0,
        health_poll_interval=2.0,
        drain_timeout=0.0,
        session_timeout=60.0,
        log_level="debug",
        env={"A": 1, "B": "x=y"},  # type: ignore[dict-item]  # a number is the text of it
    )
    words = run_flags(config, "/key")
    flags = list(zip(words[::2], words[1::2], strict=True))
    assert dict(flags[:-2]) == {
        "--agent": "my.agents:MyAgent",
        "--pairs": "3",
        "--inf": "default",
        "--model": "tiny",
        "--setup-timeout": "9.0s",
        "--health-poll-interval": "2.0s",
        "--drain-timeout": "0.0s",
        "--session-timeout": "60.0s",
        "--log-level": "debug",
        "--admin-api-key-file": "/key",
    }
    assert flags[-2:] == [("--env", "A=1"), ("--env", "B=x=y")]


def test_environment_is_empty_by_default() -> None:
    assert AgentServiceConfig().env == {} and AgentConfig().env == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_pairs", 0),
        ("setup_timeout", 0),
        ("drain_timeout", -1),
        ("health_poll_interval", 0),
        ("request_timeout", 0),
    ],
)
def test_rejects_meaningless_setting(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=setting):
        AgentServiceConfig(**{setting: value})


def test_controller_without_agent_names_missing_setting() -> None:
    controller = AgentController(AgentServiceConfig())
    with pytest.raises(UsageFault, match="which agent"):
        controller.initialize()
    controller.destroy()


async def test_call_before_initialize_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not initialized"):
        await AgentController(AgentServiceConfig(agent_cls_path="a:B")).step("hello", "absent")


# -- episodes, at a service that is there


@pytest.fixture(scope="module")
def agents(shared_place: Place, tmp_path_factory: pytest.TempPathFactory) -> WholeService:
    """Its processes end with those of the place that it records at."""
    return start_agents(shared_place.processes, tmp_path_factory.mktemp("agents"), shared_place.proxy)


@pytest.fixture
def config(agents: WholeService, place: Place) -> AgentServiceConfig:
    return AgentServiceConfig(gateway_addr=agents.url, admin_api_key=agents.key, turn_discount=0.5)


async def test_episode_uses_inference_of_service(config: AgentServiceConfig, place: Place) -> None:
    async with AgentController(config) as controller:
        started = await controller.start_session("task-7")
        session = started["session_id"]
        assert started["inference_session_id"] and started["inference_session_id"].startswith("task-7")
        assert started["api_key"] is None
        for _ in range(2):
            assert response_text(await controller.step("model", session)) == "Hello there, friend!"
        assert (await controller.set_reward(1.0, session)).interaction_count == 2
        rows = await controller.export_trajectory(session)
        assert rows.columns["rewards"].tolist() == [0.0, 1.0], "two calls of the agent's, not one conversation"
        seen = [call["body"]["input_ids"] for call in engine_calls(place.engine)]
        assert rows.columns["input_ids"][0, : len(seen[0])].tolist() == seen[0]
        with pytest.raises(StateConflict, match="was exported"):  # its rows are delivered once
            await controller.export_trajectory(session)


async def test_episode_uses_callers_rl_session(config: AgentServiceConfig, place: Place) -> None:
    async with AgentController(config) as controller:
        started = await controller.start_session(
            "mine",
            inference_gateway_addr=place.proxy.url,
            inference_admin_api_key=place.key,
            inference_model="tiny",
            api_key="my-own-rl-session-key-0123456789",
        )
        session = started["session_id"]
        assert started["api_key"] == "my-own-rl-session-key-0123456789"
        await controller.step("model", session)
        await controller.set_reward(0.25, session)
        rows = await controller.export_trajectory(session, style="concat")
        assert rows.columns["rewards"].tolist() == [0.25]
        assert rows.rows[0]["session_id"] == started["inference_session_id"]


async def test_closing_ended_session_ends_its_rl_session(
    config: AgentServiceConfig, place: Place, agents: WholeService
) -> None:
    async with AgentController(config) as controller:
        started = await controller.start_session(
            "expired", inference_gateway_addr=place.proxy.url, inference_admin_api_key=place.key
        )
        body = {"session_key": started["session_id"]}
        assert agents.gateway.call("POST", "/sessions/close", body, key=agents.key).status == 200
        await controller.close_session(started["session_id"])
        path = f"/rl/sessions/{started['inference_session_id']}"
        assert place.proxy.call("GET", path, key=place.key).json()["state"] == "ended"


async def test_foreign_inference_service_is_refused_without_leftovers(
    config: AgentServiceConfig, place: Place, agents: WholeService
) -> None:
    same_but_foreign = place.proxy.url.replace("127.0.0.1", "localhost")
    async with AgentController(config) as controller:
        with pytest.raises(CallerError) as caught:
            await controller.start_session(
                "mine", inference_gateway_addr=same_but_foreign, inference_admin_api_key=place.key
            )
        assert caught.value.code == "foreign_inference"
        listed = place.proxy.call("GET", "/rl/sessions?limit=1000", key=place.key).json()["sessions"]
        assert [each["state"] for each in listed if each["task_id"] == "mine"][-1] != "active"
        with pytest.raises(UsageFault, match="need inference_gateway_addr"):
            await controller.start_session("mine", inference_model="tiny")


async def test_failures_have_typed_errors(config: AgentServiceConfig) -> None:
    async with AgentController(config) as controller:
        with pytest.raises(KeyError):
            await controller.step("hello", "absent")
        with pytest.raises(UnknownSession, match="started no such session"):
            await controller.export_trajectory("absent")
        session = (await controller.start_session("task"))["session_id"]
        await controller.step("model", session, metadata={"any": "thing"})
        with pytest.raises(NotReady):
            await controller.export_trajectory(session)
        with pytest.raises(UsageFault, match="not ours to change"):
            controller.scale_up(1)
        await controller.close_session(session)
        with pytest.raises(UnknownSession):
            await controller.step("hello", session)


def test_controller_works_across_event_loops(config: AgentServiceConfig) -> None:
    with AgentController(config) as controller:
        session = asyncio.run(controller.start_session("task"))["session_id"]
        for count in ("0", "2"):
            assert response_text(asyncio.run(controller.step("history", session))) == count


async def test_cancelled_step_cancels_the_turn(config: AgentServiceConfig, agents: WholeService) -> None:
    async with AgentController(config) as controller:
        session = (await controller.start_session("task"))["session_id"]
        step = asyncio.create_task(controller.step("wait", session))

        def shown() -> dict[str, Any]:
            found: dict[str, Any] = agents.gateway.call("GET", f"/sessions/{session}", key=agents.key).json()
            return found

        await asyncio.to_thread(wait_until, lambda: shown()["state"] == "running")
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await asyncio.to_thread(wait_until, lambda: shown()["turns"] == 1)
        assert shown()["recorded_turns"][-1]["outcome"] == "cancelled"


def test_destroy_closes_only_sessions_it_started(config: AgentServiceConfig, agents: WholeService) -> None:
    def open_sessions() -> set[str]:
        found = agents.gateway.call("GET", "/sessions?limit=1000", key=agents.key).json()["sessions"]
        return {each["session_key"] for each in found}

    before = open_sessions()
    controller = BlockingAgentController(config)
    controller.initialize()
    controller.initialize()
    sessions = {controller.start_session(f"task-{number}")["session_id"] for number in range(3)}
    assert open_sessions() == before | sessions
    controller.destroy()
    controller.destroy()
    assert open_sessions() == before


def test_cancelled_start_is_undone(tmp_path: Path) -> None:
    os.mkfifo(key_file := tmp_path / "key")  # the start waits for the key
    controller = AgentController(
        AgentServiceConfig(gateway_addr="http://127.0.0.1:1", admin_api_key_file=str(key_file))
    )

    async def start() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), controller:
                pass
        await asyncio.to_thread(key_file.write_text, "a-key")

    asyncio.run(start())
    assert controller.gateway_addr == "" and not [each for each in threading.enumerate() if each.name == "areal-agents"]


def test_missing_key_file_is_named(agents: WholeService, tmp_path: Path) -> None:
    config = AgentServiceConfig(gateway_addr=agents.url, admin_api_key_file=str(tmp_path / "none"))
    with pytest.raises(NotFound, match="none"):
        BlockingAgentController(config).initialize()


# -- a service of the program's own


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, and the working folder with the agent."""
    monkeypatch.setenv("AREAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.chdir(AGENT.parent)
    yield tmp_path / "home"
    run_areal("agent", "stop", "--all", "--yes", what="the end of a test")


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_service_is_started_scaled_and_deleted(own_home: Path) -> None:
    config = AgentServiceConfig(agent_cls_path="helper_agent.Helper", admin_api_key="a-key-of-the-tests-own")
    with BlockingAgentController(config) as controller:
        (row,) = json.loads(run_areal("agent", "ps", "-o", "json", what="ps"))["items"]
        assert (row["address"], row["pairs"]) == (controller.gateway_addr, 1)
        session = controller.start_session("task")["session_id"]
        assert response_text(controller.step("hello", session)) == "hello"
        with pytest.raises(CallerError, match="no inference"):
            controller.set_reward(1.0, session)
        assert controller.scale_up(1) == [1]
        assert controller.scale_down(1) == [1]
        assert response_text(controller.step("history", session)) == "2"
        with pytest.raises(UsageFault, match="no such change"):
            controller.scale_down(2)
    assert json.loads(run_areal("agent", "ps", "--all", "-o", "json", what="ps"))["items"] == []
    assert not list((own_home / "runs").iterdir())


def test_existing_service_is_left_alone(own_home: Path) -> None:
    layer = Layer("apply", {"agent": "helper_agent:Helper"}, {"file": "a.yaml", "line": 1, "sha256": "0"}, "ann", 0.0)
    store = ObjectStore(Home(own_home))
    store.put(store.add_revision(StoredObject("AgentService", "shared", "uid", layers=(layer,), created_at=0.0)))
    config = AgentServiceConfig(agent_cls_path="helper_agent:Helper", service="shared")
    with pytest.raises(UsageFault, match="shared is there already"):
        BlockingAgentController(config).initialize()
    assert run_areal("get", "agentservice/shared", what="get")


@pytest.mark.timeout(300)
def test_unimportable_agent_is_reported_without_leftovers(own_home: Path) -> None:
    controller = BlockingAgentController(AgentServiceConfig(agent_cls_path="helper_agent:Helpr", setup_timeout=60))
    with pytest.raises(ArealError, match="Helpr"):
        controller.initialize()
    assert json.loads(run_areal("agent", "ps", "--all", "-o", "json", what="ps"))["items"] == []
