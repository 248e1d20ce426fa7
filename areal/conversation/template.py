"""Chat templates: Jinja templates that come with models, compiled once. Equal to ``apply_chat_template``.

A template is not trusted and runs in a sandbox (``areal.conversation.sandbox``). Probe conversations determine once
which forms of content and calls a template renders. It is an error if a part of a conversation is missing in the
rendered text. The only exception is reasoning, which templates omit on purpose.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jinja2

from areal.conversation.messages import Conversation, ConversationError, message_text, message_texts
from areal.conversation.sandbox import CompiledTemplate, to_json

RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token"})
THOUGHT_END = "</think>"
PROBE = "Zqxprobe"  # no template writes it by itself, trims it or escapes it
_PARTS = [{"type": "text", "text": PROBE}, {"type": "text", "text": PROBE[::-1]}]


class Template:
    """A compiled chat template. The constructor raises ``jinja2.TemplateSyntaxError``."""

    def __init__(self, source: str, special_tokens: Mapping[str, object]) -> None:
        self._template = CompiledTemplate(source)
        self.source = source
        self._digest = hashlib.blake2b(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._special_tokens = dict(special_tokens)
        self._shown: dict[str, bool] = {}

    def uses(self, variable: str) -> bool:
        return variable in self._template.names

    @property
    def knows_developer(self) -> bool:
        return "developer" in self.source

    def key(self, messages: object, tools: object = None, **variables: Any) -> str | None:
        """Return a short key of everything that the prompt's text depends on, the date included. None if it is not
        JSON."""
        day = datetime.date.today().isoformat() if self.uses("strftime_now") else None
        try:
            text = json.dumps([self._digest, day, messages, tools, variables])
        except (TypeError, ValueError):
            return None
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def render(self, conversation: Conversation, add_generation_prompt: bool = False, **variables: Any) -> str:
        """Render a conversation. Raises ConversationError for a field that the template refuses or omits."""
        text = self.plain(conversation, add_generation_prompt, **variables)
        self._check_shown(conversation, text, lambda other: self.plain(other, add_generation_prompt, **variables))
        return text

    def plain(self, conversation: Conversation, add_generation_prompt: bool = False, **variables: Any) -> str:
        """Render without a check that the text contains all parts."""
        variables = {**variables, "add_generation_prompt": add_generation_prompt}
        tools = list(conversation.tools) or None
        if conversation.is_plain:
            return self.text(self.shaped(conversation), tools, variables)
        texts = [
            call["function"]["arguments"]
            for message in conversation.messages
            for call in message.get("tool_calls", ())
            if isinstance(call["function"]["arguments"], str)
        ]
        try:
            text = self.text(self.shaped(conversation), tools, variables)
        except ConversationError:
            if not texts:
                raise
        else:
            if all(shows(text, each) for each in texts):
                return text
        return self.text(self.shaped(_with_calls_as_text(conversation)), tools, variables)

    def text(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> str:
        """Render messages unchanged. Raises ConversationError if the template refuses them."""
        values = {"add_generation_prompt": False, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render({"messages": messages, "tools": tools, **values})
        except jinja2.TemplateError as error:
            raise ConversationError("messages", f"are refused by the chat template: {error}") from error

    def shaped(self, conversation: Conversation) -> list[Mapping[str, object]]:
        """Return the messages in the forms of roles, content, calls and reasoning that this template renders."""
        if conversation.is_plain and self._takes_text:
            return list(conversation.messages)
        return [self._shaped(message) for message in conversation.messages]

    def _shaped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content, role = message.get("content"), message["role"]
        if len(message) == 2 and type(content) is str and role != "developer" and self._takes_text:
            return message
        shaped = dict(message)
        if role == "developer" and not self.knows_developer:
            shaped["role"] = "system"
        calls = message.get("tool_calls")
        if calls and self._takes_text_arguments:
            shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if reasoning := message.get("reasoning_content"):
            shaped = {"thinking": reasoning, **shaped}
        if content is None:
            shaped["content"] = ""
        elif isinstance(content, list) and not self._takes_parts(_kind(shaped, "content")):
            shaped["content"] = message_text(message)
        if isinstance(shaped["content"], str) and not self._takes_text:
            shaped["content"] = [{"type": "text", "text": shaped["content"]}]
        return shaped

    # Which forms the template shows.

    @cached_property
    def _takes_text(self) -> bool:
        user = {"role": "user", "content": PROBE}
        return self._probed([user]) or not self._probed([{**user, "content": _PARTS}], PROBE[::-1])

    def _takes_parts(self, kind: str) -> bool:
        """Return whether the template renders texts of parts in this kind of message, and does not dump the list."""
        if (key := f"{kind} in parts") not in self._shown:
            messages = [
                {**message, "content": _PARTS} if message["content"] in (PROBE, _PARTS[:1]) else message
                for message in self.shaped(_probe(kind))
            ]
            self._shown[key] = self._probed(messages, PROBE[::-1], unlike=(f"'{PROBE}'", f'"{PROBE}"'))
        return self._shown[key]

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the template renders calls only if their arguments are JSON text."""
        function = {"name": PROBE, "arguments": {"city": "x"}}
        call = {"id": "probecall", "type": "function", "function": function}

        def shows_call(call: dict[str, Any]) -> bool:
            answer = {"role": "assistant", "content": self._as_content(""), "tool_calls": [call]}
            return self._probed([{"role": "user", "content": self._as_content("x")}, answer])

        return not shows_call(call) and shows_call(_with_text_arguments(call))

    def _as_content(self, text: str) -> str | list[dict[str, str]]:
        return text if self._takes_text else [{"type": "text", "text": text}]

    def _probed(self, messages: Sequence[Mapping[str, object]], text: str = PROBE, unlike: Sequence[str] = ()) -> bool:
        """Return whether the template renders ``text`` in these messages, and nothing of ``unlike``."""
        try:
            rendered = self.text(messages, None, {})
        except ConversationError:
            return False
        return text in rendered and not any(other in rendered for other in unlike)

    # What a rendered text must show.

    def _check_shown(self, conversation: Conversation, text: str, render: Callable[[Conversation], str]) -> None:
        """Raise ConversationError for a part that has no effect on the text. A part passes if the template renders this
        kind of part in a probe and the text contains it. All other parts are replaced by marks at once. If a mark does
        not appear either, the text is compared with a rendering that has only this mark."""
        if conversation.tools and not self._shows("tools") and text == render(Conversation(conversation.messages)):
            raise ConversationError("tools", "have no place in the chat template")
        if conversation.is_plain and self._shows_plain(conversation, text):
            return
        open_ones = [
            (index, name, replace)
            for index, message in enumerate(conversation.messages)
            for name, part, replace in _marks(message)
            if not (self._shows(_kind(message, name)) and shows(text, part))
        ]
        marked = ""
        if len(open_ones) > 1:
            messages = list(conversation.messages)
            for number, (index, _, replace) in enumerate(open_ones):
                messages[index] = replace(messages[index], _mark(number))
            with contextlib.suppress(ConversationError):  # one by one, they may be taken
                marked = render(Conversation(tuple(messages), conversation.tools))
        for number, (index, name, replace) in enumerate(open_ones):
            if _mark(number) in marked or self._drops_as_thought(conversation.messages[index], name):
                continue
            if text == render(conversation.replaced(index, replace(conversation.messages[index], PROBE))):
                raise ConversationError(f"messages[{index}].{name}", "has no place in the chat template")

    def _drops_as_thought(self, message: Mapping[str, object], name: str) -> bool:
        """Return whether content beside calls is reasoning to the template, shown in the last turn only."""
        return name == "content" and "tool_calls" in message and self._shows(_kind(message, name))

    def _shows_plain(self, conversation: Conversation, text: str) -> bool:
        """Return whether all texts of a plain conversation are rendered."""
        kinds = set()
        for message in conversation.messages:
            if message["content"].rpartition(THOUGHT_END)[2].strip() not in text:
                return False
            kinds.add(f"{message['role']} alone")
        return all(map(self._shows, kinds))

    def _shows(self, kind: str) -> bool:
        """Return whether the template renders a part of a message, or the tools, in a probe. False if it refuses it."""
        if kind not in self._shown:
            conversation = _probe(kind)
            try:
                text = self.text(self.shaped(conversation), list(conversation.tools) or None, {})
            except ConversationError:
                text = ""
            self._shown[kind] = PROBE in text
        return self._shown[kind]


