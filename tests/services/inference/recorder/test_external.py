"""Sessions of an external model: its messages are recorded, its bytes go through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.recorder.rollouts import CHAT, Rollout, begin
from tests.services.inference.running_service import Service, build_service
from tests.services.processes import Process, Processes, chat_text, engine_calls, script, wait_ready

_TEXTS = re.compile(rb'"(?:content|text|delta)":"([^"]*)"')


@pytest.fixture(scope="module")
def friend(
    module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, Process]]:
    """A service, and a data proxy that knows its ``tiny`` as ``friend``."""
    service = build_service(module_processes, tokenizer)
    argv = (
        "--model",
        "friend",
        "--engine",
        "external",
        "--engine-url",
        service.gateway.url,
        "--provider-model",
        "tiny",
    )
    state = ("--state-dir", str(tmp_path_factory.mktemp("state")))
    proxy = module_processes.service("data_proxy", *argv, *state, env={"AREAL_PROVIDER_API_KEY": service.key})
    wait_ready(proxy)
    yield service, proxy


@pytest.fixture
def rollout(friend: tuple[Service, Process]) -> Rollout:
    service, proxy = friend
    script(service.engine, reset=True)
    return begin(proxy, service.key)


def interactions(rollout: Rollout, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rollout.export(**more)["traj"]["interactions"]
    return found


def test_messages_and_the_assistants_answer_are_exported(rollout: Rollout) -> None:
    rollout.chat("a")
    stream = rollout.stream("b")
    assert chat_text(list(stream.events())) == "Hello there, friend!"
    rollout.reward(1.0)
    first, second = interactions(rollout, discount=0.5)
    assert first["messages"] == [{"role": "user", "content": "a"}]
    assert first["response"]["content"] == second["response"]["content"] == "Hello there, friend!"
    assert second["messages"] == rollout.body("b")["messages"]
    assert (first["reward"], first["original_reward"], second["reward"]) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
    ],
)
def test_repeated_call_gets_the_same_answer(
    friend: tuple[Service, Process], rollout: Rollout, path: str, body: dict[str, Any], stream: bool
) -> None:
    headers = {"Idempotency-Key": "k"}
    first = rollout.post(path, {**body, "stream": stream}, **headers)
    second = rollout.post(path, {**body, "stream": stream}, **headers)
    assert first.status == second.status == 200
    assert len(engine_calls(friend[0].engine)) == 1
    for answer in (first, second):
        assert b"Hello there, friend!" in b"".join(_TEXTS.findall(answer.body))
        assert (b'"object":"text_completion"' in answer.body) is (path == "/v1/completions")
    assert rollout.reward(1.0)["interaction_count"] == 1
    (recorded,) = interactions(rollout)
    assert "Hello there, friend!" in str(recorded["response"]["content"])


def test_failures_of_the_api_are_counted_not_recorded(friend: tuple[Service, Process], rollout: Rollout) -> None:
    rollout.chat("a")
    script(friend[0].engine, error_after=2)
    list(rollout.stream("b").events())
    script(friend[0].engine, cut_after=0)
    assert rollout.post(CHAT, rollout.body("b")).status == 502
    rollout.reward(1.0)
    reply = rollout.export()
    assert len(reply["traj"]["interactions"]) == 1
    assert [(item["code"], item["count"]) for item in reply["failures"]] == [("engine_failed", 2)]


def test_completion_in_session_requires_text(friend: tuple[Service, Process], rollout: Rollout) -> None:
    assert rollout.post("/v1/completions", {"prompt": "Hello", "max_tokens": 3}).status == 200
    assert rollout.post("/v1/completions", {"prompt": [72, 73], "max_tokens": 3}).status == 400
    human = friend[1].call("POST", "/v1/completions", {"prompt": [72, 73], "max_tokens": 3}, key=rollout.admin_key)
    assert human.status == 200
    rollout.reward(1.0)
    assert interactions(rollout)[0]["messages"] == [{"role": "user", "content": "Hello"}]


def test_columns_of_text_are_400(rollout: Rollout) -> None:
    rollout.chat("a")
    rollout.reward(1.0)
    body = {"session_ids": [rollout.session_id], "format": "npz"}
    assert rollout.front.call("POST", "/export_trajectories", body, key=rollout.admin_key).status == 400
