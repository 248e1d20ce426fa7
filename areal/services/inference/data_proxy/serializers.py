"""Serializes responses in each API's format, whole or as stream events.

Chat completions and completions are written from the choices themselves. Other APIs are dialects: a request body is
translated to a chat body, and a writer writes the response from its pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import orjson

from areal.dataclasses import dataclass, field
from areal.services.dialects import (
    DONE,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reply,
    ResponseSummary,
    assistant_message,
    chat_delta,
    custom_call,
    custom_input,
    sse_data,
)
from areal.services.inference.data_proxy.generation import Choice, ChoiceUpdate, ResponseState
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import FinishReason, PromptLogprobs

_NO_CONTENT = b'"content":""'  # cannot occur inside a JSON string, where the quotes would be escaped

# Log-probabilities in the formats of the two APIs. Every sampled token has an entry, including the token that ended the
# response and those of a stop string: the number of entries equals ``completion_tokens``. JSON has no minus infinity;
# OpenAI's API writes -9999.

_LEAST = -9999.0


def _entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": codec.token_text(token_id),
        "logprob": max(logprob, _LEAST),
        "bytes": list(codec.bytes_of(token_id)),
    }


def chat_logprobs(codec: TextCodec, choice: Choice, start: int, end: int) -> dict[str, object]:
    content = []
    for position in range(start, end):
        top = choice.top_logprobs[position] if choice.top_logprobs else ()
        entry = _entry(codec, choice.token_ids[position], choice.logprobs[position])
        content.append({**entry, "top_logprobs": [_entry(codec, token_id, value) for token_id, value in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    codec: TextCodec, choice: Choice, start: int, end: int, offset: int
) -> dict[str, list[Any] | None]:
    """Return the completions API's ``logprobs``. ``offset``: where the first token's text begins in the choice's
    text."""
    tokens = [codec.token_text(token_id) for token_id in choice.token_ids[start:end]]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {codec.token_text(token_id): max(value, _LEAST) for token_id, value in top}
        for top in choice.top_logprobs[start:end]
    ]
    return {
        "tokens": tokens,
        "token_logprobs": plain_logprobs(choice, start, end),
        "top_logprobs": tops or None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    codec: TextCodec, prompt: Sequence[int], scores: PromptLogprobs, top: int
) -> dict[str, list[Any] | None]:
    """Return the completions API's ``logprobs`` of an echoed prompt, with null for its first token."""
    tokens = [codec.token_text(token_id) for token_id in prompt]
    offsets = [0, *accumulate(map(len, tokens[:-1]))]
    tops: list[dict[str, float] | None] = [
        {
            **{codec.token_text(token_id): max(value, _LEAST) for token_id, value in reversed(entry[:top])},
            token: max(value, _LEAST),
        }
        for token, value, entry in zip(tokens[1:], scores.logprobs, scores.top_logprobs, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None, *(max(value, _LEAST) for value in scores.logprobs)],
        "top_logprobs": [None, *tops] if top else None,
        "text_offset": offsets,
    }


def by_token(
    codec: TextCodec, prompt: Sequence[int], scores: PromptLogprobs, top: int
) -> list[dict[str, dict[str, object]] | None]:
    """Return vLLM's ``prompt_logprobs``: for each prompt token, that token and the likeliest ones, by token id."""
    entries: list[dict[str, dict[str, object]] | None] = [None]
    for token_id, value, entry in zip(prompt[1:], scores.logprobs, scores.top_logprobs, strict=True):
        every = {token_id: value, **dict(entry[:top])}
        entries.append(
            {
                str(each): {"logprob": max(logprob, _LEAST), "decoded_token": codec.token_text(each)}
                for each, logprob in every.items()
            }
        )
    return entries


def plain_logprobs(choice: Choice, start: int, end: int) -> list[float]:
    """Return the log-probabilities of the sampled tokens, without alternatives."""
    values = choice.logprobs[start:end]
    return values if not values or min(values) >= _LEAST else [max(value, _LEAST) for value in values]


def chat_finish_reason(choice: Choice) -> str | None:
    if choice.finish_reason is FinishReason.STOP and choice.reply.calls:
        return "tool_calls"
    return choice.finish_reason


