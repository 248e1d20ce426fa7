"""The math agents that AReaL's configurations name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.api.workflow_api import RolloutWorkflow
from areal.client import RolloutController
from areal.errors import UsageFault
from areal.loading import load_attr
from areal.workflow.agent import EpisodeModel
from areal.workflow.calculator import TOOLS
from tests.client.conftest import Place
from tests.rollout.test_workflows import ROWS, controller_of
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE
from tests.services.processes import Processes, script
from tests.services.tokenizer_folder import write_tokenizer

AGENTS = {
    "agents": "areal.workflow.openai_agent.math_agent.build_math_agent",
    "langchain_openai": "areal.workflow.langchain.math_agent.MathAgent",
    "claude_agent_sdk": "areal.workflow.anthropic.claude_math_agent.MathToolAgent",
}


@pytest.mark.parametrize("package", AGENTS)
def test_agent_without_package_suggests_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageFault, match="needs") as caught:
        load_attr(AGENTS[package])()
    assert str(caught.value.hint).startswith("pip install ")


async def test_agent_of_the_openai_agents_sdk_has_a_calculator() -> None:
    agents = pytest.importorskip("agents")
    from areal.workflow.openai_agent.math_agent import build_math_agent

    built = build_math_agent(name="m", tool_use_behavior="stop_on_first_tool")
    assert (built.name, built.tool_use_behavior) == ("m", "stop_on_first_tool")
    tools = {tool.name: tool for tool in built.tools if isinstance(tool, agents.FunctionTool)}
    assert list(tools) == [function.__name__ for function in TOOLS]
    context = agents.tool_context.ToolContext(
        context=None, tool_name="divide", tool_call_id="c", tool_arguments='{"a": 3, "b": 2}'
    )
    assert await tools["divide"].on_invoke_tool(context, json.dumps({"a": 3, "b": 2})) == 1.5


def tool_call(name: str) -> str:
    arguments = {"a": 31.0, "b": 2.0}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[str], EpisodeModel]]:
    """A model that calls the tool of this name, and then tells the result."""
    processes = Processes(tmp_path)

    def access(name: str) -> EpisodeModel:
        tokenizer = write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
        engine = processes.engine(tokenizer)
        proxy = processes.data_proxy(engine, tokenizer, "--tool-call-parser", "hermes")
        replies = [["<tool_response>", "It is \\boxed{33}."], ["31 + 2", f"I add.\n{tool_call(name)}"]]
        script(engine, replies=replies)
        return EpisodeModel(proxy.url, processes.key, "tiny")

    yield access
    processes.stop()


async def test_langchain_agent_uses_tools(scripted: Callable[[str], EpisodeModel]) -> None:
    pytest.importorskip("langchain_openai")
    from areal.workflow.langchain.math_agent import MathAgent

    agent = MathAgent(max_turns=3, temperature=0.5, max_tokens=16, max_completion_tokens=256)
    answer = await agent.answer([{"role": "user", "content": "31 + 2"}], scripted("add"))
    assert answer == "It is \\boxed{33}."


@pytest.mark.claude
async def test_claude_agent_uses_tools(scripted: Callable[[str], EpisodeModel]) -> None:
    pytest.importorskip("claude_agent_sdk")
    from areal.workflow.anthropic.claude_math_agent import MathToolAgent

    agent = MathToolAgent(max_turns=3, temperature=0.6, max_completion_tokens=512)
    answer = await agent.answer([{"role": "user", "content": "31 + 2"}], scripted("mcp__calculator__add"))
    assert answer == "It is \\boxed{33}."


class WithAgentsSdk(RolloutWorkflow):
    """An agent that names no model, as AReaL's example does."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        import agents

        from areal.experimental.openai import ArealOpenAI

        client = ArealOpenAI(engine=engine)
        config = agents.RunConfig(
            model_provider=agents.OpenAIProvider(openai_client=client),
            tracing_disabled=True,
            model_settings=agents.ModelSettings(max_tokens=16),
        )
        await agents.Runner.run(agents.Agent(name="a"), input=data["messages"][-1]["content"], run_config=config)
        client.set_last_reward(1.0)
        return client.export_interactions()


def test_agent_without_model_name_samples_trained_model(digits: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("agents")
    monkeypatch.setenv("OPENAI_DEFAULT_MODEL", "")
    monkeypatch.delenv("OPENAI_DEFAULT_MODEL")
    controller: RolloutController
    for controller in controller_of(digits):
        (trajectory,) = controller.rollout_batch(ROWS[:1], WithAgentsSdk())
    assert trajectory["rewards"].tolist() == [1.0]


class WithSharedClient(RolloutWorkflow):
    """A workflow with OpenAI's client over the HTTP client that episodes share, which an SDK may close."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        import openai

        from areal import workflow_context
        from areal.experimental.openai import ArealOpenAI

        client = ArealOpenAI(engine=engine)
        answer = await client.chat.completions.create(messages=data["messages"], max_completion_tokens=8)
        client.set_reward(answer.id, 1.0)
        shared = await workflow_context.get_httpx_client()
        async with openai.AsyncOpenAI(base_url=f"{engine.base_url}/v1", api_key="EMPTY", http_client=shared) as other:
            with pytest.raises(openai.AuthenticationError):
                await other.models.list()
        return client.export_interactions()


def test_episode_http_client_is_shared_and_replaced_if_closed(digits: Place) -> None:
    for controller in controller_of(digits):
        for _ in range(2):
            (trajectory,) = controller.rollout_batch(ROWS[:1], WithSharedClient())
            assert trajectory["rewards"].tolist() == [1.0]


async def test_http_client_is_available_only_in_episode() -> None:
    from areal import workflow_context

    with pytest.raises(RuntimeError, match="only available in an episode"):
        await workflow_context.get_httpx_client()
