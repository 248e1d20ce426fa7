"""The examples `search` and `tools`: their parts, and their training on a CPU as a user starts it."""

from __future__ import annotations

import asyncio
import json
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from areal.api.agent import AgentRequest
from areal.client.command import free_port
from tests.e2e.conftest import ROOT, Box, box  # noqa: F401 - fixture

EXAMPLES = ROOT / "examples"


def module(example: str, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(EXAMPLES / example)
    return runpy.run_path(str(EXAMPLES / example / f"{name}.py"))


def test_search_ranks_document_titled_like_query_first(monkeypatch: pytest.MonkeyPatch) -> None:
    file = EXAMPLES / "search" / "corpus.jsonl"
    corpus = module("search", "corpus", monkeypatch)["Corpus"](file)
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(documents) == 200
    for document in documents:
        assert corpus.search(document["title"], 1) == [document["text"]]
    assert corpus.search("nothing of it", 3) == []
    assert corpus.search("  ADBERT, town?", 1) == ["Adbert lives in Elmby."], "words in any case, a rare one first"


def test_search_documents_answer_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = module("search", "corpus", monkeypatch)["Corpus"](EXAMPLES / "search" / "corpus.jsonl")
    rows = [json.loads(line) for name in ("train", "test") for line in (EXAMPLES / "search" / f"{name}.jsonl").open()]
    assert len(rows) == 288
    for row in rows:
        _, _, kind, _, person, _ = row["prompt"].split()
        place = corpus.search(person, 1)[0].rstrip(".").split()[-1]
        if kind == "country":
            place = corpus.search(place, 1)[0].rstrip(".").split()[-1]
        assert place == row["answer"]
    names = [{row["prompt"].split()[4] for row in part} for part in (rows[:208], rows[208:])]
    assert not names[0] & names[1], "the test asks about other people"


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        ("New Elmby", 1.0, 1.0),
        (" the new elmby.", 1.0, 1.0),
        ("Elmby", 0.0, 2 / 3),
        ("It is New Elmby", 0.0, 2 / 3),
        ("Corton", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_reward_of_search_is_exact_match_or_f1(
    monkeypatch: pytest.MonkeyPatch, answer: str, exact: float, f1: float
) -> None:
    rewards = module("search", "reward", monkeypatch)
    assert rewards["exact_match"]("?", answer, answer="New Elmby") == exact
    assert rewards["f1"]("?", answer, answer="New Elmby") == pytest.approx(f1)


@pytest.mark.parametrize(("expression", "value"), [("47 * 23", "1081"), (" -(3 + 4) / 2", "-3.5"), ("7 // 2 % 2", "1")])
def test_calculator_computes_arithmetic(monkeypatch: pytest.MonkeyPatch, expression: str, value: str) -> None:
    assert module("tools", "server", monkeypatch)["calculate"](expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "x + 1", "2 ** 9", "(" * 101 + ")" * 101, "'a' * 3"])
def test_calculator_refuses_non_arithmetic(monkeypatch: pytest.MonkeyPatch, expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        module("tools", "server", monkeypatch)["calculate"](expression)


def test_python_tool_prints_and_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    python = module("tools", "server", monkeypatch)["python"]

    async def run(*programs: str) -> list[str]:
        return await asyncio.gather(*map(python, programs))

    printed, error, file, memory = asyncio.run(
        run(
            "print('4713'[::-1])",
            "1/0",
            "print('x', file=open('/tmp/of_a_model', 'w'), flush=True)",
            "print(len('x' * 10**10))",
        )
    )
    assert printed == "3174"
    assert error.endswith("ZeroDivisionError: division by zero")
    assert "File too large" in file
    assert "MemoryError" in memory
    Path("/tmp/of_a_model").unlink(missing_ok=True)


def test_python_tool_is_limited_by_processor_time_and_not_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    python = module("tools", "server", monkeypatch)["python"]
    monkeypatch.setitem(python.__globals__, "_CPU_S", 1)
    slow = "import time; time.sleep(4.5); print(7)"  # as a program that waits for a processor

    async def run() -> list[str]:
        return await asyncio.gather(python(slow), python("while True: pass"))

    assert asyncio.run(run()) == ["7", "stopped after 1 s of processor time"]
    monkeypatch.setitem(python.__globals__, "_WAIT_S", 0.2)
    assert asyncio.run(python("import time; time.sleep(9)")) == "stopped after 0.2 s"


class Emitter:
    async def emit_delta(self, text: str) -> None:
        pass

    async def emit_tool_call(self, name: str, args: Any, call_id: str | None = None) -> None:
        pass

    async def emit_tool_result(self, name: str, result: Any, call_id: str | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("example", "agent", "given"),
    [("tools", "ToolAgent", {"tools": ()}), ("search", "SearchAgent", {"corpus": "corpus.jsonl"})],
)
def test_full_context_ends_task_without_answer(
    monkeypatch: pytest.MonkeyPatch, example: str, agent: str, given: dict[str, Any]
) -> None:
    monkeypatch.chdir(EXAMPLES / example)
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"query": "Adbert"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": said}
    answer = {"id": "b", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    full = {"error": {"message": "this model's context is 128 tokens", "code": "context_length_exceeded"}}
    request = AgentRequest(
        "?", "s", "r", metadata={"areal_inference": {"base_url": "http://x", "api_key": "k", "model": "m"}}
    )

    async def run(*answers: httpx2.Response) -> str:
        replies = iter(answers)
        player = module(example, "agent", monkeypatch)[agent](**given)
        player._http = httpx2.AsyncClient(transport=httpx2.MockTransport(lambda asked: next(replies)))
        return (await player.run(request, emitter=Emitter())).summary

    assert asyncio.run(run(httpx2.Response(200, json=answer), httpx2.Response(400, json=full))) == ""
    with pytest.raises(openai.BadRequestError):  # the task alone is too long
        asyncio.run(run(httpx2.Response(400, json=full)))


@pytest.mark.extended
@pytest.mark.parametrize("example", ["search", "tools"])
def test_cpu_profile_trains_by_readme_command(box: Box, example: str) -> None:  # noqa: F811
    box.ok("init", "example", example)
    readme = (box.folder / example / "README.md").read_text().splitlines()
    command = next(line for line in readme if line.startswith("areal apply ")).removesuffix(" &&")
    inside = replace(box, folder=box.folder / example)
    inside.ok(
        *shlex.split(command)[1:],
        *("--set", f"inferenceservice/default:spec.gateway.port={box.port}"),
        *("--set", f"agentservice/{example}:spec.gateway.port={free_port()}"),
        *("--set", "values.steps=2", "--set", "values.prompts=4"),
    )
    box.ok("wait", f"trainjob/{example}-grpo", "--for", "completed", "--timeout", "200s")
    folder = box.home / "jobs" / f"{example}-grpo"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if step["step"]]
    assert len(trained) == 2 and all(step["length/prompt"] > 0 for step in trained)
    shown = json.loads(box.ok("inf", "trajectories", "show", str(folder / "trajectories"), "-o", "json").out)["items"]
    assert max(len(episode["interactions"]) for episode in shown) >= 2, "an episode has several calls of the model"
