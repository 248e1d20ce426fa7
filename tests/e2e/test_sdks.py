"""A conversation with a tool, held by the clients that people use, unchanged, in a session of a real gateway, router
and data proxy; the engine is scripted. What is exported afterwards is, token for token, what the engine got and made.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.services.inference.data_proxy.dialects.talks import TEMPLATE, WEATHER
from tests.services.inference.recorder.rollouts import Rollout, begin
from tests.services.inference.running_service import Service
from tests.services.processes import Processes, engine_calls, script
from tests.services.tokenizer_folder import write_tokenizer

QUESTION = "How is the weather in Rome?"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for Rome.\n</think>\n\n"
RESULT = "31 degrees and dry"
ANSWER = "It is dry, with 31 degrees."
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("sdks")
    processes = Processes(folder)
    tokenizer = write_tokenizer(folder / "tokenizer", template=TEMPLATE)
    engine = processes.engine(tokenizer)
    script(engine, max_model_len=100_000)
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    proxy = processes.data_proxy(engine, tokenizer, *parsers, "--state-dir", str(folder / "state"))
    router = processes.router()
    gateway = processes.gateway(router)
    processes.register(router, proxy)
    yield Service(processes, (engine,), (proxy,), router, gateway)
    processes.stop()


@pytest.fixture
def rollout(service: Service) -> Rollout:
    """A session, and an engine that calls the tool when it is asked, and answers when it has the result."""
    script(service.engine, reset=True)
    replies = [["<tool_response>", ANSWER], [QUESTION, f"{THOUGHT}I look.\n{CALL}"]]
    script(service.engine, replies=replies, version=3, max_model_len=100_000, flush=4)
    return begin(service.gateway, service.key, model="tiny")


def weather(city: str, days: int) -> str:
    assert (city, days) == ("Rome", 3)
    return RESULT


def assert_exported_is_what_the_engine_saw(service: Service, rollout: Rollout, turns: int = 2) -> None:
    """One row, for every turn goes on with the tokens of the one before, and it holds what the engine noted itself."""
    calls = engine_calls(service.engine)
    assert len(calls) == turns
    rollout.reward(1.0)
    exported = rollout.export(style="concat")
    traj, (row,) = exported["traj"], exported["rows"]
    assert row["finish_reason"] == "stop" and row["rewarded"] and traj["rewards"] == [1.0]
    tokens: list[int] = []
    generated: dict[int, int] = {}  # where, and in which turn
    for turn, call in enumerate(calls):
        prompt = call["body"]["input_ids"]
        assert prompt[: len(tokens)] == tokens
        tokens = [*prompt, *response_tokens(call)]
        generated |= dict.fromkeys(range(len(prompt), len(tokens)), turn)
    places = range(len(tokens))
    assert traj["input_ids"] == [tokens]
    assert traj["loss_mask"] == [[int(at in generated) for at in places]]
    assert traj["turn_ids"] == [[generated.get(at, -1) for at in places]]
    assert traj["versions"] == [[3 if at in generated else -1 for at in places]]
    assert traj["logprobs"] == [[-0.25 - 0.5 * (tokens[at] % 2) if at in generated else 0.0 for at in places]]


def response_tokens(call: dict[str, Any]) -> list[int]:
    tokens: list[int] = call["generated"]
    return tokens


# -- the openai client


@pytest.fixture
def openai_client(service: Service, rollout: Rollout) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.gateway.url}/v1", api_key=rollout.key, max_retries=0) as client:
        yield client


def test_openai_chat_with_a_tool(openai_client: openai.OpenAI, service: Service, rollout: Rollout) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = openai_client.chat.completions.create(model="tiny", messages=messages, tools=[CHAT_TOOL]).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    (call,) = first.message.tool_calls
    assert call.type == "function"
    messages += [first.message, tool_message(call.id, weather(**json.loads(call.function.arguments)))]
    second = openai_client.chat.completions.create(model="tiny", messages=messages, tools=[CHAT_TOOL]).choices[0]
    assert second.message.content == ANSWER and second.finish_reason == "stop"
    assert_exported_is_what_the_engine_saw(service, rollout)


def test_openai_chat_streamed_with_a_tool(openai_client: openai.OpenAI, service: Service, rollout: Rollout) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai_client.chat.completions.stream(model="tiny", messages=messages, tools=[CHAT_TOOL]) as stream:
        first = stream.get_final_completion().choices[0].message
    assert first.tool_calls and first.content == "I look."
    (call,) = first.tool_calls
    sent_back = call.model_dump(exclude={"function": {"parsed_arguments"}})
    messages += [
        {"role": "assistant", "content": first.content, "tool_calls": [sent_back]},
        tool_message(call.id, weather(**json.loads(call.function.arguments))),
    ]
    with openai_client.chat.completions.stream(model="tiny", messages=messages, tools=[CHAT_TOOL]) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == ANSWER
    assert_exported_is_what_the_engine_saw(service, rollout)


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_responses_with_a_tool(
    openai_client: openai.OpenAI, service: Service, rollout: Rollout, streamed: bool
) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "description": "W", "parameters": WEATHER, "strict": False}

    def ask(items: list[Any]) -> Any:
        if not streamed:
            return openai_client.responses.create(model="tiny", input=items, tools=[tool])
        with openai_client.responses.stream(model="tiny", input=items, tools=[tool]) as stream:
            return stream.get_final_response()

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(items)
    (call,) = [item for item in first.output if item.type == "function_call"]
    output = weather(**json.loads(call.arguments))
    items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert ask(items).output_text == ANSWER
    assert_exported_is_what_the_engine_saw(service, rollout)


def tool_message(call_id: str, result: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": result}


# -- the anthropic client


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_messages_with_a_tool(service: Service, rollout: Rollout, streamed: bool) -> None:
    tools: Any = [{"name": "get_weather", "description": "Weather", "input_schema": WEATHER}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=service.gateway.url, api_key=rollout.key, max_retries=0) as client:

        def ask() -> Any:
            if not streamed:
                return client.messages.create(model="tiny", max_tokens=500, messages=messages, tools=tools)
            with client.messages.stream(model="tiny", max_tokens=500, messages=messages, tools=tools) as stream:
                return stream.get_final_message()

        first = ask()
        assert first.stop_reason == "tool_use"
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = ask()
    assert [block.text for block in second.content] == [ANSWER]
    assert_exported_is_what_the_engine_saw(service, rollout)


# -- curl


def curl(url: str, key: str, body: Any) -> str:
    command = ["curl", "-sS", "-N", "--fail-with-body", "--max-time", "30", url]
    command += ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl_with_a_tool_whole_and_streamed(service: Service, rollout: Rollout) -> None:
    url = f"{service.gateway.url}/v1/chat/completions"
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    body = {"model": "tiny", "messages": messages, "tools": [CHAT_TOOL]}
    message = json.loads(curl(url, rollout.key, body))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    messages += [message, tool_message(call["id"], weather(**json.loads(call["function"]["arguments"])))]
    lines = curl(url, rollout.key, {**body, "stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
    reward = curl(f"{service.gateway.url}/rl/set_reward", rollout.key, {"reward": 1.0})
    assert json.loads(reward)["session_id"] == rollout.session_id
    assert_exported_is_what_the_engine_saw(service, rollout)


# -- the OpenAI Agents SDK


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents_run_with_a_tool(service: Service, rollout: Rollout, api: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        return weather(city, days)

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{service.gateway.url}/v1", api_key=rollout.key, max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        agent = agents.Agent(
            name="weather", instructions="Be brief.", tools=[get_weather], model=kind("tiny", openai_client=client)
        )
        if not streamed:
            return str((await agents.Runner.run(agent, QUESTION)).final_output)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        await client.close()
        return str(result.final_output)

    assert asyncio.run(run()) == ANSWER
    assert_exported_is_what_the_engine_saw(service, rollout)


# -- the Claude Agent SDK, which runs Claude Code


@pytest.mark.claude
def test_claude_agent_sdk_runs_its_own_tool(service: Service, rollout: Rollout, tmp_path: Path) -> None:
    sdk = pytest.importorskip("claude_agent_sdk")
    shell = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo 31 && echo degrees"}}\n</tool_call>'
    script(service.engine, replies=[["<tool_response>", ANSWER], [QUESTION, f"{THOUGHT}I look.\n{shell}"]])
    environment = {
        "ANTHROPIC_BASE_URL": service.gateway.url,
        "ANTHROPIC_API_KEY": rollout.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "HOME": str(tmp_path),
        "CLAUDE_CONFIG_DIR": str(tmp_path / "claude"),
    }
    options = sdk.ClaudeAgentOptions(
        env=environment,
        cwd=str(tmp_path),
        model="tiny",
        system_prompt="Be brief.",
        setting_sources=[],
        tools=["Bash"],
        allowed_tools=["Bash"],
        max_turns=5,
    )

    async def run() -> list[Any]:
        async with asyncio.timeout(60):
            return [message async for message in sdk.query(prompt=QUESTION, options=options)]

    messages = asyncio.run(run())
    results = [block.content for message in messages for block in _blocks(message) if hasattr(block, "tool_use_id")]
    assert results == ["31\ndegrees"], "the shell ran what the model asked for"
    assert isinstance(messages[-1], sdk.ResultMessage) and messages[-1].result == ANSWER and not messages[-1].is_error
    assert_exported_is_what_the_engine_saw(service, rollout)


def _blocks(message: Any) -> list[Any]:
    content = getattr(message, "content", None)
    return content if isinstance(content, list) else []
