"""Chat templates: the Jinja dialect in which models ship them, in a sandbox, compiled once.

A template comes with a model, so it is not ours to trust: it runs immutable and without attribute access to Python.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal.services.web.errors import bad_request

RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token"})


class _Generation(Extension):
    """``{% generation %}``: training marks the assistant's tokens with it. Here its body is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """One compiled template. Raises ``jinja2.TemplateSyntaxError`` for source that is none."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._names = meta.find_undeclared_variables(environment.parse(source))
        self._source = source
        self._template = environment.from_string(source)
        self._template.globals = dict(self._template.globals)  # each rendering copies them: not from a chain of maps
        self._special_tokens = dict(special_tokens)

    def uses(self, variable: str) -> bool:
        return variable in self._names

    @property
    def source(self) -> str:
        return self._source

    @property
    def knows_developer(self) -> bool:
        return "developer" in self._source

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt up to the end of the last message's text, for the model to go on with it."""
        last = str(messages[-1]["content"])
        prompt, text = self.render(messages, tools, {**variables, "add_generation_prompt": False}), last.strip()
        at = prompt.rfind(text)
        if at < 0:
            raise bad_request("the chat template does not let the last message be continued", param="messages")
        end = at + len(text)
        space = last[len(last.rstrip()) :]
        return prompt[:end] + (space if prompt.startswith(space, end) else "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. Raises ApiError 400 when the template itself refuses the conversation."""
        values = {"add_generation_prompt": True, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=messages, tools=tools, **values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise bad_request(f"the chat template refuses these messages: {error}", param="messages") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """``message.role`` is what templates do most: found at once in a JSON object, unless it may be a method's name,
    which the sandbox decides."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            found = obj.get(attribute, _MISSING)
            return found if found is not _MISSING else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_DICT_NAMES = frozenset(dir(dict))
_MISSING = object()


def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
