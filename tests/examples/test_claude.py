"""The Claude example: a real Claude Code whose model is scripted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.agent.whole import start_agents
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE
from tests.services.processes import Processes, script
from tests.services.tokenizer_folder import write_tokenizer

AGENT = "examples.agents.claude.agent:Claude"
SHELL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo 31 && echo degrees"}}\n</tool_call>'


@pytest.mark.claude
def test_claude_code_runs_a_tool_in_a_recorded_session(tmp_path: Path) -> None:
    pytest.importorskip("claude_agent_sdk")
    processes = Processes(tmp_path)
    try:
        tokenizer = write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
        engine = processes.engine(tokenizer)
        flags = ("--tool-call-parser", "hermes", "--state-dir", str(tmp_path / "state"))
        proxy = processes.data_proxy(engine, tokenizer, *flags)
        replies = [["<tool_response>", "31 degrees."], ["the weather", f"I look.\n{SHELL}"]]
        script(engine, replies=replies, max_model_len=100_000)
        router = processes.router()
        inference = processes.gateway(router)
        processes.register(router, proxy)
        agents = start_agents(processes, tmp_path, inference, agent=AGENT, kwargs={"tools": ["Bash"]})
        body = {"input": "the weather?", "user": "s"}
        answer = agents.gateway.call("POST", "/v1/responses", body, key=agents.key).json()
        kinds = [item["type"] for item in answer.get("output", ())]
        assert kinds[-2:] == ["mcp_call", "message"], answer
        assert answer["output"][-2]["output"] == "31\ndegrees"
        agents.gateway.call("POST", "/sessions/s/reward", {"reward": 1.0}, key=agents.key)
        rows = agents.gateway.call("POST", "/sessions/s/export", {}, key=agents.key).json()["rows"]
        assert len(rows) >= 2 and all(row["kind"] == "tokens" for row in rows)
    finally:
        processes.stop()
