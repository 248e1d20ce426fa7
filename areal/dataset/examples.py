"""Examples of ``areal inf collect``, from a file (JSON lines, a JSON list or Parquet) or a data set of the hub.

An example is one object. Its prompt is the first non-empty field of ``messages`` (chat messages), ``prompt``,
``question``, ``problem``, ``instruction``, ``input`` and ``text``. The agent and the reward get all its fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass
from areal.dataset.files import BadData, read_dataset, read_files

_PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "input", "text")
Message = Mapping[str, object]


@dataclass(frozen=True)
class Example:
    """One row and its prompt. ``number``: its position in the data set, from 0. ``tools``: those of the column."""

    number: int
    fields: Mapping[str, object]
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()

    @property
    def prompt(self) -> str:
        """The content of the last user message; JSON if that is not text."""
        messages = [each for each in self.messages if each.get("role") == "user"] or self.messages
        content = messages[-1].get("content") if messages else ""
        return content if isinstance(content, str) else json.dumps(content)


@dataclass(frozen=True)
class ExampleSet:
    """A loaded data set. ``digest``: of the examples' content. ``place``: file and line of an example, by number."""

    source: str
    examples: Sequence[Example]
    digest: str
    place: Callable[[int], str]


def load_examples(source: str, *, prompt_field: str | None = None, system: str | None = None) -> ExampleSet:
    """Load a file or a data set of the hub. Raises NotFound, and BadData with the place of an unusable row."""
    examples, digest, path = [], hashlib.sha256(), Path(source).expanduser()
    rows = read_files([path], source) if path.is_file() else read_dataset(source)  # a file of any suffix
    for number, fields in enumerate(rows):
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
        place = rows.place(number)
        messages = _messages(fields, place, prompt_field, system)
        examples.append(Example(number, fields, messages, _tools(fields, place)))
    return ExampleSet(source, examples, digest.hexdigest(), rows.place)


def _messages(fields: Mapping[str, object], where: str, chosen: str | None, system: str | None) -> tuple[Message, ...]:
    name = chosen or next((name for name in _PROMPTS if fields.get(name)), None)
    if name is None or fields.get(name) is None:
        wanted = [chosen] if chosen else _PROMPTS
        empty = next((f"its {name} is empty" for name in wanted if name in fields), "")
        why = empty or f"none of its fields ({', '.join(fields)}) is {', '.join(wanted)}"
        raise BadData(
            f"{where}: the example has no prompt: {why}",
            hint="name it with --prompt-field",
        )
    prompt = fields[name]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(each, Mapping) and "role" in each for each in prompt):
        raise BadData(f"{where}: {name} is neither text nor a list of messages")
    before = [{"role": "system", "content": system}] if system else []
    return (*before, *prompt)


def prompt_digest(fields: Mapping[str, object], prompt_field: str | None = None) -> str:
    """Identify what an example asks, in every data set that contains it: a digest of its messages without system
    prompts, or of all fields if none is a prompt."""
    try:
        asked: Any = [each for each in _messages(fields, "", prompt_field, None) if each["role"] != "system"]
    except BadData:
        asked = fields
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _tools(fields: Mapping[str, object], where: str) -> tuple[Mapping[str, object], ...]:
    if not fields.get("tools"):
        return ()
    from areal.conversation import ConversationError, read_tools

    try:
        return read_tools(fields["tools"])
    except ConversationError as error:
        raise BadData(f"{where}: {error}") from error
