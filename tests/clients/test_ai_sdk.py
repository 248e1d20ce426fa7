"""The Vercel AI SDK's provider for OpenAI-compatible services."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.programs import npm_folder, run

SCRIPT = Path(__file__).parent / "ai_sdk.mjs"


@covers("ai-sdk", "chat", "usage", "streaming", "tools", "structured output", "errors")
def test_features(served: Served, tmp_path: Path) -> None:
    env = {"AREAL_NPM_CLIENTS": str(npm_folder()), "AREAL_MODEL": MODEL}
    done = run(tmp_path, "node", str(SCRIPT), **env, AREAL_URL=served.v1, AREAL_KEY=served.key)
    assert done.returncode == 0, done.stderr
    found = {each["feature"]: each["found"] for each in map(json.loads, done.stdout.splitlines())}
    assert found["chat"] and found["usage"] > 0 and found["streaming"] > 0
    assert found["tools"] in (["on"], ["off"]) and found["structured output"] in ("good", "bad")
    assert found["errors"] == 404
