"""What the model routes answer, through the whole path, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.services.inference.running_service import COMPLETIONS, Service
from tests.services.processes import Stream, chat_text, engine_calls, release, script

ANSWER = "Hello there, friend!"


@pytest.fixture(scope="module")
def ids(tokenizer: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer / "tokenizer.json"))


def test_chat_returns_engine_text_and_token_counts(service: Service, ids: Tokenizer) -> None:
    answer = service.chat()
    assert answer.status == 200, answer.body
    data = answer.json()
    assert data["object"] == "chat.completion" and data["model"] == "tiny" and data["id"].startswith("chatcmpl-")
    choice = data["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    prompt = ids.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").ids
    assert service.engine_saw()["input_ids"] == prompt
    generated = len(ids.encode(ANSWER).ids) + 1  # the end token is sampled too
    assert data["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": generated,
        "total_tokens": len(prompt) + generated,
    }


def test_streamed_chat_arrives_token_by_token(service: Service) -> None:
    script(service.engine, gate=2)
    stream = service.stream_chat()
    assert stream.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    seen: list[Any] = []
    events = stream.events()
    while not chat_text(seen):
        seen.append(next(events))
    # Text is here while the engine still holds the rest of its answer: nothing on the way waited for the end.
    assert engine_calls(service.engine)[0]["ended"] == "running"
    assert not chat_text(seen).endswith("!")
    release(service.engine)
    seen += events
    assert seen[-1] == "[DONE]" and chat_text(seen) == ANSWER


@pytest.mark.parametrize(
    ("fields", "stream", "interval"),
    [
        ({}, False, None),
        ({"n": 4, "max_tokens": 16}, False, None),
        ({"logprobs": True}, False, None),
        ({"stream": True}, True, None),
        ({"stop": ["zzz"]}, True, 16),
        ({"logprobs": True, "top_logprobs": 2}, True, 16),
        ({"n": 128}, True, 16),  # 128 times the context
    ],
)
def test_engine_streams_only_to_readers_or_for_early_stop(
    service: Service, fields: dict[str, object], stream: bool, interval: int | None
) -> None:
    if fields.get("stream"):
        assert chat_text(list(service.stream_chat().events())) == ANSWER
    else:
        assert service.chat(**fields).json()["choices"][0]["message"]["content"] == ANSWER
    assert service.engine_saw()["stream"] is stream
    if stream:
        assert service.engine_saw().get("stream_interval") == interval


def test_streamed_chat_has_openai_chunks(service: Service) -> None:
    events = list(service.stream_chat(stream_options={"include_usage": True}).events())
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all(event["usage"] is None for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_streamed_chat_without_usage_omits_usage(service: Service) -> None:
    events = list(service.stream_chat().events())
    assert not any("usage" in event for event in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_omitted_model_selects_only_model(service: Service, path: str) -> None:
    answer = service.gateway.call("POST", path, {"messages": [{"role": "user", "content": "x"}]}, key=service.key)
    assert answer.status == 200 and answer.json()["model"] == "tiny"


def test_models_are_listed_in_openai_shape_and_as_names(service: Service) -> None:
    for path in ("/v1/models", "/models"):
        data = service.gateway.call("GET", path, key=service.key).json()
        assert data["object"] == "list" and data["models"] == ["tiny"]
        assert data["data"][0]["id"] == "tiny" and data["data"][0]["object"] == "model"
    assert service.gateway.call("GET", "/v1/models/tiny", key=service.key).json()["id"] == "tiny"
    assert service.gateway.call("GET", "/v1/models/nope", key=service.key).status == 404


def test_every_sampling_field_reaches_the_engine(service: Service, ids: Tokenizer) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "presence_penalty": 0.1,
        "frequency_penalty": -0.2, "repetition_penalty": 1.1, "n": 2, "logprobs": True, "top_logprobs": 3,
        "logit_bias": {"5": -100, "6": 1.5}, "max_tokens": 9, "min_tokens": 1, "stop_token_ids": [11],
    }  # fmt: skip
    assert service.chat(**given).status == 200
    end = ids.token_to_id("<|im_end|>")
    assert end is not None
    assert service.engine_saw()["sampling"] == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "presence_penalty": 0.1,
        "frequency_penalty": -0.2, "repetition_penalty": 1.1, "n": 2, "top_logprobs": 3,
        "logit_bias": {"5": -100.0, "6": 1.5}, "max_new_tokens": 9, "min_new_tokens": 1,
        "stop_token_ids": sorted([end, 11]),
    }  # fmt: skip


def test_max_completion_tokens_overrides_max_tokens(service: Service) -> None:
    assert service.chat(max_tokens=50, max_completion_tokens=3).json()["choices"][0]["finish_reason"] == "length"
    assert service.engine_saw()["sampling"]["max_new_tokens"] == 3


def test_chat_without_max_tokens_uses_rest_of_context(service: Service) -> None:
    service.chat()
    saw = service.engine_saw()
    assert saw["sampling"]["max_new_tokens"] == 4096 - len(saw["input_ids"])


def test_ignore_eos_continues_past_end_token(service: Service) -> None:
    service.chat(ignore_eos=True)
    assert service.engine_saw()["sampling"]["ignore_eos"] is True
    assert "stop_token_ids" not in service.engine_saw()["sampling"]


def test_zero_seed_and_zero_temperature_are_sent(service: Service) -> None:
    service.chat(seed=0, temperature=0)
    assert service.engine_saw()["sampling"] | {"seed": 0, "temperature": 0.0} == service.engine_saw()["sampling"]


def test_null_field_equals_absent_field(service: Service) -> None:
    names = ("temperature", "stop", "seed", "logprobs", "tools", "stream_options", "response_format", "user", "n")
    answer = service.chat(**dict.fromkeys(names))
    assert answer.status == 200 and "x-areal-ignored" not in answer.headers


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_string_cuts_text_and_cancels_engine_call(service: Service, streamed: bool) -> None:
    script(service.engine, text="one two ### three four five six seven", delay_s=0.01)
    if streamed:
        events = list(service.stream_chat(stop=["###", "unused"]).events())
        text = chat_text(events)
        assert not any("#" in chat_text([event]) for event in events)
        finish = events[-2]["choices"][0]["finish_reason"]
    else:
        choice = service.chat(stop="###").json()["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == ("one two ", "stop")
    assert engine_calls(service.engine, until="cancelled")[0]["ended"] == "cancelled"


def test_special_token_as_stop_string_stops_in_engine(service: Service, ids: Tokenizer) -> None:
    service.chat(stop=["<|im_start|>"])
    assert ids.token_to_id("<|im_start|>") in service.engine_saw()["sampling"]["stop_token_ids"]


@pytest.mark.parametrize("streamed", [False, True])
def test_n_returns_that_many_choices(service: Service, streamed: bool) -> None:
    if streamed:
        events = list(service.stream_chat(n=3).events())
        assert [chat_text(events, index) for index in range(3)] == [ANSWER] * 3
    else:
        choices = service.chat(n=3).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in choices} == {ANSWER}


def test_logprobs_have_bytes_and_alternatives_per_token(service: Service, ids: Tokenizer) -> None:
    script(service.engine, text="é!")
    content = service.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert spelled.decode() == "é!"
    assert content[-1]["token"] == "<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in content)
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


def test_streamed_logprobs_match_whole_answer(service: Service) -> None:
    whole = service.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    events = list(service.stream_chat(logprobs=True).events())[:-1]
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole
    assert whole[0]["top_logprobs"] == []


def test_characters_are_not_split_across_chunks(service: Service) -> None:
    script(service.engine, text="naïve 世界 👩‍👧!")
    events = list(service.stream_chat().events())
    assert chat_text(events) == "naïve 世界 👩‍👧!"
    assert not any("\ufffd" in chat_text([event]) for event in events)


def test_tools_reach_the_template(service: Service, ids: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    assert service.chat(tools=tools, tool_choice="auto").status == 200
    assert "get_weather" in ids.decode(service.engine_saw()["input_ids"])


def test_tools_with_choice_none_are_not_in_prompt(service: Service, ids: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    service.chat(tools=tools, tool_choice="none")
    assert "get_weather" not in ids.decode(service.engine_saw()["input_ids"])


def test_chat_template_kwargs_reach_the_template(service: Service, ids: Tokenizer) -> None:
    service.chat(chat_template_kwargs={"enable_thinking": False})
    assert ids.decode(service.engine_saw()["input_ids"], skip_special_tokens=False).endswith("<think></think>")


def test_only_unknown_fields_are_reported_ignored(service: Service) -> None:
    more = {"service_tier": "flex", "reasoning_effort": "high"}  # this template has no such switch
    answer = service.chat(flavour="mint", zeal=1, user="u", metadata={"k": "v"}, store=True, **more)
    assert answer.status == 200
    assert answer.headers["x-areal-ignored"] == "flavour, reasoning_effort, service_tier, zeal"
    stream = service.stream_chat(flavour="mint")
    assert stream.response.getheader("x-areal-ignored") == "flavour"
    stream.close()


@pytest.mark.parametrize("path", ["chat", "completion"])
def test_continuous_usage_is_in_every_chunk(service: Service, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "stream": True, "stream_options": options}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == "chat" else {"prompt": "Hi"}
    where = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    text = service.gateway.call("POST", where, body, key=service.key).body.decode()
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    usages = [event["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 0
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


def test_unknown_field_names_are_escaped(service: Service) -> None:
    answer = service.chat(**{"naïve field": 1, "a\nb": 2})
    assert answer.headers["x-areal-ignored"] == "a%0Ab, na%C3%AFve%20field"


def test_reply_carries_request_id_and_overhead(service: Service) -> None:
    answer = service.gateway.call(
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}]},
        key=service.key,
        headers={"x-request-id": "mine-1"},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert int(answer.headers["x-areal-overhead-us"]) > 0
    stream = service.stream_chat()
    assert int(stream.response.getheader("x-areal-overhead-us") or 0) > 0
    assert (stream.response.getheader("x-request-id") or "").startswith("req_")
    stream.close()


def test_unsafe_request_id_is_replaced(service: Service) -> None:
    answer = service.gateway.call("GET", "/health", headers={"x-request-id": "a b\tc"})
    assert answer.headers["x-request-id"].startswith("req_")


def test_overhead_excludes_engine_time(service: Service) -> None:
    script(service.engine, delay_s=0.1)
    answer = service.chat()
    tokens = answer.json()["usage"]["completion_tokens"]
    assert int(answer.headers["x-areal-overhead-us"]) < tokens * 0.1 * 1e6


def test_completion_of_a_string(service: Service, ids: Tokenizer) -> None:
    data = service.complete(max_tokens=50).json()
    assert data["object"] == "text_completion" and data["id"].startswith("cmpl-")
    assert data["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    assert service.engine_saw()["input_ids"] == ids.encode("Hello").ids


@pytest.mark.parametrize(("prompt", "room"), [([5], 16), ([5] * 4090, 6)])
def test_completion_defaults_to_sixteen_tokens_or_remaining_room(
    service: Service, prompt: list[int], room: int
) -> None:
    assert service.complete(prompt=prompt).status == 200
    assert service.engine_saw()["sampling"]["max_new_tokens"] == room


@pytest.mark.parametrize(("prompt", "count"), [(["a", "b", "c"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["only"], 1)])
def test_completion_of_lists(service: Service, prompt: list[object], count: int) -> None:
    choices = service.complete(prompt=prompt, n=2, max_tokens=50).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(2 * count))
    assert {choice["text"] for choice in choices} == {ANSWER}
    (call,) = engine_calls(service.engine)  # this engine takes all of them in one
    asked = call["body"]["input_ids"]
    assert len(asked) == count if isinstance(asked[0], list) else count == 1
    if not isinstance(prompt[0], str):
        assert asked == prompt


def test_streamed_completion_separates_prompts(service: Service) -> None:
    stream = Stream(service.gateway.port, COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 50}, service.key)
    texts = {0: "", 1: ""}
    for event in stream.events():
        for choice in event["choices"] if isinstance(event, dict) else ():
            texts[choice["index"]] += choice["text"]
    assert texts == {0: ANSWER, 1: ANSWER}


@pytest.mark.parametrize("streamed", [False, True])
def test_completion_echo_puts_the_prompt_first(service: Service, streamed: bool) -> None:
    if not streamed:
        assert service.complete(echo=True, max_tokens=50).json()["choices"][0]["text"] == "Hello" + ANSWER
        return
    body = {"prompt": "Hello", "echo": True, "max_tokens": 50}
    events = list(Stream(service.gateway.port, COMPLETIONS, body, service.key).events())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hello" + ANSWER


def test_completion_logprobs_have_legacy_shape(service: Service) -> None:
    logprobs = service.complete(logprobs=2, max_tokens=50).json()["choices"][0]["logprobs"]
    tokens = logprobs["tokens"]
    assert "".join(tokens[:-1]) == ANSWER
    assert (
        len(logprobs["token_logprobs"]) == len(tokens) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"])
    )
    assert logprobs["text_offset"] == [len("".join(tokens[:index])) for index in range(len(tokens))]


def test_token_ids_are_returned_on_request(service: Service, ids: Tokenizer) -> None:
    data = service.chat(return_token_ids=True).json()
    assert data["prompt_token_ids"] == service.engine_saw()["input_ids"]
    (choice,) = data["choices"]
    assert ids.decode(choice["token_ids"]) == ANSWER and choice["logprobs"] is None
    reported = service.complete(return_token_ids=True, logprobs=0, max_tokens=50).json()["choices"][0]
    assert reported["token_logprobs"] == reported["logprobs"]["token_logprobs"] and len(reported["versions"]) == len(
        reported["token_ids"]
    )


def test_model_calls_are_counted(service: Service) -> None:
    service.chat()
    text = service.gateway.call("GET", "/metrics").body.decode()
    assert 'areal_http_requests_total{route="/v1/chat/completions",status="200"}' in text
    text = service.proxy.call("GET", "/metrics").body.decode()
    assert "areal_generated_tokens_total" in text and 'areal_choices_total{finish_reason="stop"}' in text


def test_data_proxy_health_reports_load(service: Service) -> None:
    script(service.engine, gate=1)
    stream = service.stream_chat(max_tokens=100)
    next(stream.events())
    health = service.proxy.call("GET", "/health").json()
    assert health["in_flight"] == 1 and health["in_flight_tokens"] > 100 and health["version"] == 0
    release(service.engine)
    assert list(stream.events())[-1] == "[DONE]"
