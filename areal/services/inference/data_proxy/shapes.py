"""OpenAI's answer shapes: chat completions and text completions, whole and as stream chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from areal.services.inference.data_proxy.choice import Choice, Update
from areal.services.inference.data_proxy.logprobs import (
    by_token,
    chat_logprobs,
    completion_logprobs,
    plain_logprobs,
    prompt_logprobs,
)
from areal.services.inference.data_proxy.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
)
from areal.services.inference.data_proxy.sampling_fields import Answering
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import FinishReason, PromptLogprobs

DONE = b"data: [DONE]\n\n"
_NO_CONTENT = b'"content":""'  # within a string the quotes would be escaped


def event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


@dataclass(frozen=True)
class Frame:
    """What every object of one answer repeats."""

    answer_id: str
    model: str
    codec: TextCodec
    answering: Answering
    prompts: Sequence[Sequence[int]]
    choices: Sequence[Choice]
    echoed: Sequence[str] = ()  # the prompt texts, where they come before the answers
    scores: Sequence[PromptLogprobs] = ()  # of each prompt, where they are wanted
    no_answer: bool = False  # the prompt alone
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def per_prompt(self) -> int:
        return len(self.choices) // len(self.prompts)

    def usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        completion = 0 if self.no_answer else sum(len(choice.token_ids) for choice in self.choices)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage["total_tokens"] = prompt + completion
        if reasoning := sum(choice.reasoning_tokens for choice in self.choices):
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, kind: str, choice: dict[str, Any]) -> bytes:
        data = {**self.head(kind), "choices": [choice]}
        if self.answering.include_usage:
            data["usage"] = self.usage() if self.answering.continuous_usage else None
        return event(data)

    def usage_chunk(self, kind: str) -> bytes:
        if not self.answering.include_usage:
            return b""
        return event({**self.head(kind), "choices": [], "usage": self.usage()})

    def token_fields(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        if not self.answering.return_token_ids:
            return {}
        return {
            "token_ids": choice.token_ids[start:end],
            "token_logprobs": plain_logprobs(choice, start, end),
            "versions": choice.versions[start:end],
        }


class Shape(Protocol):
    """One API's way to say an answer."""

    def opening(self) -> bytes:
        """Chunks that come before any token."""
        ...

    def update(self, update: Update) -> bytes:
        """The chunks of one update; empty when there is nothing to say yet."""
        ...

    def closing(self) -> bytes: ...

    def whole(self) -> bytes: ...


