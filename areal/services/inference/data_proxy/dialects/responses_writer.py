"""OpenAI's Responses API: answers as responses and as their events.

An item at a time: reasoning, a message, a function's call; it is done before the next one is added. Events are numbered
from 0. https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from areal.services.inference.data_proxy.dialects.writer import Outcome, sse
from areal.services.inference.data_proxy.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
)

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


def _item(kind: str, status: str, item_id: str, **more: Any) -> dict[str, Any]:
    return {"id": item_id, "type": kind, "status": status, **more}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message(status: str, text: str, item_id: str) -> dict[str, Any]:
    return _item("message", status, item_id, role="assistant", content=[_text_part(text)])


def _thought(status: str, text: str, item_id: str) -> dict[str, Any]:
    return _item("reasoning", status, item_id, summary=[], content=[_reasoning_part(text)])


def _call(status: str, call_id: str, name: str, arguments: str, item_id: str) -> dict[str, Any]:
    return _item("function_call", status, item_id, call_id=call_id, name=name, arguments=arguments)


class ResponsesWriter:
    """Items are named after the answer and their place in it: an answer that is said again has the same ids."""

    def __init__(self, answer_id: str, model: str, created: int, *, echoed: Mapping[str, Any]) -> None:
        self._id = answer_id
        self._model = model
        self._echoed = echoed
        self._created = created
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._text: list[str] = []  # of that item

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return sse(kind, {"sequence_number": self._number, **data})

    def _item_id(self, kind: str, place: int) -> str:
        return f"{_ID_PREFIXES[kind]}{self._id.removeprefix('resp_')}_{place}"

    def opening(self, prompt_tokens: int) -> bytes:
        response = self._response("in_progress", [], None, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None, cut: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "model": self._model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": usage,
            **self._echoed,
        }

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._in("message") + self._delta(
                    "response.output_text.delta", text, content_index=0, logprobs=[]
                )
            case Reasoning(text):
                return self._in("reasoning") + self._delta("response.reasoning_text.delta", text, content_index=0)
            case CallStart(_, call_id, name):
                done = self._done("completed")
                item_id = self._item_id("function_call", len(self._items))
                return done + self._add(_call("in_progress", call_id, name, "", item_id))
            case CallArguments(_, fragment):
                return self._delta("response.function_call_arguments.delta", fragment)
            case CallEnd():
                return self._done("completed")

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _in(self, kind: str) -> bytes:
        """Makes sure that an item of this kind is open, with its one part."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        done = self._done("completed")
        item_id = self._item_id(kind, len(self._items))
        item = (_message if kind == "message" else _thought)("in_progress", "", item_id)
        part = item["content"][0]
        added = self._add({**item, "content": []})
        return done + added + self._event("response.content_part.added", **self._at(), content_index=0, part=part)

    def _add(self, item: dict[str, Any]) -> bytes:
        self._open, self._text = item, []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta(self, kind: str, text: str, **more: Any) -> bytes:
        self._text.append(text)
        return self._event(kind, **self._at(), delta=text, **more)

    def _done(self, status: str) -> bytes:
        """The events that complete the open item, if one is open."""
        item = self._open
        if item is None:
            return b""
        text, item_id = "".join(self._text), item["id"]
        said: list[bytes] = []
        if item["type"] == "function_call":
            whole = _call(status, item["call_id"], item["name"], text or "{}", item_id)
            more = {"name": item["name"], "arguments": whole["arguments"]}
            said.append(self._event("response.function_call_arguments.done", **self._at(), **more))
        elif item["type"] == "message":
            whole = _message(status, text, item_id)
            said.append(self._event("response.output_text.done", **self._at(), content_index=0, text=text, logprobs=[]))
        else:
            whole = _thought(status, text, item_id)
            said.append(self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text))
        if "content" in whole:
            part = whole["content"][0]
            said.append(self._event("response.content_part.done", **self._at(), content_index=0, part=part))
        said.append(self._event("response.output_item.done", output_index=len(self._items), item=whole))
        self._items.append(whole)
        self._open = None
        return b"".join(said)

    def closing(self, outcome: Outcome) -> bytes:
        cut = _INCOMPLETE.get(outcome.finish)
        done = self._done("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        response = self._response(status, self._items, _usage(outcome), cut)
        return done + self._event(f"response.{status}", response=response)

    def whole(self, reply: Reply, outcome: Outcome) -> dict[str, Any]:
        output = []
        if reply.reasoning:
            output.append(_thought("completed", reply.reasoning, self._item_id("reasoning", 0)))
        if reply.content:
            output.append(_message("completed", reply.content, self._item_id("message", len(output))))
        for call in reply.calls:
            item_id = self._item_id("function_call", len(output))
            output.append(_call("completed", call.id, call.name, call.arguments or "{}", item_id))
        cut = _INCOMPLETE.get(outcome.finish)
        status = "incomplete" if cut else "completed"
        if cut and output:
            output[-1]["status"] = status
        return self._response(status, output, _usage(outcome), cut)


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": outcome.output_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
        "total_tokens": outcome.prompt_tokens + outcome.output_tokens,
    }
