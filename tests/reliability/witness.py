"""The prompts and samples in an engine's own log, with which recordings are compared."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

_SPECIAL = {0, 1, 2}  # of the tests' tokenizer
_END = 2
_INTERACTION = re.compile(r"(?P<answer>[a-z]+[-_][0-9a-z]+)(-(?P<choice>[0-9]+))?")


@dataclass(frozen=True)
class Sampled:
    """One choice that the engine sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One call: its prompt, and the choices."""

    input_ids: list[int]
    choices: list[Sampled]


@dataclass(frozen=True)
class Truth:
    """One interaction: the prompt that the engine got, and the choice that it sampled."""

    prompt: list[int]
    output: Sampled

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output.token_ids

    def continues(self, before: Truth) -> bool:
        """Whether the prompt begins with the tokens of ``before``, so that both are one row."""
        return self.prompt[: len(before.tokens)] == before.tokens


class Witness:
    """A reader of the engines' logs while they grow."""

    def __init__(self, tokenizer: Path, *logs: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._logs = dict.fromkeys(logs, 0)
        self._calls: dict[str, Seen] = {}

    def calls(self) -> dict[str, Seen]:
        """The calls by the data proxy's id: that of the answer, and the index of the prompt in the request."""
        for log in self._logs:
            self._read(log)
        return self._calls

    def truth(self, interaction_id: str) -> Truth:
        """The truth of a recorded interaction whose call has one prompt."""
        named = _INTERACTION.fullmatch(interaction_id)
        assert named, interaction_id
        seen = self.calls()[f"{named['answer']}-0"]
        return Truth(seen.input_ids, seen.choices[int(named["choice"] or 0)])

    def is_plain(self, turn: Truth) -> bool:
        """Whether the answer's text has all of its tokens: only the last may be special, and the bytes are UTF-8. A
        chat template cannot render another answer as it was sampled, so that the next turn is a branch."""
        *others, last = turn.output.token_ids or [_END]
        tokens = others if last == _END else [*others, last]
        return not _SPECIAL.intersection(tokens) and "\ufffd" not in self._tokenizer.decode(tokens)

    def _read(self, log: Path) -> None:
        with log.open("rb") as file:
            file.seek(self._logs[log])
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._logs[log] += len(line)
                self._take(json.loads(line))

    def _take(self, line: dict[str, object]) -> None:
        match line:
            case {"call": str(name), "input_ids": list(ids), "n": int(count)}:
                assert name not in self._calls, "the engine got two calls with one id"
                self._calls[name] = Seen(ids, [Sampled() for _ in range(count)])
            case {"of": str(name), "index": int(index), "token": int(token), "logprob": float(lp), "version": int(v)}:
                choice = self._calls[name].choices[index]
                choice.token_ids.append(token)
                choice.logprobs.append(lp)
                choice.versions.append(v)
