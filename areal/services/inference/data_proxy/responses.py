"""Translates requests of OpenAI's Responses API to chat completions.

Input items become messages: the reasoning, text and calls of one response are one message. Responses are not stored, so
each request has the whole conversation. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from areal.services.dialects import CallForm, ResponsesWriter, custom_arguments, custom_function, joined_text, string_of
from areal.services.http.errors import bad_field, bad_request, unsupported
from areal.services.inference.data_proxy.fields import OPENAI_NO_EFFECT, Fields, left_out_tool
from areal.services.inference.data_proxy.serializers import ChatTranslation, TemplateUses

_NOT_KEPT = "responses are not kept: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _NOT_KEPT,
    "conversation": _NOT_KEPT,
    "prompt": "there are no stored prompts",
    "background": _NOT_KEPT,
}
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),  # input that is too long is refused
    "store": (),
    "top_logprobs": (0,),  # this API's responses have none here; chat completions have
    "max_tool_calls": (),  # limits tools that a provider runs
    "context_management": (),
    "moderation": (),
}
"""Known fields without effect here, and the values that request nothing."""
_INCLUDABLE = ("reasoning.encrypted_content",)  # reasoning is sent as plain text, so there is nothing to encrypt
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}


def translate(fields: Fields, uses: TemplateUses) -> ChatTranslation:
    """Translate a request body. ``uses``: which variables the chat template has. Raises 400 naming the field."""
    fields.refuse(_REFUSED)
    fields.leave_out(_LEFT_OUT)
    for name in fields.texts("include", 16):
        if name not in _INCLUDABLE:
            fields.name_left_out(f"include.{name}")
    instructions, given = fields.text("instructions"), fields.items("tools")
    asked = fields.take("input")
    tools = _ResponseTools(fields, [*given, *_additional_tools(asked)])
    messages = _messages(fields, tools, instructions, asked)
    chat: dict[str, object] = {"messages": messages, "stream": fields.flag("stream")}
    stream_options = Fields(fields.mapping("stream_options"))
    stream_options.accept(("include_obfuscation",))
    choice = fields.take("tool_choice", "auto")
    chat |= {"tools": tools.functions, "tool_choice": tools.choice(choice)}
    parallel = fields.flag("parallel_tool_calls", True)
    if tools.functions and not parallel:
        chat["parallel_tool_calls"] = False
    chat["max_tokens"] = fields.whole("max_output_tokens", 1, 2**31 - 1)
    sampling = {name: fields.take(name) for name in ("temperature", "top_p")}
    chat |= sampling | {"metadata": fields.mapping("metadata")}
    reasoning = Fields(fields.mapping("reasoning"))
    if uses("reasoning_effort") and (effort := reasoning.text("effort")) is not None:
        chat["reasoning_effort"] = effort
    ignored = [*_text(fields, chat), *(f"reasoning.{name}" for name in reasoning.ignored())]
    ignored += [f"stream_options.{name}" for name in stream_options.ignored()]
    fields.accept(OPENAI_NO_EFFECT)
    echoed = {
        "instructions": instructions,
        "max_output_tokens": chat["max_tokens"],
        "metadata": chat["metadata"],
        "parallel_tool_calls": parallel,
        "tool_choice": choice,
        "tools": given,
        **{name: 1.0 if value is None else value for name, value in sampling.items()},
    }
    writer = partial(ResponsesWriter, echoed=echoed, forms=tools.forms)
    return ChatTranslation(chat, writer, (*fields.ignored(), *ignored), _NAMES)


def _additional_tools(items: object) -> list[object]:
    """Return the tools that items of the input add."""
    added = []
    for item in items if isinstance(items, list) else []:
        if isinstance(item, Mapping) and item.get("type") == "additional_tools":
            added += Fields(item).items("tools")
    return added


def _text(fields: Fields, chat: dict[str, object]) -> list[str]:
    config = Fields(fields.mapping("text"))
    config.leave_out({"verbosity": ("medium",)})
    wanted = config.mapping("format")
    match wanted.get("type") if wanted else "text":
        case "text":
            pass
        case "json_object":
            chat["response_format"] = {"type": "json_object"}
        case "json_schema":
            schema = {name: value for name, value in wanted.items() if name != "type"}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        case _:
            message = "text.format.type must be text, json_object or json_schema"
            raise bad_request(message, param="text.format")
    return [f"text.{name}" for name in config.ignored()]


class _ResponseTools:
    """The tools of a request, as functions for the chat template.

    ``forms`` says how to write a call of a tool that the template knows by another name, or that is not a function. A
    tool in a namespace is shown as ``namespace__name``. A custom tool is shown with its input as an argument of that
    name. Tools of other types are left out and reported as ignored.
    """

    def __init__(self, fields: Fields, tools: Sequence[object]) -> None:
        self._fields = fields
        self.functions: list[dict[str, Any]] = []
        self.forms: dict[str, CallForm] = {}
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")

    def _add(self, tool: object, where: str) -> None:
        if not isinstance(tool, Mapping):
            raise bad_field(where, "must be an object")
        if tool.get("type") != "namespace":
            self._add_one(tool, where, None)
            return
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise bad_field(f"{where}.tools", "must be a list")
        name = _name(tool, where)
        for index, each in enumerate(inner):
            place = f"{where}.tools[{index}]"
            if not isinstance(each, Mapping):
                raise bad_field(place, "must be an object")
            about = ": ".join(filter(None, (tool.get("description"), each.get("description"))))
            self._add_one({**each, "description": about or None}, place, name)

    def _add_one(self, tool: Mapping[str, object], where: str, namespace: str | None) -> None:
        if not isinstance(tool.get("type"), str):
            raise bad_field(f"{where}.type", "must be a string")
        if left_out_tool(self._fields, tool, ("function", "custom")):
            return
        form = CallForm(_name(tool, where), namespace, tool["type"] == "custom")
        shown, number = _joined_name(form.name, namespace), 1
        names = {each["function"]["name"] for each in self.functions}
        while shown in self.forms or ((number > 1 or namespace) and shown in names):
            number += 1
            shown = f"{_joined_name(form.name, namespace)}_{number}"
        if shown != form.name or form.is_custom:
            self.forms[shown] = form
        about = ("description", "parameters", "strict")
        function = {name: tool[name] for name in about if tool.get(name) is not None}
        if form.is_custom:
            function = custom_function(tool)
        self.functions.append({"type": "function", "function": {"name": shown, **function}})

    def shown(self, name: str, namespace: object) -> str:
        """Return the name by which the template knows a tool."""
        space = namespace if isinstance(namespace, str) else None
        found = (shown for shown, form in self.forms.items() if (form.name, form.namespace) == (name, space))
        return next(found, _joined_name(name, space))

    def choice(self, choice: object) -> object:
        """Return a ``tool_choice`` in the form of chat completions, whose reader rejects a malformed one. Raises 400
        for a tool that was left out."""
        if not isinstance(choice, Mapping):
            return choice
        match choice.get("type"):
            case "function" | "custom":
                name = choice.get("name")
                shown = self.shown(name, choice.get("namespace")) if isinstance(name, str) else name
                return {"type": "function", "function": {"name": shown}}
            case "allowed_tools":
                listed = choice.get("tools")
                if not isinstance(listed, list):
                    return {"type": "allowed_tools", "allowed_tools": choice}
                here = [each for each in listed if not _is_left_out(each)]
                if not here:
                    return "none" if choice.get("mode") == "auto" else "required"
                allowed = {"mode": choice.get("mode"), "tools": [self.choice(each) for each in here]}
                return {"type": "allowed_tools", "allowed_tools": allowed}
            case kind if _is_left_out(choice):
                raise unsupported("tool_choice", f"there is no {kind!r} here, only tools that the caller runs")
        return choice


def _joined_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def _name(tool: Mapping[str, object], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{where}.name", "must be a string")
    return name


def _is_left_out(choice: object) -> bool:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    return isinstance(kind, str) and kind not in ("function", "custom", "allowed_tools")


class _MessageBuilder:
    """Builds messages from items. The items of one response make one message: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, role: str, content: object, **more: Any) -> dict[str, Any]:
        self.messages.append({"role": role, "content": content, **more})
        return self.messages[-1]

    def add_text(self, role: str, text: str) -> None:
        answer = self._answer() if role == "assistant" else None
        if answer is not None and not answer["content"] and "tool_calls" not in answer:
            answer["content"] = text
        else:
            self.add(role, text)

    def add_call(self, call: dict[str, object]) -> None:
        answer = self._answer() or self.add("assistant", "")
        answer.setdefault("tool_calls", []).append(call)

    def _answer(self) -> dict[str, Any] | None:
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "assistant" else None


