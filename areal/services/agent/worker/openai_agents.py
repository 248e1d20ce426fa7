"""Adapter for agents of the OpenAI Agents SDK: ``agent`` names the ``Agent`` instance.

If the session has a model, all agents of the run, hand-offs included, call it through the Chat Completions API with the
session's key. ``max_turns``, the only allowed name in ``kwargs``, goes to the runner. The answer is the text of the
model's last deltas, else the final output, as JSON unless it is text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from areal.api.agent import AgentRequest, AgentResponse, Tool, ToolError
from areal.errors import UsageFault
from areal.files import parse_json
from areal.services.agent.worker.agents import MODEL, AgentAdapter
from areal.services.agent.worker.turn import WorkerTurn, waited

if TYPE_CHECKING:
    import agents


def is_openai_agent(found: object) -> bool:
    return any(cls.__module__ == "agents.agent" and cls.__name__ == "Agent" for cls in type(found).__mro__)


def openai_agent(agent: agents.Agent[Any], kwargs: Mapping[str, Any], tools: Sequence[Tool] | None) -> AgentAdapter:
    import openai
    from agents import OpenAIProvider, RunConfig, Runner
    from pydantic_core import to_json

    if unknown := sorted(kwargs.keys() - {"max_turns"}):
        raise UsageFault(f"kwargs: an agent of the OpenAI Agents SDK takes max_turns, and no {unknown[0]!r}")
    if tools:
        agent = agent.clone(tools=[*agent.tools, *map(_function_tool, tools)])
    http = openai.DefaultAsyncHttpxClient()

    async def run(request: AgentRequest, turn: WorkerTurn) -> AgentResponse:
        access, config = request.metadata.get("areal_inference"), RunConfig()
        if access:
            url = access["base_url"].rstrip("/") + "/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key=access["api_key"], http_client=http)
            provider = OpenAIProvider(openai_client=client, use_responses=False)
            model = access.get("model") or MODEL
            config = RunConfig(model=model, model_provider=provider, tracing_disabled=True)
        messages: Any = [*items_of(request.history), {"role": "user", "content": request.message}]
        running = Runner.run_streamed(agent, messages, run_config=config, **kwargs)
        calls = _Calls(turn)
        try:
            async for event in running.stream_events():
                await waited(calls.event(event))
        finally:
            running.cancel()
        output = running.final_output
        # The model's own text, and not the SDK's serialization of it. The output may also be a tool's result.
        said = output if isinstance(output, str) else "" if output is None else to_json(output).decode()
        return AgentResponse(turn.text or said)

    return AgentAdapter(
        type(agent).__qualname__ + " of openai-agents", run, SimpleNamespace(close_all_sessions=http.aclose)
    )


class _Calls:
    """Converts the runner's stream events to events of the turn."""

    def __init__(self, turn: WorkerTurn) -> None:
        self._turn = turn
        self._names: dict[str, str] = {}

    def event(self, event: Any) -> Future[None] | None:
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            return self._turn.delta(event.data.delta)
        item = event.item if event.type == "run_item_stream_event" else None
        if item is None or not hasattr(item, "raw_item"):
            return None
        raw = item.raw_item if isinstance(item.raw_item, Mapping) else vars(item.raw_item)
        if item.type in ("tool_call_item", "handoff_call_item") and raw.get("type") == "function_call":
            self._names[raw["call_id"]] = raw["name"]
            return self._turn.tool_call(raw["name"], raw["arguments"], raw["call_id"])
        if item.type in ("tool_call_output_item", "handoff_output_item") and raw.get("call_id") in self._names:
            return self._turn.tool_result(self._names[raw["call_id"]], raw["output"], raw["call_id"])
        return None


def items_of(history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """Chat messages as input items of the Responses API, which the SDK accepts for any model."""
    for message in history:
        if message["role"] == "tool":
            yield {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
            continue
        if message.get("content") and message["role"] == "assistant":  # in one message with the calls that follow
            text = {"type": "output_text", "text": message["content"], "annotations": []}
            yield {"type": "message", "id": "", "role": "assistant", "status": "completed", "content": [text]}
        elif message.get("content"):
            yield {"role": message["role"], "content": message["content"]}
        for call in message.get("tool_calls") or ():
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _function_tool(tool: Tool) -> agents.FunctionTool:
    from agents import FunctionTool

    async def invoke(context: object, arguments: str) -> str:
        try:
            if not isinstance(given := parse_json(arguments or "{}"), dict):
                raise ValueError("the arguments must be a JSON object")
            return await tool.call(given)
        except (ToolError, ValueError) as error:  # the model may correct the call
            return f"error: {error}"

    return FunctionTool(tool.name, tool.description, dict(tool.input_schema), invoke, strict_json_schema=False)
