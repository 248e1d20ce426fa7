"""OpenAI's chat completions and completions: a body becomes a generation request, an answer its JSON or SSE chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from areal.services.http.errors import bad_request
from areal.services.inference.data_proxy.choice import (
    Choice,
    ChoiceUpdate,
    by_token,
    chat_logprobs,
    completion_logprobs,
    plain_logprobs,
    prompt_logprobs,
)
from areal.services.inference.data_proxy.fields import (
    Fields,
    ResponseOptions,
    is_token_ids,
    read_response_options,
    read_sampling,
    unsupported,
)
from areal.services.inference.data_proxy.parsers.reader import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
)
from areal.services.inference.data_proxy.template import (
    RESERVED,
    ChatTemplate,
    TemplateInput,
    read_messages,
    text_after_answer,
)
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.data_proxy.tools import Parsers, ResponseParsing, read_tool_use
from areal.services.inference.engines.base import Capabilities, FinishReason, PromptLogprobs
from areal.wire.sampling import SamplingParams

MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # the completions API's own

_NO_EFFECT = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
_NOT_IN_CHAT = {
    "functions": "it is the old form of tools",
    "function_call": "it is the old form of tool_choice",
    "audio": "the model writes text only",
    "prediction": "the engine has no predicted outputs",
    "web_search_options": "there is no web search",
    "verbosity": "the model has no such switch",
    "prompt_logprobs": "completions tell them, of a prompt that the caller knows",
}
_NOT_IN_COMPLETIONS = {"suffix": "the model only continues a text"}

_NO_PARSING = ResponseParsing()


MakePrompt = Callable[[int | None], list[int]]
"""Token ids, given how many there is room for. Raises TooLong and Abandoned."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request, whichever API it came by. ``prompts`` make the token ids; for a chat ``text`` renders its one
    prompt: both run off the event loop where they take long. Without ``sampling.max_new_tokens`` the answer may have
    ``default_max_tokens``, or all tokens that there is room for. ``store`` false: the call is not recorded. ``echo``:
    the prompt's text precedes the answer's. ``messages``: the chat as the client wrote it, in OpenAI's form.
    ``after_answer``: given the text up to and with the chat's last answer, and the text of its end token, what the
    template adds after it; None where the template does not continue that text. ``adapter``: the LoRA adapter that
    answers."""

    sampling: SamplingParams
    options: ResponseOptions
    ignored: tuple[str, ...]
    store: bool
    prompts: tuple[MakePrompt, ...] = ()
    echo: bool = False
    prompt_logprobs: int | None = None  # how many alternatives
    no_answer: bool = False  # ``max_tokens`` 0: only the prompt is of interest
    default_max_tokens: int | None = None
    parsing: ResponseParsing = _NO_PARSING
    messages: Sequence[Mapping[str, Any]] = ()
    text: Callable[[], str] | None = None
    after_answer: Callable[[str, str], str | None] | None = None
    adapter: str | None = None


def read_chat(fields: Fields, codec: TextCodec, capabilities: Capabilities, parsers: Parsers) -> GenerationRequest:
    """Raises 400 naming the field."""
    template = codec.template
    if template is None:
        message = "this model has no chat template: use /v1/completions, or give the model one"
        raise bad_request(message, param="messages", code="no_chat_template")
    fields.refuse(_NOT_IN_CHAT)
    if fields.take("modalities", ["text"]) != ["text"]:
        raise unsupported("modalities", "the model writes text only")
    client_messages = fields.take("messages")
    messages = read_messages(client_messages, template)
    tools = read_tool_use(fields, template, parsers, capabilities)
    continued = _continues_last_message(fields, messages, forced=bool(tools.primer))
    variables = _template_variables(fields, template)
    parsing = ResponseParsing(None if continued else parsers.reasoning, tools)
    wants_logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, capabilities.max_top_logprobs)
    if top is not None and not wants_logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    options = read_response_options(fields, (top or 0) if wants_logprobs else None, capabilities)
    old, new = fields.whole("max_tokens", 1, 2**31 - 1), fields.whole("max_completion_tokens", 1, 2**31 - 1)
    sampling = read_sampling(fields, codec, options, capabilities, new or old)
    if tools.response_format is not None and options.response_format is None:
        options = replace(options, response_format=tools.response_format)

    def text() -> str:
        rendered = (template.render_open if continued else template.render)(messages, tools.shown, variables)
        return rendered + parsing.prompt_end(rendered)

    def after_answer(recorded: str, end: str) -> str | None:
        if continued:
            return None
        given = TemplateInput(messages, tools.shown, variables)
        rest = text_after_answer(template, given, recorded, end, has_reasoning=parsing.has_reasoning)
        return None if rest is None else rest + parsing.prompt_end(rest)

    store, ignored = _read_rest(fields)
    return GenerationRequest(
        sampling,
        options,
        ignored,
        store,
        parsing=parsing,
        messages=client_messages,
        text=text,
        after_answer=after_answer,
    )


def _read_rest(fields: Fields) -> tuple[bool, tuple[str, ...]]:
    """Whether the call may be recorded, and the fields that no reader knows."""
    if fields.is_empty:
        return True, ()
    fields.mapping("metadata")
    store = fields.flag("store", True)
    fields.accept(_NO_EFFECT)
    return store, fields.ignored()


def _continues_last_message(fields: Fields, messages: Sequence[Mapping[str, Any]], *, forced: bool) -> bool:
    """Whether the answer continues the last message instead of starting one."""
    name = "continue_final_message"
    if not fields.flag(name):
        return False
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip() or "tool_calls" in last:
        raise bad_request(f"{name} needs the last message to be the assistant's, with text and no calls", param=name)
    if forced:
        raise bad_request(f"{name} does not go with a tool_choice that forces a call", param="tool_choice")
    return True


def _template_variables(fields: Fields, template: ChatTemplate) -> dict[str, Any]:
    variables = fields.mapping("chat_template_kwargs")
    if reserved := RESERVED & variables.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise bad_request(f"{name} is set by the service", param=name)
    variables["add_generation_prompt"] = fields.flag(
        "add_generation_prompt", variables.get("add_generation_prompt", True)
    )
    if template.uses("reasoning_effort") and (effort := fields.text("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort  # where the template lacks it, the field is reported as ignored
    return variables


def read_completion(fields: Fields, codec: TextCodec, capabilities: Capabilities) -> GenerationRequest:
    """Raises 400 naming the field."""
    fields.refuse(_NOT_IN_COMPLETIONS)
    prompts = _prompts(fields.take("prompt"), codec)
    echo = fields.flag("echo")
    top = fields.whole("logprobs", 0, capabilities.max_top_logprobs)
    scored = fields.whole("prompt_logprobs", 0, capabilities.max_top_logprobs)
    if (scored is not None or (echo and top is not None)) and not capabilities.prompt_logprobs:
        name = "echo" if scored is None else "prompt_logprobs"
        raise unsupported(name, "this engine does not tell the log-probabilities of a prompt")
    options = read_response_options(fields, top, capabilities)
    if options.stream and scored is not None:
        raise unsupported("prompt_logprobs", "not in a stream")
    most = fields.whole("max_tokens", 0, 2**31 - 1)
    if most == 0 and not echo:
        raise bad_request("max_tokens may be 0 only with echo", param="max_tokens")
    sampling = read_sampling(fields, codec, options, capabilities, most or (1 if most == 0 else None))
    if most == 0 and (sampling.n != 1 or options.stream):
        raise bad_request("max_tokens 0 goes with neither n nor stream", param="max_tokens")
    best_of = fields.whole("best_of", 1, 128)
    if best_of is not None and best_of != sampling.n:
        raise unsupported("best_of", "only as many choices are made as n says")
    if sampling.n * len(prompts) > MAX_PROMPTS:
        raise bad_request(f"n times the number of prompts may be at most {MAX_PROMPTS}", param="n")
    if echo and top is not None:
        scored = max(top, scored or 0)
    store, ignored = _read_rest(fields)
    return GenerationRequest(
        sampling,
        options,
        ignored,
        store and most != 0,
        prompts,
        echo=echo,
        prompt_logprobs=scored,
        no_answer=most == 0,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
    )


def _prompts(value: object, codec: TextCodec) -> tuple[MakePrompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""

    def from_text(text: str) -> MakePrompt:
        return lambda most: codec.encode(text, add_special_tokens=True, most=most)

    def from_ids(ids: list[int]) -> MakePrompt:
        return lambda most: ids

    if isinstance(value, str):
        return (from_text(value),)
    if isinstance(value, list) and value:
        if is_token_ids(value, codec.vocab_size):
            return (from_ids(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(map(from_text, value))
        if all(item and is_token_ids(item, codec.vocab_size) for item in value):
            return tuple(map(from_ids, value))
    message = f"prompt must be a string, token ids below {codec.vocab_size}, or a list of either; not empty"
    raise bad_request(message, param="prompt")


# Serializers write an answer in an API's form, whole or as stream chunks.

DONE = b"data: [DONE]\n\n"
_NO_CONTENT = b'"content":""'  # within a string the quotes would be escaped


def sse_data(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


@dataclass
class ResponseState:
    """One answer while it grows, and the values that each of its chunks repeats."""

    answer_id: str
    model: str
    codec: TextCodec
    options: ResponseOptions
    prompts: Sequence[Sequence[int]]
    choices: Sequence[Choice]
    echoed: Sequence[str]  # the prompt texts, where they precede the answers
    created: int
    scores: Sequence[PromptLogprobs] = ()  # of each prompt, where they are asked for
    no_answer: bool = False  # only the prompt is of interest

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
        if self.options.include_usage:
            data["usage"] = self.usage() if self.options.continuous_usage else None
        return sse_data(data)

    def usage_chunk(self, kind: str) -> bytes:
        if not self.options.include_usage:
            return b""
        return sse_data({**self.head(kind), "choices": [], "usage": self.usage()})

    def token_fields(self, choice: Choice, start: int, end: int) -> dict[str, Any]:
        if not self.options.return_token_ids:
            return {}
        return {
            "token_ids": choice.token_ids[start:end],
            "token_logprobs": plain_logprobs(choice, start, end),
            "versions": choice.versions[start:end],
        }


class Serializer(Protocol):
    """Writes one answer in an API's form."""

    def opening(self) -> bytes:
        """The chunks before any token."""
        ...

    def update(self, update: ChoiceUpdate) -> bytes:
        """The chunks of one update; empty while its text is not certain."""
        ...

    def closing(self) -> bytes: ...

    def whole(self) -> bytes: ...


