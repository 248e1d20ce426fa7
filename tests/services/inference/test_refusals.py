"""Everything a caller can get wrong: 4xx, OpenAI's error object, the field named. Never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.inference.running_service import CHAT, COMPLETIONS, Service
from tests.services.processes import Answer, script

USER = {"role": "user", "content": "Hello"}


def refused(answer: Answer, status: int = 400) -> dict[str, Any]:
    assert answer.status == status, (answer.status, answer.body)
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None), ("messages", []), ("messages", "hi"), ("messages", [{"role": "user"}]),
        ("temperature", -1), ("temperature", 3), ("temperature", "hot"), ("temperature", True),
        ("top_p", 1.5), ("top_k", 1.5), ("top_k", -2), ("min_p", 2), ("seed", "x"), ("seed", 1.5),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_completion_tokens", 0),
        ("stop", 7), ("stop", [""]), ("stop", ["a"] * 17), ("n", 0), ("n", 10_000), ("n", True),
        ("logprobs", 3), ("top_logprobs", 2), ("top_logprobs", 21), ("stream", "yes"),
        ("stream_options", {"include_usage": True}), ("presence_penalty", 3), ("frequency_penalty", "x"),
        ("logit_bias", {"x": 1}), ("logit_bias", {"999999": 1}), ("logit_bias", [1]), ("metadata", "x"), ("store", 1),
        ("response_format", {"type": "json_object"}), ("response_format", {"type": "poem"}),
        ("response_format", "text"), ("tools", [{}]), ("tool_choice", "required"),
        ("response_format", {"json_schema": {"schema": {}}}),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "alloy", "format": "wav"}), ("modalities", ["audio"]),
        ("guided_json", {}), ("guided_regex", "a+"), ("guided_choice", ["a"]), ("guided_grammar", "root ::= x"),
        ("structured_outputs", {"regex": "a"}), ("structured_outputs", {"poem": 1}), ("regex", "a"), ("ebnf", "a"),
        ("json_schema", "{}"), ("structural_tag", {"type": "tag"}), ("guided_whitespace_pattern", " "),
        ("bad_words", ["1"]), ("allowed_token_ids", [1]), ("stop_regex", "a+"), ("use_beam_search", True),
        ("include_stop_str_in_output", True), ("truncate_prompt_tokens", 2), ("chat_template", "x"),
        ("documents", [{"text": "x"}]), ("lora_path", "x"), ("thinking_token_budget", 5), ("prompt_embeds", "x"),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("custom_logit_processor", "x"), ("logits_processors", ["x"]), ("logit_bias", {"1": 101}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1": True}), ("chat_template_kwargs", 7),
        ("chat_template_kwargs", {"messages": []}), ("stop_token_ids", [10**9]), ("model", 7),
    ],
)  # fmt: skip
def test_unsupported_chat_field_is_400_naming_field(service: Service, field: str, value: object) -> None:
    error = refused(service.chat(**{field: value}))
    assert error["type"] == "invalid_request_error"
    assert field in (error["param"] or ""), error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", [1, "a"]), ("prompt", [10**9]),
        ("prompt", {}), ("prompt", [-1]), ("prompt", [True]), ("suffix", "x"), ("best_of", 3), ("logprobs", 99),
        ("logprobs", True), ("max_tokens", 0), ("min_tokens", 17), ("echo", "yes"),
        ("image_data", ["aGk="]), ("image_data", "aGk="), ("image_data", 7),
    ],
)  # fmt: skip
def test_unsupported_completion_field_is_400_naming_field(service: Service, field: str, value: object) -> None:
    assert field in (refused(service.complete(**{field: value}))["param"] or "")


def test_completion_echo_with_logprobs_is_400(service: Service) -> None:
    assert refused(service.complete(echo=True, logprobs=1))["param"] == "echo"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"not json", b"[]", b'"text"', b"null", b'{"messages": NaN}', b"\xff\xfe{}", b'{"m": "\xc3\x28"}',
        b'{"m": "\\ud800"}', b"[" * 5000, b'{"a": ' * 3000, "é".encode("latin-1"), '{"m": "m"}'.encode("utf-16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_non_object_body_is_400(service: Service, body: bytes, path: str) -> None:
    assert refused(service.gateway.call("POST", path, body, key=service.key))["code"] == "invalid_json"
    assert refused(service.proxy.call("POST", path, body, key=service.key))["code"] == "invalid_json"


def test_body_over_limit_is_413(service: Service) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (33 * 1024 * 1024)}]}).encode()
    assert refused(service.gateway.call("POST", CHAT, body, key=service.key), 413)["code"] == "body_too_large"


def test_unknown_model_is_404(service: Service) -> None:
    error = refused(service.chat(model="nope"), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    answer = service.proxy.call("POST", CHAT, {"model": "other", "messages": [USER]}, key=service.key)
    assert refused(answer, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("more", [{}, {"max_tokens": 5}])
def test_prompt_over_context_is_400(service: Service, more: dict[str, int]) -> None:
    answer = service.chat(messages=[{"role": "user", "content": "x " * 9000}], **more)
    assert refused(answer)["code"] == "context_length_exceeded"


def test_answer_over_context_is_400(service: Service) -> None:
    assert refused(service.chat(max_tokens=4096))["code"] == "context_length_exceeded"


def test_template_refusal_is_400(service: Service) -> None:
    error = refused(service.chat(messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]))
    assert "a tool cannot come first" in error["message"]


def test_engine_refusal_is_400_with_engine_message(service: Service) -> None:
    script(service.engine, fail=400, fail_message="too odd")
    assert "too odd" in refused(service.chat())["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405), ("PUT", "/", 404)])
def test_unknown_route_is_refused_in_same_shape(service: Service, method: str, path: str, status: int) -> None:
    for process in (service.gateway, service.proxy, service.router):
        if process is not service.router or path != CHAT:
            refused(process.call(method, path, key=service.key), status)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": b"Bearer schl\xc3\xbcssel"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"Authorization": "Basic dTpw"},
        {"x-api-key": b"\xe2\x82\xac"},
    ],
)
def test_caller_without_valid_key_is_401(service: Service, headers: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": [USER]}
    for process in (service.gateway, service.proxy):
        error = refused(process.call("POST", CHAT, body, headers=headers), 401)
        assert error["type"] == "authentication_error"
    refused(service.gateway.call("GET", "/v1/models", headers=headers), 401)


def test_admin_route_is_401_without_key_and_403_with_wrong_key(service: Service) -> None:
    for process in (service.gateway, service.router):
        refused(process.call("GET", "/workers"), 401)
        refused(process.call("GET", "/workers", headers={"Authorization": b"Bearer \xc3\xa9"}), 401)
        assert refused(process.call("GET", "/workers", key="wrong"), 403)["type"] == "permission_error"


def test_key_in_x_api_key_header_is_accepted(service: Service) -> None:
    answer = service.gateway.call("GET", "/v1/models", headers={"x-api-key": service.key})
    assert answer.status == 200


def test_wrong_key_error_reveals_no_key(service: Service) -> None:
    answer = service.gateway.call("GET", "/workers", key="wrong")
    assert service.key.encode() not in answer.body and b"wrong" not in answer.body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register", {}), ("/register", {"worker_addr": "nope"}), ("/register", {"worker_addr": 7}),
        ("/register", {"worker_addr": "h:1", "worker_id": "../x"}),
        ("/register", {"worker_addr": "h:1", "model": "a b"}),
        ("/unregister", {}), ("/register_model", {}), ("/register_model", {"model": "m"}),
        ("/register_model", {"model": "m", "workers": [7]}), ("/register_model", {"model": "m", "workers": [{}]}),
        ("/register_model", {"model": "m", "workers": [], "expected": -1}),
        ("/register_model", {"model": "m", "workers": [{"worker_id": "a", "worker_addr": "h:1"}] * 2}),
        ("/remove_model", {}), ("/drain", {}), ("/route", {}), ("/configure", {"strategy": "nope"}),
        ("/configure", {"limits": 7}), ("/configure", {"limits": {"nope": 1}}),
        ("/configure", {"limits": {"max_body_bytes": -1}}), ("/register", []),
    ],
)  # fmt: skip
def test_router_rejects_invalid_body(service: Service, path: str, body: object) -> None:
    refused(service.router.call("POST", path, body, key=service.key))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/unregister", {"worker_id": "absent"}), ("/remove_model", {"model": "nope"}), ("/drain", {"worker_id": "x"}),
        ("/route", {"model": "nope"}), ("/unregister", {"worker_addr": "h:1"}),
    ],
)  # fmt: skip
def test_router_returns_404_for_unknown_objects(service: Service, path: str, body: object) -> None:
    refused(service.router.call("POST", path, body, key=service.key), 404)