def _kind(message: Mapping[str, object], name: str) -> str:
    """Return the kind of this part: its role, and the other parts of its message."""
    if name == "content":
        return f"{message['role']} {'with calls' if message.get('tool_calls') else 'alone'}"
    return f"{'first' if name == 'tool_calls[0]' else 'later'} call{' with content' if message.get('content') else ''}"


def _probe(kind: str) -> Conversation:
    """Return the smallest conversation with a part of this kind; its text is the probe."""

    def calls(*names: str) -> list[dict[str, object]]:
        functions = [{"name": name, "arguments": {"city": "x"}} for name in names]
        return [
            {"id": f"probecal{place}", "type": "function", "function": function}
            for place, function in enumerate(functions)
        ]

    user: dict[str, object] = {"role": "user", "content": "x"}
    asked = {"role": "assistant", "content": "", "tool_calls": calls("x")}
    first, *rest = kind.split()
    if kind == "tools":
        schema = {"type": "object", "properties": {"city": {"type": "string", "description": "x"}}, "required": []}
        function = {"name": PROBE, "description": "x", "parameters": schema}
        return Conversation((user,), ({"type": "function", "function": function},))
    if rest[0] == "call":
        content = "x" if "content" in rest else ""
        names = (PROBE,) if first == "first" else ("x", PROBE)
        return Conversation((user, {**asked, "content": content, "tool_calls": calls(*names)}))
    message: dict[str, object] = {"role": first, "content": PROBE}
    if rest[-1] == "calls":
        return Conversation((user, {**message, "tool_calls": calls("x")}))
    if first in ("system", "developer"):
        return Conversation((message, user))
    if first == "tool":
        return Conversation((user, asked, {**message, "tool_call_id": "probecal0", "name": "x"}))
    return Conversation((message,) if first == "user" else (user, message))


