"""Every field that the APIs document: taken, left out and named, or refused with a reason.

The names come from the types of OpenAI's and Anthropic's SDKs, so that a field of a newer SDK fails here until it is in
a table. Values that ask for nothing are taken, whatever the field.
"""

from __future__ import annotations

import gzip
import typing
from typing import Any, NamedTuple

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.services.inference.data_proxy.dialects.talks import WEATHER
from tests.services.inference.running_service import Service
from tests.services.processes import Answer

TAKEN, REFUSED = "taken", "refused"


class Field(NamedTuple):
    """``outcome`` of ``value``: TAKEN, REFUSED, or the name in ``x-areal-ignored``. ``nothing``: values beside null
    that ask for nothing."""

    value: Any
    outcome: str = TAKEN
    nothing: tuple[Any, ...] = ()


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": WEATHER}}
MODERATION = {"model": "omni-moderation-latest"}
CHAT = {
    "audio": Field({"voice": "alloy", "format": "wav"}, REFUSED),
    "frequency_penalty": Field(0.5, nothing=(0, 0.0)),
    "function_call": Field({"name": "f"}, REFUSED, ("auto", "none")),
    "functions": Field([{"name": "f"}], REFUSED, ([],)),
    "logit_bias": Field({"5": 1}, nothing=({},)),
    "logprobs": Field(True, nothing=(False,)),
    "max_completion_tokens": Field(5),
    "max_tokens": Field(5),
    "messages": Field([{"role": "user", "content": "Hello"}]),
    "metadata": Field({"a": "b"}, nothing=({},)),
    "modalities": Field(["text", "audio"], REFUSED, (["text"], [])),
    "model": Field("tiny"),
    "moderation": Field(MODERATION, "moderation"),
    "n": Field(2, nothing=(1,)),
    "parallel_tool_calls": Field(True, nothing=(True, False)),
    "prediction": Field({"type": "content", "content": "Hello"}, "prediction"),
    "presence_penalty": Field(0.5, nothing=(0,)),
    "prompt_cache_key": Field("k", nothing=("",)),
    "prompt_cache_options": Field({"mode": "explicit"}),
    "prompt_cache_retention": Field("24h"),
    "reasoning_effort": Field("high", "reasoning_effort"),
    "response_format": Field({"type": "json_object"}, REFUSED, ({"type": "text"},)),
    "safety_identifier": Field("u", nothing=("",)),
    "seed": Field(3),
    "service_tier": Field("flex", "service_tier", ("auto", "default")),
    "stop": Field(["x"], nothing=([], "")),
    "store": Field(False, nothing=(True, False)),
    "stream_options": Field({"chunk_size": 3}, "stream_options.chunk_size", ({}, {"include_obfuscation": False})),
    "temperature": Field(0.5),
    "tool_choice": Field("auto", nothing=("auto", "none")),
    "tools": Field([FUNCTION], nothing=([],)),
    "top_logprobs": Field(2, REFUSED, (0,)),  # without logprobs
    "top_p": Field(0.5, nothing=(1, 1.0)),
    "user": Field("u", nothing=("",)),
    "verbosity": Field("low", "verbosity", ("medium",)),
    "web_search_options": Field({}, "web_search_options"),
}
COMPLETIONS = {
    **{
        name: CHAT[name] for name in ("frequency_penalty", "logit_bias", "max_tokens", "model", "n", "presence_penalty")
    },
    **{name: CHAT[name] for name in ("seed", "stop", "stream_options", "temperature", "top_p", "user")},
    "best_of": Field(3, REFUSED, (1,)),
    "echo": Field(True, nothing=(False,)),
    "logprobs": Field(1, nothing=(0,)),
    "prompt": Field("Hello"),
    "suffix": Field("end", REFUSED, ("",)),
}
RESPONSES = {
    **{name: CHAT[name] for name in ("moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options")},
    **{name: CHAT[name] for name in ("prompt_cache_retention", "safety_identifier", "service_tier", "stream_options")},
    **{name: CHAT[name] for name in ("metadata", "model", "temperature", "tool_choice", "top_p", "user")},
    "access_programs": Field(["a"], "access_programs"),
    "background": Field(True, REFUSED, (False,)),
    "context_management": Field([{"type": "compaction"}], "context_management", ([],)),
    "conversation": Field("conv_1", REFUSED),
    "image": Field({"detail": "high"}, "image"),
    "include": Field(["file_search_call.results"], "include.file_search_call.results", ([],)),
    "input": Field("Hello"),
    "instructions": Field("Be brief.", nothing=("",)),
    "max_output_tokens": Field(5),
    "max_tool_calls": Field(3, "max_tool_calls"),
    "previous_response_id": Field("resp_1", REFUSED, ("",)),
    "prompt": Field({"id": "p"}, REFUSED),
    "reasoning": Field({"effort": "high"}, "reasoning.effort", ({}, {"effort": None, "summary": None})),
    "store": Field(True, "store", (False,)),
    "text": Field({"verbosity": "low"}, "text.verbosity", ({}, {"format": {"type": "text"}, "verbosity": "medium"})),
    "tools": Field([{"type": "web_search"}], "tools.web_search", ([],)),
    "top_logprobs": Field(3, "top_logprobs", (0,)),
    "truncation": Field("auto", "truncation", ("disabled",)),
}
SERVER = {"type": "url", "name": "files", "url": "https://mcp.example.com"}
MESSAGES = {
    "betas": Field(["x"], "betas", ([],)),
    "billing_policy": Field({"type": "x"}, "billing_policy"),
    "cache_control": Field({"type": "ephemeral"}),
    "compaction": Field({"type": "x"}, "compaction"),
    "container": Field("c", "container", ("",)),
    "context_management": Field({"edits": [1]}, "context_management", ({},)),
    "diagnostics": Field({"a": 1}, "diagnostics"),
    "fallback_credit_token": Field("t", "fallback_credit_token"),
    "fallbacks": Field([{"model": "m"}], "fallbacks"),
    "inference_geo": Field("eu", "inference_geo"),
    "max_tokens": Field(5),
    "mcp_servers": Field([SERVER], "mcp_servers", ([],)),
    "messages": Field([{"role": "user", "content": "Hello"}]),
    "metadata": Field({"user_id": "u"}, nothing=({},)),
    "model": Field("tiny"),
    "output_config": Field({"effort": "high"}, "output_config.effort", ({},)),
    "service_tier": Field("priority", "service_tier", ("auto", "standard_only")),
    "speed": Field("fast", "speed", ("standard",)),
    "stop_sequences": Field(["x"], nothing=([],)),
    "system": Field("Be brief.", nothing=("", [])),
    "temperature": Field(0.5),
    "thinking": Field({"type": "enabled", "budget_tokens": 1024}, "thinking.budget_tokens", ({"type": "disabled"},)),
    "thread": Field("t", "thread"),
    "tool_choice": Field({"type": "auto"}, nothing=({"type": "auto"}, {"type": "none"})),
    "tools": Field([{"type": "web_search_20250305", "name": "web_search"}], "tools.web_search_20250305", ([],)),
    "top_k": Field(5),
    "top_p": Field(0.5),
    "user_profile_id": Field("u"),
    "workspace_id": Field("w"),
}
ENGINES = {  # of vLLM and SGLang, in chats
    "bad_words": Field(["x"], REFUSED, ([],)),
    "allowed_token_ids": Field([1], REFUSED, ([],)),
    "chat_template": Field("x", REFUSED, ("",)),
    "stop_regex": Field("x", REFUSED, ("", [])),
    "structured_outputs": Field({"regex": "a"}, REFUSED, ({},)),
    "use_beam_search": Field(True, REFUSED, (False,)),
    "chat_template_kwargs": Field({"a": 1}, nothing=({},)),
    "stop_token_ids": Field([3], nothing=([],)),
    "ignore_eos": Field(True, nothing=(False,)),
}


