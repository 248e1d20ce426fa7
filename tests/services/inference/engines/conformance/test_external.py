"""What of the contract applies to an external model: answers as they are, reasons of ends, and nothing to control.

The API over there is a data proxy before a real engine, so that what happens to an engine behind it can be seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.services.inference.engines.conformance.models import Models
from tests.services.processes import Process, Processes, Stream, wait_ready, wait_until

COMPLETIONS = "/v1/completions"
CALL: dict[str, Any] = {"model": "ours", "prompt": "Hello", "max_tokens": 12, "seed": 7, "temperature": 1.0}


@dataclass(frozen=True)
class Outside:
    """``proxy`` knows as ``ours`` what ``api`` calls ``theirs`` and ``engine`` computes."""

    processes: Processes
    engine: Process
    api: Process
    proxy: Process

    def ask(self, path: str, body: Any) -> Any:
        return self.proxy.call("POST", path, body, key=self.processes.key)

    def running(self) -> int:
        reported = self.engine.call("GET", "/stats", key=self.processes.key).json()
        return int(reported["running"] + reported["waiting"])


@pytest.fixture(scope="module")
def outside(module_processes: Processes, models: Callable[[bool], Models]) -> Iterator[Outside]:
    folder = str(models(False).folders[0])
    engine = module_processes.service("engines.embedded", "--model-path", folder)
    wait_ready(engine)
    token = ("--model", "theirs", "--engine", "embedded", "--engine-url", engine.url, "--tokenizer-path", folder)
    api = module_processes.service("data_proxy", *token)
    wait_ready(api)
    external = ("--model", "ours", "--provider-model", "theirs", "--engine", "external", "--engine-url", api.url)
    proxy = module_processes.service("data_proxy", *external, env={"AREAL_PROVIDER_API_KEY": module_processes.key})
    wait_ready(proxy)
    yield Outside(module_processes, engine, api, proxy)


def test_streamed_events_add_up_to_whole_answer(outside: Outside) -> None:
    whole = outside.ask(COMPLETIONS, CALL).json()["choices"][0]
    events = list(Stream(outside.proxy.port, COMPLETIONS, CALL, outside.processes.key).events())
    pieces = [choice for event in events[:-1] for choice in event["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] and events[-1] == "[DONE]"


def test_choices_and_finish_reasons_are_the_providers(outside: Outside) -> None:
    answer = outside.ask(COMPLETIONS, {**CALL, "n": 3, "ignore_eos": True}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_closing_stream_aborts_call_behind_api(outside: Outside) -> None:
    body = {**CALL, "max_tokens": 480, "ignore_eos": True, "n": 8}
    stream = Stream(outside.proxy.port, COMPLETIONS, body, outside.processes.key)
    next(stream.events())
    stream.close()
    wait_until(lambda: outside.running() == 0, what="the engine is idle")
    stats = outside.engine.call("GET", "/stats", key=outside.processes.key).json()
    assert stats["aborted"] > 0  # it did not run out by itself


def test_provider_refusal_is_relayed_without_side_effects(outside: Outside) -> None:
    refused = outside.ask(COMPLETIONS, {**CALL, "max_tokens": 10_000})
    assert refused.status == 400 and json.loads(refused.body)["error"]["code"] == "context_length_exceeded"
    assert outside.ask(COMPLETIONS, CALL).status == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/release_memory_occupation", "/set_version"])
def test_external_engine_has_no_controls(outside: Outside, path: str) -> None:
    answer = outside.ask(path, {"version": 1})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "unsupported_by_engine")


def test_unreachable_api_is_not_ready(processes: Processes) -> None:
    external = ("--model", "ours", "--engine", "external", "--engine-url", "http://127.0.0.1:9")
    proxy = processes.service("data_proxy", *external)
    gone = "http://127.0.0.1:9/v1 does not answer: Connection refused"
    wait_until(lambda: proxy.call("GET", "/ready").json()["reason"] == gone, what="not ready")
