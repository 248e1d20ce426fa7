"""Codex with its defaults: its own instructions and tools, by the Responses API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.programs import npm_program, run
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


def events(served: Served, home: Path, model: str) -> list[dict[str, Any]]:
    program = npm_program("codex")
    (home / "config.toml").write_text(CONFIG.format(url=served.v1))
    argv = (program, "exec", "--skip-git-repo-check", "--json", "--model", model, SAY)
    done = run(home, *argv, CODEX_HOME=str(home), AREAL_KEY=served.key)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@covers("codex", "chat", "streaming", "tools", "usage")
@pytest.mark.timeout(300)
def test_turn_with_codexs_own_tools(served: Served, tmp_path: Path) -> None:
    seen = events(served, tmp_path, MODEL)
    (completed,) = [event for event in seen if event["type"] == "turn.completed"]
    assert completed["usage"]["output_tokens"] > 0, seen


@covers("codex", "errors")
def test_errors(served: Served, tmp_path: Path) -> None:
    (failed,) = [event for event in events(served, tmp_path, "nobody") if event["type"] == "turn.failed"]
    assert "nobody" in failed["error"]["message"]
