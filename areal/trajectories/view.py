"""The view of an episode: its conversation as a tree of turns, each with its tokens. Pure.

A row of the ``individual`` style repeats the whole conversation before its answer; a turn shows only the tokens that
its parent has not shown. Consecutive turns stay on one level; a branch goes one level deeper. Tokens are decoded with
the tokenizer file of their model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass
from areal.errors import ArealError, NotFound
from areal.terminal import safe
from areal.trajectories.record import Episode, Interaction

Decode = Callable[[Sequence[int]], str]
_FILE = "tokenizer.json"
_BROKEN = "\ufffd"
_LONGEST = 64  # the most tokens held back for an incomplete character: after that, the text itself is damaged


class TokenDecoder:
    """Decodes a row token by token: ``texts`` returns one text per id. A character that spans several tokens is in the
    text of the last one; the other texts are empty."""

    def __init__(self, decode: Decode, source: str) -> None:
        self._decode = decode
        self.source = source

    def texts(self, ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        start = read = 0
        for end in range(1, len(ids) + 1):
            before = self._decode(ids[start:read])
            whole = self._decode(ids[start:end])
            if whole.endswith(_BROKEN) and end < len(ids) and end - read < _LONGEST:
                found.append("")
                continue
            found.append(whole[len(before) :])
            start, read = read, end
        return found


def load_decoder(path: Path) -> TokenDecoder:
    """Load a decoder from a model's folder or a tokenizer file. Raises NotFound, and ArealError for a damaged file."""
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise NotFound(f"there is no tokenizer {file}", hint="give the model's folder with --tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ArealError("decoding tokens needs tokenizers", hint="pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for an invalid file
        raise ArealError(f"cannot read the tokenizer {file}: {error}") from error
    return TokenDecoder(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), str(file))


@dataclass(frozen=True, slots=True)
class ShownToken:
    """``text`` is None without a tokenizer. ``logprob`` and ``version`` are valid only if ``generated``."""

    id: int
    text: str | None
    generated: bool
    logprob: float
    version: int
    turn: int = -1  # of its row, -1 on prompt


@dataclass(frozen=True)
class ShownTurn:
    """A turn in the view. ``number``: its place in the conversation and its branch, such as ``3b``. ``depth`` counts
    branches. ``shown_before``: the number of tokens at the row's beginning that its parent shows."""

    row: Interaction
    number: str
    depth: int
    shown_before: int
    tokens: tuple[ShownToken, ...]

    @property
    def branch(self) -> str:
        """The letters of ``number``; empty without a branch."""
        return self.number.lstrip("0123456789")

    @property
    def generated(self) -> list[ShownToken]:
        return [token for token in self.tokens if token.generated]

    @property
    def mean_logprob(self) -> float | None:
        sampled = self.generated
        return sum(token.logprob for token in sampled) / len(sampled) if sampled else None

    @property
    def versions(self) -> list[int]:
        return sorted({token.version for token in self.generated})

    @property
    def temperatures(self) -> list[float]:
        if self.row.temperature is not None:
            return [self.row.temperature]
        if not self.row.token_temperatures:
            return []  # neither is in the file
        given = zip(self.row.token_temperatures, self.row.loss_mask, strict=True)
        return sorted({value for value, is_answer in given if is_answer})

    @property
    def turn_ids(self) -> list[int]:
        """The turns of the row, more than one if the row is a whole conversation (``concat``)."""
        return sorted({token.turn for token in self.generated})

    def runs(self) -> Iterator[tuple[bool, list[ShownToken]]]:
        """Yield runs of tokens of one turn that are all prompt or all generated: (is generated, tokens)."""
        for (generated, _), tokens in groupby(self.tokens, key=lambda token: (token.generated, token.turn)):
            yield generated, list(tokens)


def turns(episode: Episode, decoder: TokenDecoder | None) -> list[ShownTurn]:
    """Return the turns of an episode in reading order: each turn before its continuations."""
    rows = {row.interaction_id: row for row in episode.interactions}
    children: dict[str | None, list[Interaction]] = {}
    for row in episode.interactions:
        children.setdefault(row.parent_id if row.parent_id in rows else None, []).append(row)
    found: list[ShownTurn] = []
    roots = children.get(None, [])
    waiting = [(row, 1, int(len(roots) > 1), branch) for row, branch in _branches(roots, "")][::-1]
    while waiting:
        row, place, depth, branch = waiting.pop()
        parent = rows.get(row.parent_id) if row.parent_id is not None else None
        found.append(_turn(row, f"{place}{branch}", depth, parent, decoder))
        following = _branches(children.pop(row.interaction_id, []), branch)  # once, also where ids repeat
        deeper = depth + (len(following) > 1)
        waiting += [(child, place + 1, deeper, name) for child, name in following][::-1]
    return found