def assistant_message(reply: Reply) -> dict[str, Any]:
    """What was answered, as the message with which callers send it back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def chat_finish_reason(choice: Choice) -> str | None:
    if choice.finish_reason is FinishReason.STOP and choice.reply.calls:
        return "tool_calls"
    return choice.finish_reason


def _chat_delta(piece: Piece) -> dict[str, Any] | None:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case CallEnd():
            return None


class ChatShape:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        how = frame.answering
        self._chunks_differ = how.top_logprobs is not None or how.return_token_ids or how.continuous_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        return b"".join(
            self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self._frame.choices
        )

    def _around_content(self, index: int) -> tuple[bytes, bytes]:
        """The chunk of a piece of content: all but the text is the same each time."""
        before, mark, after = self._chunk(index, {"content": ""}).partition(_NO_CONTENT)
        around = self._around[index] = (before + mark[:-2], after)
        return around

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return self._frame.chunk("chat.completion.chunk", choice)

    def update(self, update: Update) -> bytes:
        pieces = update.pieces
        if len(pieces) == 1 and update.finish_reason is None and not self._chunks_differ:
            piece = pieces[0]
            if type(piece) is Content:
                before, after = self._around.get(update.index) or self._around_content(update.index)
                return before + orjson.dumps(piece.text) + after
        frame = self._frame
        choice = frame.choices[update.index]
        more = frame.token_fields(choice, update.start, update.end)
        if frame.answering.top_logprobs is not None and update.end > update.start:
            more["logprobs"] = chat_logprobs(frame.codec, choice, update.start, update.end)
        deltas = [delta for piece in pieces if (delta := _chat_delta(piece)) is not None]
        if more and not deltas:  # tokens whose text is not clear yet
            deltas = [{"content": ""}]
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(update.index, delta, **more))
            more = {}
        if update.finish_reason is not None:
            chunks.append(self._chunk(update.index, {}, chat_finish_reason(choice)))
        return b"".join(chunks)

    def closing(self) -> bytes:
        return self._frame.usage_chunk("chat.completion.chunk") + DONE

    def whole(self) -> bytes:
        frame = self._frame
        data = {**frame.head("chat.completion"), "choices": [self._whole(choice) for choice in frame.choices]}
        if frame.answering.return_token_ids:
            data["prompt_token_ids"] = frame.prompts[0]
        return orjson.dumps({**data, "usage": frame.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        frame, end = self._frame, len(choice.token_ids)
        wanted = frame.answering.top_logprobs is not None
        return {
            "index": choice.index,
            "message": assistant_message(choice.reply),
            "logprobs": chat_logprobs(frame.codec, choice, 0, end) if wanted else None,
            "finish_reason": chat_finish_reason(choice),
            **frame.token_fields(choice, 0, end),
        }


class CompletionShape:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._offsets = [len(self._echo(choice)) for choice in frame.choices]

    def _echo(self, choice: Choice) -> str:
        frame = self._frame
        return frame.echoed[choice.index // frame.per_prompt] if frame.echoed else ""

    def opening(self) -> bytes:
        if not self._frame.echoed:
            return b""
        chunks = []
        for choice in self._frame.choices:
            chunks.append(self._chunk(choice.index, self._echo(choice), logprobs=self._echoed_logprobs(choice)))
        return b"".join(chunks)

    def _echoed_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of the prompt, where it is echoed and logprobs are wanted."""
        frame, place = self._frame, choice.index // self._frame.per_prompt
        wanted = frame.answering.top_logprobs
        if not frame.echoed or wanted is None or not frame.scores:
            return None
        return prompt_logprobs(frame.codec, frame.prompts[place], frame.scores[place], wanted)

    def _chunk(self, index: int, text: str, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, **more}
        return self._frame.chunk("text_completion", choice)

    def update(self, update: Update) -> bytes:
        frame = self._frame
        choice = frame.choices[update.index]
        more = frame.token_fields(choice, update.start, update.end)
        if frame.answering.top_logprobs is not None and update.end > update.start:
            offset = self._offsets[update.index]
            more["logprobs"] = completion_logprobs(frame.codec, choice, update.start, update.end, offset)
            self._offsets[update.index] += sum(map(len, more["logprobs"]["tokens"]))
        if not (update.text or more or update.finish_reason):
            return b""
        finish = update.finish_reason.value if update.finish_reason else None
        return self._chunk(update.index, update.text, finish, **more)

    def closing(self) -> bytes:
        return self._frame.usage_chunk("text_completion") + DONE

    def whole(self) -> bytes:
        frame = self._frame
        data = {**frame.head("text_completion"), "choices": [self._whole(choice) for choice in frame.choices]}
        return orjson.dumps({**data, "usage": frame.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        frame, end, echo = self._frame, len(choice.token_ids), self._echo(choice)
        wanted = frame.answering.top_logprobs is not None
        end = 0 if frame.no_answer else end
        more = frame.token_fields(choice, 0, end)
        place = choice.index // frame.per_prompt
        if more:
            more["prompt_token_ids"] = frame.prompts[place]
        if frame.scores and not (echo and wanted):
            more["prompt_logprobs"] = by_token(frame.codec, frame.prompts[place], frame.scores[place])
        logprobs = completion_logprobs(frame.codec, choice, 0, end, len(echo)) if wanted else None
        if logprobs is not None and (of_prompt := self._echoed_logprobs(choice)) is not None:
            tops = of_prompt["top_logprobs"] + (logprobs["top_logprobs"] or [])
            logprobs = {name: of_prompt[name] + (values or []) for name, values in logprobs.items()}
            logprobs["top_logprobs"] = tops or None
        return {
            "index": choice.index,
            "text": echo if frame.no_answer else echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": FinishReason.LENGTH if frame.no_answer else choice.finish_reason,
            **more,
        }
