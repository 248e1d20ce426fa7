"""Chat templates, and checks of the messages and tools that they render.

Models ship a template in a dialect of Jinja, which is compiled once. It is not trusted: it runs in an immutable sandbox
without access to attributes of Python objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.conversation import RESERVED, ConversationError, Template, decoded_arguments
from areal.services.dialects import joined_text
from areal.services.http.errors import ApiError, bad_request

__all__ = ["RESERVED", "ChatTemplate", "TemplateInput", "check_tools", "read_messages", "text_after_answer"]

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ChatTemplate(Template):
    """A compiled chat template whose refusals are the client's errors. Raises ``jinja2.TemplateSyntaxError``."""

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Render the prompt up to the end of the last message's text, which the model is to continue. Raises ApiError
        400 when the template refuses the conversation or changes that text."""
        last = str(messages[-1]["content"])
        prompt = self.render_messages(messages, tools, {**variables, "add_generation_prompt": False})
        text = last.strip()
        at = prompt.rfind(text)
        if at < 0:
            raise bad_request("the chat template does not let the last message be continued", param="messages")
        end = at + len(text)
        space = last[len(last.rstrip()) :]
        return prompt[:end] + (space if prompt.startswith(space, end) else "")

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Render the prompt. Raises ApiError 400 when the template refuses the conversation."""
        try:
            return self.text(messages, tools, {"add_generation_prompt": True, **variables})
        except ConversationError as error:
            raise bad_request(str(error), param=error.field) from error


# Prefix reuse: the text that a template adds after a recorded response, so that the response is not rendered again. The
# recorded text is reused if the template would keep it: if it starts with the rendered tools and messages before the
# first response, and if messages after the last response change nothing before them. Reasoning that a client does not
# send back is rendered as if it were sent: the template decides whether to keep it.

_REASONING_KEYS = ("reasoning_content", "thinking")  # names that templates use


@dataclass(frozen=True)
class TemplateInput:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]


def text_after_answer(
    template: ChatTemplate, given: TemplateInput, recorded: str, end: str, *, has_reasoning: bool
) -> str | None:
    """Return the prompt's text after ``recorded``, the text up to the last response in the messages and its ``end``
    token. None if the template would render that text differently. ``has_reasoning``: the model's reasoning is
    separated from its content."""
    messages, no_prompt = list(given.messages), {**given.variables, "add_generation_prompt": False}
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return None
    first, last = answers[0], answers[-1]
    if has_reasoning:
        messages[last] = {**dict.fromkeys(_REASONING_KEYS, "reasoning"), **messages[last]}
    try:
        head = template.render_messages(messages[:first], given.tools, no_prompt)
        before = template.render_messages(messages[: last + 1], given.tools, no_prompt)
        whole = template.render_messages(messages, given.tools, given.variables)
    except ApiError:
        return None
    _, found, tail = before.rpartition(end)
    if not recorded.startswith(head) or not whole.startswith(before) or not found or tail.strip():
        return None
    return tail + whole[len(before) :]


# Chat messages: checked, and converted to the form that chat templates expect.

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PLAIN_ROLES = ("system", "user", "assistant")  # their messages need no conversion if the content is a string


def read_messages(value: object, template: ChatTemplate) -> list[dict[str, Any]]:
    """Check and convert messages. Raises 400 naming the message and the part."""
    if not isinstance(value, list) or not value:
        raise bad_request("messages must be a list with at least one message", param="messages")
    return [_message(item, f"messages[{index}]", template) for index, item in enumerate(value)]


def _message(value: object, where: str, template: ChatTemplate) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object", param=where)
    role = value.get("role")
    if len(value) == 2 and role in _PLAIN_ROLES and type(value.get("content")) is str:
        return value
    if role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if role == "developer" and not template.knows_developer:
        role = "system"
    message = {name: item for name, item in value.items() if item is not None}
    calls = _tool_calls(message.pop("tool_calls", None), where)
    content = message.get("content")
    if content is None and not (role == "assistant" and (calls or "reasoning_content" in message)):
        raise bad_request(f"{where}.content is required", param=f"{where}.content")
    text = "" if content is None else joined_text(content, f"{where}.content", "\n", _TEXT_PARTS)
    message |= {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments decoded: templates serialize the arguments."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_request(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            name = f"{where}.tool_calls[{index}].function"
            raise bad_request(f"{name} must be an object with a name", param=name)
        calls.append({**call, "function": {**function, "arguments": decoded_arguments(function.get("arguments"))}})
    return calls


def check_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Return ``tools``. Raises 400 for a tool that is not a function with a name."""
    for index, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            name = f"tools[{index}].type"
            raise bad_request(f"{name} is {tool['type']!r}; only functions are supported", param=name)
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            name = f"tools[{index}].function"
            raise bad_request(f"{name} must be an object with a name", param=name)
    return tools