def _messages(
    fields: Fields, tools: _ResponseTools, instructions: str | None, value: object
) -> list[dict[str, object]]:
    builder = _MessageBuilder()
    if instructions:
        builder.add_text("system", instructions)
    if isinstance(value, str):
        builder.add_text("user", value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _add(builder, item, f"input[{index}]", fields, tools)
    if not builder.messages or value in (None, "", []):
        raise bad_field("input", "must be a string or a list of items, not empty")
    return builder.messages


_LEFT_OUT_ITEMS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
    *("mcp_call", "mcp_approval_request", "mcp_approval_response", "compaction", "compaction_trigger"),
    *("tool_search_call", "tool_search_output", "configuration_update", "program", "program_output"),
    *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "computer_call"),
    *("apply_patch_call", "apply_patch_call_output", "computer_call_output"),
)
"""Types of items that describe a provider's own actions, or calls of tools that it has trained its own models to use.
They are left out; the text of the answers is kept."""


def _add(builder: _MessageBuilder, item: object, where: str, fields: Fields, tools: _ResponseTools) -> None:
    if not isinstance(item, Mapping):
        raise bad_field(where, "must be an object")
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                message = f"{where}.role must be user, assistant, system or developer"
                raise bad_request(message, param=f"{where}.role")
            content = item.get("content")
            if role == "user" and isinstance(content, list) and any(map(_is_image, content)):
                builder.add("user", _parts(content, f"{where}.content"))
            else:
                builder.add_text(role, joined_text(content, f"{where}.content", "" if role == "assistant" else "\n"))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            builder.add("assistant", "", reasoning_content=joined_text(parts, f"{where}.content", "\n"))
        case "function_call":
            names = ("call_id", "name", "arguments")
            call_id, name, arguments = (string_of(item, each, where) for each in names)
            function = {"name": tools.shown(name, item.get("namespace")), "arguments": arguments}
            builder.add_call({"id": call_id, "type": "function", "function": function})
        case "custom_tool_call":
            call_id, name, given = (string_of(item, each, where) for each in ("call_id", "name", "input"))
            function = {"name": tools.shown(name, item.get("namespace")), "arguments": custom_arguments(given)}
            builder.add_call({"id": call_id, "type": "function", "function": function})
        case "additional_tools":
            pass  # they are among the request's tools
        case kind if kind in _LEFT_OUT_ITEMS:
            fields.name_left_out(f"input.{kind}")
        case "function_call_output" | "custom_tool_call_output":
            text = joined_text(item.get("output"), f"{where}.output", "\n")
            has_id = item.get("call_id") is not None
            builder.add("tool", text, **({"tool_call_id": string_of(item, "call_id", where)} if has_id else {}))
        case "item_reference":
            raise unsupported(f"{where}.type", f"{_NOT_KEPT} (with store: false, the Vercel AI SDK does)")
        case kind:
            raise unsupported(f"{where}.type", f"there is no {kind!r} here")


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _parts(content: list[Any], where: str) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not _is_image(part):
            parts.append({"type": "text", "text": joined_text([part], where, "")})
            continue
        if part.get("file_id") is not None:
            raise unsupported(f"{place}.file_id", "files are not stored; give the image's URL or its data")
        image = {"url": string_of(part, "image_url", place)} | (
            {"detail": part["detail"]} if part.get("detail") else {}
        )
        parts.append({"type": "image_url", "image_url": image})
    return parts