def _branches(rows: Sequence[Interaction], branch: str) -> list[tuple[Interaction, str]]:
    """Return each row with the name of its branch. Of several, each has one letter more, ``a`` to ``y``, then ``za`` to
    ``zy``, ``zza``...: none is the prefix of another, so that joined letters identify a branch."""
    if len(rows) == 1:
        return [(rows[0], branch)]
    return [(row, branch + "z" * (place // 25) + chr(ord("a") + place % 25)) for place, row in enumerate(rows)]


def _turn(
    row: Interaction, number: str, depth: int, parent: Interaction | None, decoder: TokenDecoder | None
) -> ShownTurn:
    ids = list(row.input_ids)
    before = (
        len(parent.input_ids) if parent is not None and ids[: len(parent.input_ids)] == list(parent.input_ids) else 0
    )
    texts: Sequence[str | None] = decoder.texts(ids) if decoder is not None else [None] * len(ids)
    tokens = tuple(
        ShownToken(ids[at], texts[at], bool(row.loss_mask[at]), row.logprobs[at], row.versions[at], row.turn_ids[at])
        for at in range(before, len(ids))
    )
    return ShownTurn(row, number, depth, before, tokens)


@dataclass(frozen=True)
class Stretch:
    """Consecutive turns without a branch. ``branches``: the continuations of the last turn."""

    turns: tuple[ShownTurn, ...]
    branches: tuple[Stretch, ...]


def stretches(conversation: Sequence[ShownTurn]) -> tuple[Stretch, ...]:
    """Return the tree of a conversation, from its turns in reading order."""
    named: dict[str, list[ShownTurn]] = {}
    for turn in conversation:
        named.setdefault(turn.branch, []).append(turn)

    def below(branch: str) -> tuple[Stretch, ...]:
        return tuple(
            Stretch(tuple(named[name]), below(name))
            for name in named
            if name != branch and name.startswith(branch) and _parent_of(name, named) == branch
        )

    return (Stretch(tuple(named[""]), below("")),) if "" in named else below("")


def _parent_of(branch: str, known: Mapping[str, object]) -> str:
    """Return the longest known branch that ``branch`` continues."""
    return next((branch[:end] for end in range(len(branch) - 1, 0, -1) if branch[:end] in known), "")


def text_of_messages(row: Interaction) -> list[tuple[str, str]]:
    """Return the messages of an external model's interaction: pairs of role and text, tool calls included."""
    messages = []
    for message in (*row.messages, *([row.response] if row.response is not None else [])):
        content = message.get("content")
        if not isinstance(content, str):
            content = "" if content is None else json.dumps(content, ensure_ascii=False)
        functions = (call.get("function") or call for call in message.get("tool_calls") or ())
        calls = (call_text(str(each.get("name")), str(each.get("arguments"))) for each in functions)
        messages.append((str(message.get("role", "?")), "\n".join(filter(None, (content, *calls)))))
    return messages


def call_text(name: str, arguments: str) -> str:
    """Return a tool call as one line of text."""
    return f"-> {name}({' '.join(arguments.split())})"


# An episode as the JSON document of a page: its turns with their tokens.

HINT = 200  # characters


def origin(episode: Episode) -> list[str]:
    """Return the origin of a trainer's episode: "training step 12", "sample 3 of group t-7"."""
    found = []
    if episode.step is not None:
        found.append(f"{'evaluation after' if episode.is_eval else 'training'} step {episode.step}")
    elif episode.is_eval:
        found.append("evaluation")
    if episode.group:
        found.append(f"sample {episode.sample} of group {safe(episode.group)}")
    return found


def shown_episode(episode: Episode, decoder: TokenDecoder | None) -> dict[str, Any]:
    """Columns of a turn: ``ids``, ``texts`` (None without a tokenizer) and ``mask`` of all tokens; ``lp``, ``v`` and
    ``turns`` of the generated ones. ``before``: tokens at its beginning that an earlier turn shows. ``hint``: the
    beginning of the model's last answer."""
    example = {name: value if isinstance(value, str) else json.dumps(value) for name, value in episode.example.items()}
    conversation = turns(episode, decoder)
    return {
        "name": episode.episode,
        "origin": origin(episode),
        "reward": _finite(episode.reward),
        "seconds": _finite(episode.seconds),
        "example": example,
        "failures": episode.failure_texts,
        "hint": _hint(conversation[-1]) if conversation else "",
        "turns": [_turn_document(each) for each in conversation],
    }


def _hint(turn: ShownTurn) -> str:
    return answer_hint(turn.row, [token.id for token in turn.generated], [token.text for token in turn.generated])


def answer_hint(row: Interaction, ids: Sequence[int], texts: Sequence[str | None]) -> str:
    """Return how the answer of a row begins, up to ``HINT`` characters: the texts of its tokens, or their ids."""
    if row.response is not None:
        return text_of_messages(row)[-1][1][:HINT]
    found = "".join(f"{each} " if text is None else text[:HINT] for each, text in zip(ids[:HINT], texts, strict=False))
    return found[:HINT].strip()


def _turn_document(turn: ShownTurn) -> dict[str, object]:
    row = turn.row
    about: dict[str, object] = {
        "id": row.interaction_id,
        "number": turn.number,
        "depth": turn.depth,
        "model": row.model,
        "finish": row.finish_reason,
        "truncated": row.truncated,
        "reward": _finite(row.original_reward) if row.rewarded else None,
        "ret": _finite(row.reward),
        "advantage": _finite(row.advantage),
    }
    if row.response is not None:
        return {**about, "messages": text_of_messages(row)}
    tokens = turn.tokens
    return {
        **about,
        "temperature": ", ".join(f"{each:g}" for each in turn.temperatures),
        "before": turn.shown_before,
        "ids": [token.id for token in tokens],
        "texts": [token.text for token in tokens],
        "mask": "".join("1" if token.generated else "0" for token in tokens),
        "lp": [_finite(token.logprob) for token in tokens if token.generated],
        "v": [token.version for token in tokens if token.generated],
        "turns": [token.turn for token in tokens if token.generated] if len(turn.turn_ids) > 1 else None,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: the page shows null as absent."""
    return round(value, 4) if value is not None and math.isfinite(value) else None
