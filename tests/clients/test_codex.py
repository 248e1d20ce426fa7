"""Codex with its defaults: its own instructions and tools, by the Responses API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.programs import npm_program, run
from tests.clients.scripted import scripted_model
from tests.clients.shapes import SAY

CONFIG = """
model_provider = "areal"
[model_providers.areal]
name = "areal"
base_url = "{url}"
env_key = "AREAL_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def events(served: Served, home: Path, model: str, asked: str = SAY) -> list[dict[str, Any]]:
    program = npm_program("codex")
    (home / "config.toml").write_text(CONFIG.format(url=served.v1))
    argv = (program, "exec", "--skip-git-repo-check", "--json", "--model", model, asked)
    done = run(home, *argv, CODEX_HOME=str(home), AREAL_KEY=served.key)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@covers("codex", "chat", "streaming", "usage")
@pytest.mark.timeout(300)
def test_turn_runs_codex_tools(served: Served, tmp_path: Path) -> None:
    seen = events(served, tmp_path, MODEL)
    (completed,) = [event for event in seen if event["type"] == "turn.completed"]
    assert completed["usage"]["output_tokens"] > 0, seen


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@covers("codex", "tools")
@pytest.mark.timeout(300)
def test_function_and_namespace_calls_are_executed(tmp_path: Path) -> None:
    npm_program("codex")
    with scripted_model(tmp_path) as served:
        shell = tool_call("exec_command", cmd="echo areal-$((6*7))")
        spaced = tool_call("multi_agent_v1__close_agent", target="areal-agent")
        served.answer({"areal-42": spaced, "count": shell}, text="All done.")
        seen = [event.get("item", {}) for event in events(served, tmp_path, MODEL, "Please count.")]
        asked = served.prompts()[-1]
    ran = [item for item in seen if item.get("type") == "command_execution" and item["status"] == "completed"]
    assert [item["aggregated_output"].strip() for item in ran] == ["areal-42"], seen
    assert [item["text"] for item in seen if item.get("type") == "agent_message"] == ["All done."], seen
    first, _, rest = asked.partition(shell)[2].partition(spaced)
    assert "areal-42" in first and rest.count("<tool_response>") == 1, rest


@covers("codex", "errors")
def test_errors(served: Served, tmp_path: Path) -> None:
    (failed,) = [event for event in events(served, tmp_path, "absent") if event["type"] == "turn.failed"]
    assert "absent" in failed["error"]["message"]