class Api(NamedTuple):
    path: str
    least: dict[str, Any]
    fields: dict[str, Field]
    documented: tuple[Any, ...] = ()


ASKED = [{"role": "user", "content": "Hello"}]
APIS = [
    Api("/v1/chat/completions", {"messages": ASKED}, CHAT, (chat_create_params.CompletionCreateParamsBase,)),
    Api("/v1/chat/completions", {"messages": ASKED}, ENGINES),
    Api("/v1/completions", {"prompt": "Hello"}, COMPLETIONS, (completion_create_params.CompletionCreateParamsBase,)),
    Api("/v1/responses", {"input": "Hello"}, RESPONSES, (response_create_params.ResponseCreateParamsBase,)),
    Api(
        "/v1/messages",
        {"messages": ASKED, "max_tokens": 20},
        MESSAGES,
        (message_create_params.MessageCreateParamsBase, beta_message_create_params.MessageCreateParamsBase),
    ),
]
CASES = [(api, name) for api in APIS for name in api.fields]


def ask(service: Service, api: Api, **body: Any) -> Answer:
    return service.gateway.call("POST", api.path, {"model": "tiny", **api.least, **body}, key=service.key)


def ignored(answer: Answer) -> list[str]:
    return [name for name in answer.headers.get("x-areal-ignored", "").split(", ") if name]


