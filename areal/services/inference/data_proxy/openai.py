"""Reads requests of OpenAI's chat completions and completions: their fields, tools, and the parsing of their responses.

A tool call is forced by starting it: the prompt ends within a call in the model's own format, so that the model can
only complete that call. If a tool is named, the start includes its name. The model then writes the arguments, which
engines with grammars constrain to the tool's schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from areal.conversation import RESERVED, Conversation, Template
from areal.conversation.messages import are_plain, message_text, read_tools
from areal.dataclasses import dataclass, replace
from areal.errors import UsageFault
from areal.services.dialects import function_of, with_function_calls
from areal.services.http.errors import bad_field, bad_request, unsupported
from areal.services.inference.data_proxy.fields import (
    OPENAI_NO_EFFECT,
    Fields,
    ResponseOptions,
    is_token_ids,
    left_out_tool,
    read_response_options,
    read_sampling,
)
from areal.services.inference.data_proxy.parsers.reader import (
    PLAIN,
    ReasoningFormat,
    ResponseReader,
    Tools,
    is_name_char,
)
from areal.services.inference.data_proxy.parsers.registry import (
    ToolFormat,
    detect_tool_format,
    reasoning_format,
    tool_format,
)
from areal.services.inference.data_proxy.prompts import ChatPrompt, TemplateRefusals, read_conversation
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import Capabilities
from areal.wire.parsers import NO_PARSER, REASONING_PARSERS, TOOL_CALL_PARSERS, WHOLE, parser_conflict
from areal.wire.sampling import MAX_IMAGES, WHOLE_RANGES, SamplingParams

PROMPT_TAIL_TOKENS = 32  # enough to see whether the prompt's end opens or closes reasoning


@dataclass(frozen=True)
class Parsers:
    """The tool-call and reasoning formats of the served model. None: such text stays content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @cached_property
    def without_tools(self) -> ResponseParsing:
        """How the response to a request without tools is parsed."""
        form = self.tools if self.tools is not None and self.tools.whole else None
        return ResponseParsing(self.reasoning, ToolUse(form=form))


def load_parsers(tool_call_parser: str | None, reasoning_parser: str | None, template: str | None) -> Parsers:
    """Return the formats with these names. Without a name, calls are parsed in the format that the chat template shows,
    and reasoning stays content. Raises UsageFault for an unknown name, and for names that conflict."""
    thoughts = REASONING_PARSERS.resolve(reasoning_parser or NO_PARSER)
    if tool_call_parser is None:
        tools = detect_tool_format(template or "")
    else:
        tools = None if TOOL_CALL_PARSERS.resolve(tool_call_parser) == NO_PARSER else tool_format(tool_call_parser)
    if conflict := parser_conflict(tool_call_parser, reasoning_parser):
        raise UsageFault(conflict)
    if thoughts in WHOLE:
        return Parsers(tool_format(thoughts))
    return Parsers(tools, None if thoughts == NO_PARSER or (tools and tools.whole) else reasoning_format(thoughts))


