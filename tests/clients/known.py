"""Which client does what against a served model, and what of it does not work: the table of ``docs/clients.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CLIENTS = {
    "openai": "OpenAI's SDK",
    "anthropic": "Anthropic's SDK",
    "openai-agents": "OpenAI Agents SDK",
    "langchain": "LangChain (`langchain-openai`, `langchain-anthropic`)",
    "litellm": "LiteLLM",
    "pydantic-ai": "Pydantic AI",
    "instructor": "Instructor",
    "inspect-ai": "Inspect",
    "lm-eval": "lm-evaluation-harness",
    "codex": "Codex, with its defaults",
    "opencode": "opencode",
    "aider": "aider",
    "ai-sdk": "Vercel AI SDK (`@ai-sdk/openai-compatible`)",
    "llm": "`llm`",
    "dspy": "DSPy",
    "smolagents": "smolagents",
    "haystack": "Haystack",
    "llama-index": "LlamaIndex (`llama-index-llms-openai-like`)",
    "autogen": "AutoGen",
    "crewai": "CrewAI",
    "guidellm": "GuideLLM (its requests, not the program, which installs a GPU build of torch)",
}
FEATURES = ("chat", "streaming", "tools", "structured output", "usage", "errors", "retries", "async", "likelihoods")

NOT_THEIRS: dict[str, tuple[str, ...]] = {
    **{client: ("likelihoods",) for client in CLIENTS if client != "lm-eval"},
    "anthropic": ("structured output", "likelihoods"),
    "instructor": ("streaming", "likelihoods"),
    "inspect-ai": ("streaming", "likelihoods"),
    "lm-eval": ("streaming", "tools", "structured output", "usage", "async"),
    "codex": ("structured output", "retries", "async", "likelihoods"),
    "opencode": ("structured output", "usage", "errors", "retries", "async", "likelihoods"),
    "aider": ("tools", "structured output", "errors", "retries", "async", "likelihoods"),
    "ai-sdk": ("retries", "async", "likelihoods"),
    "llm": ("tools", "retries", "async", "likelihoods"),
    "dspy": ("streaming", "tools", "structured output", "likelihoods"),
    "smolagents": ("structured output", "retries", "async", "likelihoods"),
    "haystack": ("structured output", "retries", "async", "likelihoods"),
    "llama-index": ("structured output", "likelihoods"),
    "autogen": ("likelihoods",),
    "crewai": ("tools", "structured output", "usage", "retries", "async", "likelihoods"),
    "guidellm": ("tools", "structured output", "errors", "retries", "async", "likelihoods"),
}
"""What a client does not have, or leaves to another one here."""

FAILS: dict[tuple[str, str], str] = {}
"""What does not work, and why."""

COVERED: set[tuple[str, str]] = set()


def covers(client: str, *features: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a test that shows that ``client`` can do these; it is to fail where ``FAILS`` says so."""
    COVERED.update((client, feature) for feature in features)

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        for feature in features:
            if (reason := FAILS.get((client, feature))) is not None:
                test = pytest.mark.xfail(strict=True, reason=reason)(test)
        return pytest.mark.clients(test)

    return mark


def table() -> str:
    lines = ["| client | " + " | ".join(FEATURES) + " |", "|---|" + "---|" * len(FEATURES)]
    for client, title in CLIENTS.items():
        lines.append(f"| {title} | " + " | ".join(_cell(client, feature) for feature in FEATURES) + " |")
    return "\n".join(lines)


def _cell(client: str, feature: str) -> str:
    if feature in NOT_THEIRS.get(client, ()):
        return "-"
    return FAILS.get((client, feature), "yes")