def test_every_documented_field_is_in_a_table() -> None:
    for api in APIS:
        documented = {name for params in api.documented for name in typing.get_type_hints(params)}
        assert documented <= {"stream", *api.fields}, (api.path, documented - api.fields.keys())


@pytest.mark.parametrize(("api", "name"), CASES, ids=[f"{api.path}-{name}" for api, name in CASES])
def test_field_is_taken_ignored_or_refused_per_table(service: Service, api: Api, name: str) -> None:
    field = api.fields[name]
    answer = ask(service, api, **{name: field.value})
    if field.outcome == REFUSED:
        assert answer.status == 400 and name in answer.json()["error"]["message"], answer.body
        return
    assert answer.status == 200, answer.body
    assert ignored(answer) == ([] if field.outcome == TAKEN else [field.outcome])


@pytest.mark.parametrize(("api", "name"), CASES, ids=[f"{api.path}-{name}" for api, name in CASES])
def test_no_op_value_is_taken_without_warning(service: Service, api: Api, name: str) -> None:
    values = api.fields[name].nothing if name in api.least else (None, *api.fields[name].nothing)
    for value in values:
        answer = ask(service, api, **{name: value})
        assert (answer.status, ignored(answer)) == (200, []), (value, answer.body)


def test_all_no_op_values_are_taken_together(service: Service) -> None:
    for api in APIS:
        nothing = {
            name: field.nothing[0] for name, field in api.fields.items() if field.nothing and name not in api.least
        }
        answer = ask(service, api, **nothing)
        assert (answer.status, ignored(answer)) == (200, []), answer.body


PROVIDERS = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell"),
    *("shell", "computer", "computer_use_preview", "apply_patch", "tool_search", "programmatic_tool_calling"),
)


def test_provider_tools_are_dropped_and_listed_as_ignored(service: Service) -> None:
    function = {"type": "function", "name": "f", "parameters": WEATHER}
    answer = ask(service, APIS[3], tools=[function, *({"type": kind} for kind in PROVIDERS)])
    assert (answer.status, ignored(answer)) == (200, sorted(f"tools.{kind}" for kind in PROVIDERS)), answer.body
    ours = {"name": "f", "input_schema": WEATHER}
    theirs = [{"type": kind, "name": "x"} for kind in ("bash_20250124", "code_execution_20250825", "mcp_toolset")]
    answer = ask(service, APIS[4], tools=[ours, *theirs])
    assert ignored(answer) == ["tools.bash_20250124", "tools.code_execution_20250825", "tools.mcp_toolset"]
    answer = ask(service, APIS[0], tools=[FUNCTION, {"type": "web_search"}])
    assert (answer.status, ignored(answer)) == (200, ["tools.web_search"])


def test_forced_call_of_dropped_tool_is_refused(service: Service) -> None:
    answer = ask(service, APIS[3], tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
    assert answer.status == 400 and "web_search" in answer.json()["error"]["message"]


# Compressed bodies.


def test_gzip_body_is_read(service: Service) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}'
    for data in (gzip.compress(body), gzip.compress(body[:9]) + gzip.compress(body[9:])):
        answer = service.gateway.call(
            "POST", "/v1/chat/completions", data, key=service.key, headers={"Content-Encoding": "gzip"}
        )
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        ("br", b"x", 415),
        ("zstd", b"x", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
        ("gzip", b"no gzip", 400),
        ("gzip", gzip.compress(b'{"model": "tiny"}')[:-9], 400),
        ("gzip", gzip.compress(b" " * (64 * 1024 * 1024)), 413),
        ("gzip", gzip.compress(b"") * 100_000, 400),
    ],
    ids=["br", "zstd", "twice", "other", "cut", "bomb", "members"],
)
def test_body_of_another_encoding_or_size_is_refused(service: Service, encoding: str, data: bytes, status: int) -> None:
    answer = service.gateway.call(
        "POST", "/v1/chat/completions", data, key=service.key, headers={"Content-Encoding": encoding}
    )
    assert answer.status == status, answer.body
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip" and "gzip" in answer.json()["error"]["message"]
