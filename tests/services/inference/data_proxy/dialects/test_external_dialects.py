"""The dialects before an external chat API: here that is the gateway of another service."""

from __future__ import annotations

import json
from typing import Any, cast

import anthropic
import openai
import pytest

from areal.services.dialects import CallArguments, CallEnd, CallStart, Content, Reasoning
from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.external import ChatDeltaReader, api_failures, chat_body
from areal.services.inference.data_proxy.external_recording import NotACompletion, ResponseRecorder, field_of, items_of
from areal.services.inference.data_proxy.sessions import CallRecorder
from tests.services.inference.data_proxy.dialects.talks import ROME, THOUGHT, TWO_CALLS, WEATHER
from tests.services.inference.running_service import Service
from tests.services.processes import Process, Processes, script, wait_ready

TOOLS: Any = [{"name": "get_weather", "input_schema": WEATHER}, {"name": "now", "input_schema": {"type": "object"}}]
USER: Any = {"role": "user", "content": "How is Rome?"}


@pytest.fixture(scope="module")
def friend(talking_service: Service, module_processes: Processes) -> Process:
    """A data proxy that knows ``tiny`` of the service as ``friend``."""
    argv = ("--model", "friend", "--engine", "external", "--engine-url", talking_service.gateway.url)
    env = {"AREAL_PROVIDER_API_KEY": talking_service.key}
    proxy = module_processes.service("data_proxy", *argv, "--provider-model", "tiny", env=env)
    wait_ready(proxy)
    return proxy


@pytest.fixture
def claude(friend: Process, module_processes: Processes) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=friend.url, api_key=module_processes.key, max_retries=0)


def test_external_model_answers_messages_api(service: Service, claude: anthropic.Anthropic) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    message = claude.messages.create(model="friend", max_tokens=500, messages=[USER], tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == json.loads(ROME)  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use" and message.model == "friend" and message.usage.input_tokens > 0
    assert service.engine_saw()["sampling"]["max_new_tokens"] == 500


def test_external_model_streams_messages_api(service: Service, claude: anthropic.Anthropic) -> None:
    script(service.engine, text=f"{THOUGHT}I look.\n{TWO_CALLS}")
    with claude.messages.stream(model="friend", max_tokens=500, messages=[USER], tools=TOOLS) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use" and message.usage.output_tokens > 10


def test_external_model_answers_responses_api(service: Service, friend: Process, module_processes: Processes) -> None:
    tools: Any = [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}]
    script(service.engine, text=f"Hm.\n{TWO_CALLS}")
    with openai.OpenAI(base_url=f"{friend.url}/v1", api_key=module_processes.key, max_retries=0) as client:
        whole = client.responses.create(model="friend", input="Hi", tools=tools)
        with client.responses.stream(model="friend", input="Hi", tools=tools) as stream:
            streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
        assert response.usage is not None and response.usage.output_tokens > 10


def test_refusals_use_the_dialects_error_shape(service: Service, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="context is 4096 tokens"):
        claude.messages.create(model="friend", max_tokens=9_999, messages=[USER])
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="tiny", max_tokens=9, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="the last message must be the user's"):
        claude.messages.create(model="friend", max_tokens=9, messages=[USER, {"role": "assistant", "content": "It"}])
    with pytest.raises(anthropic.BadRequestError, match="not ours to count"):
        claude.messages.count_tokens(model="friend", messages=[USER])


def test_failed_stream_ends_with_error_event(service: Service, claude: anthropic.Anthropic) -> None:
    script(service.engine, error_after=3)
    with pytest.raises(anthropic.APIStatusError, match="scripted error line"):
        with claude.messages.stream(model="friend", max_tokens=9, messages=[USER]) as stream:
            stream.until_done()


def test_sends_only_given_openai_fields() -> None:
    chat = {
        "messages": [{"role": "tool", "tool_call_id": "c", "content": "x", "is_error": True}],
        "stop": [], "stream": True, "top_p": None, "max_tokens": 5, "metadata": {"user_id": "u"}, "tools": [],
        "tool_choice": "auto", "chat_template_kwargs": {},
    }  # fmt: skip
    assert chat_body(chat) == {
        "messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 5,
    }


def test_chunks_become_pieces() -> None:
    chunks = ChatDeltaReader()
    call = {"index": 0, "id": "c0", "function": {"name": "f", "arguments": ""}}
    assert chunks.pieces({"reasoning_content": "Hm", "content": "Hi"}) == [Reasoning("Hm"), Content("Hi")]
    assert chunks.pieces({"tool_calls": [call]}) == [CallStart(0, "c0", "f")]
    more = {"index": 0, "function": {"arguments": "{}"}}
    other = {"index": 1, "id": "c1", "function": {"name": "g"}}
    assert chunks.pieces({"tool_calls": [more, other]}) == [CallArguments(0, "{}"), CallEnd(0), CallStart(1, "c1", "g")]
    with pytest.raises(NotACompletion, match="goes on after"):
        chunks.pieces({"tool_calls": [more]})


@pytest.mark.parametrize(
    "data",
    [
        {"choices": 7}, {"choices": [7]}, {"choices": [{"delta": []}]}, {"choices": [{"delta": {"content": 7}}]},
        {"choices": [{"delta": {"tool_calls": [{"id": "c"}]}}]}, {"choices": [{"finish_reason": {}}]}, {"usage": "x"},
    ],
)  # fmt: skip
def test_malformed_chunk_is_an_api_failure(data: dict[str, Any]) -> None:
    chunks = ChatDeltaReader()
    with pytest.raises(NotACompletion):
        chunks.note(data)
        chunks.pieces(field_of(items_of(data, "choices")[0], "delta", dict, {}))


def test_internal_fault_is_not_an_api_failure() -> None:
    with pytest.raises(TypeError), api_failures():
        raise TypeError("ours")


def test_finish_and_usage_come_from_last_chunks() -> None:
    chunks = ChatDeltaReader()
    chunks.note({"choices": [{"delta": {}, "finish_reason": "length", "stop_reason": None}]})
    chunks.note({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    outcome = chunks.summary()
    assert (outcome.finish, outcome.prompt_tokens, outcome.output_tokens) == ("length", 3, 4)


def test_a_continued_message_is_refused() -> None:
    with pytest.raises(ApiError):
        chat_body({"messages": [], "continue_final_message": True})


@pytest.mark.parametrize("data", [{"choices": 7}, {"choices": [{"index": 0, "delta": {"content": []}}]}])
async def test_malformed_answer_counts_as_failure_unrecorded(data: dict[str, Any]) -> None:
    failures: list[str] = []

    class Call:
        async def fail(self, code: str) -> None:
            failures.append(code)

    recorder = ResponseRecorder(cast(CallRecorder, Call()), "m")
    recorder.data({"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}, whole=False)
    recorder.data(data, whole=False)
    await recorder.end()
    assert failures == ["engine_failed"]
