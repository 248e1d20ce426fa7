"""Tools of the Responses API that are not plain functions, as Codex sends them: namespaces and custom tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.services.inference.data_proxy.dialects.talks import prompts
from tests.services.inference.data_proxy.dialects.test_responses import USER, post, stream
from tests.services.inference.running_service import Service
from tests.services.processes import script

SPAWN: dict[str, Any] = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
CODEX: dict[str, Any] = {
    "store": False,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "instructions": "Be brief.",
    "tools": [
        {"type": "function", "name": "spawn", "parameters": SPAWN, "strict": False},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Other agents",
            "tools": [{"type": "function", "name": "spawn", "description": "Starts one.", "parameters": SPAWN}],
        },
        {"type": "custom", "name": "patch", "format": GRAMMAR},
        {"type": "web_search", "external_web_access": False},
    ],
}
TASK = '{"task": "look"}'
PATCH = "*** Begin\n+a"


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = "\n".join(
    (tool_call("spawn", TASK), tool_call("agents__spawn", TASK), tool_call("patch", json.dumps({"input": PATCH})))
)


def test_namespaced_and_custom_tools_round_trip(service: Service, talking_tokenizer: Path) -> None:
    script(service.engine, text=CALLS)
    answer = post(service, input=[USER], **CODEX)
    assert answer.status == 200, answer.body
    assert answer.headers["x-areal-ignored"] == "tools.web_search, reasoning.effort, reasoning.summary"
    plain, spaced, custom = output = answer.json()["output"]
    assert (plain["type"], plain["name"], plain.get("namespace")) == ("function_call", "spawn", None)
    assert (spaced["type"], spaced["name"], spaced["namespace"]) == ("function_call", "spawn", "agents")
    assert spaced["arguments"] == plain["arguments"] == TASK
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", PATCH)

    script(service.engine, text=CALLS)
    events = stream(service, input=[USER], **CODEX)
    forms = [(item["type"], item["name"], item.get("namespace")) for item in output]
    added, done = (
        [event["item"] for event in events if event["type"] == f"response.output_item.{kind}"]
        for kind in ("added", "done")
    )
    for items in (added, done):
        assert [(item["type"], item["name"], item.get("namespace")) for item in items] == forms
    assert done[-1]["input"] == PATCH and events[-1]["response"]["output"] == done
    inputs = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert [(event.get("delta"), event.get("input")) for event in inputs] == [(PATCH, None), (None, PATCH)]

    script(service.engine, text="Done.")
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": f"result {place}"}
        for place, item in enumerate(output)
    ]
    again = post(service, input=[USER, *output, *results], **CODEX)
    assert again.status == 200, again.body
    before, *_, after = prompts(service, talking_tokenizer)
    assert "Other agents: Starts one." in before and "agents__spawn" in before and "start: /x/" in before
    assert CALLS in after and after.count("result ") == 3


def test_forced_call_of_namespaced_tool_is_prefilled(service: Service) -> None:
    choice = {"type": "function", "name": "spawn", "namespace": "agents"}
    script(service.engine, text=f"{TASK}}}\n</tool_call>")
    (call,) = post(service, **{**CODEX, "tool_choice": choice}).json()["output"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("spawn", "agents", TASK)
    script(service.engine, text=CALLS)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice, {"type": "web_search"}]}
    assert post(service, **{**CODEX, "tool_choice": allowed}).status == 200


def test_tool_name_collision_is_resolved(service: Service) -> None:
    inner = {"type": "function", "name": "spawn", "parameters": SPAWN}
    tools = [{**inner, "name": "agents__spawn"}, {"type": "namespace", "name": "agents", "tools": [inner]}]
    for shown, name, namespace in (("agents__spawn", "agents__spawn", None), ("agents__spawn_2", "spawn", "agents")):
        script(service.engine, text=tool_call(shown, TASK))
        (call,) = post(service, tools=tools).json()["output"]
        assert (call["name"], call.get("namespace")) == (name, namespace)


def test_non_object_input_of_custom_tool_is_text(service: Service) -> None:
    script(service.engine, text=tool_call("patch", '"plain"'))
    (call,) = post(service, **CODEX).json()["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "plain")


def test_provider_items_are_dropped_and_listed_as_ignored(service: Service) -> None:
    items = [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}]
    answer = post(service, input=items)
    assert (answer.status, answer.headers["x-areal-ignored"]) == (200, "input.web_search_call")
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    reply = {"role": "assistant", "content": [used, found, {"type": "text", "text": "Sunny."}]}
    body = {"model": "tiny", "max_tokens": 20, "messages": [USER, reply, USER]}
    answer = service.gateway.call("POST", "/v1/messages", body, key=service.key)
    names = "messages.server_tool_use, messages.web_search_tool_result"
    assert (answer.status, answer.headers["x-areal-ignored"]) == (200, names)
