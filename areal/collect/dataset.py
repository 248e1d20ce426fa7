"""Examples from a file: JSON lines, a JSON list, Parquet, or a data set of the Hugging Face hub.

An example is one object. Its prompt is ``messages`` (as in a chat), or text in ``prompt``, ``question``, ``problem``,
``instruction``, ``input`` or ``text``, the first of them that is there; all its fields reach the agent and the reward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from areal.errors import ArealError, NotFound

_PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "input", "text")
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """``number``: its place in the data set, from 0."""

    number: int
    fields: Mapping[str, Any]
    messages: tuple[Message, ...]

    @property
    def prompt(self) -> str:
        """The text of the last message that a user wrote."""
        said = [each for each in self.messages if each.get("role") == "user"] or self.messages
        content = said[-1].get("content") if said else ""
        return content if isinstance(content, str) else json.dumps(content)


@dataclass(frozen=True)
class Dataset:
    """``digest`` is of the examples' content, so that a copy of the file elsewhere is the same set."""

    source: str
    examples: Sequence[Example]
    digest: str


def load_dataset(source: str, *, prompt_field: str | None = None, system: str | None = None) -> Dataset:
    """Raises NotFound, and ArealError naming the line of what cannot be used."""
    examples, digest = [], hashlib.sha256()
    for number, (where, fields) in enumerate(_objects(source)):
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
        examples.append(Example(number, fields, _messages(fields, where, prompt_field, system)))
    if not examples:
        raise ArealError(f"{source} holds no example")
    return Dataset(source, examples, digest.hexdigest())


def _messages(fields: Mapping[str, Any], where: str, chosen: str | None, system: str | None) -> tuple[Message, ...]:
    name = chosen or next((name for name in _PROMPTS if fields.get(name)), None)
    if name is None or fields.get(name) is None:
        wanted = chosen or ", ".join(_PROMPTS)
        raise ArealError(
            f"{where}: the example has no prompt: none of its fields ({', '.join(fields)}) is {wanted}",
            hint="name it with --prompt-field",
        )
    prompt = fields[name]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not all(isinstance(each, Mapping) and "role" in each for each in prompt):
        raise ArealError(f"{where}: {name} is neither text nor a list of messages")
    before = [{"role": "system", "content": system}] if system else []
    return (*before, *prompt)


def _objects(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(source).expanduser()
    read = _parquet if path.suffix == ".parquet" else _json
    for where, row in read(path) if path.is_file() else _hub(source):
        if not isinstance(row, dict):
            raise ArealError(f"{where}: an example is an object, this is {type(row).__name__}")
        yield where, row


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """A file that begins with a bracket is one list, every other one is lines."""
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(1) == "[":
                file.seek(0)
                yield from ((f"{path}: example {number}", row) for number, row in enumerate(json.load(file)))
                return
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _line(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArealError(f"cannot read {path}: {error}") from error


def _line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ArealError(f"{where}: not JSON: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    from areal.trajectories.parquet import pyarrow

    arrow = pyarrow()
    try:
        for batch in arrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from ((f"{path}: a row", row) for row in batch.to_pylist())
    except arrow.ArrowException as error:
        raise ArealError(f"cannot read {path}: {error}") from error


def _hub(source: str) -> Iterator[tuple[str, Any]]:
    """``NAME``, ``NAME:SPLIT`` or ``NAME:CONFIG:SPLIT``; the split is ``train`` if none is named."""
    if source.endswith((".json", ".jsonl", ".parquet")) or source.startswith((".", "/", "~")):
        raise NotFound(f"there is no file {source}")
    from areal.dataset.hub import hub_rows

    rows = hub_rows(source)
    yield from ((rows.place(number), row) for number, row in enumerate(rows))


def limited(dataset: Dataset, limit: int | None) -> Sequence[Example]:
    return list(islice(dataset.examples, limit))
