"""Turns by the Responses API: what OpenAI's own client makes of them, items, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, ConflictError, InternalServerError

from tests.services.agent.gateway.conftest import INFERENCE, AgentService
from tests.services.inference.running_service import later

Body = dict[str, Any]
ME = {"role": "assistant", "content": "me"}


def metadata_of(service: AgentService, **body: Any) -> Body:
    """What the agent gets beside its message."""
    return dict(json.loads(text_of(service.respond("metadata", **body).json())))


def text_of(response: Body) -> str:
    items = [item for item in response["output"] if item["type"] == "message"]
    return str(items[-1]["content"][0]["text"])


def test_client_has_whole_response(service: AgentService) -> None:
    answer = service.sdk().responses.create(input="good day", user="whole")
    assert (answer.status, answer.output_text, answer.model) == ("completed", "You said: good day", "helper")


def test_client_has_streamed_response(service: AgentService) -> None:
    events = list(service.sdk().responses.create(input="tools", stream=True, user="streamed"))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "response.content_part.added" in kinds and "response.mcp_call_arguments.done" in kinds
    [whole] = [event.response for event in events if event.type == "response.completed"]
    assert whole.output_text == "Sunny."
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in whole.output]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_stream_is_of_utf_8_events(service: AgentService, path: str) -> None:
    stream = service.stream("tools", "of-events", path)
    assert stream.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    list(stream.events())


@pytest.mark.parametrize("streamed", [False, True])
def test_raw_agent_stream_is_output_and_in_history(service: AgentService, streamed: bool) -> None:
    session = f"own-stream-{streamed}"
    sdk = service.sdk()
    if streamed:
        events = list(sdk.responses.create(input="stream", user=session, stream=True))
        assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["one", "\ntwo"]
        answer = events[-1].response  # type: ignore[union-attr]
    else:
        answer = sdk.responses.create(input="stream", user=session)
    assert answer.output_text == "one\ntwo"
    history = service.call("GET", f"/sessions/{session}").json()["history"]
    assert history == [{"role": "user", "content": "stream"}, {"role": "assistant", "content": "one\ntwo"}]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_reply_reports_service_overhead(service: AgentService, path: str, streamed: bool) -> None:
    for message, status in (("hello", 200), ("fail", 500)):
        body = {"input": message, "messages": [{"role": "user", "content": message}], "stream": streamed}
        answer = service.call("POST", path, body)
        if status == 200 or not streamed:
            assert answer.status == status
        assert int(answer.headers["x-areal-overhead-us"]) > 0


def test_calls_that_the_agent_executed_are_final(service: AgentService) -> None:
    output = service.respond("tools").json()["output"]
    assert [item["type"] for item in output] == [*["mcp_call"] * 2, "message"]
    calls = output[:2]
    assert [(item["server_label"], item["name"], json.loads(item["arguments"])["city"]) for item in calls] == [
        ("helper", "weather", "Rome"),
        ("helper", "weather", "Oslo"),
    ]
    assert [(item["output"], item["status"]) for item in calls] == [("sun 1", "completed"), ("sun 2", "completed")]
    assert len({item["id"] for item in output}) == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_agents_sdk_runs_no_call_of_the_agent(service: AgentService, streamed: bool) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    speaks = openai.AsyncOpenAI(base_url=f"{service.gateway.url}/v1", api_key=service.key, max_retries=0)
    caller = agents.Agent(name="caller", model=agents.OpenAIResponsesModel(model="helper", openai_client=speaks))
    if streamed:
        result = agents.Runner.run_streamed(caller, "tools")
        assert [event async for event in result.stream_events()]
    else:
        result = await agents.Runner.run(caller, "tools")
    assert result.final_output == "Sunny."
    again = [*result.to_input_list(), {"role": "user", "content": "again"}]
    assert (await agents.Runner.run(caller, again)).final_output == "You said: again"


def test_call_without_result_is_incomplete(service: AgentService) -> None:
    call, text = service.respond("call").json()["output"]
    assert (call["type"], call["status"], call["output"], text["type"]) == ("mcp_call", "incomplete", None, "message")


def test_first_delta_arrives_before_end(service: AgentService) -> None:
    stream = service.stream("wait", "early")
    events = stream.events()
    assert any(event["type"] == "response.output_text.delta" for event in events)
    service.release()
    assert [event["type"] for event in events][-1] == "response.completed"


def test_session_is_named_by_header_before_user(service: AgentService) -> None:
    answer = service.respond("one", "by-header", user="by-user")
    assert answer.headers["x-areal-session-key"] == "by-header"
    assert service.respond("two", user="by-user").headers["x-areal-session-key"] == "by-user"
    assert service.respond("three", "by-header").status == 200
    history = service.call("GET", "/sessions/by-header").json()["history"]
    assert [turn["content"] for turn in history if turn["role"] == "user"] == ["one", "three"]


def test_each_unnamed_turn_has_a_new_session(service: AgentService) -> None:
    keys = {service.respond("hello").headers["x-areal-session-key"] for _ in range(2)}
    assert len(keys) == 2
    assert all(key.startswith("sk-") and len(key) > 40 for key in keys)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("plain", "plain"),
        ([{"role": "user", "content": "typeless"}], "typeless"),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "part"}]}], "part"),
        ([ME, {"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "x\n\ny"),
    ],
)
def test_input_may_be_text_or_items(service: AgentService, given: Any, message: str) -> None:
    assert text_of(service.respond(given).json()) == f"You said: {message}"


def test_agent_receives_request_metadata(service: AgentService) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    reported = metadata_of(service, instructions="be brief", tools=tools, metadata={"task": 3})
    assert reported == {"task": 3, "instructions": "be brief", "tools": tools}
    items = [{"role": "system", "content": "s"}, {"role": "user", "content": "metadata"}]
    assert json.loads(text_of(service.respond(items).json())) == {"input": items}


def test_fields_without_effect_are_reported(service: AgentService) -> None:
    answer = service.respond("hello", temperature=0.5, top_p=None)
    assert answer.headers["x-areal-ignored"] == "temperature"


def test_caller_may_supply_inference_session(service: AgentService) -> None:
    reported = metadata_of(service, inf_base_url=f"{INFERENCE}/v1/", session_api_key="sk-mine")
    assert reported == {"areal_inference": {"base_url": INFERENCE, "api_key": "sk-mine", "model": "tiny"}}


BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [ME]}, "input"),
    ({"instructions": 3}, "instructions"),
    ({"model": ["m"]}, "model"),
    ({"user": ""}, "user"),
    ({"user": "a\nb"}, "user"),
    ({"tools": "all"}, "tools"),
    ({"metadata": []}, "metadata"),
    ({"stream": "yes"}, "stream"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"metadata": {"areal_inference": {}}}, "metadata.areal_inference"),
    ({"metadata": {"chat_request": {}}}, "metadata.chat_request"),
    ({"metadata": {"instructions": "x"}, "instructions": "y"}, "metadata.instructions"),
    ({"inf_base_url": "http://evil:1", "session_api_key": "k"}, "inf_base_url"),
    ({"inf_base_url": f"{INFERENCE}.evil.example", "session_api_key": "k"}, "inf_base_url"),
    ({"inf_base_url": INFERENCE}, "session_api_key"),
    ({"inf_base_url": INFERENCE, "session_api_key": "a\r\nb"}, "session_api_key"),
    ({"session_api_key": "k"}, "inf_base_url"),
    ({"inf_model": "m"}, "inf_base_url"),
    ({"inf_base_url": 3, "session_api_key": "k"}, "inf_base_url"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{param}-{place}" for place, (_, param) in enumerate(BAD)])
def test_bad_body_is_refused_by_name(service: AgentService, body: Body, param: str) -> None:
    before = service.call("GET", "/sessions?limit=1000").json()["sessions"]
    answer = service.call("POST", "/v1/responses", {"input": "hello", **body})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert service.call("GET", "/sessions?limit=1000").json()["sessions"] == before


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b""])
def test_non_object_body_is_400(service: AgentService, body: bytes) -> None:
    assert service.call("POST", "/v1/responses", body).status == 400


def test_agent_failure_is_500_and_not_retried_by_clients(service: AgentService) -> None:
    answer = service.respond("fail")
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (500, "agent_failed")
    assert error["message"].startswith("ValueError: no")
    assert answer.headers["x-should-retry"] == "false"
    with pytest.raises(InternalServerError, match="ValueError: no"):
        service.sdk().responses.create(input="fail")


def test_lost_model_is_502(service: AgentService) -> None:
    answer = service.respond("lose")
    assert (answer.status, answer.json()["error"]["code"]) == (502, "worker_lost")


def test_failure_mid_stream_is_last_event(service: AgentService) -> None:
    with pytest.raises(APIError, match="the model is away"):
        list(service.sdk().responses.create(input="lose", stream=True))
    events = list(service.stream("lose", "failing").events())
    assert events[-1]["type"] == "error" and events[-1]["code"] == "worker_lost"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_cancelled_turn_is_409(service: AgentService) -> None:
    turn = later(service.sdk().responses.create, input="wait", user="to-cancel")
    service.wait_running(1)
    assert service.call("DELETE", "/sessions/to-cancel/turn").json()["cancelled"] is True
    with pytest.raises(ConflictError) as refused:
        turn.result(10)
    assert refused.value.code == "turn_cancelled"
    service.wait_running(0)
    assert service.respond("again", "to-cancel").status == 200


def test_caller_disconnect_cancels_turn(service: AgentService) -> None:
    stream = service.stream("wait", "left")
    service.wait_running(1)
    stream.close()
    service.wait_running(0)


def test_data_proxy_lost_mid_turn_fails_turn_but_not_session(own: AgentService, tmp_path: Path) -> None:
    own.respond("one", "goes-on")
    events = own.stream("wait", "goes-on").events()
    assert any(event["type"] == "response.output_text.delta" for event in events)
    own.proxies[0].kill()
    last = list(events)[-1]
    assert (last["type"], last["code"]) == ("error", "worker_lost")
    turn = later(own.respond, "two", "goes-on")  # waits for whoever adopts the session
    own.add_pair(tmp_path / "state")
    own.register()
    assert text_of(turn.result(30).json()) == "You said: two"
    history = own.call("GET", "/sessions/goes-on").json()["history"]
    assert [reply["content"] for reply in history][::2] == ["one", "two"]


def test_repeated_request_is_answered_from_its_record(service: AgentService) -> None:
    headers = {"X-AReaL-Session-Key": "repeated", "Idempotency-Key": "once"}
    first, again = (service.call("POST", "/v1/responses", {"input": "tools"}, headers=headers).json() for _ in "12")
    assert first["output"] == again["output"] and first["id"] == again["id"]
    refused = service.call("POST", "/v1/responses", {"input": "another"}, headers=headers)
    assert (refused.status, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert service.call("GET", "/sessions/repeated").json()["turns"] == 1
    bad = service.call("POST", "/v1/responses", {"input": "x"}, headers={"Idempotency-Key": "x" * 256})
    assert (bad.status, bad.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_idempotency_key_without_a_session_is_refused(service: AgentService, path: str) -> None:
    body = {"input": "x", "messages": [{"role": "user", "content": "x"}]}
    refused = service.call("POST", path, body, headers={"Idempotency-Key": "once"})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "session_key_required")


def test_closed_session_accepts_no_turn(service: AgentService) -> None:
    for key in ("mine", service.respond("hello").headers["x-areal-session-key"]):
        service.respond("one", key)
        assert service.call("POST", "/sessions/close", {"session_key": key}).json()["closed"] is True
        ended = service.respond("two", key)
        assert (ended.status, ended.json()["error"]["code"]) == (410, "session_ended")
