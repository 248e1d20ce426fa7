"""aider, by LiteLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.programs import run
from tests.clients.shapes import ENOUGH, SAY


@covers("aider", "chat", "streaming", "usage")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_message(served: Served, tmp_path: Path, stream: str) -> None:
    pytest.importorskip("aider")
    settings = tmp_path / "settings.yml"
    known = {"name": f"openai/{MODEL}", "use_temperature": False, "extra_params": {"max_tokens": ENOUGH}}
    settings.write_text(json.dumps([known]))
    prices = tmp_path / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text(json.dumps({f"openai/{MODEL}": {"max_tokens": 100_000}}))  # else it asks a server for them
    quiet = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
    argv = ("--model", f"openai/{MODEL}", "--model-settings-file", str(settings), "--map-tokens", "0", "--no-pretty")
    env = {"OPENAI_API_BASE": served.v1, "OPENAI_API_KEY": served.key, "LITELLM_LOCAL_MODEL_COST_MAP": "true"}
    done = run(tmp_path, sys.executable, "-m", "aider", *argv, *quiet, stream, "--message", SAY, **env)
    assert done.returncode == 0 and "received" in done.stdout and "Error" not in done.stdout, done
