"""CrewAI's model for OpenAI-compatible services, alone and in a crew."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("CREWAI_TRACING_ENABLED", "false")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))


def model(served: Served, name: str = MODEL, **more: Any) -> Any:
    crewai = pytest.importorskip("crewai")
    return crewai.LLM(f"openai/{name}", base_url=served.v1, api_key=served.key, max_tokens=TOKENS, **more)


@covers("crewai", "chat")
def test_chat(served: Served) -> None:
    assert model(served).call(SAY)
    from crewai import Agent, Crew, Task

    agent = Agent(role="tester", goal="test", backstory="none", llm=model(served), max_iter=1, max_retry_limit=0)
    crew = Crew(agents=[agent], tasks=[Task(description=SAY, expected_output="words", agent=agent)])
    assert str(crew.kickoff())


@covers("crewai", "streaming")
def test_streaming(served: Served) -> None:
    assert model(served, stream=True).call(SAY)


@covers("crewai", "errors")
def test_errors(served: Served) -> None:
    with pytest.raises(Exception, match="absent"):
        model(served, "absent").call(SAY)
