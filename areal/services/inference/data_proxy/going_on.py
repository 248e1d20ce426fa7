"""What a template adds after an answer that is recorded, so that the answer itself is not written again.

The recorded text is kept where the template would still have it there: where it is what the template makes of the
messages before the first answer and of the tools, and where a message that follows changes nothing of what came
before. Reasoning that a client does not send back counts as sent: whether it stays is the template's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.services.inference.data_proxy.templating import ChatTemplate
from areal.services.web.errors import ApiError

_REASONING = ("reasoning_content", "thinking")  # by which templates know it


@dataclass(frozen=True)
class Shown:
    """What a template is given."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    def render(self, template: ChatTemplate, count: int, *, opening: bool) -> str:
        """The first ``count`` messages. ``opening``: and the beginning of an answer to them."""
        variables = {**self.variables, **({} if opening else {"add_generation_prompt": False})}
        return template.render(self.messages[:count], self.tools, variables)


def after_recorded(template: ChatTemplate, shown: Shown, spoken: str, end: str, *, thinks: bool) -> str | None:
    """The prompt's text after ``spoken``, which is recorded, ends with the last answer in the messages and with its
    ``end`` token. None where the template would not have it like that. ``thinks``: the model's answers have reasoning
    apart."""
    answers = [at for at, message in enumerate(shown.messages) if message["role"] == "assistant"]
    if not answers:
        return None
    if thinks:
        shown = _with_reasoning(shown, answers[-1])
    try:
        head = shown.render(template, answers[0], opening=False)
        before = shown.render(template, answers[-1] + 1, opening=False)
        whole = shown.render(template, len(shown.messages), opening=True)
    except ApiError:
        return None
    _, found, tail = before.rpartition(end)
    if not spoken.startswith(head) or not whole.startswith(before) or not found or tail.strip():
        return None
    return tail + whole[len(before) :]


def _with_reasoning(shown: Shown, at: int) -> Shown:
    answer = {**dict.fromkeys(_REASONING, "reasoning"), **shown.messages[at]}
    messages = [*shown.messages[:at], answer, *shown.messages[at + 1 :]]
    return Shown(messages, shown.tools, shown.variables)
