"""opencode with its own tools, by the Vercel AI SDK that it brings."""

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


def events(served: Served, home: Path, asked: str) -> list[dict[str, Any]]:
    program = npm_program("opencode")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": served.v1, "apiKey": served.key},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 100_000, "output": 200}}},
    }
    names = {"model": f"areal/{MODEL}", "small_model": f"areal/{MODEL}"}
    (home / "work").mkdir()
    config = {**names, "provider": {"areal": provider}, "autoupdate": False, "share": "disabled"}
    (home / "work" / "opencode.json").write_text(json.dumps(config))
    done = run(home, program, "run", "--format", "json", asked)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@covers("opencode", "chat", "streaming")
@pytest.mark.timeout(300)
def test_run(served: Served, tmp_path: Path) -> None:
    kinds = [event["type"] for event in events(served, tmp_path, SAY)]
    assert "text" in kinds and "step_finish" in kinds and "error" not in kinds, kinds


@covers("opencode", "tools")
@pytest.mark.timeout(300)
def test_own_tool_calls_are_executed(tmp_path: Path) -> None:
    npm_program("opencode")
    with scripted_model(tmp_path) as served:
        asked = {"command": "echo areal-$((6*7))", "description": "Counts."}
        call = f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': asked})}\n</tool_call>"
        served.answer({"areal-42": "All done.", "count": call}, text="A title")
        seen = events(served, tmp_path, "Please count.")
    states = [event["part"]["state"] for event in seen if event["type"] == "tool_use"]
    assert [(state["status"], state["output"].strip()) for state in states] == [("completed", "areal-42")], seen
    assert "All done." in [event["part"]["text"] for event in seen if event["type"] == "text"]