class _OpenAISerializer(ABC):
    """The parts that chat completions and completions share."""

    kind: str  # ``object`` of a whole response
    chunk_kind: str  # ``object`` of a stream's chunk

    def __init__(self, state: ResponseState) -> None:
        self._state = state

    def _usage(self) -> dict[str, object]:
        state = self._state
        prompt, completion, reasoning = sum(map(len, state.prompts)), 0, 0
        for choice in state.choices:
            completion += 0 if state.no_answer else len(choice.token_ids)
            reasoning += choice.reasoning_tokens
        usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage["total_tokens"] = prompt + completion
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def _head(self, kind: str) -> dict[str, object]:
        state = self._state
        return {"id": state.answer_id, "object": kind, "created": state.created, "model": state.model}

    def _chunk_of(self, choice: dict[str, object]) -> bytes:
        options, data = self._state.options, {**self._head(self.chunk_kind), "choices": [choice]}
        if options.include_usage:
            data["usage"] = self._usage() if options.continuous_usage else None
        return sse_data(data)

    def _token_fields(self, choice: Choice, start: int, end: int) -> dict[str, object]:
        if not self._state.options.return_token_ids:
            return {}
        return {
            "token_ids": choice.token_ids[start:end],
            "token_logprobs": plain_logprobs(choice, start, end),
            "versions": choice.versions[start:end],
        }

    def closing(self) -> bytes:
        if not self._state.options.include_usage:
            return DONE
        return sse_data({**self._head(self.chunk_kind), "choices": [], "usage": self._usage()}) + DONE

    def whole(self) -> bytes:
        data = {**self._head(self.kind), "choices": [self._whole(choice) for choice in self._state.choices]}
        return orjson.dumps({**data, **self._beside_choices(), "usage": self._usage()})

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, object]: ...

    def _beside_choices(self) -> dict[str, object]:
        return {}


