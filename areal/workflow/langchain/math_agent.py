"""A math agent of LangChain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.errors import UsageFault
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.workflow.agent import AnsweringAgent, EpisodeModel
from areal.workflow.calculator import TOOLS


class MathAgent(AnsweringAgent):
    """A LangChain chat model with a calculator. Keyword arguments are those of ``ChatOpenAI``, where
    ``max_completion_tokens`` or ``max_tokens`` bounds an answer. Raises UsageFault where LangChain is not installed."""

    def __init__(self, reward_fn: Any = gsm8k_reward_fn, max_turns: int = 10, **options: Any) -> None:
        super().__init__(reward_fn, max_turns)
        try:
            import langchain_openai  # noqa: F401
        except ImportError as error:
            raise UsageFault(
                "areal.workflow.langchain needs LangChain's client", hint="pip install langchain-openai"
            ) from error
        if (limit := options.pop("max_completion_tokens", None)) is not None:
            options["max_tokens"] = limit
        self._options = options

    async def answer(self, messages: list[dict[str, Any]], access: EpisodeModel) -> str:
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI

        tools = {function.__name__: tool(function) for function in TOOLS}
        model = ChatOpenAI(
            model=access.model,
            base_url=f"{access.base_url}/v1" if access.base_url else None,
            api_key=access.api_key,
            http_async_client=access.http_client,
            **self._options,
        ).bind_tools(list(tools.values()))
        conversation: list[Any] = list(messages)
        for _ in range(self.max_turns):
            reply = await model.ainvoke(conversation)
            if not reply.tool_calls:
                break
            conversation.append(reply)
            for call in reply.tool_calls:
                conversation.append(await _result(tools.get(call["name"]), call))
        return str(reply.text)


async def _result(called: Any, call: Mapping[str, Any]) -> Any:
    """Return the message of a tool's result; an error is a result that the model reads."""
    from langchain_core.messages import ToolMessage

    try:
        if called is None:
            raise ValueError(f"there is no tool {call['name']}")
        content = str(await called.ainvoke(call["args"]))
    except Exception as error:  # noqa: BLE001 - the model's arguments are wrong: it gets the error
        content = f"error: {error}"
    return ToolMessage(content, tool_call_id=call["id"])
