"""What a request asks for, as one value, from an OpenAI chat or completion body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.services.inference.data_proxy.fields import Fields, is_token_ids, unsupported
from areal.services.inference.data_proxy.going_on import Shown, after_recorded
from areal.services.inference.data_proxy.messages import read_messages
from areal.services.inference.data_proxy.reading import Parsers, Reading
from areal.services.inference.data_proxy.sampling_fields import Answering, read_answering, read_sampling
from areal.services.inference.data_proxy.templating import RESERVED, ChatTemplate
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.data_proxy.tool_choice import read_tool_use
from areal.services.inference.engines.base import Capabilities, Sampling
from areal.services.web.errors import bad_request

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

_PLAIN = Reading()


MakePrompt = Callable[[int | None], list[int]]
"""Token ids, given how many there is room for. Raises TooLong and Abandoned."""


@dataclass(frozen=True)
class Ask:
    """One request. ``prompts`` make the token ids, for a chat ``text`` makes the one prompt's text: off the event loop
    where that is long. Where ``sampling`` has no ``max_new_tokens``, the answer may have ``default_max_tokens``, or all
    that there is room for. ``store`` false: the call is not to be recorded. ``echo``: the prompt's text comes before
    the answer's. ``messages`` is the chat as the caller wrote it, in OpenAI's form whichever API it came by.
    ``after_answer``: given the text up to and with the chat's last answer, and that of its end token, what the template
    has after it; None where the template does not go on from that text. ``adapter``: the LoRA adapter that answers."""

    prompts: tuple[MakePrompt, ...]
    sampling: Sampling
    answering: Answering
    ignored: tuple[str, ...]
    metadata: Mapping[str, Any]
    store: bool
    echo: bool = False
    prompt_logprobs: int | None = None  # how many alternatives
    no_answer: bool = False  # ``max_tokens`` 0: the prompt alone is asked about
    default_max_tokens: int | None = None
    reading: Reading = _PLAIN
    messages: Sequence[Mapping[str, Any]] = ()
    text: Callable[[], str] | None = None
    after_answer: Callable[[str, str], str | None] | None = None
    adapter: str | None = None


def read_chat(fields: Fields, codec: TextCodec, capabilities: Capabilities, parsers: Parsers) -> Ask:
    """Raises 400 naming the field."""
    template = codec.template
    if template is None:
        message = "this model has no chat template: use /v1/completions, or give the model one"
        raise bad_request(message, param="messages", code="no_chat_template")
    fields.refuse(_NOT_IN_CHAT)
    if fields.take("modalities", ["text"]) != ["text"]:
        raise unsupported("modalities", "the model writes text only")
    given = fields.take("messages")
    messages = read_messages(given, template)
    tools = read_tool_use(fields, template, parsers, capabilities)
    continued = _continues(fields, messages, forced=bool(tools.primer))
    variables = _template_variables(fields, template)
    reading = Reading(None if continued else parsers.reasoning, tools)
    answering = read_answering(fields, _chat_logprobs(fields, capabilities), capabilities)
    old, new = fields.whole("max_tokens", 1, 2**31 - 1), fields.whole("max_completion_tokens", 1, 2**31 - 1)
    sampling = read_sampling(fields, codec, answering, capabilities, new or old)
    if tools.response_format is not None and answering.response_format is None:
        answering = replace(answering, response_format=tools.response_format)

    def prompt() -> str:
        text = (template.render_open if continued else template.render)(messages, tools.shown, variables)
        return text + reading.prompt_end(text)

    def after_answer(spoken: str, end: str) -> str | None:
        if continued:
            return None
        shown = Shown(messages, tools.shown, variables)
        rest = after_recorded(template, shown, spoken, end, thinks=reading.thinks)
        return None if rest is None else rest + reading.prompt_end(rest)

    return _ask(
        fields, (), sampling, answering, reading=reading, messages=given, text=prompt, after_answer=after_answer
    )


def _continues(fields: Fields, messages: Sequence[Mapping[str, Any]], *, forced: bool) -> bool:
    """Whether the answer goes on with the last message instead of beginning one."""
    name = "continue_final_message"
    if not fields.flag(name):
        return False
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip() or "tool_calls" in last:
        raise bad_request(f"{name} needs the last message to be the assistant's, with text and no calls", param=name)
    if forced:
        raise bad_request(f"{name} does not go with a tool_choice that forces a call", param="tool_choice")
    return True


def _ask(
    fields: Fields,
    prompts: tuple[MakePrompt, ...],
    sampling: Sampling,
    answering: Answering,
    **more: Any,
) -> Ask:
    metadata, store = fields.mapping("metadata"), fields.flag("store", True)
    if not fields.is_empty:
        fields.accept(_NO_EFFECT)
    return Ask(prompts, sampling, answering, fields.ignored(), metadata, store, **more)


def _chat_logprobs(fields: Fields, capabilities: Capabilities) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, capabilities.max_top_logprobs)
    if top is not None and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if wanted else None


def _template_variables(fields: Fields, template: ChatTemplate) -> dict[str, Any]:
    variables = fields.mapping("chat_template_kwargs")
    if reserved := RESERVED & variables.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise bad_request(f"{name} is set by the service", param=name)
    variables["add_generation_prompt"] = fields.flag(
        "add_generation_prompt", variables.get("add_generation_prompt", True)
    )
    if template.uses("reasoning_effort") and (effort := fields.text("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort  # else it is named among what was ignored
    return variables


def read_completion(fields: Fields, codec: TextCodec, capabilities: Capabilities) -> Ask:
    """Raises 400 naming the field."""
    fields.refuse(_NOT_IN_COMPLETIONS)
    prompts = _prompts(fields.take("prompt"), codec)
    echo = fields.flag("echo")
    top = fields.whole("logprobs", 0, capabilities.max_top_logprobs)
    scored = fields.whole("prompt_logprobs", 0, capabilities.max_top_logprobs)
    if (scored is not None or (echo and top is not None)) and not capabilities.prompt_logprobs:
        name = "echo" if scored is None else "prompt_logprobs"
        raise unsupported(name, "this engine does not tell the log-probabilities of a prompt")
    answering = read_answering(fields, top, capabilities)
    if answering.stream and scored is not None:
        raise unsupported("prompt_logprobs", "not in a stream")
    most = fields.whole("max_tokens", 0, 2**31 - 1)
    if most == 0 and not echo:
        raise bad_request("max_tokens may be 0 only with echo", param="max_tokens")
    sampling = read_sampling(fields, codec, answering, capabilities, most or (1 if most == 0 else None))
    if most == 0 and (sampling.n != 1 or answering.stream):
        raise bad_request("max_tokens 0 goes with neither n nor stream", param="max_tokens")
    best_of = fields.whole("best_of", 1, 128)
    if best_of is not None and best_of != sampling.n:
        raise unsupported("best_of", "only as many choices are made as n says")
    if sampling.n * len(prompts) > MAX_PROMPTS:
        raise bad_request(f"n times the number of prompts may be at most {MAX_PROMPTS}", param="n")
    if echo and top is not None:
        scored = max(top, scored or 0)
    ask = _ask(
        fields,
        prompts,
        sampling,
        answering,
        echo=echo,
        prompt_logprobs=scored,
        no_answer=most == 0,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
    )
    return replace(ask, store=ask.store and most != 0)


def _prompts(value: object, codec: TextCodec) -> tuple[MakePrompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    if isinstance(value, str):
        return (_text_prompt(value, codec),)
    if isinstance(value, list) and value:
        if is_token_ids(value, codec.vocab_size):
            return (_ids_prompt(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(_text_prompt(item, codec) for item in value)
        if all(item and is_token_ids(item, codec.vocab_size) for item in value):
            return tuple(_ids_prompt(item) for item in value)
    message = f"prompt must be a string, token ids below {codec.vocab_size}, or a list of either; not empty"
    raise bad_request(message, param="prompt")


def _text_prompt(text: str, codec: TextCodec) -> MakePrompt:
    return lambda most: codec.encode(text, add_special_tokens=True, most=most)


def _ids_prompt(ids: list[int]) -> MakePrompt:
    return lambda most: ids