def _mark(number: int) -> str:
    return f"{PROBE}{number}z"  # none begins another one


_Replace = Callable[[Mapping[str, object], str], dict[str, object]]


def _marks(message: Mapping[str, Any]) -> list[tuple[str, str, _Replace]]:
    """Return the texts of a message that a rendering must contain: (field, text, function that replaces it)."""
    marks: list[tuple[str, str, _Replace]] = []
    for at, text in enumerate(message_texts(message)):
        if text := text.rpartition(THOUGHT_END)[2].strip():
            marks.append(("content", text, partial(_with_content, at)))
    for at, call in enumerate(message.get("tool_calls", ())):
        marks.append((f"tool_calls[{at}]", call["function"]["name"], partial(_with_name, at)))
    return marks


def _with_content(at: int, message: Mapping[str, Any], text: str) -> dict[str, object]:
    content = message["content"]
    other = text if isinstance(content, str) else swapped(content, at, {"type": "text", "text": text})
    return {**message, "content": other}


def _with_name(at: int, message: Mapping[str, Any], name: str) -> dict[str, object]:
    call = message["tool_calls"][at]
    renamed = {**call, "function": {**call["function"], "name": name}}
    return {**message, "tool_calls": swapped(message["tool_calls"], at, renamed)}


def swapped(items: Sequence[Any], at: int, item: Any) -> list[Any]:
    """Return the items with the one at ``at`` replaced by ``item``."""
    return [*items[:at], item, *items[at + 1 :]]


def shows(text: str, part: str) -> bool:
    """Return whether a rendered text contains this part, as it is or as JSON."""
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, object]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else to_json(arguments)
    return {**call, "function": {**function, "arguments": text}}


def _with_calls_as_text(conversation: Conversation) -> Conversation:
    """Move calls whose arguments are not JSON, such as those of a truncated response, into the content."""
    messages = []
    for message in conversation.messages:
        calls = message.get("tool_calls", ())
        broken = [call["function"] for call in calls if isinstance(call["function"]["arguments"], str)]
        if broken:
            texts = message_texts(message)
            texts += [f'{{"name": {to_json(each["name"])}, "arguments": {each["arguments"]}' for each in broken]
            kept = [call for call in calls if not isinstance(call["function"]["arguments"], str)]
            message = {**message, "content": "\n".join(filter(None, texts)), "tool_calls": kept}
            if not kept:
                del message["tool_calls"]
        messages.append(message)
    return Conversation(tuple(messages), conversation.tools)
