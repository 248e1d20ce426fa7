"""The Claude Agent SDK as an agent: Claude Code runs the tools, and calls the session's model by ``/v1/messages``."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from areal.api.agent import AgentRequest, AgentResponse, EventEmitter

try:
    import claude_agent_sdk as sdk
except ImportError as error:
    raise ImportError("examples/agents/claude needs the Claude Agent SDK: pip install claude-agent-sdk") from error


class Claude:
    """One Claude Code for each session, in a folder of its own, as long as the session stays at this worker. One that
    comes from another worker begins with the conversation so far as text. ``tools``: the built-in tools that it may
    use, without asking anybody: none by default."""

    def __init__(self, tools: list[str] | None = None, system_prompt: str = "Be brief.", max_turns: int = 20) -> None:
        self._how: dict[str, Any] = {"tools": tools or [], "allowed_tools": tools or []}
        self._how |= {"system_prompt": system_prompt, "max_turns": max_turns}
        self._clients: dict[str, tuple[sdk.ClaudeSDKClient, Path, int]] = {}

    async def run(self, request: AgentRequest, *, emitter: EventEmitter) -> AgentResponse:
        client, prompt = await self._client(request)
        names: dict[str, str] = {}  # of tool calls, by their ids
        try:
            await client.query(prompt)
            async for message in client.receive_response():
                if isinstance(message, sdk.ResultMessage):
                    result = message
                content = getattr(message, "content", None)
                for block in content if isinstance(content, list) else ():
                    if isinstance(block, sdk.TextBlock):
                        await emitter.emit_delta(block.text)
                    elif isinstance(block, sdk.ToolUseBlock):
                        names[block.id] = block.name
                        await emitter.emit_tool_call(block.name, json.dumps(block.input), block.id)
                    elif isinstance(block, sdk.ToolResultBlock) and block.tool_use_id in names:
                        await emitter.emit_tool_result(
                            names[block.tool_use_id], _text(block.content), block.tool_use_id
                        )
            if result.is_error:
                raise RuntimeError(result.result or result.subtype)
        except BaseException:
            await self.close_session(request.session_key)
            raise
        client, folder, turns = self._clients[request.session_key]
        self._clients[request.session_key] = client, folder, turns + 1
        return AgentResponse(result.result or "", {"turns": result.num_turns})

    async def _client(self, request: AgentRequest) -> tuple[sdk.ClaudeSDKClient, str]:
        """The session's client, and what to say to it."""
        said = sum(message["role"] == "user" for message in request.history)
        known = self._clients.get(request.session_key)
        if known is not None and known[2] == said:
            return known[0], request.message
        await self.close_session(request.session_key)
        access = request.metadata["areal_inference"]
        folder = Path(tempfile.mkdtemp(prefix="areal-claude-"))
        environment = {
            "ANTHROPIC_BASE_URL": access["base_url"],
            "ANTHROPIC_API_KEY": access["api_key"],
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "HOME": str(folder),
            "CLAUDE_CONFIG_DIR": str(folder / "claude"),
        }
        model = access["model"] or "default"
        options = sdk.ClaudeAgentOptions(env=environment, cwd=str(folder), model=model, setting_sources=[], **self._how)
        client = sdk.ClaudeSDKClient(options)
        self._clients[request.session_key] = client, folder, said
        await client.connect()
        earlier = "\n".join(f"{each['role']}: {each['content']}" for each in request.history if each.get("content"))
        return client, f"Our conversation so far:\n{earlier}\n\n{request.message}" if earlier else request.message

    async def close_session(self, session_key: str) -> None:
        if (known := self._clients.pop(session_key, None)) is not None:
            with contextlib.suppress(sdk.ClaudeSDKError):
                await known[0].disconnect()
            shutil.rmtree(known[1], ignore_errors=True)

    async def close_all_sessions(self) -> None:
        for key in list(self._clients):
            await self.close_session(key)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")
