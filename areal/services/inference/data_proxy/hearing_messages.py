"""Keeping what Anthropic's API answers, while its bytes go through: its events, heard as chat completions' chunks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from areal.services.inference.data_proxy.dialects.anthropic import chat_messages
from areal.services.inference.data_proxy.hearing import Heard, NotHeard
from areal.services.inference.data_proxy.visits import Visit
from areal.services.web.errors import ApiError

_LAST = "message_stop"
_EVENT_ENDS = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")
_FINISH = {"max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}  # everything else: stop


class MessagesHeard(Heard):
    """Takes Anthropic's events and answers for what ``Heard`` takes of OpenAI's."""

    _calls = 0  # tool_use blocks so far

    def events(self, part: bytes) -> bytes:
        said: list[bytes] = []
        for event in filter(None, _EVENT_ENDS.split(part)):
            data = _data(event)
            if self.held or data.get("type") == _LAST:
                self.held += event
                continue
            for chunk in self._chunks(data):
                self.data(chunk, whole=False)
            said.append(event)
        return b"".join(said)

    def data(self, data: Mapping[str, Any], *, whole: bool) -> None:
        super().data(_completion(data) if whole and isinstance(data, Mapping) else data, whole=whole)

    def _chunks(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        match event.get("type"):
            case "message_start":
                message = _mapping(event, "message")
                yield {**_chunk({}), "id": message.get("id"), "usage": _usage(_mapping(message, "usage"))}
            case "content_block_start" if _mapping(event, "content_block").get("type") == "tool_use":
                block = _mapping(event, "content_block")
                self._calls += 1
                yield self._call({"id": block.get("id")}, {"name": block.get("name"), "arguments": ""})
            case "content_block_delta":
                delta = _mapping(event, "delta")
                match delta.get("type"):
                    case "text_delta":
                        yield _chunk({"content": delta.get("text")})
                    case "thinking_delta":
                        yield _chunk({"reasoning_content": delta.get("thinking")})
                    case "input_json_delta":
                        yield self._call({}, {"arguments": delta.get("partial_json")})
            case "message_delta":
                reason = _mapping(event, "delta").get("stop_reason")
                yield {**_chunk({}, reason), "usage": _usage(_mapping(event, "usage"))}

    def _call(self, head: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
        return _chunk({"tool_calls": [{**head, "index": self._calls - 1, "function": function}]})


def hearing_messages(visit: Visit, model: str, data: Mapping[str, Any]) -> Heard:
    """Raises 400 for a call of a session whose messages could not be recorded as a chat's."""
    if not visit.keeps(True):
        return NotHeard()
    try:
        messages = chat_messages(data.get("system"), data.get("messages"))
    except ApiError:
        if visit.of_a_session:
            raise
        return NotHeard()  # the API may well take it
    return MessagesHeard(visit, model, messages, None)


def _data(event: bytes) -> Mapping[str, Any]:
    for line in event.splitlines():
        if line.startswith(b"data:"):
            with contextlib.suppress(orjson.JSONDecodeError):
                data = orjson.loads(line[5:])
                return data if isinstance(data, dict) else {}
    return {}


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _chunk(delta: dict[str, Any], stop_reason: object = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": _finish(stop_reason)}]}


def _finish(stop_reason: object) -> str | None:
    return None if stop_reason is None else _FINISH.get(str(stop_reason), "stop")


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    prompt, completion = (int(usage.get(name) or 0) for name in ("input_tokens", "output_tokens"))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion(message: Mapping[str, Any]) -> dict[str, Any]:
    """A whole message as a chat completion."""
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in message.get("content") or ():
        match block.get("type"):
            case "text":
                answer["content"] += block.get("text") or ""
            case "thinking":
                answer["reasoning_content"] = answer.get("reasoning_content", "") + (block.get("thinking") or "")
            case "tool_use":
                function = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input") or {}).decode()}
                call = {"id": block.get("id"), "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
    choice = {"index": 0, "message": answer, "finish_reason": _finish(message.get("stop_reason"))}
    return {"id": message.get("id"), "choices": [choice], "usage": _usage(_mapping(message, "usage"))}