@dataclass(frozen=True)
class ToolUse:
    """The use of tools in a request. ``shown``: the tools in the prompt.

    ``primer``: the start of a forced call, which ends the prompt. ``response_format`` constrains the rest of the call
    to the tool's schema, if the engine supports that. ``custom``: the names of the tools whose input is a text.
    """

    shown: list[dict[str, Any]] | None = None
    form: ToolFormat | None = None
    primer: str = ""
    one_call: bool = False
    response_format: Mapping[str, Any] | None = None
    custom: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ResponseParsing:
    """How the choices of one response are parsed."""

    reasoning: ReasoningFormat | None = None
    tools: ToolUse = ToolUse()

    @cached_property
    def markers(self) -> frozenset[str]:
        """Texts to keep in the response even if they are special tokens."""
        reasoning, form = self.reasoning, self.tools.form
        return frozenset((reasoning.markers if reasoning else ()) + (form.markers if form else ()))

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is separated from the content, so that a client may not send it back."""
        return self.reasoning is not None or (self.tools.form is not None and self.tools.form.whole)

    def new_reader(self, prompt_tail: str, call_ids: Sequence[str] = ()) -> ResponseReader:
        """Return the reader of one choice, given the end of its prompt. ``call_ids``: the ids of its recorded calls."""
        use, reasoning = self.tools, self.reasoning
        if use.form is None and reasoning is None:
            return PLAIN
        fresh, given = use.form.new_id if use.form else str, iter(call_ids)
        if use.primer:
            reasoning = None  # the prompt has closed it
        return ResponseReader(
            reasoning=reasoning,
            inside=reasoning is not None and reasoning.opened_by(prompt_tail),
            parse=use.form.parse if use.form else None,
            tools=Tools(use.shown or ()),
            new_id=lambda: next(given, None) or fresh(),
            primer=use.primer,
            one_call=use.one_call,
        )

    def prompt_end(self, prompt: str) -> str:
        """Return the text to add to the rendered prompt: the start of a forced call, after any open reasoning is
        closed."""
        if not self.tools.primer:
            return ""
        open_reasoning = self.reasoning is not None and self.reasoning.opened_by(prompt)
        closed = f"\n{self.reasoning.end}\n\n" if open_reasoning and self.reasoning else ""
        return closed + self.tools.primer


_NO_PARSER = "the model is served without a tool-call parser: set spec.toolCallParser"
_CHOICES = ("auto", "none", "required")
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def read_tool_use(fields: Fields, template: Template, parsers: Parsers, capabilities: Capabilities) -> ToolUse:
    """Read a request's tools and tool choice. Raises 400 naming the field."""
    if fields.has_none(_TOOL_FIELDS):
        return parsers.without_tools.tools
    given = [tool for tool in fields.items("tools") if not left_out_tool(fields, tool, ("function", "custom"))]
    with TemplateRefusals():
        tools = list(read_tools(list(map(function_of, given))))
    custom = frozenset(
        tool["function"]["name"] for tool, item in zip(tools, given, strict=True) if item.get("type") == "custom"
    )
    choice = fields.take("tool_choice", "auto")
    one_call = not fields.flag("parallel_tool_calls", True)
    tools, mode, name = _choice(choice, tools)
    if mode == "required":
        if parsers.tools is None:
            raise unsupported("tool_choice", _NO_PARSER)
        if not tools:
            raise bad_field("tool_choice", "needs tools")
        if name is not None and parsers.tools.named_call is None:
            why = f"in the format {parsers.tools.name!r} a call of one tool cannot be forced; required can be"
            raise unsupported("tool_choice", why)
        if name is None and len(tools) > 1 and parsers.tools.any_call is None:
            why = (
                f"in the format {parsers.tools.name!r} a call of any tool cannot be forced; one of a named tool can be"
            )
            raise unsupported("tool_choice", why)
    if not tools or mode == "none":
        return parsers.without_tools.tools
    if one_call and parsers.tools is None:
        raise unsupported("parallel_tool_calls", _NO_PARSER)
    if not template.uses("tools"):
        raise unsupported("tools", "the chat template of this model does not support tools")
    if mode == "required" and parsers.tools is not None:
        return replace(_forced(tools, name, parsers.tools, one_call, capabilities), custom=custom)
    return ToolUse(tools, parsers.tools, one_call=one_call, custom=custom)


def _choice(choice: object, tools: list[dict[str, object]]) -> tuple[list[dict[str, object]], str, str | None]:
    """Return the tools that may be called, one of ``_CHOICES``, and the name of the tool that must be called."""
    if isinstance(choice, str) and choice in _CHOICES:
        return tools, choice, None
    if isinstance(choice, Mapping):
        match choice.get("type"):
            case "function" | "custom":
                return tools, "required", _name(choice, tools)
            case "allowed_tools":
                return _allowed(choice.get("allowed_tools"), tools)
    message = f"tool_choice must be one of {', '.join(_CHOICES)}, or name a function"
    raise bad_request(message, param="tool_choice")