def assistant_message(reply: Reply) -> dict[str, Any]:
    """The reply as the message with which clients send it back."""
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


class ChatSerializer:
    def __init__(self, state: ResponseState) -> None:
        self._state = state
        how = state.options
        self._chunks_differ = how.top_logprobs is not None or how.return_token_ids or how.continuous_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        return b"".join(
            self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self._state.choices
        )

    def _around_content(self, index: int) -> tuple[bytes, bytes]:
        """The chunk of a piece of content: all but the text is the same each time."""
        before, mark, after = self._chunk(index, {"content": ""}).partition(_NO_CONTENT)
        around = self._around[index] = (before + mark[:-2], after)
        return around

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
        return self._state.chunk("chat.completion.chunk", choice)

    def update(self, update: ChoiceUpdate) -> bytes:
        pieces = update.pieces
        if len(pieces) == 1 and update.finish_reason is None and not self._chunks_differ:
            piece = pieces[0]
            if type(piece) is Content:
                before, after = self._around.get(update.index) or self._around_content(update.index)
                return before + orjson.dumps(piece.text) + after
        state = self._state
        choice = state.choices[update.index]
        more = state.token_fields(choice, update.start, update.end)
        if state.options.top_logprobs is not None and update.end > update.start:
            more["logprobs"] = chat_logprobs(state.codec, choice, update.start, update.end)
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
        return self._state.usage_chunk("chat.completion.chunk") + DONE

    def whole(self) -> bytes:
        state = self._state
        data = {**state.head("chat.completion"), "choices": [self._whole(choice) for choice in state.choices]}
        if state.options.return_token_ids:
            data["prompt_token_ids"] = state.prompts[0]
        return orjson.dumps({**data, "usage": state.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        state, end = self._state, len(choice.token_ids)
        wanted = state.options.top_logprobs is not None
        return {
            "index": choice.index,
            "message": assistant_message(choice.reply),
            "logprobs": chat_logprobs(state.codec, choice, 0, end) if wanted else None,
            "finish_reason": chat_finish_reason(choice),
            **state.token_fields(choice, 0, end),
        }


class CompletionSerializer:
    def __init__(self, state: ResponseState) -> None:
        self._state = state
        self._offsets = [len(self._echo(choice)) for choice in state.choices]

    def _echo(self, choice: Choice) -> str:
        state = self._state
        return state.echoed[choice.index // state.per_prompt] if state.echoed else ""

    def opening(self) -> bytes:
        if not self._state.echoed:
            return b""
        chunks = []
        for choice in self._state.choices:
            chunks.append(self._chunk(choice.index, self._echo(choice), logprobs=self._echoed_logprobs(choice)))
        return b"".join(chunks)

    def _echoed_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of the prompt, where it is echoed and logprobs are wanted."""
        state, place = self._state, choice.index // self._state.per_prompt
        wanted = state.options.top_logprobs
        if not state.echoed or wanted is None or not state.scores:
            return None
        return prompt_logprobs(state.codec, state.prompts[place], state.scores[place], wanted)

    def _chunk(self, index: int, text: str, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, **more}
        return self._state.chunk("text_completion", choice)

    def update(self, update: ChoiceUpdate) -> bytes:
        state = self._state
        choice = state.choices[update.index]
        more = state.token_fields(choice, update.start, update.end)
        if state.options.top_logprobs is not None and update.end > update.start:
            offset = self._offsets[update.index]
            more["logprobs"] = completion_logprobs(state.codec, choice, update.start, update.end, offset)
            self._offsets[update.index] += sum(map(len, more["logprobs"]["tokens"]))
        if not (update.text or more or update.finish_reason):
            return b""
        finish = update.finish_reason.value if update.finish_reason else None
        return self._chunk(update.index, update.text, finish, **more)

    def closing(self) -> bytes:
        return self._state.usage_chunk("text_completion") + DONE

    def whole(self) -> bytes:
        state = self._state
        data = {**state.head("text_completion"), "choices": [self._whole(choice) for choice in state.choices]}
        return orjson.dumps({**data, "usage": state.usage()})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        state, end, echo = self._state, len(choice.token_ids), self._echo(choice)
        wanted = state.options.top_logprobs is not None
        end = 0 if state.no_answer else end
        more = state.token_fields(choice, 0, end)
        place = choice.index // state.per_prompt
        if more:
            more["prompt_token_ids"] = state.prompts[place]
        if state.scores and not (echo and wanted):
            more["prompt_logprobs"] = by_token(state.codec, state.prompts[place], state.scores[place])
        logprobs = completion_logprobs(state.codec, choice, 0, end, len(echo)) if wanted else None
        if logprobs is not None and (of_prompt := self._echoed_logprobs(choice)) is not None:
            tops = of_prompt["top_logprobs"] + (logprobs["top_logprobs"] or [])
            logprobs = {name: of_prompt[name] + (values or []) for name, values in logprobs.items()}
            logprobs["top_logprobs"] = tops or None
        return {
            "index": choice.index,
            "text": echo if state.no_answer else echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": FinishReason.LENGTH if state.no_answer else choice.finish_reason,
            **more,
        }
