"""A math agent of the Claude Agent SDK."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from typing import Any

from areal.errors import UsageFault
from areal.reward.gsm8k import gsm8k_reward_fn
from areal.workflow.agent import AnsweringAgent, EpisodeModel
from areal.workflow.calculator import INSTRUCTIONS, TOOLS

_log = logging.getLogger(__name__)
_SERVER = "calculator"


class MathToolAgent(AnsweringAgent):
    """Claude Code with a calculator as its only tools, in an empty folder. ``temperature`` and ``top_p`` are accepted
    without effect, with a warning. ``options``: further arguments of ``ClaudeAgentOptions``. Raises UsageFault where
    the SDK is not installed."""

    def __init__(
        self,
        reward_fn: Any = gsm8k_reward_fn,
        max_turns: int = 10,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(reward_fn, max_turns)
        try:
            import claude_agent_sdk  # noqa: F401
        except ImportError as error:
            raise UsageFault(
                "areal.workflow.anthropic.claude_math_agent needs the Claude Agent SDK",
                hint="pip install claude-agent-sdk",
            ) from error
        for name, value in (("temperature", temperature), ("top_p", top_p)):
            if value not in (None, 1.0):
                _log.warning("%s %s has no effect: Claude Code has no such setting, it samples at 1", name, value)
        self._max_output = max_completion_tokens or max_tokens
        self._options = options

    async def answer(self, messages: list[dict[str, Any]], access: EpisodeModel) -> str:
        import claude_agent_sdk as sdk

        server = sdk.create_sdk_mcp_server(_SERVER, tools=[_tool(sdk, function) for function in TOOLS])
        with tempfile.TemporaryDirectory(prefix="areal-claude-", ignore_cleanup_errors=True) as folder:
            environment = {
                "ANTHROPIC_BASE_URL": access.base_url or "",
                "ANTHROPIC_API_KEY": access.api_key or "",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "HOME": folder,
                "CLAUDE_CONFIG_DIR": f"{folder}/claude",
            }
            if self._max_output is not None:
                environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(self._max_output)
            options = sdk.ClaudeAgentOptions(
                env=environment,
                cwd=folder,
                model=access.model,
                setting_sources=[],
                system_prompt=INSTRUCTIONS,
                max_turns=self.max_turns,
                tools=[],
                mcp_servers={_SERVER: server},
                allowed_tools=[f"mcp__{_SERVER}__{function.__name__}" for function in TOOLS],
                **self._options,
            )
            text = "\n".join(str(message["content"]) for message in messages)
            results = [each async for each in sdk.query(prompt=text, options=options)]
        return next(each.result or "" for each in reversed(results) if isinstance(each, sdk.ResultMessage))


def _tool(sdk: Any, function: Callable[[float, float], float]) -> Any:
    """Return the function as a tool of an MCP server."""

    async def call(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            text = str(function(arguments["a"], arguments["b"]))
        except (ArithmeticError, KeyError, TypeError) as error:
            text = f"error: {error!r}"
        return {"content": [{"type": "text", "text": text}]}

    return sdk.tool(function.__name__, function.__doc__, {"a": float, "b": float})(call)
