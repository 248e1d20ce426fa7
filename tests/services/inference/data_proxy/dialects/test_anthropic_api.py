"""A model behind Anthropic's API, which here is another service's: asked as it is, recorded as messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from areal.http.events import EventReader
from areal.services.inference.data_proxy.external_recording import MessagesRecorder
from tests.services.inference.data_proxy.dialects.talks import THOUGHT, TWO_CALLS, WEATHER
from tests.services.inference.recorder.rollouts import CHAT, Rollout, begin
from tests.services.inference.running_service import Service
from tests.services.processes import Process, Processes, engine_calls, script, wait_ready

TOOLS: Any = [{"name": "get_weather", "input_schema": WEATHER}, {"name": "now", "input_schema": {"type": "object"}}]
USER: Any = {"role": "user", "content": "How is Rome?"}
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def friend(
    talking_service: Service,
    module_processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Service, Process]]:
    argv: tuple[str, ...] = ("--model", "friend", "--engine", "external", "--engine-url", talking_service.gateway.url)
    argv += ("--provider-api", "anthropic", "--provider-model", "tiny")
    state = ("--state-dir", str(tmp_path_factory.mktemp("state")))
    env = {"AREAL_PROVIDER_API_KEY": talking_service.key}
    proxy = module_processes.service("data_proxy", *argv, *state, env=env)
    wait_ready(proxy)
    yield talking_service, proxy


@pytest.fixture
def rollout(friend: tuple[Service, Process]) -> Rollout:
    service, proxy = friend
    script(service.engine, reset=True, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    return begin(proxy, service.key)


def recorded(rollout: Rollout) -> list[dict[str, Any]]:
    rollout.reward(1.0)
    found: list[dict[str, Any]] = rollout.export()["traj"]["interactions"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_answer_is_relayed_and_recorded_as_chat_message(rollout: Rollout, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=rollout.front.url, api_key=rollout.key, max_retries=0)
    wanted: Any = {"model": "friend", "max_tokens": 500, "messages": [USER], "tools": TOOLS, "system": "Be brief."}
    if stream:
        with client.messages.stream(**wanted) as streamed:
            message = streamed.get_final_message()
    else:
        message = client.messages.create(**wanted)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    (kept,) = recorded(rollout)
    assert kept["messages"] == [{"role": "system", "content": "Be brief."}, USER]
    answer = kept["response"]
    assert answer["content"].strip() == "I look." and answer["reasoning_content"]
    assert [call["function"]["name"] for call in answer["tool_calls"]] == [
        block.name for block in message.content if block.type == "tool_use"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_repeated_call_is_answered_again_and_recorded_once(
    rollout: Rollout, friend: tuple[Service, Process], stream: bool
) -> None:
    body = {"model": "friend", "max_tokens": 50, "messages": [USER], "stream": stream}
    first, again = (rollout.post(MESSAGES, body, **{"Idempotency-Key": f"k{stream}"}) for _ in range(2))
    assert first.status == again.status == 200
    assert len(engine_calls(friend[0].engine)) == 1
    if not stream:
        assert again.json()["content"] == first.json()["content"]
    assert len(recorded(rollout)) == 1


def test_other_apis_name_the_supported_one(rollout: Rollout) -> None:
    for path in (CHAT, "/v1/completions", "/v1/responses"):
        answer = rollout.post(path, {"messages": [USER]})
        assert answer.status == 400 and MESSAGES in answer.json()["error"]["message"]


def test_tokens_are_counted_by_provider(rollout: Rollout) -> None:
    answer = rollout.post(f"{MESSAGES}/count_tokens", {"messages": [USER]})
    assert answer.status == 200 and answer.json()["input_tokens"] > 0


def test_session_call_that_is_not_a_chat_is_refused(rollout: Rollout, friend: tuple[Service, Process]) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}
    refused = rollout.post(MESSAGES, body)
    assert refused.status == 400 and "document" in refused.json()["error"]["message"]


def test_events_are_held_from_the_last_event_on() -> None:
    recorder = MessagesRecorder(None, "m")
    events = EventReader()

    def passed(part: bytes) -> bytes:
        return b"".join(map(recorder.event, events.feed(part)))

    text = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}\n\n'
    )
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert passed(text + text) == text + text
    assert passed(text + stop) == text and recorder.held == stop
    assert passed(b": later\n\n") == b"" and recorder.held == stop + b": later\n\n"
