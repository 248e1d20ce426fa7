"""JSON schemas, regular expressions and grammars by llguidance: the tokens that may come next.

A grammar is compiled once per request; each sequence has its own matcher. Needs the package ``llguidance`` and the
model's ``tokenizer.json``; without either, ``response_format`` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.errors import ArealError, UsageFault
from areal.files import parse_json
from areal.installation import install_command

_OBJECT = {"type": "object"}
_GOES_WELL = ("NotStopped", "NoExtension", "EndOfSentence")  # llguidance's stop reasons that are not errors
_NO_TOKEN = "NoExtensionBias"  # its stop reason if no token can follow
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")  # special characters of its regular expressions
_BITS = np.arange(32, dtype=np.uint32)


class Matcher:
    """One sequence's position in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return the tokens that may come next: [vocab_size]. These are only end tokens if the answer is complete, or
        if the model has no token to continue with (``observe`` tells which)."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
        bits = ((words[:, None] >> _BITS) & 1).astype(bool).reshape(-1)[:vocab_size]
        return np.pad(bits, (0, vocab_size - len(bits)))

    def observe(self, token: int) -> str | None:
        """Advance by ``token``. Returns None while the answer can match the grammar, else the reason why it cannot."""
        consumed, reason = self._matcher.consume_token(token), self._matcher.stop_reason()
        if consumed and reason in _GOES_WELL:
            return None
        words = self.error()
        if words == _NO_TOKEN:
            return f"after what it has written, the model has no token that the grammar allows ({words})"
        return f"the grammar stopped: {': '.join(filter(None, (reason, words)))}"

    def try_token(self, token: int) -> bool:
        """Advance by ``token`` if the grammar allows it. llguidance's mask for a byte without a token has one that it
        does not."""
        return self._matcher.try_consume_tokens([token]) == 1

    def error(self) -> str:
        """Return the error message of llguidance; empty if there is none."""
        return str(self._matcher.get_error()).partition("\n")[0]

    def fork(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one model. Raises ArealError with the reason if that is impossible."""

    def __init__(self, tokenizer_folder: Path, vocab_size: int, end_tokens: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ArealError(
                "the engine has no grammars: llguidance is not installed", hint=install_command("structured")
            ) from error
        file = tokenizer_folder / "tokenizer.json"
        ends = sorted(end_tokens)
        if not file.is_file() or not ends:
            missing = "no end token" if file.is_file() else "no tokenizer.json"
            raise ArealError(f"the engine has no grammars: {tokenizer_folder} has {missing}")
        self._library: Any = llguidance
        self._vocab_size = vocab_size
        try:
            tokenizer = parse_json(file.read_text(encoding="utf-8"))
            if tokenizer.get("decoder") == {"type": "Fuse"}:  # unknown to llguidance: plain concatenation
                tokenizer["decoder"] = {"type": "ByteFallback"}
            self._tokenizer = self._library.LLTokenizer(json.dumps(tokenizer), vocab_size, ends)
        except (ValueError, OSError) as error:
            raise ArealError(f"the engine has no grammars: llguidance cannot read {file}: {error}") from error

    def matcher(self, response_format: Mapping[str, Any]) -> Matcher | None:
        """Return a matcher for ``EngineCall.response_format``; None for plain text. Raises UsageFault for an
        unsupported format."""
        kind = response_format.get("type", "text")
        if kind == "text":
            return None
        what = "schema" if kind in ("json_object", "json_schema") else kind
        try:
            matcher = self._library.LLMatcher(self._tokenizer, self._grammar(kind, response_format))
        except ValueError as error:
            raise UsageFault(f"response_format: the {what} cannot be used: {error}") from error
        made = Matcher(matcher)
        if problem := made.error() or self._first_token_problem(made):
            raise UsageFault(f"response_format: the {what} cannot be used: {problem}")
        return made

    def _first_token_problem(self, made: Matcher) -> str:
        """Return why no answer can begin; empty if one can."""
        first = np.flatnonzero(made.allowed(self._vocab_size))
        if problem := made.error():
            return problem
        if len(first) == 1 and not (fork := made.fork()).try_token(int(first[0])):
            return fork.error() or "this model has no tokens to write it"
        return ""

    def _grammar(self, kind: str, response_format: Mapping[str, Any]) -> str:
        """Return the grammar in llguidance's format. Raises UsageFault, ValueError."""
        library = self._library.LLMatcher
        if kind in ("json_object", "json_schema"):
            schema = _OBJECT if kind == "json_object" else (response_format.get("json_schema") or {}).get("schema")
            if not isinstance(schema, Mapping):
                raise UsageFault("response_format.json_schema.schema must be an object")
            return str(library.grammar_from_json_schema(json.dumps(schema)))
        if kind == "regex":
            return str(library.grammar_from_regex(response_format["regex"]))
        if kind == "choice":
            # One lexeme: as rules, more than 2,000 choices are more than llguidance keeps in one row of its parser.
            return str(
                library.grammar_from_regex("|".join(_META.sub(r"\\\g<0>", each) for each in response_format["choice"]))
            )
        if kind == "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            try:
                lark = any_to_lark(response_format["grammar"])
            except Exception as error:
                raise UsageFault(f"response_format: the grammar cannot be used: {error}") from error
            return str(library.grammar_from_lark(lark))
        raise UsageFault("response_format.type must be text, json_object, json_schema, regex, choice or grammar")


def keep_allowed(logits: Tensor, matchers: Sequence[tuple[int, Matcher]]) -> Tensor:
    """Return a copy of ``logits`` [n, vocab], -inf where a row's matcher forbids a token."""
    logits = logits.clone()
    for row, matcher in matchers:
        allowed = torch.from_numpy(matcher.allowed(logits.shape[1])).to(logits.device)
        logits[row].masked_fill_(~allowed, float("-inf"))
    return logits