def _name(choice: Mapping[str, object], tools: list[dict[str, Any]]) -> str:
    kind = "custom" if choice.get("type") == "custom" else "function"
    function = choice.get(kind)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_field(f"tool_choice.{kind}", "must be an object with a name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise bad_request(f"tool_choice: {name!r} is not among tools", param="tool_choice")
    return name


def _allowed(allowed: object, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str, str | None]:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        message = "tool_choice.allowed_tools must have a mode, auto or required, and tools"
        raise bad_request(message, param="tool_choice.allowed_tools")
    names = {_name(item if isinstance(item, Mapping) else {}, tools) for item in listed}
    return [tool for tool in tools if tool["function"]["name"] in names], mode, None


def _forced(
    tools: list[dict[str, Any]], name: str | None, form: ToolFormat, one_call: bool, capabilities: Capabilities
) -> ToolUse:
    if name is None and len(tools) == 1 and form.named_call is not None:
        name = str(tools[0]["function"]["name"])
    if name is None or form.named_call is None:
        return ToolUse(tools, form, form.any_call or "", one_call)
    if not all(map(is_name_char, name)):
        raise unsupported("tool_choice", f"the name {name!r} cannot be written in a call")
    schema = next(tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    held = None
    if form.bare_arguments and capabilities.response_format and isinstance(schema, dict) and schema:
        held = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    return ToolUse(tools, form, form.named_call.replace("%s", name), one_call, held)


MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # the completions API's default

_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "prediction": (),  # it changes no text
    "moderation": (),
}
"""Known fields without effect here, and the values that request nothing."""
_NOT_IN_CHAT = {
    "functions": "it is the old form of tools",
    "audio": "the model writes text only",
    "prompt_logprobs": "completions tell them, of a prompt that the caller knows",
}
_OTHER_FORMS = frozenset({*_NOT_IN_CHAT, "function_call", "web_search_options", "modalities"})
_RENDERING_FIELDS = frozenset(
    {"continue_final_message", "chat_template_kwargs", "add_generation_prompt", "reasoning_effort"}
)
_NOT_IN_COMPLETIONS = {"suffix": "the model only continues a text"}

MakePrompt = Callable[[int | None], list[int]]
"""Makes the token ids of a prompt, given the context length. Raises TooLong and Abandoned."""


@dataclass(frozen=True)
class GenerationRequest:
    """A parsed request of any API.

    ``prompts`` make the token ids of completions, ``chat`` those of a chat. Both run off the event loop if they take
    long. Without ``sampling.max_new_tokens`` the response may have ``default_max_tokens``, or as many
    tokens as the context holds. ``store`` false: the call is not recorded. ``echo``: the texts of the prompts, which
    precede the responses; None for a prompt of token ids. ``prompt_logprobs``: how many alternatives to each prompt
    token are returned. ``messages``: the chat as the client sent it, in OpenAI's form. ``adapter``: the LoRA adapter
    that samples. ``default_seeds``: one for each prompt, where the engine has them for nothing. ``images``: those of
    the one prompt, in base64; such a call is not recorded."""

    sampling: SamplingParams
    options: ResponseOptions
    ignored: tuple[str, ...]
    store: bool
    prompts: tuple[MakePrompt, ...] = ()
    echo: tuple[str | None, ...] = ()
    prompt_logprobs: int | None = None
    no_answer: bool = False  # ``max_tokens`` 0: only the prompt is returned
    default_max_tokens: int | None = None
    parsing: ResponseParsing = ResponseParsing()
    messages: Sequence[Mapping[str, object]] = ()
    chat: ChatPrompt | None = None
    adapter: str | None = None
    default_seeds: Sequence[int] | None = None
    images: Sequence[str] = ()

    @property
    def scored(self) -> int | None:
        """How many alternatives to each prompt token are requested from the engine; None: prompts are not scored."""
        requested, top = self.prompt_logprobs, self.options.top_logprobs if self.echo else None
        return requested if top is None else max(top, requested or 0)


def read_chat(fields: Fields, codec: TextCodec, capabilities: Capabilities, parsers: Parsers) -> GenerationRequest:
    """Read a request for a chat completion. Raises 400 naming the field."""
    chat, tool_chat = codec.chat, codec.tool_chat
    if chat is None or tool_chat is None:
        message = "this model has no chat template: use /v1/completions, or give the model one"
        raise bad_request(message, param="messages", code="no_chat_template")
    if not fields.has_none(_OTHER_FORMS):
        _refuse_other_forms(fields)
    client_messages = fields.take("messages")
    if isinstance(client_messages, list) and client_messages and are_plain(client_messages):
        conversation = Conversation(tuple(client_messages))
    else:
        client_messages = with_function_calls(client_messages)
        conversation = read_conversation(client_messages)
    tools = read_tool_use(fields, tool_chat.template, parsers, capabilities)
    chat = tool_chat if tools.shown else chat
    continued, variables = False, dict[str, Any]()
    if not fields.has_none(_RENDERING_FIELDS):
        continued = _continues_last_message(fields, conversation.messages, forced=bool(tools.primer))
        variables = _template_variables(fields, chat.template)
    parsing = parsers.without_tools
    if continued or tools is not parsing.tools:
        parsing = ResponseParsing(None if continued else parsers.reasoning, tools)
    wants_logprobs, top = fields.flag("logprobs"), _alternatives(fields, "top_logprobs", codec, capabilities)
    if top and not wants_logprobs:
        raise bad_field("top_logprobs", "needs logprobs: true")
    options = read_response_options(fields, (top or 0) if wants_logprobs else None, capabilities)
    old, new = fields.whole("max_tokens", 1, 2**31 - 1), fields.whole("max_completion_tokens", 1, 2**31 - 1)
    sampling = read_sampling(fields, codec, options, capabilities, new or old)
    if tools.response_format is not None and options.response_format is None:
        options = replace(options, response_format=tools.response_format, constrained_by="tool_choice")

    prompt = ChatPrompt(
        codec,
        chat,
        Conversation(conversation.messages, tuple(tools.shown)) if tools.shown else conversation,
        variables,
        parsing.prompt_end if tools.primer else None,
        add_generation_prompt=variables.pop("add_generation_prompt", True),
        is_open=continued,
        has_reasoning=parsing.has_reasoning,
    )
    store, ignored = _read_rest(fields)
    return GenerationRequest(sampling, options, ignored, store, parsing=parsing, messages=client_messages, chat=prompt)


def _refuse_other_forms(fields: Fields) -> None:
    """Take the fields of ``_OTHER_FORMS``. Raises 400 for a value that has an effect."""
    fields.refuse(_NOT_IN_CHAT)
    if fields.take("function_call", "auto") not in ("auto", "none"):
        raise unsupported("function_call", "it is the old form of tool_choice")
    if fields.given("web_search_options"):  # an empty object asks for a search too
        fields.accept(("web_search_options",))
        fields.name_left_out("web_search_options")
    if fields.take("modalities", ["text"]) not in (["text"], []):
        raise unsupported("modalities", "the model writes text only")


def _read_rest(fields: Fields) -> tuple[bool, tuple[str, ...]]:
    """Return whether the call may be recorded, and the unknown fields."""
    if fields.is_empty:
        return True, ()
    fields.mapping("metadata")
    store = fields.flag("store", True)
    fields.accept(OPENAI_NO_EFFECT)
    fields.leave_out(_LEFT_OUT)
    return store, fields.ignored()


def _continues_last_message(fields: Fields, messages: Sequence[Mapping[str, object]], *, forced: bool) -> bool:
    """Return whether the response continues the last message instead of starting a new one."""
    name = "continue_final_message"
    if not fields.flag(name):
        return False
    last = messages[-1]
    if last["role"] != "assistant" or not message_text(last).strip() or "tool_calls" in last:
        raise bad_field(name, "needs the last message to be the assistant's, with text and no calls")
    if forced:
        raise bad_request(f"{name} does not go with a tool_choice that forces a call", param="tool_choice")
    if fields.given("add_generation_prompt") and fields.flag("add_generation_prompt"):
        raise bad_field(
            "add_generation_prompt", f"does not go with {name}: a prompt ends with a new message, or an old one"
        )
    return True


def _template_variables(fields: Fields, template: Template) -> dict[str, Any]:
    variables = fields.mapping("chat_template_kwargs")
    if reserved := RESERVED & variables.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise bad_field(name, "is set by the service")
    variables["add_generation_prompt"] = fields.flag(
        "add_generation_prompt", variables.get("add_generation_prompt", True)
    )
    if template.uses("reasoning_effort") and (effort := fields.text("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort  # without it in the template, the field is reported as ignored
    return variables


def _alternatives(fields: Fields, name: str, codec: TextCodec, capabilities: Capabilities) -> int | None:
    """Take the number of likeliest tokens to return: at most the whole vocabulary, because more would end SGLang."""
    count = fields.whole(name, 0, capabilities.max_top_logprobs)
    return None if count is None else min(count, codec.vocab_size)


def read_completion(fields: Fields, codec: TextCodec, capabilities: Capabilities) -> GenerationRequest:
    """Read a request for a completion. Raises 400 naming the field."""
    fields.refuse(_NOT_IN_COMPLETIONS)
    prompt = fields.take("prompt")
    prompts = _prompts(prompt, codec)
    echo = fields.flag("echo")
    top = _alternatives(fields, "logprobs", codec, capabilities)
    scored = _alternatives(fields, "prompt_logprobs", codec, capabilities)
    if (scored is not None or (echo and top is not None)) and not capabilities.prompt_logprobs:
        name = "echo" if scored is None else "prompt_logprobs"
        raise unsupported(name, "this engine does not report the log-probabilities of a prompt")
    options = read_response_options(fields, top, capabilities)
    if options.stream and scored is not None:
        raise unsupported("prompt_logprobs", "not in a stream")
    most = fields.whole("max_tokens", 0, 2**31 - 1)
    if most == 0 and not echo:
        raise bad_field("max_tokens", "may be 0 only with echo")
    sampling = read_sampling(fields, codec, options, capabilities, most or (1 if most == 0 else None))
    if most == 0 and (sampling.n != 1 or options.stream):
        raise bad_field("max_tokens", "0 goes with neither n nor stream")
    best_of = fields.whole("best_of", 1, 128)
    if best_of is not None and best_of != sampling.n:
        raise unsupported("best_of", "exactly n choices are sampled")
    if sampling.n * len(prompts) > MAX_PROMPTS:
        raise bad_field("n", f"times the number of prompts may be at most {MAX_PROMPTS}")
    seeds = _default_seeds(fields, len(prompts)) if capabilities.free_seeds else None
    fields.accept(("default_seed",))
    images = _images(fields, prompt, capabilities)
    texts = prompt if isinstance(prompt, list) and len(prompt) == len(prompts) else [prompt] * len(prompts)
    store, ignored = _read_rest(fields)
    if images and (store or scored is not None):
        why = "its call is not recorded: send store: false" if store else "its prompt has no log-probabilities"
        raise unsupported("image_data", why)
    return GenerationRequest(
        sampling,
        options,
        ignored,
        store and most != 0,
        prompts,
        echo=tuple(text if isinstance(text, str) else None for text in texts) if echo else (),
        prompt_logprobs=scored,
        no_answer=most == 0,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        default_seeds=seeds,
        images=images,
    )


def _images(fields: Fields, prompt: object, capabilities: Capabilities) -> tuple[str, ...]:
    """Read ``image_data``: base64 images for the placeholders in the one prompt, which must be token ids."""
    name = "image_data"
    if not fields.given(name):
        return ()
    if not capabilities.images:
        raise unsupported(name, capabilities.no_images)
    images = fields.texts(name, MAX_IMAGES)
    if images and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise bad_request(f"{name} goes with one prompt of token ids", param=name)
    return images


def _default_seeds(fields: Fields, prompts: int) -> list[int] | None:
    """Read ``default_seed``: a number for one prompt, or a list with a number for each prompt."""
    given = fields.take("default_seed")
    if given is None:
        return None
    seeds = given if isinstance(given, list) else [given]
    low, high = WHOLE_RANGES["seed"]
    if len(seeds) != prompts or not all(type(seed) is int and low <= seed <= high for seed in seeds):
        message = f"default_seed must be a whole number for each of the {prompts} prompts"
        raise bad_request(message, param="default_seed")
    return seeds


def _prompts(value: object, codec: TextCodec) -> tuple[MakePrompt, ...]:
    """Read the prompts: a string, a list of strings, token ids, or a list of lists of token ids."""

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
