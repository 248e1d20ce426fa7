"""The whole path, router, gateway, data proxy and engine, as an OpenAI client meets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.processes import Process, Processes, Stream, chat_text, engine_calls, release, script

MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class House:
    engine: Process
    proxy: Process
    router: Process
    gateway: Process
    key: str


@pytest.fixture(scope="module")
def house(module_processes: Processes, tokenizer: Path) -> House:
    engine = module_processes.engine(tokenizer)
    proxy = module_processes.data_proxy(engine, tokenizer)
    router = module_processes.router()
    gateway = module_processes.gateway(router)
    module_processes.register(router, proxy)
    return House(engine, proxy, router, gateway, module_processes.key)


@pytest.fixture(autouse=True)
def _fresh_script(house: House) -> Iterator[None]:
    script(house.engine, reset=True)
    yield


def test_chat_not_streamed_answers_the_engines_text(house: House) -> None:
    answer = house.gateway.call("POST", "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}, key=house.key)
    assert answer.status == 200, answer.body
    data = answer.json()
    assert data["choices"][0]["message"]["content"] == "Hello there, friend!"
    assert data["choices"][0]["finish_reason"] == "stop"
    assert data["usage"]["total_tokens"] == data["usage"]["prompt_tokens"] + data["usage"]["completion_tokens"]


def test_chat_streamed_arrives_token_by_token(house: House) -> None:
    script(house.engine, gate=2)
    stream = Stream(house.gateway.port, "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}, house.key)
    seen = []
    for event in stream.events():
        seen.append(event)
        if len(chat_text(seen)) >= 2:  # the engine holds the rest: what is here came before it ended
            release(house.engine)
            break
    assert engine_calls(house.engine)[0]["ended"] == "running" or len(seen) < 8
    seen += list(stream.events())
    assert seen[-1] == "[DONE]"
    assert chat_text(seen) == "Hello there, friend!"
