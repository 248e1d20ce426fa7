"""An agent of the OpenAI Agents SDK against a scripted model."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents.models.chatcmpl_converter import Converter

from areal.services.agent.worker.agents import items_of
from tests.services.agent.worker.conftest import Events, StartWorker, run, start_agent
from tests.services.processes import REPOSITORY, Process, Processes
from tests.services.scripted_api import ScriptedApi, scripted_api

CHAT = "POST /v1/chat/completions"
CODE = """
    from agents import Agent as SdkAgent, function_tool
    from pydantic import BaseModel

    @function_tool
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    class Sum(BaseModel):
        value: int

    helper = SdkAgent(name="helper", instructions="Help.")
    Agent = SdkAgent(name="adder", instructions="Add.", tools=[add], handoffs=[helper], model="gpt-5.1")
    typed = SdkAgent(name="typed", output_type=Sum)
"""


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}


def says(*words: str) -> list[Any]:
    return [*(chunk({"role": "assistant", "content": word}) for word in words), chunk({}, "stop"), "[DONE]"]


def calls(*made: tuple[str, str, str]) -> list[Any]:
    tools = [
        {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (id_, name, arguments) in enumerate(made)
    ]
    return [chunk({"role": "assistant", "tool_calls": tools}), chunk({}, "tool_calls"), "[DONE]"]


@pytest.fixture
async def model() -> AsyncIterator[ScriptedApi]:
    async with scripted_api() as api:
        yield api


def script(model: ScriptedApi, *replies: Any) -> None:
    """One reply after the other."""
    left = iter(replies)

    async def following() -> None:
        model.replies[CHAT] = next(left)

    model.hooks[CHAT] = following


@pytest.fixture(scope="module")
def worker(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Process:
    return start_agent(module_processes, tmp_path_factory.mktemp("agent"), CODE)


async def turn(worker: Process, model: ScriptedApi, **more: Any) -> list[dict[str, Any]]:
    access = {"base_url": model.url, "api_key": "session-key", "model": "tiny"}
    return await asyncio.to_thread(run, worker, "add", metadata={"areal_inference": access}, **more)


async def test_turn_streams_calls_results_and_text(worker: Process, model: ScriptedApi) -> None:
    script(model, calls(("1", "add", '{"a": 1, "b": 2}'), ("2", "add", '{"a": 3, "b": 4}')), says("It is ", "3 and 7."))
    history = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
    *events, last = await turn(worker, model, history=history)
    assert [(e["type"], e.get("id"), e.get("result")) for e in events if e["type"] != "delta"] == [
        ("tool_call", "1", None),
        ("tool_call", "2", None),
        ("tool_result", "1", "3"),
        ("tool_result", "2", "7"),
    ]
    assert [event["text"] for event in events if event["type"] == "delta"] == ["It is ", "3 and 7."]
    assert last == {"type": "complete", "summary": "It is 3 and 7.", "metadata": {}}
    route, first, headers = model.got[0]
    assert (route, first["model"], headers["Authorization"]) == (CHAT, "tiny", "Bearer session-key")
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "user"]
    assert "reasoning_effort" not in first and "verbosity" not in first


async def test_invalid_arguments_of_a_call_are_returned_to_the_model(worker: Process, model: ScriptedApi) -> None:
    script(model, calls(("1", "add", '{"a": 1, "b"')), says("Sorry."))
    call, result, *_, last = await turn(worker, model)
    assert call["arguments"] == '{"a": 1, "b"' and "An error occurred" in result["result"]
    assert last["summary"] == "Sorry."
    assert model.bodies(CHAT)[1]["messages"][-1]["content"] == result["result"]


async def test_handoff_calls_the_same_model(worker: Process, model: ScriptedApi) -> None:
    script(model, calls(("1", "transfer_to_helper", "{}")), says("helped"))
    *events, last = await turn(worker, model)
    assert [event["type"] for event in events] == ["tool_call", "tool_result", "delta"]
    assert last["summary"] == "helped" and {body["model"] for body in model.bodies(CHAT)} == {"tiny"}


async def test_failing_model_is_infra_failure(worker: Process, model: ScriptedApi) -> None:
    model.replies[CHAT] = (404, {"error": {"message": "no model", "code": "model_not_found"}})
    last = (await turn(worker, model))[-1]
    assert last["failure"] == "infra" and "no model" in last["error"]


async def test_disconnect_ends_model_call(worker: Process, model: ScriptedApi) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    model.replies[CHAT] = [chunk({"role": "assistant", "content": "a"}), forever]
    access = {"base_url": model.url, "api_key": "k", "model": "tiny"}
    events = await asyncio.to_thread(Events, worker, "add", metadata={"areal_inference": access})
    await begun.wait()
    await asyncio.to_thread(events.leave)
    await asyncio.wait_for(ended.wait(), 30)


@pytest.mark.extended
async def test_output_type_is_serialised_as_json(start_worker: StartWorker, model: ScriptedApi) -> None:
    worker = await asyncio.to_thread(start_worker, CODE + "\n    Agent = typed\n", "--kwargs", '{"max_turns": 3}')
    script(model, says('{ "value": 3 }'))
    assert (await turn(worker, model))[-1]["summary"] == '{ "value": 3 }'  # as the model wrote it


@pytest.mark.extended
def test_kwargs_other_than_max_turns_are_refused(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from agents import Agent\nAgent = Agent(name='a')\n")
    flags = ("--agent", f"{tmp_path / 'a.py'}:Agent", "--kwargs", '{"turns": 1}')
    process = processes.spawn("-m", "areal.services.agent.worker", "--port", "0", *flags)
    process.wait_log("takes max_turns, and no 'turns'")
    assert process.wait() == 2


def test_history_becomes_items() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "b"},
    ]
    items: Any = list(items_of(history))
    assert Converter.items_to_messages(items) == history  # as its models get them


async def test_generated_agent_answers(processes: Processes, tmp_path: Path, model: ScriptedApi) -> None:
    init = processes.spawn("-m", "areal.cli", "init", "agentservice", "--out", str(tmp_path / "agents.yaml"))
    assert await asyncio.to_thread(init.wait) == 0
    named = re.search(r"^  agent: (\S+)$", (tmp_path / "agents.yaml").read_text(), re.M)
    assert named is not None
    env = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    worker = processes.service("agent.worker", "--agent", named[1], keyed=False, env=env)
    script(model, says("It is ", "3."))
    *deltas, last = await turn(worker, model, history=[{"role": "user", "content": "before"}])
    assert [event["text"] for event in deltas] == ["It is ", "3."] and last["summary"] == "It is 3."
    assert [message["content"] for message in model.bodies(CHAT)[0]["messages"]] == ["before", "add"]