class ChatSerializer(_OpenAISerializer):
    """Writes chat completions. ``custom``: the names of the tools whose input is text."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, state: ResponseState, custom: frozenset[str] = frozenset()) -> None:
        super().__init__(state)
        self._custom = custom
        self._inputs: dict[tuple[int, int], str] = {}  # arguments of the custom calls that are open, by choice and call
        options = state.options
        self._chunks_differ = options.top_logprobs is not None or options.return_token_ids or options.continuous_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        return b"".join(
            self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self._state.choices
        )

    def _around_content(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in a content chunk. They are the same in each such chunk."""
        before, mark, after = self._chunk(index, {"content": ""}).partition(_NO_CONTENT)
        around = self._around[index] = (before + mark[:-2], after)
        return around

    def _chunk(
        self, index: int, delta: dict[str, object], finish: str | None = None, more: Mapping[str, object] = {}
    ) -> bytes:
        return self._chunk_of({"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more})

    def update(self, update: ChoiceUpdate) -> bytes:
        pieces = update.pieces
        if len(pieces) == 1 and update.finish_reason is None and not self._chunks_differ:
            piece = pieces[0]
            if type(piece) is Content:
                before, after = self._around.get(update.index) or self._around_content(update.index)
                return before + orjson.dumps(piece.text) + after
        state = self._state
        choice = state.choices[update.index]
        more = self._token_fields(choice, update.start, update.end)
        if state.options.top_logprobs is not None and update.end > update.start:
            more["logprobs"] = chat_logprobs(state.codec, choice, update.start, update.end)
        deltas = [delta for piece in pieces if (delta := self._delta(update.index, piece)) is not None]
        if update.finish_reason is not None:
            open_calls = [call for index, call in self._inputs if index == update.index]
            deltas += [self._custom_input(update.index, call) for call in open_calls]
        if more and not deltas:  # tokens whose text is not certain yet
            deltas = [{"content": ""}]
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(update.index, delta, more=more))
            more = {}
        if update.finish_reason is not None:
            chunks.append(self._chunk(update.index, {}, chat_finish_reason(choice)))
        return b"".join(chunks)

    def _delta(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a piece's delta. A custom call's input can only be read from its complete arguments, so it is one
        delta."""
        match piece:
            case CallStart(call, call_id, name) if name in self._custom:
                self._inputs[index, call] = ""
                return {"tool_calls": [{"index": call, **custom_call(call_id, name, "")}]}
            case CallArguments(call, fragment) if (index, call) in self._inputs:
                self._inputs[index, call] += fragment
                return None
            case CallEnd(call) if (index, call) in self._inputs:
                return self._custom_input(index, call)
        return chat_delta(piece)

    def _custom_input(self, index: int, call: int) -> dict[str, object]:
        given = custom_input(self._inputs.pop((index, call)))
        return {"tool_calls": [{"index": call, "custom": {"input": given}}]}

    def _message(self, reply: Reply) -> dict[str, object]:
        message = assistant_message(reply)
        for place, call in enumerate(reply.calls):
            if call.name in self._custom:
                message["tool_calls"][place] = custom_call(call.id, call.name, custom_input(call.arguments))
        return message

    def _whole(self, choice: Choice) -> dict[str, object]:
        state, end = self._state, len(choice.token_ids)
        wanted = state.options.top_logprobs is not None
        return {
            "index": choice.index,
            "message": self._message(choice.reply),
            "logprobs": chat_logprobs(state.codec, choice, 0, end) if wanted else None,
            "finish_reason": chat_finish_reason(choice),
            **self._token_fields(choice, 0, end),
        }

    def _beside_choices(self) -> dict[str, object]:
        return {"prompt_token_ids": self._state.prompts[0].tolist()} if self._state.options.return_token_ids else {}


class CompletionSerializer(_OpenAISerializer):
    kind = chunk_kind = "text_completion"

    def __init__(self, state: ResponseState) -> None:
        super().__init__(state)
        self._offsets = [len(self._echo(choice)) for choice in state.choices]

    def _echo(self, choice: Choice) -> str:
        state = self._state
        return state.echoed[choice.index // state.per_prompt] if state.echoed else ""

    def opening(self) -> bytes:
        if not self._state.echoed:
            return b""
        return b"".join(
            self._chunk(choice.index, self._echo(choice), more={"logprobs": self._echoed_logprobs(choice)})
            for choice in self._state.choices
        )

    def _echoed_logprobs(self, choice: Choice) -> dict[str, list[Any] | None] | None:
        """Return the logprobs of the prompt, or None unless the request has both ``echo`` and ``logprobs``."""
        state, place = self._state, choice.index // self._state.per_prompt
        wanted = state.options.top_logprobs
        if not state.echoed or wanted is None or not state.scores:
            return None
        return prompt_logprobs(state.codec, state.prompts[place], state.scores[place], wanted)

    def _chunk(self, index: int, text: str, finish: str | None = None, more: Mapping[str, object] = {}) -> bytes:
        return self._chunk_of({"index": index, "text": text, "logprobs": None, "finish_reason": finish, **more})

    def update(self, update: ChoiceUpdate) -> bytes:
        state = self._state
        choice = state.choices[update.index]
        more = self._token_fields(choice, update.start, update.end)
        if state.options.top_logprobs is not None and update.end > update.start:
            offset = self._offsets[update.index]
            more["logprobs"] = found = completion_logprobs(state.codec, choice, update.start, update.end, offset)
            self._offsets[update.index] += sum(map(len, found["tokens"] or ()))
        if not (update.text or more or update.finish_reason):
            return b""
        finish = update.finish_reason.value if update.finish_reason else None
        return self._chunk(update.index, update.text, finish, more)

    def _whole(self, choice: Choice) -> dict[str, object]:
        state, echo, place = self._state, self._echo(choice), choice.index // self._state.per_prompt
        wanted = state.options.top_logprobs is not None
        end = 0 if state.no_answer else len(choice.token_ids)
        more = self._token_fields(choice, 0, end)
        if more:
            more["prompt_token_ids"] = state.prompts[place].tolist()
        if state.scores and (top := state.prompt_logprobs) is not None:
            more["prompt_logprobs"] = by_token(state.codec, state.prompts[place], state.scores[place], top)
        logprobs = completion_logprobs(state.codec, choice, 0, end, len(echo)) if wanted else None
        if logprobs is not None and (of_prompt := self._echoed_logprobs(choice)) is not None:
            logprobs = {name: (of_prompt[name] or []) + (values or []) or None for name, values in logprobs.items()}
        return {
            "index": choice.index,
            "text": echo if state.no_answer else echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": FinishReason.LENGTH if state.no_answer else choice.finish_reason,
            **more,
        }


TemplateUses = Callable[[str], bool]
"""Whether the model's chat template has a variable of this name."""


class DialectWriter(Protocol):
    """Writes one response in a dialect, as events or whole."""

    def opening(self, prompt_tokens: int) -> bytes: ...

    def pieces(self, pieces: Iterable[Piece]) -> bytes: ...

    def closing(self, summary: ResponseSummary) -> bytes: ...

    def whole(self, reply: Reply, summary: ResponseSummary) -> dict[str, object]: ...


@dataclass(frozen=True)
class ChatTranslation:
    """A request of a dialect as the body of a chat completion (``chat``). ``names`` maps chat fields to the dialect's
    names. ``ignored``: the dialect's fields without effect. ``writer`` takes the response's id, the model's name and
    the time of creation in epoch seconds."""

    chat: dict[str, Any]
    writer: Callable[[str, str, int], DialectWriter]
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class DialectSerializer:
    """Passes a token engine's response to a dialect's writer."""

    _state: ResponseState
    _writer: DialectWriter

    def opening(self) -> bytes:
        return self._writer.opening(sum(map(len, self._state.prompts)))

    def update(self, update: ChoiceUpdate) -> bytes:
        return self._writer.pieces(update.pieces)

    def closing(self) -> bytes:
        return self._writer.closing(self._summary())

    def whole(self) -> bytes:
        return orjson.dumps(self._writer.whole(self._state.choices[0].reply, self._summary()))

    def _summary(self) -> ResponseSummary:
        state, choice = self._state, self._state.choices[0]
        # A stop string that is a special token has no text in the response: compare the last token.
        last = state.codec.token_text(choice.token_ids[-1]) if choice.token_ids else ""
        return ResponseSummary(
            finish=str(chat_finish_reason(choice)),
            prompt_tokens=sum(map(len, state.prompts)),
            output_tokens=len(choice.token_ids),
            reasoning_tokens=choice.reasoning_tokens,
            stop=choice.stop or (last if last in state.options.stops else None),
        )
