"""opencode with its own tools, by the Vercel AI SDK that it brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.programs import npm_program, run
from tests.clients.shapes import SAY


@covers("opencode", "chat", "streaming", "tools")
@pytest.mark.timeout(300)
def test_run(served: Served, tmp_path: Path) -> None:
    program = npm_program("opencode")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": served.v1, "apiKey": served.key},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 100_000, "output": 200}}},
    }
    names = {"model": f"areal/{MODEL}", "small_model": f"areal/{MODEL}"}
    (tmp_path / "work").mkdir()
    config = {**names, "provider": {"areal": provider}, "autoupdate": False, "share": "disabled"}
    (tmp_path / "work" / "opencode.json").write_text(json.dumps(config))
    done = run(tmp_path, program, "run", "--format", "json", SAY)
    kinds = [json.loads(line)["type"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert "text" in kinds and "step_finish" in kinds and "error" not in kinds, done
